"""When N workers that share max_iter end: a global counter with quotas, or the paper's three rules.

counter  workers claim the job's iterations from one counter in the box, a few at a time: each is done once
master   the paper's (1): all end when the leading worker has done its share, max_iter/N
fastest  the paper's (2): all end when the first of them has done its share
mean     the paper's (3): all end when their mean has reached the share

Source: Ahn et al., ShmCaffe, ICDCS 2018 (termination alignment); the counter is Korean patent 10-2190511's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shmtrain.group import Column, Progress, Rows, State

MAX_QUOTA = 16
PACED = 16  # steps
SHARES = 50  # quotas a worker takes at least, so that all end within 1/50 of their share


def quota(iterations: int, workers: int) -> int:
    """Iterations claimed at once: few enough that the workers end together, enough to ask the box seldom."""
    return max(1, min(MAX_QUOTA, iterations // (workers * SHARES)))


class Tickets(Protocol):
    """The job's counter, as smb.Counter."""

    def add(self, amount: int = 1) -> int: ...


class Ended(Protocol):
    """Whether the job ends, from the table and a worker's share of the iterations."""

    def __call__(self, rows: Rows, share: int) -> bool: ...


def _master(rows: Rows, share: int) -> bool:
    return rows.done(rows.leader) >= share


def _fastest(rows: Rows, share: int) -> bool:
    return int(rows.table[:, Column.DONE].max()) >= share


def _mean(rows: Rows, share: int) -> bool:
    return int(rows.table[:, Column.DONE].sum()) >= share * rows.began


RULES: dict[str, Ended] = {"master": _master, "fastest": _fastest, "mean": _mean}


@dataclass(frozen=True)
class Place:
    """A worker's place: the rows of ``progress`` share the iterations start .. max_iter-1.

    They are steps of counting.Portion where the workers share the net's batch out.
    """

    progress: Progress
    rank: int
    start: int
    max_iter: int


class _Stopwatch:
    """How long a worker's own steps take, in its row: the mean of every PACED of them, the first left out."""

    def __init__(self, progress: Progress, rank: int) -> None:
        self._progress, self._rank = progress, rank
        self._begun: tuple[float, float] | None = None
        self._steps = 0

    def lap(self, stood: float) -> None:
        """A step has ended; ``stood``: seconds for which this worker has stood still for others so far."""
        now = time.perf_counter()
        if self._begun is None:
            self._begun = now, stood
            return
        self._steps += 1
        if self._steps == PACED:
            since, before = self._begun
            pace = 1e6 * (now - since - (stood - before)) / PACED
            self._progress.put(self._rank, Column.PACE, max(int(pace), 1))
            self._begun, self._steps = (now, stood), 0


class RankCounting(ABC):
    """What all ways of counting write into this worker's row."""

    def __init__(self, place: Place) -> None:
        self._progress, self._rank = place.progress, place.rank
        self._start, self._max_iter = place.start, place.max_iter
        rows = self._progress.rows()
        self._workers = rows.began
        self._claimed = self._done = rows.done(
            place.rank
        )  # what one before has done in this row stays counted
        self._leaving = False
        self._pace = _Stopwatch(self._progress, self._rank)
        self.stood: Callable[[], float] = lambda: 0.0  # seconds for which this worker stood still for others
        self._training = False

    def _claim(self, count: int) -> None:
        self._claimed += count
        self._progress.put(self._rank, Column.CLAIMED, self._claimed)

    def _train(self) -> None:
        """The worker's row says that it makes steps, from the first claim on."""
        if not self._training:
            self._training = True
            self._progress.put(self._rank, Column.STATE, State.TRAINING)

    @abstractmethod
    def claim(self) -> int | None:
        """As in counting.Counting."""

    def leave(self) -> None:
        """Claim nothing more; what is claimed already is still this worker's to compute."""
        self._leaving = True

    def complete(self) -> int:
        """Count this worker's iteration; return how many the job has now."""
        self._pace.lap(self.stood())
        self._done += 1
        self._progress.put(self._rank, Column.DONE, self._done)
        return self.completed

    @property
    def completed(self) -> int:
        """The job's iterations that are done, or died with their worker."""
        return self._start + self._progress.rows().total


class SharedCounting(RankCounting):
    """Iterations start .. max_iter-1, each given to one worker once.

    What a worker had claimed when it died is lost with it (at most two quotas) and counts as done.
    """

    def __init__(self, place: Place, tickets: Tickets, begun: int) -> None:
        """``tickets`` is the job's counter in the box: iterations claimed by all, ``begun`` at the start."""
        super().__init__(place)
        self._tickets, self._begun = tickets, begun
        self._quota = quota(place.max_iter - place.start, self._workers)
        self._mine: dict[int, int] = {}  # iterations by turn, from the one under way on
        self._turn = self._known = 0

    def claim(self) -> int | None:
        self._train()
        iteration = self.upcoming(self._turn)
        if iteration is not None:
            self._mine.pop(self._turn - 1, None)
            self._turn += 1
        return iteration

    def upcoming(self, turn: int) -> int | None:
        """What this worker computes as its ``turn``-th iteration, from 0; claimed now where it was not.

        None: nothing is left for it. The turn may lie ahead of the present one, but not behind it.
        """
        while turn >= self._known and self._take():
            pass
        return self._mine.get(turn)

    def _take(self) -> bool:
        if self._leaving:
            return False
        first = self._start - self._begun + self._tickets.add(self._quota)
        end = min(first + self._quota, self._max_iter)
        if first >= end:
            return False
        for iteration in range(first, end):
            self._mine[self._known] = iteration
            self._known += 1
        self._claim(end - first)
        return True


class RuleCounting(RankCounting):
    """The paper's rules: each worker counts for itself and looks at the others before each iteration.

    The job's iteration that a claim gives (for the learning rate) is the number done by all, below max_iter.
    """

    def __init__(self, place: Place, ended: Ended) -> None:
        super().__init__(place)
        self._ended = ended
        self._share = -(-(place.max_iter - place.start) // self._workers)

    def claim(self) -> int | None:
        self._train()
        rows = self._progress.rows()
        if self._leaving or self._ended(rows, self._share):
            return None
        self._claim(1)
        return min(self._start + rows.total, self._max_iter - 1)


def open_counting(
    rule: str, place: Place, tickets: Callable[[], Tickets], begun: int = 0
) -> SharedCounting | RuleCounting:
    """``rule``: counter, master, fastest or mean.

    ``tickets`` opens the job's counter where it is needed; it stood at ``begun`` when the job began.
    """
    if rule == "counter":
        return SharedCounting(place, tickets(), begun)
    return RuleCounting(place, RULES[rule])
