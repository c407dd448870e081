"""A segment whose chunks lie at several daemons: each operation goes to all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from smb import protocol
from smb.crew import Crew
from smb.errors import NotSupported, RangeError, RequestError
from smb.pieces import before, pieces
from smb.segment import CHUNK_BYTES
from smb.transport.arrays import DeviceMemory
from smb.transport.base import Array, Part
from smb.transport.remote import RemoteAttachment
from smb.transport.stream import WireStats

T = TypeVar("T")


def _length(array: Any) -> int:
    """Elements of a numpy array, torch tensor or GPU memory; whether it fits otherwise, each part looks."""
    if isinstance(array, DeviceMemory):
        return array.count
    numel = getattr(array, "numel", None)
    return int(numel()) if numel else int(np.asarray(array).size)


class StripedAttachment:
    """All stripes of one segment; part i is at daemon i. An Attachment.

    An update is done when all parts have done it, and then counted on the first one's version; updates that
    failed in any part are not counted. After NonFinite each part has stopped before its own first bad chunk.
    """

    def __init__(self, crew: Crew, parts: Sequence[Part], stripes: int, count: int, dtype: str) -> None:
        self._crew, self._parts = crew, parts
        self._stripes = stripes if len(parts) > 1 else 1  # a segment of one stripe is like any other
        self._count, self._dtype = count, dtype
        self._per_chunk = CHUNK_BYTES // protocol.DTYPES[dtype]

    def _check(self, verb: str, offset: int, count: int) -> None:
        if offset < 0 or offset + count > self._count:
            raise RangeError(
                f"{verb}: {count} elements at offset {offset} run past the segment ({self._count} elements)"
            )

    def _share(self, element: int, part: int) -> int:
        return before(element, self._per_chunk, part, self._stripes)

    def _touched(self, offset: int, count: int) -> list[int]:
        """The parts in which some of a range lies; all of them for an empty one, so that each looks at it."""
        touched = [
            i for i in range(len(self._parts)) if self._share(offset + count, i) > self._share(offset, i)
        ]
        return touched or list(range(len(self._parts)))

    def _each(self, verb: str, array: Array, offset: int, do: Callable[[Part, int], T]) -> list[T]:
        """``do(part, stripe)`` at each part that the array's range touches."""
        count, parts = _length(array), self._parts
        self._check(verb, offset, count)
        return self._crew.all(self._touched(offset, count), lambda i: do(parts[i], i))

    def _update(self, verb: str, array: Array, offset: int, do: Callable[[Part, int], int]) -> int:
        """The same, and then counted; the version after it."""
        versions = self._each(verb, array, offset, do)
        if self._stripes == 1:  # counted where it was done
            return versions[0]
        return self._count_update() if _length(array) else self.version

    @property
    def wires(self) -> bool:
        """Whether increments may travel in another type than float32, to all daemons."""
        return all(getattr(part, "wires", False) for part in self._parts)

    def wire_stats(self) -> WireStats | None:
        """What all parts moved together; None where one of them does not count it."""
        if not self.wires:
            return None
        figures = [cast(RemoteAttachment, part).wire_stats() for part in self._parts]
        return WireStats(*(sum(column) for column in zip(*figures, strict=True)))

    @property
    def version(self) -> int:
        return self._crew.at(0, lambda: self._parts[0].version)

    def _count_update(self) -> int:
        return self._crew.at(0, self._parts[0].count_update)

    def wait(self, version: int, timeout: float) -> bool:
        return self._crew.at(0, lambda: self._parts[0].wait(version, timeout))

    def read(self, out: Array, offset: int = 0, threads: int = 1) -> None:
        n = self._stripes
        self._each("read", out, offset, lambda part, i: part.read(out, offset, threads, stripe=i, stripes=n))

    def write(self, array: Array, offset: int = 0, threads: int = 1) -> int:
        n = self._stripes

        def one(part: Part, i: int) -> int:
            return part.write(array, offset, threads, stripe=i, stripes=n)

        return self._update("write", array, offset, one)

    def accumulate(
        self, source: Any, scale: float = 1.0, offset: int = 0, threads: int = 1, **wire: str
    ) -> int:
        if source is self:
            raise RequestError("accumulate: source and target are the same segment")
        if isinstance(source, StripedAttachment):
            return self.combine("axpy", scale, source, offset, source._count, threads=threads)
        n = self._stripes

        def one(part: Part, i: int) -> int:
            add: Callable[..., int] = part.accumulate  # not every transport knows wire types
            return add(source, scale, offset, threads, stripe=i, stripes=n, **wire)

        return self._update("accumulate", source, offset, one)

    def exchange(self, local: Array, alpha: float, offset: int = 0, threads: int = 1, **wire: str) -> int:
        n = self._stripes

        def one(part: Part, i: int) -> int:
            exchange: Callable[..., int] = part.exchange
            return exchange(local, alpha, offset, threads, stripe=i, stripes=n, **wire)

        return self._update("exchange", local, offset, one)

    def combine(
        self,
        how: str,
        scalar: float,
        source: Any,
        offset: int,
        count: int,
        *,
        threads: int = 1,
    ) -> int:
        self._check(how, offset, count)
        others = self._other(how, source)
        if source is not None:
            source._check(how, 0, count)
            if self._stripes > 1 and offset % (self._per_chunk * self._stripes):
                return self._combine_here(how, scalar, source, offset, count)

        def part(i: int) -> int:
            begin, end = self._share(offset, i), self._share(offset + count, i)
            other = others[i] if others else None
            return self._parts[i].combine(
                how, scalar, other, begin, end - begin, counts=False, threads=threads
            )

        self._crew.all(self._touched(offset, count), part)
        return self._count_update() if count else self.version

    def _combine_here(
        self, how: str, scalar: float, source: StripedAttachment, offset: int, count: int
    ) -> int:
        """Where the two segments' elements lie at different daemons, they come together in this process."""
        if source is self or source._parts[0] is self._parts[0]:
            raise RequestError(f"{how}: source and target are the same segment")
        values = np.empty(count, self._dtype)
        source.read(values)
        if how == "copy":
            return self.write(values, offset)
        return self.accumulate(values, scalar, offset)

    def adagrad(
        self,
        sums: Any,
        gradient: Any,
        rate: float,
        *,
        scale: float,
        epsilon: float,
        offset: int,
        count: int,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        self._check("adagrad", offset, count)
        squares, pushed = self._other("adagrad", sums), self._other("adagrad", gradient)
        for one in (sums, gradient):
            one._check("adagrad", offset, count)

        def part(i: int) -> int:
            begin, end = self._share(offset, i), self._share(offset + count, i)
            return self._parts[i].adagrad(
                squares[i], pushed[i], rate, scale=scale, epsilon=epsilon, offset=begin, count=end - begin,
                counts=False, threads=threads,
            )  # fmt: skip

        self._crew.all(self._touched(offset, count), part)
        return self._count_update() if count and counts else self.version

    def reduce(self, how: str, other: Any = None, *, threads: int = 1) -> float:
        others = self._other(how, other)
        if other is not None and other._count != self._count:
            raise RangeError(f"{how}: one segment has {self._count} elements, the other {other._count}")

        def part(i: int) -> float:
            return self._parts[i].reduce(how, others[i] if others else None, threads=threads)

        return sum(self._crew.all(range(len(self._parts)), part))

    def _other(self, how: str, other: Any) -> Sequence[Part]:
        """The parts of another segment of this box, none for None."""
        if other is None:
            return ()
        if not isinstance(other, StripedAttachment) or other._crew is not self._crew:
            raise RequestError(f"{how}: needs a segment of the same box")
        return other._parts

    def rescue(self, out: Array, offset: int = 0) -> int:
        """Each part from memory where it is mapped, else from its daemon while that lives."""
        values = np.empty(_length(out), self._dtype)
        self._check("rescue", offset, values.size)
        torn = 0
        for i in self._touched(offset, values.size):
            share = list(pieces(offset, values.size, self._per_chunk, i, self._stripes))
            packed = np.empty(sum(piece.count for piece in share), self._dtype)
            try:
                torn += self._parts[i].rescue(packed, share[0].begin) if share else 0
            except NotSupported:
                self._parts[i].read(packed, share[0].begin)
            at = 0
            for piece in share:
                values[piece.at : piece.at + piece.count] = packed[at : at + piece.count]
                at += piece.count
        np.copyto(np.asarray(out).reshape(-1), values)
        return torn

    def close(self) -> None:
        for part in self._parts:
            part.close()
