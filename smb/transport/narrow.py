"""Updates over a queue pair in fewer bytes: jobs (pipeline.py) whose increments travel in a narrow wire type.

Each increment is quantised here, and both sides apply what was sent. The daemon adds it in float32; here an
exchange takes away the same values, and what rounding took from an accumulate goes with the next. There are
no shadows, which an exchange over TCP needs: the segment is read before it is moved, one-sidedly, in float32.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from smb import _native
from smb.segment import CHUNK_BYTES
from smb.transport import rdma
from smb.transport.pipeline import F32, ElasticMove, Piece, nonfinite
from smb.transport.stream import WireStats, wire_code

CHUNK = CHUNK_BYTES // 4  # elements


class Ledger:
    """What one segment's operations moved, and what quantising cost. Any thread may enter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = WireStats(0, 0, 0.0, 0.0)

    def enter(self, more: WireStats) -> None:
        with self._lock:
            have = self._sum
            self._sum = WireStats(
                have.bytes_sent + more.bytes_sent,
                have.bytes_received + more.bytes_received,
                have.squared_error + more.squared_error,
                have.squared_sum + more.squared_sum,
            )

    @property
    def sum(self) -> WireStats:
        return self._sum


class Quantiser:
    """Q(v) for one piece at a time. ``error`` and ``squares`` are sums over all of them, as in WireStats.

    scratch  a chunk of registered memory for each slot
    """

    def __init__(self, wire: str, scratch: rdma.Buffer) -> None:
        self.wire, self._code, self.scratch = wire, wire_code(wire), scratch
        self._carried = np.empty(CHUNK, np.float32)
        self.error = self.squares = 0.0

    def _sent(self, piece: Piece, slot: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        at = slot * CHUNK_BYTES
        return self.scratch.bytes[at : at + _native.wire_bytes(self._code, piece.count)]

    def send(self, piece: Piece, slot: int, values: F32) -> tuple[rdma.Span, F32]:
        """Q(values), put into the slot's scratch memory, and what it stands for; values become the rest."""
        data = self._sent(piece, slot)
        _native.to_wire(data, values, self._code)
        carried = self.carried(piece, slot)
        self.squares += _native.dot(values, values)
        np.subtract(values, carried, out=values)
        self.error += _native.dot(values, values)
        return self.scratch.region.span(slot * CHUNK_BYTES, data.nbytes), carried

    def carried(self, piece: Piece, slot: int) -> F32:
        """What a piece that was sent stands for; until the next call."""
        out = self._carried[: piece.count]
        _native.from_wire(out, self._sent(piece, slot), self._code)
        return out


class NarrowAccumulation:
    """segment += Q(scale * values + owed); owed becomes what Q took away.

    owed  (n,) float32 of the whole segment, kept by the caller from one to the next
    """

    name = "accumulate"
    scale = 1.0  # what is sent is scaled already

    def __init__(self, number: int, scale: float, values: F32, owed: F32, by: Quantiser) -> None:
        self.number, self.wire, self._by = number, by.wire, by
        self._factor, self._values, self._owed = np.float32(scale), values, owed
        self.error = self.squares = 0.0

    def source(self, piece: Piece, slot: int) -> None:
        """Nothing is read."""

    def make(self, piece: Piece, slot: int) -> rdma.Span:
        part = self._values[piece.begin : piece.begin + piece.count]
        nonfinite(self.name, piece, part, "the source")
        owed = self._owed[piece.offset : piece.offset + piece.count]
        with np.errstate(over="ignore"):
            wanted = np.add(self._factor * part, owed)
        nonfinite(self.name, piece, wanted, "the scaled source")
        span, _ = self._by.send(piece, slot, wanted)
        owed[:] = wanted  # what is left of it
        self.error, self.squares = self._by.error, self._by.squares
        return span

    def refused(self, piece: Piece, slot: int) -> None:
        self._owed[piece.offset : piece.offset + piece.count] = 0


class NarrowMove(ElasticMove):
    """d = Q(alpha (local - segment)); local -= d; segment += d."""

    def __init__(self, number: int, alpha: float, local: F32, center: rdma.Place, by: Quantiser) -> None:
        super().__init__(number, alpha, local, center, by.scratch)
        self.wire, self._by = by.wire, by
        self._wanted = np.empty(CHUNK, np.float32)

    def make(self, piece: Piece, slot: int) -> rdma.Span:
        wanted = self._wanted[: piece.count]
        local = self._pull(piece, slot, wanted)
        span, carried = self._by.send(piece, slot, wanted)
        np.subtract(local, carried, out=local)
        self.error, self.squares = self._by.error, self._by.squares
        return span

    def refused(self, piece: Piece, slot: int) -> None:
        local = self._parts(piece, slot)[0]
        np.add(local, self._by.carried(piece, slot), out=local)
