"""The elastic exchange through the box against its limits and against MPI, all in one interleaved run.

    python benchmarks/exchange.py [--rounds 15] [--mib 16,64,256] [--json FILE] [--only shm,workers,...]
        [--mpich-python PYTHON --mpich-exec MPIEXEC] [--ompi-python PYTHON --ompi-exec MPIEXEC]

Each round takes every measure, in an order drawn by chance, each after a call that warms the caches; figures
are medians over the rounds (for MPI the best variant's). What is compared with MPI is pinned as its ranks
are. Two MPI ranks keep two cores busy: they are compared with two threads of the box, and one thread is
printed beside it; the loop over a window is one thread on both sides. The MPI interpreters need numpy and
mpi4py and are given the box's own kernels ($MPICH_PYTHON, $MPICH_EXEC, $OMPI_PYTHON, $OMPI_EXEC are the
defaults of the options). Prints a table of ratios with their bars, PASS or short, and the load before and
after: on a busy machine it proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from exchange_local import MIB, Exchanges, Small, Workers, memset, open_box, prefault

from shmtrain.bench.mpi import Mpi

MPI_OPS = ("server", "rma", "allreduce", "window")
MEASURES = ("shm", "kernel", "read", "write", "memcpy", "small", "prefault", "memset", "workers", *MPI_OPS)
Samples = dict[tuple[object, ...], list[float]]


def run(mpi: Mpi, samples: Samples, ranks: int, ops: str, mib: str) -> None:
    """One start of the ranks; their lines go into samples."""
    for got in mpi.lines(ranks, ["--ops", ops, "--mib", mib]):
        key = (mpi.name, got["op"], got["variant"], got["mib"], got["workers"])
        samples[key] += got["seconds"]


def measures(
    samples: Samples, sizes: list[int], exchanges: dict[int, Exchanges], small: Small, workers: Workers
) -> list[tuple[object, Callable[[], None]]]:
    """What one round takes: the first words of the keys, each with a call that adds to samples."""

    def add(key: tuple[object, ...], take: Callable[[], list[float]]) -> tuple[object, Callable[[], None]]:
        return key[0], lambda: samples[key].extend(take())

    taken = [add(("small",), small.exchange), add(("memset",), partial(memset, 256 * MIB))]
    for mib, one in exchanges.items():
        for name, copy in (("read", one.read), ("write", one.write), ("memcpy", one.memcpy)):
            taken.append(add((name, mib), copy))
    for threads in (1, 2):
        taken.append(add(("prefault", threads), partial(prefault, 256 * MIB, threads)))
        for mib in sizes:
            one = exchanges[mib]
            taken.append(add(("shm", mib, threads), partial(one.shm, threads)))
            for check in (True, False):
                work = partial(one.kernel, threads, check)
                taken.append(add(("kernel", mib, threads, check), work))
    for count, mib, rounds in [(1, 16, 8), (2, 16, 8), *((n, 64, max(1, 8 // n)) for n in (1, 2, 4, 16))]:
        for locked in (True, False):
            work = partial(workers.run, count, mib, locked, rounds)
            taken.append(add(("workers", count, mib, locked), work))
    return taken


def collect(given: argparse.Namespace, sizes: list[int], mpis: list[Mpi]) -> Samples:
    samples: Samples = defaultdict(list)
    workers = Workers(16, [16, 64])  # forked before this process has threads
    with tempfile.TemporaryDirectory() as folder:
        daemon, box = open_box(folder)
        exchanges = {mib: Exchanges(box, mib) for mib in sizes}
        small = Small(box)
        only = given.only
        taken = [
            take
            for name, take in measures(samples, sizes, exchanges, small, workers)
            if not only or name in only
        ]
        ops = ",".join(op for op in MPI_OPS if not only or op in only)
        for mpi in mpis if ops else []:
            taken.append(partial(run, mpi, samples, 2, ops, ",".join(map(str, sizes))))
            if mpi.name == "mpich" and "server" in ops:
                taken.append(partial(run, mpi, samples, 5, "server", "64"))
        for one in [*exchanges.values()] * 2:
            for threads in (1, 2):  # warm the memory, the helpers and the caches
                one.shm(threads), one.kernel(threads)
        for number in range(given.rounds):
            for take in random.sample(taken, len(taken)):
                take()
            sys.stderr.write(f"\rround {number + 1} of {given.rounds}")
        print(file=sys.stderr, flush=True)
        box.close()
        daemon.close()
    workers.close()
    return samples


class Table:
    """Rows of a ratio and its bar."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, what: str, above: float | None, below: float | None, bar: float, at_most: bool) -> None:
        """Leaves out a ratio of which something was not measured."""
        if above is None or below is None:
            return
        value = above / below
        good = value <= bar if at_most else value >= bar
        sign = "<=" if at_most else ">="
        self.rows.append({"what": what, "value": round(value, 3), "bar": f"{sign} {bar}", "met": good})
        print(f"{what:<66} {value:8.2f}   {sign} {bar:<5} {'PASS' if good else 'short'}")


