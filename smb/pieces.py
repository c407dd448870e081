"""Which elements of a segment lie in which stripe of it: plain numbers, no I/O.

A segment over ``stripes`` daemons has chunk k at daemon k % stripes, which packs its chunks into one plain
segment of its own. So a range of the large segment is one range of each stripe, and only the caller's array
is in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """``count`` elements, all in one chunk."""

    begin: int  # in the stripe's own segment
    at: int  # in the caller's array
    count: int


def before(element: int, per_chunk: int, stripe: int, stripes: int) -> int:
    """How many of the large segment's elements before ``element`` lie in the stripe."""
    chunk, rest = divmod(element, per_chunk)
    whole = (chunk + stripes - 1 - stripe) // stripes
    return whole * per_chunk + (rest if chunk % stripes == stripe else 0)


def pieces(offset: int, count: int, per_chunk: int, stripe: int = 0, stripes: int = 1) -> Iterator[Piece]:
    """The stripe's share of the large segment's elements [offset, offset + count), in ascending order.

    offset, count  of the large segment, in elements; the caller's array begins at ``offset``
    per_chunk      elements of a chunk
    """
    begin = before(offset, per_chunk, stripe, stripes)
    end = before(offset + count, per_chunk, stripe, stripes)
    while begin < end:
        chunk, rest = divmod(begin, per_chunk)
        size = min(per_chunk - rest, end - begin)
        yield Piece(begin, (chunk * stripes + stripe) * per_chunk + rest - offset, size)
        begin += size
