"""Updates over a queue pair, piece by piece: read where that is needed, move, write behind it, have it added.

A piece lies in one chunk of the segment and takes one of SLOTS places, here in the channel's scratch memory
and there in the daemon's slots, from its READ until its answer has come. So reading, moving, writing and
adding go on at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from smb import _native, protocol
from smb.errors import NonFinite, SmbError
from smb.pieces import pieces
from smb.segment import CHUNK_BYTES
from smb.transport import rdma
from smb.transport.channel import SLOTS, Channel, Move
from smb.transport.stream import WireStats

F32 = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Piece:
    """Elements [offset, offset + count) of the segment, [begin, begin + count) of the array.

    last   as protocol.Write has it
    whole  the first element's number in the segment, or in the larger one that it is a stripe of
    """

    offset: int
    begin: int
    count: int
    last: int
    whole: int


def update(offset: int, count: int, stripe: int = 0, stripes: int = 1) -> list[Piece]:
    """A stripe's share of a range of float32, cut at the chunks; one of several does not count it."""
    cut = list(pieces(offset, count, CHUNK_BYTES // 4, stripe, stripes))
    ends = 1 if stripes == 1 else 2
    return [
        Piece(one.begin, one.at, one.count, ends if one is cut[-1] else 0, offset + one.at) for one in cut
    ]


class Job(Protocol):
    """One update of a segment of float32."""

    name: str
    number: int  # the segment's
    scale: float
    wire: str  # how what ``make`` gives travels
    error: float  # what quantising cost so far, as stream.WireStats has it
    squares: float

    def source(self, piece: Piece, slot: int) -> Move | None:
        """What to READ before the piece can be made; None: nothing."""

    def make(self, piece: Piece, slot: int) -> rdma.Span:
        """What the daemon is to add, scaled. Raises NonFinite, and then nothing has changed."""

    def refused(self, piece: Piece, slot: int) -> None:
        """The daemon did not add it: take back what ``make`` did."""


def nonfinite(verb: str, piece: Piece, values: F32, whose: str) -> None:
    """Raises NonFinite with chunk and element of the first NaN or Inf; nothing of this piece was done."""
    bad = _native.first_nonfinite(values)
    if bad < 0:
        return
    chunk, element = piece.whole * 4 // CHUNK_BYTES, piece.whole + bad
    error = NonFinite(
        f"{verb}: element {piece.begin + bad} of {whose} is NaN or Inf (element {element} of the segment, "
        f"chunk {chunk}); the chunks before it are done, it and later ones are not"
    )
    error.chunk, error.element = chunk, piece.begin + bad  # type: ignore[attr-defined]
    raise error


class Accumulation:
    """segment += scale * values. ``data`` is their region; without one they go through scratch memory."""

    name, wire = "accumulate", "float32"
    error = squares = 0.0

    def __init__(
        self, number: int, scale: float, values: F32, data: rdma.Region | None, scratch: rdma.Buffer
    ) -> None:
        self.number, self.scale = number, scale
        self._values, self._data, self._scratch = values, data, scratch

    def source(self, piece: Piece, slot: int) -> Move | None:
        return None

    def make(self, piece: Piece, slot: int) -> rdma.Span:
        part = self._values[piece.begin : piece.begin + piece.count]
        nonfinite(self.name, piece, part, "the source")
        if self._data:
            return self._data.span(4 * piece.begin, part.nbytes)
        at = slot * CHUNK_BYTES
        self._scratch.bytes[at : at + part.nbytes] = part.view(np.uint8)
        return self._scratch.region.span(at, part.nbytes)

    def refused(self, piece: Piece, slot: int) -> None:
        """Nothing was done here."""


class ElasticMove:
    """d = alpha (local - segment); local -= d; segment += d.

    Source: Zhang, Choromanska, LeCun 2015, Algorithm 1.
    """

    name, wire = "exchange", "float32"
    scale, error, squares = 1.0, 0.0, 0.0

    def __init__(
        self, number: int, alpha: float, local: F32, center: rdma.Place, scratch: rdma.Buffer
    ) -> None:
        self.number, self._alpha = number, np.float32(alpha)
        self._local, self._center, self._scratch = local, center, scratch

    def _span(self, piece: Piece, slot: int) -> rdma.Span:
        return self._scratch.region.span(slot * CHUNK_BYTES, 4 * piece.count)

    def _parts(self, piece: Piece, slot: int) -> tuple[F32, F32]:
        """The local elements, and the scratch memory that holds the segment's first, and then d."""
        at = slot * CHUNK_BYTES
        other = self._scratch.bytes[at : at + 4 * piece.count].view(np.float32)
        return self._local[piece.begin : piece.begin + piece.count], other

    def source(self, piece: Piece, slot: int) -> Move | None:
        there = rdma.Place(self._center.address + 4 * piece.offset, self._center.rkey)
        return Move(self._span(piece, slot), there)

    def _pull(self, piece: Piece, slot: int, d: F32 | None = None) -> F32:
        """d, by default in place of the segment's elements; the local ones, not moved yet."""
        local, center = self._parts(piece, slot)
        d = center if d is None else d
        nonfinite(self.name, piece, local, "the local array")
        nonfinite(self.name, piece, center, "the segment")
        with np.errstate(over="ignore"):
            np.subtract(local, center, out=d)
            np.multiply(d, self._alpha, out=d)
        nonfinite(self.name, piece, d, "the difference")
        return local

    def make(self, piece: Piece, slot: int) -> rdma.Span:
        local = self._pull(piece, slot)
        np.subtract(local, self._parts(piece, slot)[1], out=local)
        return self._span(piece, slot)

    def refused(self, piece: Piece, slot: int) -> None:
        local, d = self._parts(piece, slot)
        np.add(local, d, out=local)


class Pipeline:
    """A job on its way. ``run`` may be called again after Broken, once the channel is mended."""

    def __init__(self, channel: Channel, job: Job, cut: list[Piece]) -> None:
        self._channel, self._job, self._pieces = channel, job, cut
        self._fetched = self._started = self._sent = self._answered = 0
        self._error: SmbError | None = None
        self._ended = False
        self.version = self._bytes_out = self._bytes_in = 0

    @property
    def moved(self) -> WireStats:
        return WireStats(self._bytes_out, self._bytes_in, self._job.error, self._job.squares)

    def run(self) -> None:
        """To the end: every piece that was sent is answered. Raises what stopped it."""
        self._started = self._fetched  # a new queue pair knows nothing of the reads that were under way
        while True:
            self._begin()
            self._send()
            if self._error and not self._ended:
                self._end()
            if not self._channel.requests and (self._error or self._answered == len(self._pieces)):
                break
            answers, fetched = self._channel.collect(self._job.name)
            self._fetched += len(fetched)
            for answer in answers:
                self._settle(answer.record)
        self._drain()
        if self._error:
            raise self._error

    def _begin(self) -> None:
        while not self._error and self._started < min(len(self._pieces), self._answered + SLOTS):
            piece, slot = self._pieces[self._started], self._started % SLOTS
            move = self._job.source(piece, slot)
            if move:
                self._channel.fetch(slot, move)
                self._bytes_in += move.here.nbytes
            else:
                self._fetched += 1
            self._started += 1

    def _send(self) -> None:
        while not self._error and self._sent < self._fetched:
            piece, slot = self._pieces[self._sent], self._sent % SLOTS
            try:
                data = self._job.make(piece, slot)
            except NonFinite as error:
                self._error = error
                return
            self._sent += 1
            self._submit(piece, slot, data)
            self._ended = bool(piece.last)

    def _submit(self, piece: Piece, slot: int, data: rdma.Span | None) -> None:
        channel, job = self._channel, self._job
        record = protocol.Accumulate(
            job.number,
            channel.next_sequence(),
            channel.acknowledged,
            piece.offset,
            piece.count,
            piece.last,
            job.wire,
            job.scale,
        )
        self._bytes_out += data.nbytes if data else 0
        channel.submit(record, slot, data)

    def _end(self) -> None:
        """End an operation whose last piece will not come, without counting it."""
        self._ended = True
        if self._sent:
            self._submit(Piece(0, 0, 0, 2, 0), 0, None)

    def _settle(self, record: Callable[[], Any]) -> None:
        """One answer, to the oldest piece under way or to the end of a stopped operation."""
        self._channel.acknowledged += 1
        index, self._answered = self._answered, self._answered + 1
        try:
            applied: protocol.Applied = record()
            self.version = applied.version
        except SmbError as error:
            if index < self._sent:
                self._job.refused(self._pieces[index], index % SLOTS)
            self._error = self._error or error

    def _drain(self) -> None:
        """Wait for reads that nobody needs any more."""
        while self._fetched < self._started:
            self._fetched += len(self._channel.collect(self._job.name)[1])
