"""Who computes which iteration: the job's iterations are counted once, whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Portion:
    """What one step of a worker is of an iteration: so many ``images`` of ``whole``.

    They differ where the workers share the net's batch out (``--batch global``): the job's iterations, by
    which its file counts, stay those of the whole batch, and its workers count steps.
    """

    images: int
    whole: int

    def steps(self, iterations: int) -> int:
        """The steps that make so many iterations; the last one may begin the next."""
        return -(-iterations * self.whole // self.images)

    def iterations(self, steps: int) -> int:
        """The whole iterations in so many steps."""
        return steps * self.images // self.whole

    def batches(self, workers: int) -> int:
        """How many of the net's batches so many workers take in one step each; at least 1."""
        return max(1, round(workers * self.images / self.whole))


class Portioned:
    """The iterations that the steps which ``steps`` counts come to."""

    def __init__(self, steps: Counting, portion: Portion) -> None:
        self._steps, self._portion = steps, portion

    @property
    def completed(self) -> int:
        return self._portion.iterations(self._steps.completed)

    def claim(self) -> int | None:
        step = self._steps.claim()
        return None if step is None else self._portion.iterations(step)

    def complete(self) -> int:
        return self._portion.iterations(self._steps.complete())

    def leave(self) -> None:
        self._steps.leave()


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
