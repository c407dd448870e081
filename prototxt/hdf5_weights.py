"""HDF5 weights and solver states, laid out as the original does.

weights  /data/LAYER/0, 1, ..: float32, a group for every layer, shared parameters under their owner alone;
         with diffs also /diff/LAYER/0, 1, .. for all
state    /iter and /current_step (one int32 each), /learned_net (text), /history/0, 1, ..: float32

A '/' in a layer's name is a group in a group here, which the original can neither write nor find.
Numbers are only read where their shape, or the file's size, has been checked: no file makes us fill memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from math import prod
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from torch import nn

from prototxt.blob import ParamBlob
from prototxt.caffemodel import Array, wrong_number, wrong_shape
from prototxt.data.hdf5_source import DAMAGED
from prototxt.errors import WeightsError, first_line
from prototxt.files import replacing_file
from prototxt.room import unpacked_limit

if TYPE_CHECKING:
    from prototxt.net import Net

_log = getLogger(__name__)
Match = tuple[list[nn.Parameter], list[Array]]  # a layer's parameters, and the file's values for them


# Reading -------------------------------------------------------------------------------------------------


@contextmanager
def _open(path: str | os.PathLike[str], what: str) -> Iterator[Any]:
    """The file, open for reading; what goes wrong while it is becomes a WeightsError."""
    shown = os.fspath(path)
    try:
        with h5py.File(shown, "r", locking=False) as file:
            yield file
    except WeightsError:
        raise
    except DAMAGED as error:
        raise WeightsError(f"{shown}: cannot be read as an HDF5 {what}: {first_line(error)}") from error


def _member(group: Any, path: str, kind: type) -> Any:
    """What lies at ``path`` in the group, if it is of ``kind`` and in this very file; else None."""
    for part in path.split("/"):
        if not isinstance(group, h5py.Group) or not isinstance(group.get(part, getlink=True), h5py.HardLink):
            return None
        group = group[part]
    return group if isinstance(group, kind) else None


def _numbers(dataset: Any) -> Array:
    if dataset.dtype.kind not in "fiu" or dataset.external:
        raise WeightsError(f"{dataset.file.filename}: {dataset.name} is of type {dataset.dtype}, not numbers")
    chunk = prod(dataset.chunks or ()) * dataset.dtype.itemsize
    if chunk > unpacked_limit(os.path.getsize(dataset.file.filename)):
        raise WeightsError(
            f"{dataset.file.filename}: a chunk of {dataset.name} takes {chunk} bytes, too many for its size"
        )
    return np.asarray(dataset[()], np.float32)


def layer_blobs(net: Net, path: str | os.PathLike[str]) -> Iterator[Match]:
    """For each layer of ``net`` that the file has: its parameters, and the file's values for them.

    A parameter that another layer owns may be absent. Raises WeightsError where number or shape differ.
    """
    shown = os.fspath(path)
    owners = {(learnable.layer, learnable.index) for learnable in net.learnable}
    with _open(path, "weight file") as file:
        data = _member(file, "data", h5py.Group)
        if data is None:
            raise WeightsError(f"{shown}: not an HDF5 weight file: it has no group 'data'")
        for name, targets in net.params.items():
            group = _member(data, name, h5py.Group)
            if group is None:
                continue
            blobs = []
            for index, target in enumerate(targets):
                dataset = _member(group, str(index), h5py.Dataset)
                if dataset is not None:
                    if dataset.shape != target.shape:
                        raise WeightsError(wrong_shape(shown, name, index, dataset.shape, target.shape))
                    blobs.append(_numbers(dataset))
                elif (name, index) in owners:
                    raise WeightsError(wrong_number(shown, name, len(group), len(targets)))
                else:
                    blobs.append(target.data)
            if _member(group, str(len(targets)), h5py.Dataset) is not None:
                raise WeightsError(wrong_number(shown, name, len(group), len(targets)))
            yield [target.param for target in targets], blobs
        known = net.layer_dict
        for name in data:
            if name not in known and not any(layer.startswith(f"{name}/") for layer in known):
                _log.info("Ignoring source layer %s", name)


def check(path: str | os.PathLike[str]) -> None:
    """WeightsError unless the file is an HDF5 weight file that is there as a whole."""
    with _open(path, "weight file") as file:
        if _member(file, "data", h5py.Group) is None:
            raise WeightsError(f"{os.fspath(path)}: not an HDF5 weight file: it has no group 'data'")


def read_state(path: str | os.PathLike[str]) -> tuple[dict[str, int], str | None, list[Array]]:
    """iter and current_step by name, learned_net (None without one), and the history in its order.

    Raises WeightsError for another file, and where the history is larger than the file.
    """
    shown = os.fspath(path)
    with _open(path, "solver state") as file:
        found = {name: _member(file, name, h5py.Dataset) for name in ("iter", "current_step", "learned_net")}
        history = _member(file, "history", h5py.Group)
        if found["iter"] is None or history is None:
            raise WeightsError(f"{shown}: it has no iter or no history")
        arrays, room = [], os.path.getsize(shown)
        for index in range(len(history)):
            dataset = _member(history, str(index), h5py.Dataset)
            if dataset is None:
                raise WeightsError(f"{shown}: history {index} of {len(history)} is missing")
            room -= dataset.nbytes
            if room < 0:
                raise WeightsError(f"{shown}: its history claims more numbers than the file has bytes")
            arrays.append(_numbers(dataset))
        numbers = {name: _number(found[name]) for name in ("iter", "current_step") if found[name] is not None}
        return numbers, _text(found["learned_net"]), arrays


def _number(dataset: Any) -> int:
    if dataset.size != 1 or dataset.dtype.kind not in "iu":
        raise WeightsError(f"{dataset.file.filename}: {dataset.name} is not one whole number")
    return int(np.asarray(dataset[()]).item())


def _text(dataset: Any) -> str | None:
    if dataset is None:
        return None
    if dataset.size != 1 or h5py.check_string_dtype(dataset.dtype) is None or dataset.nbytes > 1 << 16:
        raise WeightsError(f"{dataset.file.filename}: {dataset.name} is not a text")
    return os.fsdecode(bytes(dataset[()]).split(b"\0")[0])


# Writing -------------------------------------------------------------------------------------------------


@contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A file to write into, in place of ``path`` once it is whole; WeightsError when that fails."""
    try:
        with replacing_file(path) as beside, h5py.File(beside, "w", locking=False) as file:
            yield file
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WeightsError(f"cannot write {os.fspath(path)}: {reason}") from error


