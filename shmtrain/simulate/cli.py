"""The command ``shmtrain simulate``. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from shmtrain.commands.common import command_parser
from shmtrain.simulate.setting import WAYS, Computing, Machine, Setting, SettingError

MIB = 1 << 20
SAME = {"easgd": "seasgd", "eamsgd": "seasgd", "mpi-allreduce": "allreduce"}  # what costs the same
COLUMNS = (
    "way", "workers", "iteration ms", "computing ms", "iterations/s", "efficiency", "communication",
    "staleness", "stalest",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    p = parser()
    given = p.parse_args(argv)
    if find_spec("simpy") is None:
        print("shmtrain simulate: needs simpy: `pip install 'shmtrain[simulate]'`", file=sys.stderr)
        return 1
    if given.paper:
        from shmtrain.simulate import paper

        print("\n".join(paper.table()))
        return 0
    with ExitStack() as stack:
        try:
            settings = [_setting(given, way, n) for way in given.algorithms for n in given.workers]
            file = stack.enter_context(open(given.csv, "w", newline="")) if given.csv else None
        except (SettingError, OSError) as error:
            p.error(str(error))
        rows = _shown(settings)
        if file is not None:
            csv.writer(file).writerows([COLUMNS, *rows])
    return 0


def _shown(settings: Sequence[Setting]) -> list[tuple[str, ...]]:
    """The table's rows, each printed when it is there."""
    rows: list[tuple[str, ...]] = []
    for row in _rows(settings):
        if not rows:
            print("".join(f"{head:>15}" for head in COLUMNS))
        rows.append(row)
        print("".join(f"{value:>15}" for value in row), flush=True)
    return rows


def _rows(settings: Sequence[Setting]) -> Iterator[tuple[str, ...]]:
    from shmtrain.simulate.run import simulate

    for setting in settings:
        got = simulate(setting)
        yield (
            setting.way, str(setting.workers), f"{1e3 * got.iteration:.2f}", f"{1e3 * got.computing:.2f}",
            f"{got.throughput:.3f}", f"{got.efficiency:.3f}", f"{got.share:.3f}", f"{got.staleness:.2f}",
            str(got.stalest),
        )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = command_parser(
        "simulate",
        "Iteration time, throughput, communication share and staleness of machines not at hand.\n"
        f"Ways: {', '.join(WAYS)}.",
        "shmtrain simulate --algorithms seasgd,hybrid,allreduce --workers 1,16,64 --compute-ms 250",
    )
    p.add_argument(
        "--paper", action="store_true", help="the ShmCaffe paper's shares beside the simulated ones"
    )
    p.add_argument("--algorithms", type=_ways, default=("seasgd",), metavar="W,..", help="the ways (seasgd)")
    p.add_argument("--workers", type=_counts, default=(1, 2, 4, 8, 16), metavar="N,..", help="(1,2,4,8,16)")
    p.add_argument("--mib", type=float, default=97.5, help="MiB of the vector (97.5: ResNet_50)")
    p.add_argument(
        "--iterations", type=int, default=50, metavar="K", help="of each worker; a fifth warms up (50)"
    )
    p.add_argument("--seed", type=int, default=1, metavar="S", help="of the computing times (1)")
    p.add_argument("--csv", metavar="F", help="write the table there, too")
    _add_computing(p)
    _add_way(p)
    _add_machine(p)
    return p


def _add_computing(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("computing of an iteration")
    g.add_argument("--compute-ms", type=float, default=100.0, metavar="T", help="mean (100)")
    g.add_argument(
        "--spread", type=float, default=0.05, metavar="C", help="of the mean, a gamma distribution (0.05)"
    )
    g.add_argument("--measured", metavar="FILE", help="draw from these milliseconds, one a line, instead")
    g.add_argument(
        "--slow", type=float, default=1.0, metavar="F", help="the first worker takes F times as long (1)"
    )


def _add_way(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("options of the ways")
    g.add_argument("--tau", type=int, default=1, metavar="T", help="iterations between two exchanges (1)")
    g.add_argument("--group-size", type=int, default=4, metavar="G", help="hybrid (4)")
    g.add_argument(
        "--root", default="seasgd", help="hybrid: how the roots exchange, seasgd or paper (seasgd)"
    )
    g.add_argument("--backup-workers", type=int, default=0, metavar="B", help="sync (0)")
    g.add_argument(
        "--hidden", type=float, default=0.0, metavar="P", help="allreduce, hybrid: part under backward (0)"
    )


def _add_machine(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("the machine; GB/s of vector, those of memory for one thread")
    m = Machine()
    for name, does in (
        ("link", "a box's link, both directions together; 0: one host's shared memory"),
        ("nic", "a host's link, likewise"), ("inside", "sums inside a host"), ("exchange", "the fused move"),
        ("copy", "reads and writes in shared memory"), ("accumulate", "adding an increment"),
        ("apply", "the worker's own half of the move"),
    ):  # fmt: skip
        g.add_argument(
            f"--{name}", type=float, default=getattr(m, name), metavar="GB", help=f"{does} (%(default)g)"
        )
    g.add_argument(
        "--parallel", type=float, default=m.parallel, metavar="X", help="threads' worth of a memory (4)"
    )
    g.add_argument("--serial", action="store_true", help="a box takes one increment at a time")
    g.add_argument("--boxes", type=int, default=1, metavar="K", help="striped over so many (1)")
    g.add_argument("--per-host", type=int, default=1, metavar="G", help="workers on one host (1)")
    g.add_argument("--cores", type=int, metavar="C", help="processors of the one host (--link 0)")
    g.add_argument("--latency-us", type=float, default=5.0, metavar="L", help="of a message (5)")


def _setting(given: argparse.Namespace, way: str, workers: int) -> Setting:
    rates = {
        name: getattr(given, name) for name in ("nic", "inside", "exchange", "copy", "accumulate", "apply")
    }
    machine = Machine(
        link=given.link or None,
        per_host=given.per_host,
        boxes=given.boxes,
        latency=given.latency_us / 1e6,
        parallel=given.parallel,
        serial=given.serial,
        cores=given.cores,
        **rates,
    )
    measured = _measured(given.measured) if given.measured else ()
    return Setting(
        way,
        workers,
        given.mib * MIB,
        machine,
        Computing(given.compute_ms / 1e3, given.spread, measured, given.slow),
        tau=given.tau,
        group=given.group_size,
        root=given.root,
        backups=min(given.backup_workers, workers - 1) if way == "sync" else 0,
        hidden=given.hidden,
        iterations=given.iterations,
        seed=given.seed,
    )


def _measured(path: str) -> tuple[float, ...]:
    try:
        return tuple(float(line) / 1e3 for line in Path(path).read_text().split())
    except ValueError as error:
        raise SettingError(f"{path}: milliseconds, one a line: {error}") from error


def _ways(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(SAME.get(way, way) for way in text.split(",")))
    if unknown := [way for way in found if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(WAYS)}")
    return found


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers with commas") from error
