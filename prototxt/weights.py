"""Weights between a net and its files: matched by layer name, checked blob by blob."""

from __future__ import annotations

import os
from collections.abc import Iterator
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prototxt import hdf5_weights
from prototxt.blob import ParamBlob
from prototxt.caffemodel import (
    Array,
    blob_array,
    blob_shape,
    fill_blob,
    is_hdf5,
    is_legacy,
    read_net,
    wrong_number,
    wrong_shape,
)
from prototxt.errors import WeightsError
from prototxt.registry import Shape
from prototxt.schema import wire

if TYPE_CHECKING:
    from prototxt.net import Net
    from prototxt.nodes import Node

_log = getLogger(__name__)


def load_weights(net: Net, path: str | os.PathLike[str], strict: bool = False) -> None:
    """Copy the file's blobs into the layers of the same name.

    Layers that the net lacks are ignored, which the log says; layers that the file lacks keep their values.
    Raises WeightsError when a layer's blobs differ in number or shape; nothing is copied then. Where no layer
    fits, the log warns; with ``strict`` it is a WeightsError, too.
    """
    shown = os.fspath(path)
    pairs: list[tuple[torch.Tensor, Array]] = []
    for targets, blobs in _matches(net, shown):
        pairs += zip((target.data for target in targets), blobs, strict=True)
    for target, array in pairs:
        target.copy_(torch.from_numpy(np.array(array)).view(target.shape))
    if net.params and not pairs:
        if strict:
            raise WeightsError(
                f"{shown}: weights of another net? None of its layers has a name that {net.path} has too "
                f"(with parameters: {', '.join(net.params)})"
            )
        _log.warning(
            "%s: nothing was loaded: no layer with parameters has a name that the net has too", shown
        )


def _matches(net: Net, path: str) -> Iterator[hdf5_weights.Match]:
    """The layers that file and net have in common; a solver's state is told as what it is."""
    try:
        yield from hdf5_weights.layer_blobs(net, path) if is_hdf5(path) else _proto_layers(net, path)
    except WeightsError as error:
        if ".solverstate" not in os.path.basename(path) or not os.path.isfile(path):
            raise
        weights = path.replace(".solverstate", ".caffemodel")
        raise WeightsError(
            f"{path}: this is a solver's state, use --snapshot; the weights are {weights}"
        ) from error


def _proto_layers(net: Net, path: str) -> Iterator[hdf5_weights.Match]:
    """Pairs equal names; where a name occurs several times, the first with the first, and so on."""
    nodes: dict[str, list[Node]] = {}
    for node in reversed(net.layers):
        nodes.setdefault(node.name, []).append(node)
    layers = read_net(path).layer
    if not layers:
        raise WeightsError(f"{path}: not a weight file: it holds no layers")
    for layer in layers:
        if layer.name not in nodes:
            _log.info("Ignoring source layer %s", layer.name)
            continue
        named = nodes[layer.name]
        targets = (named.pop() if len(named) > 1 else named[0]).blobs
        if len(layer.blobs) != len(targets):
            raise WeightsError(wrong_number(path, layer.name, len(layer.blobs), len(targets)))
        for index, (blob, target) in enumerate(zip(layer.blobs, targets, strict=True)):
            if not _fits(blob, tuple(target.shape)):
                shapes = blob_shape(blob), tuple(target.shape)
                raise WeightsError(wrong_shape(path, layer.name, index, *shapes))
        yield targets, [blob_array(blob) for blob in layer.blobs]


def _fits(blob: Any, shape: Shape) -> bool:
    """Equal shapes; four legacy sizes fit a shape of at most four axes once it is padded with 1s in front."""
    if is_legacy(blob):
        return len(shape) <= 4 and blob_shape(blob) == (1,) * (4 - len(shape)) + shape
    return blob_shape(blob) == shape


def net_message(net: Net, diff: bool) -> Any:
    """The net as a wire NetParameter: the layers as they were built, Splits included, with their blobs."""
    message = wire.NetParameter(name=net.name)
    for node in net.layers:
        layer = message.layer.add()
        layer.ParseFromString(node.spec.message.SerializeToString())
        layer.ClearField("blobs")
        if node.built.loss and not layer.loss_weight:
            layer.loss_weight.extend(node.loss_weights)  # the original writes a loss's default weight out
        for param in node.blobs:
            source = ParamBlob(param)
            fill_blob(layer.blobs.add(), source.data, source.diff if diff else None)
    return message


def share_parameters(net: Net, other: Net) -> None:
    """Point parameters of equally named layers at ``other``'s storage; WeightsError when shapes differ."""
    pairs = []
    for name, sources in other.params.items():
        targets = net.params.get(name)
        if targets is None:
            continue
        if len(targets) != len(sources):
            raise WeightsError(wrong_number(other.path, name, len(sources), len(targets)))
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            if target.shape != source.shape:
                raise WeightsError(wrong_shape(other.path, name, index, source.shape, target.shape))
            pairs.append((target.param, source.param))
    for mine, theirs in pairs:
        mine.data = theirs.data
