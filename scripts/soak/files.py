"""20,000 mutated files: weights, states, databases, HDF5, images, lists, nets and solvers.

Each number is the seed of one mutation of one small good file, so a run is resumed with --first, and what
ended badly is tried again with --first NUMBER --count 1. Outcomes are added to FOLDER/outcomes.jsonl; the
table is of all that stand there. A bad file stays in FOLDER/kept/NUMBER. How a file may end:
tests/prototxt/hostile/trial.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ENDS = ("fine", "refused", "told", "died apart", "foreign", "died", "hang", "memory", "executed")
BAD = ENDS[4:]


def run(folder: Path, first: int, count: int, kind: str) -> None:
    """Add the outcomes of these numbers to the folder's file; of a number the last line counts."""
    words = [sys.executable, "-m", "tests.prototxt.hostile.trial", str(folder), str(first), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        open(folder / "outcomes.jsonl", "a") as out,
        subprocess.Popen(
            [*words, *filter(None, [kind])], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        for line in process.stdout or ():
            out.write(line)
            out.flush()
            outcome = json.loads(line)
            if outcome["end"] in BAD:
                show(outcome, folder)
        if process.wait():
            raise SystemExit(f"the trials ended with {process.returncode}")


def show(outcome: dict[str, Any], folder: Path) -> None:
    print(f"{outcome['end']}: {outcome['kind']} ({outcome['what']}) in {folder}/kept/{outcome['number']}")
    print(f"  {outcome['error']} {outcome['said'][-600:]}", flush=True)


def report(folder: Path) -> int:
    """Print the table; how many ended badly."""
    outcomes = {}
    for line in (folder / "outcomes.jsonl").read_text().splitlines():
        outcome = json.loads(line)
        outcomes[outcome["number"]] = outcome
    table: dict[str, Counter[str]] = defaultdict(Counter)
    most: dict[str, int] = defaultdict(int)
    longest: dict[str, float] = defaultdict(float)
    for outcome in outcomes.values():
        kind = outcome["kind"]
        table[kind][outcome["end"]] += 1
        most[kind] = max(most[kind], outcome["grown"] >> 20)
        longest[kind] = max(longest[kind], outcome["seconds"])
    print(f"| file | files | {' | '.join(ENDS)} | most MiB | longest s |\n|---|{'---|' * (len(ENDS) + 3)}")
    for kind, ends in table.items():
        shown = " | ".join(str(ends[end]) for end in ENDS)
        print(f"| {kind} | {ends.total()} | {shown} | {most[kind]} | {longest[kind]:.1f} |")
    bad = sum(ends[end] for ends in table.values() for end in BAD)
    print(f"{len(outcomes)} mutated files, {bad} ended badly")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--count", type=int, default=20_000, help="how many (20,000); 0: only the table")
    parser.add_argument("--kind", default="", help="only this kind of file; the seeds mean others then")
    parser.add_argument("--folder", type=Path, help="keep samples, outcomes and bad files there (a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hostile-"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seeds {options.first} to {options.first + options.count - 1}, in {folder}", flush=True)
    if options.count:
        run(folder, options.first, options.count, options.kind)
    return 1 if report(folder) else 0


if __name__ == "__main__":
    sys.exit(main())