def aside(what: str, above: float | None, below: float | None) -> None:
    """A ratio without a bar."""
    if above is not None and below is not None:
        print(f"{'  ' + what:<66} {above / below:8.2f}")


def report(samples: Samples, sizes: list[int], mpis: list[Mpi]) -> Table:
    table = Table()
    median = {key: statistics.median(times) for key, times in samples.items()}

    def of(*key: object) -> float | None:
        return median.get(key)

    for mib in sizes:
        for threads in (1, 2):
            what, shm = (
                f"{mib} MiB, {threads} thread(s): exchange / kernel on private memory",
                of("shm", mib, threads),
            )
            table.add(what, shm, of("kernel", mib, threads, True), 1.10, True)
            aside("against that kernel without its check for NaN", shm, of("kernel", mib, threads, False))
        table.add(f"{mib} MiB: two threads over one", of("shm", mib, 1), of("shm", mib, 2), 1.7, False)
        for name in ("read", "write"):
            what = f"{mib} MiB: {name} / memcpy of private memory"
            table.add(what, of(name, mib), of("memcpy", mib), 1.1, True)
    table.add("4 KiB exchange from Python, microseconds", of("small"), 1e-6, 1.0, True)
    table.add("pre-fault / memset, one thread", of("prefault", 1), of("memset"), 1.05, True)
    table.add("pre-fault / memset, two threads", of("prefault", 2), of("memset"), 0.7, True)
    what = "16 MiB: 2 processes move, times what one does"
    table.add(what, of("workers", 1, 16, True), of("workers", 2, 16, True), 1.5, False)
    for count in (1, 2, 4, 16):
        what = f"64 MiB: {count} process(es), time over time without locks"
        table.add(what, of("workers", count, 64, True), of("workers", count, 64, False), 1.2, True)
    for mpi in mpis:
        against(table, median, mpi, sizes)
    return table


def against(table: Table, median: dict[tuple[object, ...], float], mpi: Mpi, sizes: list[int]) -> None:
    """The rows of one MPI library."""
    for mib in sizes:
        one, two = median.get(("shm", mib, 1)), median.get(("shm", mib, 2))
        for op, bar in (("server", 4.0), ("rma", 3.0), ("allreduce", 3.0)):
            what, rival = f"{mib} MiB: times faster than {mpi.name} {op}", best(median, mpi, op, mib, 1)
            table.add(f"{what}, two cores each", rival, two, bar, False)
            aside("with one thread", rival, one)
        what = f"{mib} MiB: exchange / own loop over a window of {mpi.name}"
        table.add(what, one, best(median, mpi, "window", mib, 1), 1.1, True)
    if mpi.name == "mpich":
        what = "64 MiB: 4 workers, times faster than mpich's server"
        table.add(what, best(median, mpi, "server", 64, 4), median.get(("workers", 4, 64, True)), 8.0, False)


def best(median: dict[tuple[object, ...], float], mpi: Mpi, op: str, mib: int, workers: int) -> float | None:
    """The rival's best variant."""
    wanted = (mpi.name, op, mib, workers)  # a key has the variant in third place
    return min(
        (t for key, t in median.items() if len(key) == 5 and (*key[:2], *key[3:]) == wanted), default=None
    )


def chosen(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(MEASURES):
        raise argparse.ArgumentTypeError(f"no such measure: {min(unknown)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", default="16,64,256")
    parser.add_argument(
        "--only", type=chosen, default=(), help=f"these measures alone, of {', '.join(MEASURES)}"
    )
    parser.add_argument("--json", type=Path, help="write all samples there")
    for name in ("mpich", "ompi"):
        for what in ("python", "exec"):
            variable = f"{name}_{what}".upper()
            parser.add_argument(
                f"--{name}-{what}", default=os.environ.get(variable), help=f"default: ${variable}"
            )
    given = parser.parse_args()
    settings = vars(given)
    mpis = [
        Mpi(name, settings[f"{name}_python"], settings[f"{name}_exec"])
        for name in ("mpich", "ompi")
        if settings[f"{name}_python"] and settings[f"{name}_exec"]
    ]
    sizes = [int(size) for size in given.mib.split(",")]
    before = os.getloadavg()
    samples = collect(given, sizes, mpis)
    table = report(samples, sizes, mpis)
    print("load before", before, "after", os.getloadavg(), "(the run itself makes some)")
    if given.json:
        raw = {" ".join(map(str, key)): times for key, times in samples.items()}
        given.json.write_text(json.dumps({"rows": table.rows, "samples": raw}, indent=1))


if __name__ == "__main__":
    main()
