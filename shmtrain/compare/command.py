"""``shmtrain compare SOLVER.prototxt``: trains it by several ways of sharing, and shows them side by side.

Exit codes: 0 all runs are there, 1 a run failed (the others were made, and the report), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prototxt.errors import PrototxtError
from shmtrain.commands.common import names
from shmtrain.compare import tables
from shmtrain.compare.groups import grouped
from shmtrain.compare.plan import (
    MEMORY,
    RUNS,
    SOLVER,
    Case,
    Plan,
    recall,
    refuse_own,
    remembered,
    replace_text,
    solver_text,
    ways,
)
from shmtrain.compare.results import read, read_all
from shmtrain.compare.runs import Runner, errors, held
from shmtrain.options import ConfigError
from shmtrain.report import NoPlots, draw, page
from smb.arguments import whole

OK, FAILED = 0, 1
LIMIT = 24 * 3600.0
EXAMPLE = """\
What stands after -- goes to every run. A run that is there already is not made again, so an interrupted
comparison goes on by the same command, and more ways, workers or seeds may be asked of its folder.

example:
  shmtrain compare solver.prototxt --algorithms seasgd,hybrid --variant "fixed=seasgd --alpha 0.2" \\
      --workers 1,4,16 --seeds 3 --out runs/first -- --threads 1
"""


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    p = parser()
    own, common = _split(argv)
    args = p.parse_args(own)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.report_only:
            return write_report(args.out, args.target)
        if args.solver is None:
            p.error("name a solver file")
        return _compare(args, common)
    except ConfigError as error:
        p.error(str(error))
    except KeyboardInterrupt:
        print("shmtrain compare: interrupted; the same command goes on", file=sys.stderr)
    except (PrototxtError, OSError) as error:
        print(f"shmtrain compare: {error}", file=sys.stderr)
    return FAILED


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="shmtrain compare",
        usage="shmtrain compare SOLVER.prototxt --algorithms A,B --out FOLDER [options] [-- OPTIONS]",
        description="Train one solver by several ways of sharing, on equal samples, and show them together.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("solver", nargs="?", metavar="SOLVER.prototxt")
    p.add_argument("--algorithms", type=names, default=[], metavar="A,B", help="as --algorithm takes them")
    p.add_argument(
        "--variant", action="append", default=[], metavar='"NAME=A OPTIONS"',
        help="an algorithm with options of its own, under a name of its own; as often as you like",
    )  # fmt: skip
    p.add_argument("--workers", type=_numbers, default=[1, 2, 4], metavar="N,M", help="(1,2,4)")
    p.add_argument("--seeds", type=_seeds, default=[1, 2, 3], metavar="K", help="how many, or a,b,c (3)")
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="runs and report go there")
    p.add_argument(
        "--max-iter", type=int, metavar="N", help="instead of the solver's, by all workers together"
    )
    p.add_argument("--test-interval", type=int, metavar="N", help="instead of the solver's")
    p.add_argument("--target", type=float, metavar="PERCENT", help="accuracy that the time to it is shown of")
    p.add_argument("--limit", type=float, default=LIMIT, metavar="S", help="longest run (24 hours)")
    p.add_argument("--mpirun", type=shlex.split, default=["mpirun"], metavar="CMD", help="for ways by MPI")
    p.add_argument("--report-only", action="store_true", help="make the report anew from what is there")
    return p


def _numbers(text: str) -> list[int]:
    numbers = {whole(word) for word in names(text)}
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on")
    return sorted(numbers)


def _seeds(text: str) -> list[int]:
    return _numbers(text) if "," in text else list(range(1, _numbers(text)[0] + 1))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """This command's own words, and those after ``--``."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _compare(args: argparse.Namespace, common: list[str]) -> int:
    refuse_own(common, "the options of every run")
    if not args.limit > 0:
        raise ConfigError(f"--limit {args.limit:g}: must be above 0")
    plan = Plan(
        folder=args.out,
        solver=args.solver,
        ways=ways(args.algorithms, args.variant),
        workers=tuple(args.workers),
        seeds=tuple(args.seeds),
        common=tuple(common),
        mpirun=tuple(args.mpirun),
    )
    if not plan.ways and max(plan.workers) > 1:
        raise ConfigError("name some ways by --algorithms or --variant")
    text = solver_text(args.solver, args.out, args.max_iter, args.test_interval)
    args.out.mkdir(parents=True, exist_ok=True)
    with held(args.out) as lock:
        memory = recall(plan, text)
        (args.out / SOLVER).write_text(text)
        plan.check()
        replace_text(args.out / MEMORY, json.dumps(memory, indent=1))
        failed = _run_all(Runner(plan, lock, args.limit))
        code = write_report(args.out, args.target)
    for case, why in failed.items():
        print(f"FAILED  {case.label}: {why}")
    return FAILED if failed else code


def _run_all(runner: Runner) -> dict[Case, str]:
    """Make the runs that are not there; those that failed, and why."""
    failed, cases = {}, list(runner.plan.cases())
    for number, case in enumerate(cases, 1):
        place = f"[{number}/{len(cases)}] {case.label}"
        if runner.whole(case):
            print(f"{place}: there already", flush=True)
            continue
        why = runner.run(case)
        if why:
            failed[case] = why
            print(f"{place}: FAILED, {why}", flush=True)
            for line in errors(runner.folder(case)):
                print(f"    {line}", flush=True)
        else:
            print(f"{place}: {_came_to(runner.folder(case))}", flush=True)
    return failed


def _came_to(folder: Path) -> str:
    result = read(folder)
    accuracy = "" if result.accuracy is None else f"accuracy {100 * result.accuracy:.2f}%, "
    return f"{accuracy}{result.images_per_second:,.0f} images/s, {result.seconds:.1f} s"


def write_report(folder: Path, percent: float | None) -> int:
    """Table, CSV and plots from the folder's whole runs; the exit code."""
    path = folder / MEMORY
    if not path.exists():
        raise ConfigError(f"{folder} holds no comparison: {path} does not exist")
    memory = remembered(path)
    results, broken = read_all(folder / RUNS)
    groups = grouped(results, list(memory["ways"]))
    if not groups:
        print(f"shmtrain compare: no whole run in {folder}", file=sys.stderr)
        return FAILED
    aim = None if percent is None else percent / 100
    tables.write_runs(folder / "runs.csv", groups)
    tables.write_curves(folder / "curves.csv", groups)
    tables.write_staleness(folder / "staleness.csv", groups)
    try:
        pictures = draw(groups, folder)
    except NoPlots as error:
        print(f"shmtrain compare: {error}", file=sys.stderr)
        pictures = []
    text = tables.report(groups, memory, aim, broken, pictures)
    (folder / "report.md").write_text(text)
    (folder / "report.html").write_text(page(text, folder))
    print(f"{tables.report(groups, memory, aim, broken)}\n{folder / 'report.md'}, {folder / 'report.html'}")
    return OK
