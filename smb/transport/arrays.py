"""A client's own arrays as an adapter reaches them: checked, registered once, kept within limits."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smb.errors import RangeError, TypeMismatch
from smb.transport import rdma

MOST = 64  # arrays kept registered
MOST_BYTES = 8 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU that a dma-buf descriptor stands for; Segment.read and write take it over RDMA.

    descriptor  stays the caller's, who closes it after the segment is detached
    offset      in bytes, from the buffer's start
    """

    descriptor: int
    count: int
    dtype: str = "float32"
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Flat:
    """An array as one run of elements. ``owner`` is the object whose life is the memory's."""

    count: int
    nbytes: int
    writable: bool
    owner: Any
    values: np.ndarray[Any, Any] | None  # None: memory of a GPU

    @property
    def host(self) -> np.ndarray[Any, Any]:
        if self.values is None:
            raise TypeMismatch("memory of a GPU can be read into and written from, no more")
        return self.values


def flat(array: Any, dtype: str, verb: str, *, writable: bool = False) -> Flat:
    """``array`` when it can be used for a segment of ``dtype``. Raises TypeMismatch."""
    if isinstance(array, DeviceMemory):
        _same(array.dtype, dtype, verb)
        return Flat(array.count, array.nbytes, True, array, None)
    values, owner = _tensor(array, verb) if hasattr(array, "data_ptr") else _buffer(array, verb)
    _same(values.dtype.name, dtype, verb)
    if writable and not values.flags.writeable:
        raise TypeMismatch(
            f"{verb}: must be a C-contiguous writable array, this {type(array).__name__} is not"
        )
    return Flat(values.size, values.nbytes, bool(values.flags.writeable), owner, values.reshape(-1))


def _same(have: str, dtype: str, verb: str) -> None:
    if have != dtype:
        raise TypeMismatch(f"{verb}: the segment holds {dtype}, the array {have}")


def _buffer(array: Any, verb: str) -> tuple[np.ndarray[Any, Any], Any]:
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(memoryview(array))
        except TypeError:
            kind = type(array).__name__
            raise TypeMismatch(f"{verb}: must be a numpy array or a CPU torch tensor, got {kind}") from None
    if not array.flags.c_contiguous:
        raise TypeMismatch(f"{verb}: must be a C-contiguous array, this {type(array).__name__} is not")
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return array, owner


def _tensor(tensor: Any, verb: str) -> tuple[np.ndarray[Any, Any], Any]:
    if not tensor.is_cpu or not tensor.is_contiguous():
        what = "a contiguous CPU tensor of a type that segments hold"
        raise TypeMismatch(f"{verb}: must be {what}, got {tensor.dtype}")
    try:
        return tensor.detach().numpy(), tensor
    except TypeError as error:
        raise TypeMismatch(f"{verb}: {error}") from None


def check_range(verb: str, offset: int, count: int, size: int) -> None:
    """Raises RangeError unless elements [offset, offset + count) lie in a segment of ``size``."""
    if offset < 0 or offset + count > size:
        raise RangeError(
            f"{verb}: {count} elements at offset {offset} run past the segment ({size} elements)"
        )


@dataclass(eq=False)
class _Entry:
    region: rdma.Region
    owner: weakref.ref[Any] | None
    values: np.ndarray[Any, Any] | None  # a tensor's storage, which must not go while it is registered
    writable: bool
    users: int = 0
    segments: set[int] = field(default_factory=set)


class Arrays:
    """What one client has registered. Any thread may call.

    An array is registered when it is first used, and kept until its memory's owner is gone, the segments
    that it was used for are detached, or there is no room for it. One in use is never let go.
    """

    def __init__(self, adapter: rdma.Adapter, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._adapter, self._most, self._most_bytes = adapter, most, most_bytes
        self._lock = threading.RLock()  # an owner may be collected while this thread holds it
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @contextlib.contextmanager
    def lend(self, array: Flat, segment: int) -> Iterator[rdma.Region]:
        """The array's region, while the block lasts. Raises TransportError, NotSupported for a GPU's."""
        with self._lock:
            entry = self._find(array) or self._enter(array)
            entry.users += 1
            entry.segments.add(segment)
        try:
            yield entry.region
        finally:
            with self._lock:
                entry.users -= 1
                if not entry.users and entry is not self._entries.get(self._key(array)):
                    entry.region.close()  # the place was another's, who is using it
                self._trim()

    @staticmethod
    def _key(array: Flat) -> tuple[int, int]:
        if array.values is None:
            return (-1 - array.owner.descriptor - (array.owner.offset << 32), array.nbytes)
        return (array.values.ctypes.data, array.nbytes)

    def _find(self, array: Flat) -> _Entry | None:
        key = self._key(array)
        entry = self._entries.get(key)
        if entry is None:
            return None
        same = entry.owner is None or entry.owner() is array.owner
        if not same or (array.writable and not entry.writable):
            if not entry.users:
                self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def _enter(self, array: Flat) -> _Entry:
        key = self._key(array)
        if array.values is None:
            region = self._adapter.register_dmabuf(
                array.owner.descriptor, array.nbytes, array.owner.offset, writable=False
            )
            entry = _Entry(region, None, None, True)
        else:
            address = array.values.ctypes.data
            region = self._adapter.register(address, array.nbytes, local=array.writable)
            held = None if isinstance(array.owner, np.ndarray) else array.values
            owner = weakref.ref(array.owner, lambda ref: self._gone(key, ref))
            entry = _Entry(region, owner, held, array.writable)
        self._entries.setdefault(key, entry)  # else it is used once
        return entry

    def _gone(self, key: tuple[int, int], owner: weakref.ref[Any]) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry and entry.owner is owner:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._entries.pop(key).region.close()

    def _trim(self) -> None:
        idle = [key for key, entry in self._entries.items() if not entry.users]
        held = sum(entry.region.nbytes for entry in self._entries.values())
        for key in idle:
            if len(self._entries) <= self._most and held <= self._most_bytes:
                return
            held -= self._entries[key].region.nbytes
            self._drop(key)

    def detach(self, segment: int) -> None:
        """Let go of what was used for this segment alone."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                entry.segments.discard(segment)
                if not entry.segments and not entry.users:
                    self._drop(key)

    def close(self) -> None:
        with self._lock:
            for key in list(self._entries):
                self._drop(key)
