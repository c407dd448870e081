"""Held-out accuracy of LeNet by number of workers, at equal samples: the mean of several seeds, all listed.

    python benchmarks/accuracy.py --data DIR [--workers 1,2,4] [--exchange fused,paper] [--seeds 1,2,3]

DIR holds mnist_train_lmdb and mnist_test_lmdb (``shmtrain data mnist --from IDX --out DIR``). Every run is
the example's solver with its data paths replaced. Results are appended to results.jsonl in --work, and what
stands there already is not run again, so that an interrupted benchmark goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist"


def main() -> int:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    results = args.work / "results.jsonl"
    solver = write_solver(args.work, args.data.resolve(), args.max_iter)
    known = {key(r): r for r in map(json.loads, results.read_text().splitlines())} if results.exists() else {}
    for seed in args.seeds:
        for workers in args.workers:
            for exchange in args.exchange if workers > 1 else ["none"]:
                case = {"workers": workers, "exchange": exchange, "seed": seed, "rule": args.lr_rule}
                case["max_iter"] = args.max_iter
                if key(case) in known:
                    continue
                known[key(case)] = measured = run(solver, case, args)
                with results.open("a") as f:
                    f.write(json.dumps(measured) + "\n")
                print(json.dumps(measured), flush=True)
    report([r for r in known.values() if r["rule"] == args.lr_rule and r["max_iter"] == args.max_iter])
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4])
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--exchange", type=lambda t: t.split(","), default=["fused", "paper"])
    parser.add_argument("--max-iter", type=int, default=10000)
    parser.add_argument("--lr-rule", default="", help="as shmtrain takes it (its default)")
    parser.add_argument("--threads", default="", help="torch threads of each worker (shmtrain's default)")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(case[k] for k in ("workers", "exchange", "seed", "rule", "max_iter"))


def write_solver(work: Path, data: Path, max_iter: int) -> Path:
    """The example's net and solver with ``data``'s paths, tested at the end and snapshot nowhere else."""
    net = (EXAMPLE / "lenet_train_test.prototxt").read_text().replace('"examples/mnist/', f'"{data}/')
    (work / "net.prototxt").write_text(net)
    solver = (EXAMPLE / "lenet_solver.prototxt").read_text()
    solver = solver.replace("examples/mnist/lenet_train_test.prototxt", str(work / "net.prototxt"))
    solver = solver.replace("examples/mnist/lenet", str(work / "snapshot"))
    solver = solver.replace("snapshot: 5000", "").replace("max_iter: 10000", f"max_iter: {max_iter}")
    solver = solver.replace("test_interval: 500", f"test_interval: {max_iter}\ntest_initialization: false")
    path = work / "solver.prototxt"
    path.write_text(solver)
    return path


def run(solver: Path, case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train once; the accuracy is the last test's, in percent."""
    logs = args.work / "logs-{workers}-{exchange}-{seed}".format(**case)
    command = [sys.executable, "-m", "shmtrain.cli", str(solver), "--no-progress", "--log-dir", str(logs)]
    command += ["--workers", str(case["workers"]), "--seed", str(case["seed"])]
    command += ["--exchange", case["exchange"]] if case["workers"] > 1 else []
    command += ["--lr-rule", args.lr_rule] if args.lr_rule else []
    command += ["--threads", args.threads] if args.threads else []
    for old in logs.glob("*"):
        old.unlink()
    start = time.monotonic()
    subprocess.run(command, check=True, timeout=3600)
    lines = [json.loads(line) for line in (logs / "snapshot.jsonl").read_text().splitlines()]
    test = [line for line in lines if line["kind"] == "test"][-1]
    seconds = round(time.monotonic() - start, 1)
    return {**case, "accuracy": round(100 * test["accuracy"], 2), "seconds": seconds}


def report(results: list[dict[str, Any]]) -> None:
    """One line a way of training: mean of the seeds, each seed, and the distance from one worker."""
    ways = sorted({(r["workers"], r["exchange"]) for r in results})
    base: float | None = None
    for workers, exchange in ways:
        found = sorted(
            (r["seed"], r["accuracy"])
            for r in results
            if (r["workers"], r["exchange"]) == (workers, exchange)
        )
        mean = statistics.mean(a for _, a in found)
        base = mean if workers == 1 else base
        seeds = ", ".join(f"seed {seed}: {accuracy:.2f}" for seed, accuracy in found)
        gap = "" if base is None else f"  ({mean - base:+.2f} against 1 worker)"
        print(f"{workers} worker(s), {exchange:5}  {mean:6.2f}%{gap}  [{seeds}]")


if __name__ == "__main__":
    raise SystemExit(main())
