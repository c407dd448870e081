"""``shmtrain simulate`` against runs on this machine: the same vectors, computing times measured, no fitting.

    python benchmarks/simulate_check.py [--workers 1,2,3,4] [--mib 51] [--compute-ms 60] [--rounds 3]

For each number of workers there are rounds of steps of computing and exchange, in an order drawn by chance:
computing as a busy loop and as a wait, by the fused exchange and by the paper's two threads. The same rounds
measure the computing alone with as many processes, so under the same oversubscription; one process's fused
exchange, copies, sums and moves, each after a pause of the computing's length (a thread's rates); and two
workers' exchange at once against one's (how many threads' worth of bandwidth the memory has).
Simulated and measured milliseconds of a step must agree within 10%.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import smb
from shmtrain.bench.computing import Busy
from shmtrain.bench.contest import BOX, COMPUTE, Measure, placed
from shmtrain.bench.groups import Group, hall
from shmtrain.bench.job import ALPHA, MIB, NOTHING, PUSH, SEQUENTIAL, floats
from shmtrain.simulate.run import simulate
from shmtrain.simulate.setting import GB, Computing, Machine, Setting
from smb import _native

Row = tuple[str, float, float]
BAR = 0.10
STEPS = 12  # of a sample
CORES = sorted(os.sched_getaffinity(0))
WAYS = {"fused": ("seasgd", SEQUENTIAL), "paper": ("paper", PUSH)}
KINDS = ("busy", "wait")
RATES = ("exchange", "copy", "accumulate", "apply")
FUSED = Measure(BOX, "fused", "1")


def take(group: Group, measure: Measure, count: int, amount: float, steps: int) -> float:
    """Seconds of a step."""
    job = placed(measure, measure.job(count, amount, steps), group.workers, CORES)
    return group.run(job)[0] / steps


class Rates:
    """This machine's rates, taken in the rounds in which they are used: a memory is not the same all day."""

    def __init__(self, box: smb.Box, groups: dict[int, Group], count: int, pause: float) -> None:
        self.groups, self.count, self.pause = groups, count, pause
        self.center, self.own = (box.create(f"check/{name}", count) for name in ("center", "own"))
        self.mine, self.room = floats(count), floats(count)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.take()  # the first time is that of pages that nobody has touched
        self.times.clear()

    def take(self) -> None:
        """The fused move, then the paper's sequence, each after a pause of the computing's length."""
        for _ in range(3):
            time.sleep(self.pause)
            self._time("exchange", lambda: self.center.exchange(self.mine, ALPHA))
        for _ in range(3):
            time.sleep(self.pause)
            self._time("copy", lambda: self.center.read(self.room))
            self._time("apply", lambda: _native.elastic_pull(self.mine, self.room, ALPHA, out=self.room))
            self._time("copy", lambda: self.own.write(self.room))
            self._time("accumulate", lambda: self.center.accumulate(self.own))
        for number in (1, 2):
            self.times[str(number)].append(take(self.groups[number], FUSED, self.count, 0, 4))

    def _time(self, name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        self.times[name].append(time.perf_counter() - began)

    def machine(self) -> Machine:
        """As the simulation knows it."""
        median = {name: statistics.median(times) for name, times in self.times.items()}
        rates = {name: 4 * self.count / median[name] / GB for name in RATES}
        parallel = min(float(len(CORES)), max(1.0, 2 * median["1"] / median["2"]))
        return Machine(link=None, latency=0.0, parallel=parallel, **rates)


def check(group: Group, rates: Rates, given: argparse.Namespace, busy: float) -> list[Row]:
    """(what, measured, simulated) milliseconds of a step of this group; ``busy``: calls a second."""
    workers = group.workers
    measures = [
        *(Measure(BOX, COMPUTE, "", NOTHING, kind) for kind in KINDS),
        *(Measure(BOX, op, "1", overlap, kind) for op, (_, overlap) in WAYS.items() for kind in KINDS),
    ]
    samples: dict[Measure, list[float]] = defaultdict(list)
    for _ in range(given.rounds):
        rates.take()
        for one in random.sample(measures, len(measures)):
            amount = given.compute_ms / 1e3 * (busy if one.computing == "busy" else 1.0)
            samples[one].append(take(group, one, rates.count, amount, STEPS))
    median = {one: statistics.median(times) for one, times in samples.items()}
    alone = {one.computing: seconds for one, seconds in median.items() if one.op == COMPUTE}
    machine = rates.machine()
    print(", ".join(f"{name} {getattr(machine, name):.2f}" for name in (*RATES, "parallel")))
    rows = []
    for one, measured in median.items():
        if one.op != COMPUTE:
            kind = one.computing
            # A processor that waits is free: only who keeps it busy takes turns on it.
            place = replace(machine, cores=len(CORES) if kind == "busy" else None)
            computing = Computing(alone[kind], 0.0)
            way = WAYS[one.op][0]
            got = simulate(Setting(way, workers, 4 * rates.count, place, computing, iterations=5 * STEPS))
            rows.append((f"{workers} workers, {one.op}, {kind}", 1e3 * measured, 1e3 * got.iteration))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,2,3,4")
    parser.add_argument("--mib", type=float, default=51.0)
    parser.add_argument("--compute-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    numbers = [int(word) for word in given.workers.split(",")]
    before, busy = os.getloadavg(), Busy().rate()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmtrain-check-"))
        address = f"unix:{folder}/box"
        stack.enter_context(smb.serve(unix=f"{folder}/box"))
        place = stack.enter_context(hall())
        groups = {number: place.box(number, address) for number in sorted({1, 2, *numbers})}
        box = stack.enter_context(smb.connect(address))
        rates = Rates(box, groups, int(given.mib * MIB) // 4, given.compute_ms / 1e3)
        print("GB/s of a thread, and threads' worth of memory:")
        print(f"{'':36}{'measured ms':>12}{'simulated':>12}{'off':>8}")
        for number in numbers:
            for what, measured, simulated in check(groups[number], rates, given, busy):
                off = simulated / measured - 1
                verdict = "PASS" if abs(off) <= BAR else "short"
                print(f"{what:36}{measured:12.2f}{simulated:12.2f}{100 * off:+7.1f}%  {verdict}", flush=True)
    print("load before", before, "after", os.getloadavg(), "(the run itself makes some)")


if __name__ == "__main__":
    main()
