"""What a run came to, read from its folder: the record of this command and the metrics of every worker.

Seconds are those of training: the wall clock since the first step without the time of the tests. While the
leading worker tests, the share ``standing`` of the workers stands still, so that share of the time is left
out: all of it where everybody waits, 1/N of it where the others train on.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shmtrain.compare.plan import ALONE, PREFIX
from shmtrain.metrics import ranked

RECORD = "run.json"
WAITS = ("collective", "wait")


class Broken(Exception):
    """A run that has not come to its end; the words say why."""


@dataclass(frozen=True)
class Point:
    """The center as it was tested, or the mean training loss since the last point."""

    iteration: int
    seconds: float
    loss: float | None
    accuracy: float | None = None


@dataclass(frozen=True)
class Result:
    """One whole run. ``record`` is what the command wrote, ``ends`` the last metrics of each worker."""

    record: dict[str, Any]
    start: dict[str, Any]
    ends: list[dict[str, Any]]
    tests: list[Point] = field(default_factory=list)
    losses: list[Point] = field(default_factory=list)

    @property
    def name(self) -> str:
        return ALONE if self.workers == 1 else str(self.record["name"])

    @property
    def workers(self) -> int:
        return int(self.record["workers"])

    @property
    def seed(self) -> int:
        return int(self.record["seed"])

    @property
    def iterations(self) -> int:
        return int(self.ends[0]["iteration"])

    # Time ------------------------------------------------------------------------------------------------

    @property
    def _testing(self) -> float:
        """Seconds of tests before the last step; they are the leading worker's."""
        return max(float(end["loop_testing_seconds"]) for end in self.ends)

    @cached_property
    def seconds(self) -> float:
        longest = max(float(end["loop_seconds"]) for end in self.ends)
        return max(longest - self._testing * float(self.record["standing"]), 1e-9)

    @property
    def images_per_second(self) -> float:
        return self.iterations * int(self.start["batch"]) / self.seconds

    @cached_property
    def _waited(self) -> list[float]:
        """Seconds for which each worker waited for the leader's tests: those of the lowest ranks that do."""
        standing = round(self.record["standing"] * self.workers)
        return [
            self._testing - float(end["loop_testing_seconds"]) if rank < standing else 0.0
            for rank, end in enumerate(self.ends)
        ]

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Mean seconds of a worker's iteration that a second thread did beside the computing."""
        return self._mean_parts([dict(end.get("hidden_parts", {})) for end in self.ends])

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of a worker's iteration by part of the exchange, waiting for tests left out."""
        every = [dict(end.get("parts", {})) for end in self.ends]
        for waited, parts in zip(self._waited, every, strict=True):
            name = max((name for name in WAITS if name in parts), key=parts.__getitem__, default=None)
            if name is not None:
                parts[name] = max(parts[name] - waited, 0.0)
        return self._mean_parts(every)

    def _mean_parts(self, every: list[dict[str, float]]) -> dict[str, float]:
        sums: Counter[str] = Counter()
        for end, parts in zip(self.ends, every, strict=True):
            sums.update({name: seconds / max(end["steps"], 1) for name, seconds in parts.items()})
        return {name: total / len(self.ends) for name, total in sums.items()}

    @property
    def iteration_seconds(self) -> float:
        """T_iter: of a worker's own iteration, the mean of all."""
        return statistics.fmean(
            (float(e["loop_seconds"]) - float(e["loop_testing_seconds"]) - waited) / max(e["steps"], 1)
            for e, waited in zip(self.ends, self._waited, strict=True)
        )

    @property
    def exchange_seconds(self) -> float:
        """T_iter - T_comp: for which an iteration stood still for the exchange."""
        return statistics.fmean(
            max(float(e.get("exchange_seconds", 0.0)) - waited, 0.0) / max(e["steps"], 1)
            for e, waited in zip(self.ends, self._waited, strict=True)
        )

    @property
    def share(self) -> float:
        """Of an iteration, that is not computing."""
        return self.exchange_seconds / self.iteration_seconds

    # Accuracy --------------------------------------------------------------------------------------------

    @property
    def accuracy(self) -> float | None:
        """Of the last test, 0 to 1."""
        return self.tests[-1].accuracy if self.tests else None

    @property
    def loss(self) -> float | None:
        """Of the last test, else of the last training losses."""
        points = [p.loss for p in (self.tests or self.losses) if p.loss is not None]
        return points[-1] if points else None

    def reached(self, accuracy: float) -> Point | None:
        """The first test that was at least as good."""
        return next((p for p in self.tests if p.accuracy is not None and p.accuracy >= accuracy), None)

    # What was moved --------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Between the workers and the box, or from one worker to another, each once."""
        return sum(int(e.get("bytes_sent", 0)) + int(e.get("bytes_received", 0)) for e in self.ends)

    @property
    def bytes_per_iteration(self) -> float:
        return self.bytes / max(self.iterations, 1)

    @property
    def dropped(self) -> int:
        return sum(int(e.get("dropped", 0)) for e in self.ends)

    @cached_property
    def staleness(self) -> Counter[int]:
        """How often each was seen, by all workers."""
        seen: Counter[int] = Counter()
        for end in self.ends:
            seen.update({int(s): int(count) for s, count in end.get("staleness", {}).items()})
        return seen

    @property
    def mean_staleness(self) -> float | None:
        total = sum(self.staleness.values())
        return sum(s * count for s, count in self.staleness.items()) / total if total else None


