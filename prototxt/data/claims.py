"""Batches that are this worker's because it has claimed them: for workers that come and go.

A training program hands Net(options={"claims": claims}) to its TRAIN layers that read files:

    claims(n) -> int | None     the number of the batch that this worker reads n-th, both from 0

Batch b of a layer holds the records b * batch_size .. (b + 1) * batch_size - 1 of the endless sequence of its
source, so that each number claimed once is each record read once an epoch, whoever reads it. None: there is
nothing to claim now. Every layer asks, with n going up by one, some batches before it needs them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

Claims = Callable[[int], "int | None"]

CLAIM = b"N"  # the first byte of such a message to the reader
AHEAD = 4  # batches that are asked for before they are needed: what a worker that dies takes with it


def pack_claims(numbers: Iterable[int]) -> bytes:
    numbers = tuple(numbers)
    return CLAIM + struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_claims(message: bytes) -> tuple[int, ...]:
    """The inverse of pack_claims."""
    return struct.unpack(f"<{(len(message) - 1) // 8}Q", message[1:])


class Claiming:
    """Which batches a reader is to be told of. ``claims`` as above."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._told = self._taken = 0
        self._last = -1

    def take(self) -> tuple[int, ...]:
        """Called before each batch is taken: the numbers that the reader must be told now.

        A batch that nobody could claim (the original shows the loss of one more at the end) follows the last.
        """
        numbers: list[int] = []
        if self._told - self._taken <= AHEAD // 2:
            while self._told + len(numbers) <= self._taken + AHEAD:
                number = self._claims(self._told + len(numbers))
                if number is None:
                    break
                numbers.append(number)
        if self._told + len(numbers) == self._taken:
            numbers.append((numbers[-1] if numbers else self._last) + 1)
        self._told += len(numbers)
        self._taken += 1
        self._last = numbers[-1] if numbers else self._last
        return tuple(numbers)
