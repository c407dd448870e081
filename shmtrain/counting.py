"""Who computes which iteration: the job's iterations are counted once, whoever computes them."""

from __future__ import annotations

from typing import Protocol


class Counting(Protocol):
    """The job's iterations, shared by its workers. All calls come from the thread of the training loop.

    claim      the job's iteration (from 0) that this worker computes next; None: nothing is left for it
    complete   counts the claimed iteration as done; the number of iterations that the job has completed now
    completed  that number, without counting anything
    leave      claim gives nothing more than what this worker has already taken on
    """

    @property
    def completed(self) -> int: ...

    def claim(self) -> int | None: ...

    def complete(self) -> int: ...

    def leave(self) -> None: ...


class LocalCounting:
    """One worker alone: ``start``, ``start + 1``, ... up to but not including ``max_iter``."""

    def __init__(self, start: int, max_iter: int) -> None:
        self.completed = start
        self._end = max_iter

    def leave(self) -> None:
        self._end = self.completed

    def claim(self) -> int | None:
        return self.completed if self.completed < self._end else None

    def complete(self) -> int:
        self.completed += 1
        return self.completed
