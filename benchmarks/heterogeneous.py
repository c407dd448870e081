"""Two workers, the second one slowed: what an asynchronous way gets out of both, what a synchronous one does.

    python benchmarks/heterogeneous.py [--factor 3] [--rounds 1] [--out runs/heterogeneous.jsonl]

LeNet on made-up images, batch 64. Each worker is a process of its own with one torch thread, pinned to a
processor of its own; the slow one sleeps after each forward and backward pass, so that it takes ``factor``
times as long. A round measures each worker alone (no box, nobody to wait for) and then both together by each
algorithm, the cases in a shuffled order. What counts is the images a second of both together, divided by the
sum of what they made alone in the same round. Rounds are appended to --out, and the summary is of all in it.

Target: asynchronous at least 0.9. Synchronous workers go at the pace of the slowest: 2/(1 + factor) of the
sum of two that make 1 + 1/factor, at best 0.5 for a factor of 3.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 64
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist" / "lenet_train_test.prototxt"
DATA = f"""
layer {{
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {{
    shape {{ dim: {BATCH} dim: 1 dim: 28 dim: 28 }} shape {{ dim: {BATCH} }}
    data_filler {{ type: "constant" value: 0.5 }} data_filler {{ type: "constant" value: 1 }}
  }}
}}
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.0001 momentum: 0.9 lr_policy: "fixed" random_seed: 1
max_iter: {iterations} snapshot_after_train: false
"""
LIMIT = 300.0  # seconds of one training


def main() -> int:
    if sys.argv[1:2] == ["--be"]:
        return be(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    args = parse()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two processors are needed")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder, args.out.open("a") as out:
            out.write(json.dumps(measure_round(Path(folder), args)) + "\n")
    report([json.loads(line) for line in args.out.read_text().splitlines()], args)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each training, about")
    parser.add_argument("--asynchronous", type=lambda t: t.split(","), default=["seasgd"])
    parser.add_argument("--synchronous", type=lambda t: t.split(","), default=["sync"])
    parser.add_argument("--out", type=Path, default=Path("runs/heterogeneous.jsonl"))
    return parser.parse_args()


# One worker ----------------------------------------------------------------------------------------------


def be(processor: int, factor: float, words: list[str]) -> int:
    """This process as a worker: pinned, and slowed by ``factor``."""
    os.sched_setaffinity(0, {processor})
    from shmtrain import cli
    from shmtrain.learner import Learner

    compute = Learner.compute

    def slowed(self: Learner, *given: Any, **named: Any) -> float:
        start = time.perf_counter()
        loss = compute(self, *given, **named)
        time.sleep((factor - 1.0) * (time.perf_counter() - start))
        return loss

    if factor > 1.0:
        Learner.compute = slowed  # type: ignore[method-assign]
    return cli.main(words)


def train(folder: Path, iterations: int, speeds: dict[int, float], algorithm: str | None) -> float:
    """Images a second of one training by the workers of ``speeds`` (processor: how many times slower)."""
    (folder / "net.prototxt").write_text(made_up_net())
    (folder / "solver.prototxt").write_text(SOLVER.format(iterations=iterations))
    logs = Path(tempfile.mkdtemp(dir=folder))
    words = ["solver.prototxt", "--threads", "1", "--no-progress", "--log-dir", str(logs)]
    processes = []
    for rank, (processor, factor) in enumerate(speeds.items()):
        command = [sys.executable, __file__, "--be", str(processor), str(factor), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if algorithm is not None:
            command += ["--algorithm", algorithm]
            environment |= {
                "TORCHELASTIC_RUN_ID": logs.name, "RANK": str(rank), "WORLD_SIZE": str(len(speeds)),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(speeds)),
            }  # fmt: skip
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL))
    try:
        codes = [process.wait(LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"a worker of {algorithm or 'one alone'} ended with {codes}")
    ends = [json.loads(path.read_text().splitlines()[-1]) for path in sorted(logs.glob("*.jsonl"))]
    return iterations * BATCH / max(float(end["loop_seconds"]) for end in ends)


def made_up_net() -> str:
    """The example's training net on images that cost nothing to read."""
    from prototxt import schema
    from prototxt.text import parse_net

    net = parse_net(str(EXAMPLE))
    kept = [layer for layer in net.layer if layer.type not in ("Data", "Accuracy")]
    return "\n".join([DATA, str(schema.NetParameter(layer=kept))])


# Rounds --------------------------------------------------------------------------------------------------


def measure_round(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Images a second of every case."""
    factor = args.factor
    step = probe(folder)
    fast, slow = int(args.seconds / step), int(args.seconds / step / factor)
    cases: dict[str, tuple[int, dict[int, float], str | None]] = {
        "fast alone": (fast, {0: 1.0}, None),
        "slow alone": (slow, {1: factor}, None),
        **{name: (fast + slow, {0: 1.0, 1: factor}, name) for name in args.asynchronous},
        **{name: (2 * slow, {0: 1.0, 1: factor}, name) for name in args.synchronous},
    }
    names = list(cases)
    random.shuffle(names)
    load = os.getloadavg()[0]
    found = {name: round(train(folder, *cases[name]), 1) for name in names}
    return {"factor": factor, "load_before": load, "images_per_second": found}


def probe(folder: Path) -> float:
    """Seconds of a step of the fast worker, about."""
    return BATCH / train(folder, 100, {0: 1.0}, None)


def report(rounds: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """One line a case: median of the rounds, and the share of the sum of both alone."""
    mine = [r["images_per_second"] for r in rounds if r["factor"] == args.factor]
    print(f"{len(mine)} round(s), the second worker {args.factor:g} times slower; images a second, medians")
    for name in ("fast alone", "slow alone", *args.asynchronous, *args.synchronous):
        rates = [r[name] for r in mine if name in r]
        shares = [r[name] / (r["fast alone"] + r["slow alone"]) for r in mine if name in r]
        if not rates:
            continue
        share = (
            f"  {statistics.median(shares):.3f} of both alone, rounds {min(shares):.3f} to {max(shares):.3f}"
        )
        print(f"{name:12} {statistics.median(rates):9,.0f}{'' if name.endswith('alone') else share}")


if __name__ == "__main__":
    raise SystemExit(main())
