"""What a net is made of, in numbers: shapes, parameters, multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from prototxt.registry import Shape

if TYPE_CHECKING:
    from prototxt.net import Net
    from prototxt.nodes import Node


@dataclass(frozen=True)
class LayerFigures:
    """One layer's figures.

    tops           shapes of its tops, in order
    parameters     numbers in its blobs, shared ones too
    shared         of these, those that belong to an earlier layer
    multiply_adds  of one forward pass of the batch
    """

    name: str
    type: str
    tops: tuple[Shape, ...]
    parameters: int
    shared: int
    multiply_adds: int


@dataclass(frozen=True)
class Figures:
    """A net's figures: ``layers`` in order, without Splits; totals count what is shared once.

    trained, frozen, statistics  parameters that are learned, that lr_mult 0 keeps, and BatchNorm's sums
    batch  rows of the first data blob; 1 without one
    """

    layers: tuple[LayerFigures, ...]
    trained: int
    frozen: int
    statistics: int
    batch: int

    @property
    def parameters(self) -> int:
        return self.trained + self.frozen + self.statistics

    @property
    def shared(self) -> int:
        return sum(layer.shared for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        return sum(layer.multiply_adds for layer in self.layers)


def figures(net: Net) -> Figures:
    """Count a built net; nothing is run."""
    seen: set[int] = set()
    layers = []
    batch = 0
    for node in net.layers:
        if node.type == "Split":
            continue
        tops = tuple(tuple(net.blobs[top].shape) for top in node.tops if top in net.blobs)
        if not batch and not node.bottoms and tops and tops[0]:
            batch = tops[0][0]
        places = [(blob.data_ptr(), blob.numel()) for blob in node.blobs]
        layers.append(
            LayerFigures(
                node.name, node.type, tops,
                sum(count for _, count in places),
                sum(count for place, count in places if place in seen),
                _multiply_adds(node, [tuple(net.blobs[name].shape) for name in node.bottoms], tops),
            )
        )  # fmt: skip
        seen.update(place for place, _ in places)
    kinds = {"trained": 0, "frozen": 0, "statistics": 0}
    for learnable in net.learnable:
        kind = "statistics" if learnable.statistics else "trained" if learnable.lr_mult else "frozen"
        kinds[kind] += learnable.param.numel()
    return Figures(tuple(layers), batch=batch or 1, **kinds)


def _multiply_adds(node: Node, bottoms: Sequence[Shape], tops: Sequence[Shape]) -> int:
    """Products with weights; other layers' arithmetic is not counted.

    A weight of a convolution is used once a position of the output, of a Deconvolution once one of the input,
    of an InnerProduct once a row, of a recurrent layer once a step of each sequence.
    """
    if not node.blobs:
        return 0
    weights = node.blobs[0].numel()
    if node.type in ("Convolution", "Deconvolution"):
        shapes = tops if node.type == "Convolution" else bottoms
        axis = node.spec.convolution_param.axis  # of the channels; before it are rows, behind it positions
        axes = [axis % len(shape) if shape else 0 for shape in shapes]
        return weights * sum(prod(s[:a]) * prod(s[a + 1 :]) for s, a in zip(shapes, axes, strict=True))
    if node.type == "InnerProduct":
        return weights * prod(tops[0][:-1])
    if node.type in ("LSTM", "RNN"):
        return _recurrent(node, bottoms)
    return 0


def _recurrent(node: Node, bottoms: Sequence[Shape]) -> int:
    """W_static, the third blob where there is a third bottom of features, is used once a sequence."""
    steps, rows = bottoms[0][:2]
    weights = [blob.numel() for blob in node.blobs if blob.dim() == 2]
    static = len(weights) > (2 if node.type == "LSTM" else 3)
    once = weights.pop(1) if static else 0
    return int(rows * (steps * sum(weights) + once))
