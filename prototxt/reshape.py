"""Shapes of a net whose inputs were reshaped, found without running it."""

from __future__ import annotations

import torch

from prototxt.blob import ActivationBlob
from prototxt.nodes import Graph, Node
from prototxt.registry import Shape, build_layer


def reshape_blobs(graph: Graph, blobs: list[ActivationBlob]) -> None:
    """Ask each layer's builder, on the meta device, for the tops of its bottoms' present shapes.

    Raises LayerError where the new shape does not fit the layer, or would need weights of another shape.
    """
    for node in graph.nodes:
        if node.built.feed or node.built.source:
            continue
        shapes = [blobs[slot].shape for slot in node.bottom_slots]
        if node.built.reshape is not None:
            _take_over(node, blobs, node.built.reshape(shapes))
            continue
        with torch.device("meta"):
            built = build_layer(node.spec, shapes)
        for index, (new, old) in enumerate(zip(built.blobs, node.built.blobs, strict=True)):
            if new.shape != old.shape:
                raise node.spec.error(
                    f"bottom shape {shapes[0]} does not fit its weights: parameter {index} has shape "
                    f"{tuple(old.shape)}, {tuple(new.shape)} would be needed"
                )
        _take_over(node, blobs, built.tops)


def _take_over(node: Node, blobs: list[ActivationBlob], shapes: list[Shape]) -> None:
    for slot, shape in zip(node.top_slots, shapes, strict=True):
        if not node.alias and blobs[slot].shape != shape:
            blobs[slot].reshape(*shape)
