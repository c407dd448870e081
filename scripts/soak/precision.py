"""Trains one solver file in float32 by several seeds and in bf16 by the same: are the loss curves alike?

    python scripts/soak/precision.py FOLDER SOLVER.prototxt [--iterations 300] [--seeds 3]
        [--bf16-seeds 1] [--window 20]

FOLDER is where the paths of the solver file begin. Losses are means over windows of iterations. Held when a
bf16 curve is on average no further from the float32 curve of its seed than two float32 seeds are from each
other. ``--result FILE`` writes a page for docs/results.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
from google.protobuf import text_format

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from prototxt import schema  # noqa: E402

Curve = npt.NDArray[np.float64]
LIMIT = 3600.0  # seconds of one training


def solver_text(path: Path, iterations: int) -> str:
    """The solver with each loss shown, without tests and snapshots."""
    message = text_format.Parse(path.read_text(), schema.SolverParameter())
    del message.test_iter[:]
    for field in ("test_interval", "test_initialization", "snapshot"):
        message.ClearField(field)
    message.display, message.max_iter = 1, iterations
    message.average_loss, message.snapshot_after_train = 1, False
    return str(text_format.MessageToString(message))


def train(args: argparse.Namespace, text: str, seed: int, precision: str) -> Curve:
    """The mean loss of each window of iterations."""
    with tempfile.TemporaryDirectory() as temporary:
        solver = Path(temporary) / "solver.prototxt"
        solver.write_text(text)
        command = [
            sys.executable, "-m", "shmtrain.cli", str(solver), "--seed", str(seed),
            "--precision", precision, "--log-dir", temporary, "--no-progress",
        ]  # fmt: skip
        subprocess.run(command, cwd=args.folder, check=True, stderr=subprocess.DEVNULL, timeout=LIMIT)
        (metrics,) = Path(temporary).glob("*.jsonl")
        lines = map(json.loads, metrics.read_text().splitlines())
        losses = [line["loss"] for line in lines if line["kind"] == "train"][: args.iterations]
    whole = len(losses) // args.window * args.window
    curve: Curve = np.asarray(losses[:whole]).reshape(-1, args.window).mean(1)
    print(precision, seed, np.round(curve, 3).tolist(), flush=True)
    return curve


def apart(a: Curve, b: Curve) -> float:
    return float(np.abs(a - b).mean())


def page(args: argparse.Namespace, curves: dict[str, Curve], figures: dict[str, float], held: bool) -> str:
    said = f"--iterations {args.iterations} --window {args.window} --seeds {args.seeds}"
    said += f" --bf16-seeds {args.bf16_seeds}"
    shown = [0, len(next(iter(curves.values()))) // 2, -1]
    rows = [f"| {name} | {' | '.join(f'{curve[i]:.3f}' for i in shown)} |" for name, curve in curves.items()]
    return "\n".join([
        "# bf16 beside float32", "",
        f"`python scripts/soak/precision.py FOLDER {args.solver.name} {said}` on"
        f" {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}.", "",
        f"Mean training loss over {args.window} iterations, in the first, middle and last window:", "",
        "| precision, seed | first | middle | last |", "|---|---|---|---|", *rows, "",
        "Mean distance between two curves, over all windows:", "",
        *[f"- {name}: {value:.4f}" for name, value in figures.items()], "",
        f"bf16 within the noise of float32's seeds: {'held' if held else 'NOT held'}.", "",
    ])  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("folder", type=Path)
    p.add_argument("solver", type=Path)
    p.add_argument("--iterations", type=int, default=300)
    p.add_argument("--window", type=int, default=20)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--bf16-seeds", type=int, default=1)
    p.add_argument("--result", type=Path)
    args = p.parse_args()
    if args.seeds < 2 or not 1 <= args.bf16_seeds <= args.seeds or args.iterations < args.window:
        p.error("at least 2 seeds, of them 1 or more in bf16, and iterations for one window")
    text = solver_text(args.solver, args.iterations)
    curves = {f"float32, {seed}": train(args, text, seed, "float32") for seed in range(args.seeds)}
    curves |= {f"bf16, {seed}": train(args, text, seed, "bf16") for seed in range(args.bf16_seeds)}
    exact = [curves[f"float32, {seed}"] for seed in range(args.seeds)]
    noise = float(np.mean([apart(a, b) for a, b in combinations(exact, 2)]))
    figures = {"two float32 seeds": noise} | {
        f"bf16 and float32 of seed {seed}": apart(curves[f"bf16, {seed}"], exact[seed])
        for seed in range(args.bf16_seeds)
    }
    held = max(figures.values()) == noise
    print(json.dumps({"held": held, **figures}))
    if args.result:
        args.result.write_text(page(args, curves, figures, held))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
