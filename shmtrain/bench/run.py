"""One interleaved run: every round takes every measure, in an order drawn by chance."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import smb
from shmtrain.bench.computing import Busy
from shmtrain.bench.contest import BOX, COMPUTE, GLOO, Measure, hold, measures, placed
from shmtrain.bench.errors import BenchError
from shmtrain.bench.groups import Group, Hall, hall
from shmtrain.bench.job import MIB, NOTHING, WHOLE
from shmtrain.bench.mpi import Mpi
from shmtrain.tempdir import keep_short
from smb.memory import available, cgroup_left, show

CLOSE = 1.25  # a variant this much slower than the best of its kind goes no further
AGAIN = 3
CHECKED = 70_001  # elements of the vector on which each way is checked
Samples = dict[Measure, list[float]]  # seconds of a step


@dataclass(frozen=True)
class Setting:
    """What is compared.

    sizes    MiB of a vector
    compute  seconds of a step's computing in the overlapped parts
    seconds  that one size and number of workers may take: a round that would take longer is not begun
    """

    sizes: tuple[float, ...]
    workers: tuple[int, ...]
    parts: tuple[str, ...]
    mpis: tuple[Mpi, ...]
    gloo: bool
    rounds: int
    repeat: int
    compute: float
    seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One measure's medians: milliseconds.

    step         wall time of a step in which each worker exchanges once, computing included
    uncovered    what the exchange added to a step: step less what the computing alone took
    spread       half the distance of the quickest and the slowest sample
    """

    mib: float
    workers: int
    library: str
    op: str
    variant: str
    overlap: str
    computing: str
    step: float
    uncovered: float
    spread: float
    samples: int


def compare(setting: Setting) -> Iterator[list[Row]]:
    """The rows of each size and number of workers as they are done."""
    rate = Busy().rate()
    for workers in setting.workers:
        _room(setting, workers)
        with contextlib.ExitStack() as stack:
            groups = _start(stack, setting, workers)
            _check(setting, groups, workers)
            for mib in setting.sizes:
                yield _of_size(setting, groups, workers, mib, rate)


def _room(setting: Setting, workers: int) -> None:
    """Refuse what this machine has no memory for."""
    vectors = workers * 5 + (len(setting.mpis) * (5 * workers + 4)) + setting.gloo * 2 * workers
    need = int(vectors * max(setting.sizes) * MIB + workers * (80 + 300 * setting.gloo) * MIB)
    rooms = [room for room in (available(), cgroup_left()) if room is not None]
    if rooms and need > (free := min(rooms)):
        raise BenchError(
            f"{workers} workers with vectors of {max(setting.sizes):g} MiB may need {show(need)} in all, "
            f"and {show(free)} are free: take smaller --sizes or fewer --workers"
        )


def _start(stack: contextlib.ExitStack, setting: Setting, workers: int) -> dict[str, Group]:
    keep_short()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmtrain-bench-box-"))
    address = f"unix:{folder}/box"
    stack.enter_context(smb.serve(unix=f"{folder}/box"))
    place: Hall = stack.enter_context(hall())
    groups = {BOX: place.box(workers, address)}
    if setting.gloo and workers > 1:
        groups[GLOO] = place.gloo(workers)
    for mpi in setting.mpis:
        groups[mpi.name] = place.mpi(mpi, workers)
    return groups


def _measures(setting: Setting, groups: dict[str, Group], part: str, workers: int) -> list[Measure]:
    names = [mpi.name for mpi in setting.mpis]
    threads = max(1, (os.cpu_count() or 1) // workers)
    found = measures(part, names, GLOO in groups, threads)
    return [one for one in found if workers > 1 or one.op != "allreduce"]  # alone there is nothing to sum


def _check(setting: Setting, groups: dict[str, Group], workers: int) -> None:
    """Each way does its work on a small vector: what does not exchange would be fastest."""
    for part in setting.parts:
        for one in _measures(setting, groups, part, workers):
            if one.overlap == NOTHING or one.computing == "busy":
                continue
            job = replace(one.job(CHECKED), computing="none", check=True)
            if one.overlap != WHOLE:  # there the weights lie elsewhere
                _, held = groups[one.library].run(placed(one, job, workers, _cores()))
                hold(one, workers, held)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _of_size(setting: Setting, groups: dict[str, Group], workers: int, mib: float, rate: float) -> list[Row]:
    """A trial of everything, then rounds of what may be the best of its kind."""
    entries = [one for part in setting.parts for one in _measures(setting, groups, part, workers)]
    place = Place(groups, int(mib * MIB) // 4, workers, setting.compute, rate)
    began = time.monotonic()
    order = random.Random(setting.seed)
    trial = {one: [place.take(one, 1)] for one in order.sample(entries, len(entries))}
    todo = _close(entries, trial)
    samples: Samples = {one: [] for one in entries if one in todo}
    for number in range(setting.rounds):
        # All differences are to the computing alone: it is taken more often than the rest.
        calls = todo + AGAIN * [one for one in todo if one.op == COMPUTE]
        for one in order.sample(calls, len(calls)):
            samples[one].append(place.take(one, setting.repeat))
        todo = _close(todo, samples)
        _tell(f"{mib:g} MiB, {workers} workers: round {number + 1} of {setting.rounds} ")
        spent = time.monotonic() - began
        if setting.seconds and spent * (number + 2) / (number + 1) > setting.seconds:
            break  # another round would take too long
    _tell("")
    left_out = {one: times for one, times in trial.items() if one not in samples}
    return _rows({one: samples.get(one) or left_out[one] for one in entries}, workers, mib)


@dataclass(frozen=True)
class Place:
    """Groups, and what they move: ``count`` elements, with ``compute`` seconds of a step."""

    groups: dict[str, Group]
    count: int
    workers: int
    compute: float
    rate: float

    def take(self, one: Measure, repeat: int) -> float:
        """Seconds of a step."""
        amount = self.compute * (self.rate if one.computing == "busy" else 1.0)
        job = placed(one, one.job(self.count, amount, repeat), self.workers, _cores())
        wall, _ = self.groups[one.library].run(job)
        return wall / repeat


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")


def _close(todo: Sequence[Measure], samples: Samples) -> list[Measure]:
    """Those that may be the best of their kind."""
    best: dict[tuple[str, ...], float] = {}
    for one in todo:
        best[one.kind] = min(best.get(one.kind, float("inf")), *samples[one])
    return [one for one in todo if min(samples[one]) <= CLOSE * best[one.kind]]


def _rows(samples: Samples, workers: int, mib: float) -> list[Row]:
    median = {one: 1e3 * statistics.median(times) for one, times in samples.items()}
    alone = {one.computing: time for one, time in median.items() if one.op == COMPUTE}
    return [
        Row(
            mib, workers, one.library, one.op, one.variant, one.overlap, one.computing,
            round(time, 3), round(time - alone.get(one.computing, 0.0), 3),
            round(500 * (max(samples[one]) - min(samples[one])), 3), len(samples[one]),
        )
        for one, time in median.items()
    ]  # fmt: skip
