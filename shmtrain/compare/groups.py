"""The runs of one way and number of workers, taken together: means over seeds and their intervals."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shmtrain.compare.plan import ALONE
from shmtrain.compare.results import Point, Result

BINS = 50  # of a curve of the training loss
# Student's t for 95%, two-sided, of 1 to 10 degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Mean:
    """A mean and half of its 95% interval; None of one value alone, which says nothing of the spread."""

    value: float
    half: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """``values`` must not be empty."""
        half = None
        if len(values) > 1:
            half = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half, tuple(values))


def t95(freedom: int) -> float:
    """Student's t for a two-sided 95% interval; above 10 degrees within 0.02 of the table's."""
    return T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.5 / freedom


@dataclass(frozen=True)
class Group:
    """All seeds of one way with one number of workers; at least one."""

    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        return self.results[0].name

    @property
    def workers(self) -> int:
        return self.results[0].workers

    @property
    def label(self) -> str:
        return "1 worker" if self.workers == 1 else f"{self.name}, {self.workers} workers"

    def mean(self, of: Callable[[Result], float | None]) -> Mean | None:
        """Of those runs that have it."""
        values = [value for result in self.results if (value := of(result)) is not None]
        return Mean.of(values) if values else None

    @property
    def accuracy(self) -> Mean | None:
        return self.mean(lambda r: r.accuracy)

    @property
    def speed(self) -> float:
        """Images a second."""
        return statistics.fmean(r.images_per_second for r in self.results)

    def part(self, name: str, hidden: bool = False) -> float:
        """Seconds of one part in a worker's iteration; ``hidden`` of what was done beside the computing."""
        return statistics.fmean((r.hidden if hidden else r.parts).get(name, 0.0) for r in self.results)

    def average(self, of: Callable[[Result], float]) -> float:
        return statistics.fmean(of(r) for r in self.results)

    @property
    def staleness(self) -> Counter[int]:
        return sum((r.staleness for r in self.results), Counter[int]())

    def time_to(self, accuracy: float) -> tuple[int, Mean | None]:
        """How many of the runs reached it, and their seconds."""
        points = [p for r in self.results if (p := r.reached(accuracy)) is not None]
        return len(points), Mean.of([p.seconds for p in points]) if points else None

    def tested(self) -> list[Point]:
        """The mean over seeds at each iteration that all seeds have tested."""
        series = [{p.iteration: p for p in r.tests} for r in self.results]
        common = [i for i in series[0] if all(i in points for points in series)]
        return [_mean([points[i] for points in series]) for i in common]

    def trained(self) -> list[Point]:
        """The mean training loss of all seeds in each of BINS equal parts of the training."""
        width = max(max(r.iterations for r in self.results) / BINS, 1)
        bins: dict[int, list[Point]] = {}
        for result in self.results:
            for point in result.losses:
                bins.setdefault(int(point.iteration / width), []).append(point)
        return [_mean(points) for _, points in sorted(bins.items())]


def _mean(points: Sequence[Point]) -> Point:
    def of(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return statistics.fmean(known) if known else None

    return Point(
        round(statistics.fmean(p.iteration for p in points)),
        statistics.fmean(p.seconds for p in points),
        of([p.loss for p in points]),
        of([p.accuracy for p in points]),
    )


def grouped(results: Sequence[Result], order: Sequence[str]) -> list[Group]:
    """One worker first, then way by way in ``order``, the fewest workers first."""
    ranks = {name: place for place, name in enumerate((ALONE, *order))}
    known = [r for r in results if r.name in ranks]
    keys = sorted({(ranks[r.name], r.workers) for r in known})
    return [
        Group(tuple(sorted((r for r in known if (ranks[r.name], r.workers) == key), key=lambda r: r.seed)))
        for key in keys
    ]


def alone(groups: Sequence[Group]) -> Group | None:
    """One worker, where it was run."""
    return next((g for g in groups if g.workers == 1), None)


def target(groups: Sequence[Group]) -> float | None:
    """The accuracy that the time to it is asked of, by default: the worst mean, less half a point."""
    means = [mean.value for g in groups if (mean := g.accuracy) is not None]
    return math.floor(1000 * min(means) - 5) / 1000 if means else None
