"""Vector operations on segments, done where they lie: what a coordinator of many workers computes with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from smb.errors import RangeError, SmbError, TypeMismatch
from smb.transport.base import Attachment

T = TypeVar("T")


def check_threads(threads: int) -> None:
    """Raises RangeError."""
    if threads < 1:
        raise RangeError(f"threads is {threads}: an operation needs at least 1")


class Vectors(ABC):
    """A base of Segment. With shared memory the client does the work, otherwise the daemon.

    The first five are updates like write: chunk by chunk under the chunks' locks, counted once in the
    version, which they return. All but copy_from need float32. Ranges are in elements. ``other`` is another
    segment of the same box, taken from its element 0 on.
    """

    count: int
    _attachment: Attachment
    _seen: int

    @abstractmethod
    def _named(self, error: SmbError) -> SmbError:
        """The same error, with the segment's key."""

    def copy_from(self, other: Vectors, offset: int = 0) -> int:
        """Elements from ``offset`` on become those of ``other``, all of it; both of one dtype."""
        return self._combine("copy", 0.0, self._one(other), offset, other.count)

    def axpy(self, a: float, other: Vectors, offset: int = 0) -> int:
        """Elements from ``offset`` on += a times ``other``, all of it. NonFinite as in accumulate."""
        return self._combine("axpy", a, self._one(other), offset, other.count)

    def adagrad(
        self,
        sums: Vectors,
        gradient: Vectors,
        rate: float,
        *,
        scale: float = 1.0,
        epsilon: float = 1e-8,
        offset: int = 0,
        count: int | None = None,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """q = scale gradient; sums += q^2; self -= rate q / (sqrt(sums) + epsilon), in one pass.

        Element i of each belongs together; ``count`` of them from ``offset`` on, by default as many as the
        gradient has. Other steps at once are made one after the other in each chunk of ``sums``.

        counts  False: the update does not count in the version (part of a larger one)

        NonFinite names the first chunk where q^2 is NaN or Inf, before anything has moved (where the box is
        several daemons, at the one where that chunk lies).
        Source: Duchi, Hazan, Singer 2011; at the center: Dean et al. 2012, section 4.1.
        """
        squares, pushed = self._one(sums)._attachment, self._one(gradient)._attachment
        size = max(gradient.count - offset, 0) if count is None else count

        def step() -> int:
            check_threads(threads)
            return self._attachment.adagrad(
                squares,
                pushed,
                rate,
                scale=scale,
                epsilon=epsilon,
                offset=offset,
                count=size,
                counts=counts,
                threads=threads,
            )

        version = self._asked(step)
        self._seen += counts
        return version

    def scale(self, a: float, offset: int = 0, count: int | None = None) -> int:
        """``count`` elements from ``offset`` on, by default to the end, times a."""
        return self._combine("scale", a, None, offset, count)

    def fill(self, value: float, offset: int = 0, count: int | None = None) -> int:
        """``count`` elements from ``offset`` on, by default to the end, become ``value``."""
        return self._combine("fill", value, None, offset, count)

    def dot(self, other: Vectors) -> float:
        """The sum of self[i] other[i] in float64, of segments of one count.

        Like a read it may mix two updates at chunk borders.
        """
        source = self._one(other)._attachment
        return self._asked(lambda: self._attachment.reduce("dot", source))

    def norm(self) -> float:
        """The Euclidean norm, the square root of dot with itself."""
        return math.sqrt(self.dot(self))

    def sum(self) -> float:
        """The sum of all elements in float64."""
        return self._asked(lambda: self._attachment.reduce("sum"))

    def _one(self, other: Vectors) -> Vectors:
        if not isinstance(other, Vectors):
            raise self._named(TypeMismatch(f"must be a segment, got {type(other).__name__}"))
        return other

    def _combine(self, how: str, scalar: float, other: Vectors | None, offset: int, count: int | None) -> int:
        source = other._attachment if other else None
        size = max(self.count - offset, 0) if count is None else count
        version = self._asked(lambda: self._attachment.combine(how, scalar, source, offset, size))
        self._seen += 1  # mine, so that it counts in nobody's staleness
        return version

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except SmbError as error:
            raise self._named(error) from error