def write_net(net: Net, path: str | os.PathLike[str], diff: bool = False) -> None:
    """Write a net's weights, ``diff``: its gradients too; the file appears whole or not at all.

    Raises WeightsError when it cannot be written, and for layer names that no group can have.
    """
    owners = {(learnable.layer, learnable.index) for learnable in net.learnable}
    with _whole(path) as file:
        fields = ("data", "diff") if diff else ("data",)
        groups = {field: file.create_group(field) for field in fields}
        for node in net.layers:
            for field, group in groups.items():
                own = _layer_group(group, node.name)
                for index, param in enumerate(node.blobs):
                    if field == "diff" or (node.name, index) in owners:
                        own.create_dataset(str(index), data=getattr(ParamBlob(param), field))


def _layer_group(group: Any, name: str) -> Any:
    if any(part in ("", ".") for part in name.split("/")):
        raise WeightsError(f"layer {name!r} cannot be a group of an HDF5 file; use BINARYPROTO")
    return group.require_group(name)


def write_state(
    path: str | os.PathLike[str],
    numbers: Mapping[str, int],
    learned_net: str | None,
    history: Sequence[Array],
) -> None:
    """Write a solver state; the reverse of read_state. The file appears whole or not at all."""
    with _whole(path) as file:
        for name, value in numbers.items():
            file.create_dataset(name, data=np.array([value], np.int32))
        if learned_net is not None:
            _write_text(file, b"learned_net", os.fsencode(learned_net))
        group = file.create_group("history")
        for index, array in enumerate(history):
            group.create_dataset(str(index), data=np.asarray(array, np.float32))


def _write_text(file: Any, name: bytes, text: bytes) -> None:
    """As C reads it: of fixed length, its last byte 0. h5py itself would leave that byte out."""
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(text) + 1)
    kind.set_strpad(h5py.h5t.STR_NULLTERM)
    dataset = h5py.h5d.create(file.id, name, kind, h5py.h5s.create(h5py.h5s.SCALAR))
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(text, f"S{len(text) + 1}"), mtype=kind)
