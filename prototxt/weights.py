"""Weights between a net and its files: matched by layer name, checked blob by blob."""

from __future__ import annotations

import os
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from prototxt.blob import ParamBlob
from prototxt.caffemodel import HDF5_MAGIC, Array, blob_array, blob_shape, fill_blob, is_legacy, read_net
from prototxt.errors import WeightsError
from prototxt.registry import Shape
from prototxt.schema import wire

if TYPE_CHECKING:
    from prototxt.net import Net
    from prototxt.nodes import Node

_log = getLogger(__name__)
_Match = tuple[list[nn.Parameter], list[Array]]  # a layer's parameters, and the file's values for them


def load_weights(net: Net, path: str | os.PathLike[str]) -> None:
    """Copy the file's blobs into the layers of the same name.

    Layers that the net lacks are ignored, which the log says; layers that the file lacks keep their values.
    Raises WeightsError when a layer's blobs differ in number or shape; nothing is copied then.
    """
    shown = os.fspath(path)
    pairs: list[tuple[torch.Tensor, Array]] = []
    for targets, blobs in _hdf5_layers(net, shown) if _is_hdf5(path) else _proto_layers(net, shown):
        pairs += zip((target.data for target in targets), blobs, strict=True)
    for target, array in pairs:
        target.copy_(torch.from_numpy(np.array(array)).view(target.shape))


def _is_hdf5(path: str | os.PathLike[str]) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError as error:
        raise WeightsError(
            f"cannot read {os.fspath(path)!r}: {error.strerror}: {os.path.abspath(path)}"
        ) from error


def _proto_layers(net: Net, path: str) -> Iterator[_Match]:
    """Pairs equal names; where a name occurs several times, the first with the first, and so on."""
    nodes: dict[str, list[Node]] = {}
    for node in reversed(net.layers):
        nodes.setdefault(node.name, []).append(node)
    for layer in read_net(path).layer:
        if layer.name not in nodes:
            _log.info("Ignoring source layer %s", layer.name)
            continue
        named = nodes[layer.name]
        targets = (named.pop() if len(named) > 1 else named[0]).blobs
        if len(layer.blobs) != len(targets):
            raise WeightsError(_wrong_number(path, layer.name, len(layer.blobs), len(targets)))
        for index, (blob, target) in enumerate(zip(layer.blobs, targets, strict=True)):
            if not _fits(blob, tuple(target.shape)):
                shapes = blob_shape(blob), tuple(target.shape)
                raise WeightsError(_wrong_shape(path, layer.name, index, *shapes))
        yield targets, [blob_array(blob) for blob in layer.blobs]


def _fits(blob: Any, shape: Shape) -> bool:
    """Equal shapes; four legacy sizes fit a shape of at most four axes once it is padded with 1s in front."""
    if is_legacy(blob):
        return len(shape) <= 4 and blob_shape(blob) == (1,) * (4 - len(shape)) + shape
    return blob_shape(blob) == shape


def _wrong_number(path: str, layer: str, source: int, target: int) -> str:
    return (
        f"{path}: Incompatible number of blobs for layer {layer}: the file has {source}, the net {target}; "
        f"to learn this layer's parameters anew, rename it"
    )


def _wrong_shape(path: str, layer: str, index: int, source: Shape, target: Shape) -> str:
    shapes = [f"{' '.join(map(str, shape))} ({int(np.prod(shape))})" for shape in (source, target)]
    return (
        f"{path}: Cannot copy param {index} weights from layer '{layer}'; shape mismatch. "
        f"Source param shape is {shapes[0]}; target param shape is {shapes[1]}. "
        f"To learn this layer's parameters from scratch rather than copying them, rename the layer"
    )


def _hdf5_layers(net: Net, path: str) -> Iterator[_Match]:
    """Group /data/<layer>/<i>: a blob that is shared is stored under its owner only."""
    import h5py

    owners = {(learnable.layer, learnable.index) for learnable in net.learnable}
    try:
        with h5py.File(path, "r") as file:
            data = file["data"]
            for name, targets in net.params.items():
                if name not in data:
                    continue
                group, blobs = data[name], []
                for index, target in enumerate(targets):
                    if str(index) in group:
                        array = np.asarray(group[str(index)], dtype=np.float32)
                        if array.shape != target.shape:
                            raise WeightsError(_wrong_shape(path, name, index, array.shape, target.shape))
                    elif (name, index) in owners:
                        raise WeightsError(_wrong_number(path, name, len(group), len(targets)))
                    else:
                        array = target.data
                    blobs.append(array)
                if str(len(targets)) in group:
                    raise WeightsError(_wrong_number(path, name, len(group), len(targets)))
                yield [target.param for target in targets], blobs
            known = net.layer_dict
            for name in data:
                if name not in known and not any(layer.startswith(f"{name}/") for layer in known):
                    _log.info("Ignoring source layer %s", name)
    except (OSError, KeyError) as error:
        raise WeightsError(f"{path}: cannot be read as an HDF5 weight file: {error}") from error


def net_message(net: Net, diff: bool) -> Any:
    """The net as a wire NetParameter: the layers as they were built, Splits included, with their blobs."""
    message = wire.NetParameter(name=net.name)
    for node in net.layers:
        layer = message.layer.add()
        layer.ParseFromString(node.spec.message.SerializeToString())
        layer.ClearField("blobs")
        if node.built.loss and not layer.loss_weight:
            layer.loss_weight.append(1.0)  # the original writes a loss's default weight out
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
            raise WeightsError(_wrong_number(other.path, name, len(sources), len(targets)))
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            if target.shape != source.shape:
                raise WeightsError(_wrong_shape(other.path, name, index, source.shape, target.shape))
            pairs.append((target.param, source.param))
    for mine, theirs in pairs:
        mine.data = theirs.data
