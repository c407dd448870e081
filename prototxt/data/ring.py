"""The slots batches are written to: one memfd that reader and net both map, so nothing is copied between.

A slot holds one batch, each top at a multiple of 64 bytes. The slots are used in turn (counts.py). The reader
says by a message where the tops of a slot lie and their shapes, whenever that is not as it was.
"""

from __future__ import annotations

import mmap
import os
import struct
from math import prod

from prototxt.data.config import Shape
from prototxt.errors import DataError
from prototxt.room import LARGE, MOST_VALUES, available_memory

ALIGN = 64
MAX_SLOTS = 64
MAX_COUNT = MOST_VALUES
_HEAD = struct.Struct("<cBB")  # kind, slot, number of tops
_TOP = struct.Struct("<QB")  # offset in the memory, number of axes

# The first byte of a message from the reader; the net's when it hands over memory, and to wake the reader.
HELLO, BATCH, MORE, FAILED = b"H", b"B", b"R", b"E"
ALLOT, WAKE = b"M", b"W"

Place = tuple[int, Shape]  # where a top begins, in bytes; its shape


def pack_batch(slot: int, places: list[Place]) -> bytes:
    parts = [_HEAD.pack(BATCH, slot, len(places))]
    for offset, shape in places:
        parts.append(_TOP.pack(offset, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape))
    return b"".join(parts)


def unpack_batch(message: bytes) -> tuple[int, list[Place]]:
    """(slot, places); the inverse of pack_batch."""
    _, slot, tops = _HEAD.unpack_from(message)
    at, places = _HEAD.size, []
    for _ in range(tops):
        offset, axes = _TOP.unpack_from(message, at)
        at += _TOP.size
        places.append((offset, struct.unpack_from(f"<{axes}Q", message, at)))
        at += 8 * axes
    return slot, places


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def batch_bytes(shapes: list[Shape]) -> int:
    """What a batch of float32 tops takes in a slot."""
    return sum(_aligned(4 * prod(shape), ALIGN) for shape in shapes)


def allot(batch: int) -> int:
    """The room for one slot, of a batch of so many bytes."""
    return _aligned(batch, mmap.PAGESIZE)


class Ring:
    """The writing side: finds room for a batch in a slot.

    Empty memory grows to what the largest batch needs; memory that has a size is the program's and keeps it.
    """

    def __init__(self, fd: int, slots: int) -> None:
        self._fd = fd
        self._limit = os.fstat(fd).st_size
        self._end = 0
        self._places = [(0, 0)] * slots  # (offset, capacity) of each slot
        self._known: dict[tuple[int, tuple[Shape, ...]], tuple[bytes, list[memoryview[float]]]] = {}

    def slot(self, slot: int, shapes: list[Shape]) -> tuple[bytes, list[memoryview[float]]]:
        """The message that says where this batch lies, and a float view of each of its tops to fill.

        Raises DataError or OSError when there is no memory for it.
        """
        key = (slot, tuple(shapes))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._lay_out(slot, shapes)
        return found

    def _lay_out(self, slot: int, shapes: list[Shape]) -> tuple[bytes, list[memoryview[float]]]:
        if len(self._known) >= 4 * MAX_SLOTS:  # shapes that never come back must not pile up
            self._known.clear()
        need = batch_bytes(shapes)
        if self._places[slot][1] < need:
            self._enlarge(slot, need)
        at, places = self._places[slot][0], []
        for shape in shapes:
            places.append((at, shape))
            at += _aligned(4 * prod(shape), ALIGN)
        memory = memoryview(mmap.mmap(self._fd, self._end))
        views = [memory[offset : offset + 4 * prod(shape)].cast("f") for offset, shape in places]
        return pack_batch(slot, places), views

    def _enlarge(self, slot: int, need: int) -> None:
        """New room at the end: the net may still read the old. Doubling bounds the waste."""
        if self._limit:
            self._cut(slot, need)
            return
        capacity = _aligned(max(need, 2 * self._places[slot][1]), mmap.PAGESIZE)
        if capacity > LARGE and capacity > (available := available_memory()):
            raise DataError(f"a batch takes {need >> 20} MiB of memory, {available >> 20} MiB are available")
        os.posix_fallocate(self._fd, self._end, capacity)  # an error here, not a SIGBUS at the first write
        self._places[slot] = (self._end, capacity)
        self._end += capacity

    def _cut(self, slot: int, need: int) -> None:
        """The slot's equal part of memory that does not grow."""
        part = self._limit // len(self._places) // mmap.PAGESIZE * mmap.PAGESIZE
        if need > part:
            raise DataError(
                f"a batch takes {need} bytes, and a slot of the memory that the workers share {part}:"
                " images of many sizes need a reader for each worker"
            )
        self._places[slot] = (slot * part, part)
        self._end = self._limit