def read(folder: Path) -> Result:
    """The run in a folder. Raises Broken."""
    try:
        return _read(folder)
    except (KeyError, TypeError, AttributeError) as error:  # JSON, and of something else
        raise Broken(f"is damaged: {type(error).__name__} {error}") from None


def _read(folder: Path) -> Result:
    try:
        record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        raise Broken("was not run to its end") from None
    except ValueError as error:
        raise Broken(f"{RECORD} is not whole: {error}") from None
    if record["code"] != 0:
        late = f"took more than {record['limit']:g} s" if record.get("limit") else ""
        raise Broken(late or f"ended with {record['code']}")
    logs = [_lines(Path(ranked(str(folder / f"{PREFIX}.jsonl"), rank))) for rank in range(record["workers"])]
    ends = [end for lines in logs if (end := next((r for r in lines if r["kind"] == "end"), None))]
    if len(ends) < record["workers"]:
        raise Broken(f"{len(ends)} of {record['workers']} workers came to the end")
    if any(end["stopped"] for end in ends):
        raise Broken("was stopped early")
    start = next((r for r in logs[0] if r["kind"] == "start"), None)
    if start is None:
        raise Broken("has no first line in its metrics")
    result = Result(record, start, ends)
    result.tests.extend(_points(logs[0], "test", result))
    result.losses.extend(_points(logs[0], "train", result))
    return result


def read_all(runs: Path) -> tuple[list[Result], dict[str, str]]:
    """A comparison's whole runs, in the order of their names; the others' names, and why they are not."""
    found, broken = [], {}
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            found.append(read(folder))
        except Broken as error:
            broken[folder.name] = str(error)
    return found, broken


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise Broken(f"{path.name} is not whole: {error}") from None


def _points(lines: list[dict[str, Any]], kind: str, result: Result) -> list[Point]:
    """Of the first test net. What comes after the last step took no more training than that."""
    points = []
    for line in lines:
        if line["kind"] != kind or line.get("net", 0) != 0:
            continue
        seconds = line["seconds"] - line["testing_seconds"] * result.record["standing"]
        loss = line.get("loss") if kind == "test" else line.get("mean_loss")
        points.append(Point(line["iteration"], min(seconds, result.seconds), loss, _accuracy(line)))
    return points


def _accuracy(line: dict[str, Any]) -> float | None:
    """The output that is called accuracy, else the first whose name has the word in it."""
    names = sorted(name for name in line if "accuracy" in name.lower())
    value = line[min(names, key=lambda name: (name != "accuracy", name))] if names else None
    return float(value) if isinstance(value, (int, float)) else None
