"""``shmtrain simulate`` against runs on this machine: the same vectors, computing times measured, no fitting.

    python benchmarks/simulate_check.py [--workers 1,2,3,4] [--mib 51] [--compute-ms 60] [--rounds 3]

Measured first, alone: one process's fused exchange, copies, sums and moves, each after a pause of the
computing's length, when the caches hold other things (the rates of a thread); and two workers' exchange at
once against one's (how many threads' worth of bandwidth the memory has). Then, for each number of
workers, rounds of steps of computing and exchange, in an order drawn by chance: computing as a busy loop and
as a wait, by the fused exchange and by the paper's two threads; the computing alone is measured in the same
rounds with as many processes, so under the same oversubscription. Simulated and measured milliseconds of a
step must agree within 10%.
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
from shmtrain.bench.job import MIB, NOTHING, PUSH, SEQUENTIAL, floats
from shmtrain.simulate.run import simulate
from shmtrain.simulate.setting import GB, Computing, Machine, Setting
from smb import _native

Row = tuple[str, float, float]
BAR = 0.10
STEPS = 12  # of a sample
CORES = sorted(os.sched_getaffinity(0))
WAYS = {"fused": ("seasgd", SEQUENTIAL), "paper": ("paper", PUSH)}
KINDS = ("busy", "wait")
RATES = ("exchange", "copy", "accumulate", "apply", "parallel")


def timed(work: Callable[[], object], pause: float, repeat: int = 9) -> float:
    """Median seconds of a call that comes after a pause, after one that warms up."""
    work()
    times = []
    for _ in range(repeat):
        time.sleep(pause)
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def take(group: Group, measure: Measure, count: int, amount: float, steps: int) -> float:
    """Seconds of a step."""
    job = placed(measure, measure.job(count, amount, steps), group.workers, CORES)
    return group.run(job)[0] / steps


def rates(address: str, groups: dict[int, Group], count: int, pause: float) -> Machine:
    """This machine as the simulation knows it: one worker's operations, and two workers' exchange at once."""
    size = 4 * count
    mine, room = floats(count), floats(count)
    fused = Measure(BOX, "fused", "1")
    one, two = (statistics.median(take(groups[n], fused, count, 0, 6) for _ in range(5)) for n in (1, 2))
    with smb.connect(address) as box:
        center, own = (box.create(f"check/{name}", count) for name in ("center", "own"))
        move = timed(lambda: center.exchange(mine, 0.1), pause)
        copy = (timed(lambda: center.read(mine), pause) + timed(lambda: own.write(mine), pause)) / 2
        add = timed(lambda: center.accumulate(own), pause)
    pull = timed(lambda: _native.elastic_pull(mine, room, 0.1, out=room), pause)
    return Machine(
        link=None,
        latency=0.0,
        exchange=size / move / GB,
        copy=size / copy / GB,
        accumulate=size / add / GB,
        apply=size / pull / GB,
        parallel=min(float(len(CORES)), max(1.0, 2 * one / two)),
    )


def check(group: Group, machine: Machine, given: argparse.Namespace, rate: float) -> list[Row]:
    """(what, measured, simulated) milliseconds of a step with this group's workers."""
    count, workers = int(given.mib * MIB) // 4, group.workers
    measures = [
        *(Measure(BOX, COMPUTE, "", NOTHING, kind) for kind in KINDS),
        *(Measure(BOX, op, "1", overlap, kind) for op, (_, overlap) in WAYS.items() for kind in KINDS),
    ]
    samples: dict[Measure, list[float]] = defaultdict(list)
    for _ in range(given.rounds):
        for one in random.sample(measures, len(measures)):
            amount = given.compute_ms / 1e3 * (rate if one.computing == "busy" else 1.0)
            samples[one].append(take(group, one, count, amount, STEPS))
    median = {one: statistics.median(times) for one, times in samples.items()}
    alone = {one.computing: seconds for one, seconds in median.items() if one.op == COMPUTE}
    rows = []
    for one, measured in median.items():
        if one.op != COMPUTE:
            kind = one.computing
            # A processor that waits is free: only who keeps it busy takes turns on it.
            place = replace(machine, cores=len(CORES) if kind == "busy" else None)
            setting = Setting(
                WAYS[one.op][0], workers, 4 * count, place, Computing(alone[kind], 0.0), iterations=5 * STEPS
            )
            rows.append(
                (f"{workers} workers, {one.op}, {kind}", 1e3 * measured, 1e3 * simulate(setting).iteration)
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,2,3,4")
    parser.add_argument("--mib", type=float, default=51.0)
    parser.add_argument("--compute-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    numbers = [int(word) for word in given.workers.split(",")]
    before, rate = os.getloadavg(), Busy().rate()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shmtrain-check-"))
        address = f"unix:{folder}/box"
        stack.enter_context(smb.serve(unix=f"{folder}/box"))
        place = stack.enter_context(hall())
        groups = {number: place.box(number, address) for number in sorted({1, 2, *numbers})}
        machine = rates(address, groups, int(given.mib * MIB) // 4, given.compute_ms / 1e3)
        print(
            ", ".join(f"{name} {getattr(machine, name):.2f}" for name in RATES), "(GB/s of a thread; threads)"
        )
        print(f"{'':36}{'measured ms':>12}{'simulated':>12}{'off':>8}")
        for number in numbers:
            for what, measured, simulated in check(groups[number], machine, given, rate):
                off = simulated / measured - 1
                verdict = "PASS" if abs(off) <= BAR else "short"
                print(f"{what:36}{measured:12.2f}{simulated:12.2f}{100 * off:+7.1f}%  {verdict}", flush=True)
    print("load before", before, "after", os.getloadavg(), "(the run itself makes some)")


if __name__ == "__main__":
    main()
