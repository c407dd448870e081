"""Two workers, the second one slowed: what an asynchronous way gets out of both, what a synchronous one does.

    python benchmarks/heterogeneous.py [--factor 3] [--rounds 12] [--window 1] [--out FILE.jsonl]

LeNet on made-up images, batch 64. Each worker is a process of its own with one torch thread, pinned to a
processor of its own; the slow one sleeps after each forward and backward pass, so that it takes ``factor``
times as long. Every case (each worker alone, without a box; both together by each algorithm) is started once
and stopped. Then they take turns in a shuffled order: a case is let run for a window of a second, and the
steps that its workers make are counted. So what else the machine does meets all cases alike. What counts is
the images a second of both together, divided by the sum of what they make alone.

Target: asynchronous at least 0.9. Synchronous workers go at the pace of the slowest: 2/(1 + factor) of the
sum of two that make 1 + 1/factor, at best 0.5 for a factor of 3.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
max_iter: 100000000 snapshot_after_train: false
"""
START = 120.0  # seconds that the processes may take to start
END = 20.0


def main() -> int:
    if sys.argv[1:2] == ["--be"]:
        return be(int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the stopped processes are ended then, too
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two processors are needed")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cases = {
            name: stack.enter_context(training(Path(folder), name, speeds, algorithm))
            for name, (speeds, algorithm) in wanted(args).items()
        }
        rounds = [measure(cases, args.window) for _ in range(args.rounds)]
    if args.out:
        with args.out.open("a") as file:
            for found in rounds:
                file.write(json.dumps({"factor": args.factor, "window": args.window, **found}) + "\n")
    report(rounds, args)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--window", type=float, default=1.0, help="seconds")
    parser.add_argument("--asynchronous", type=lambda t: t.split(","), default=["seasgd"])
    parser.add_argument("--synchronous", type=lambda t: t.split(","), default=["sync"])
    parser.add_argument("--out", type=Path, help="every round is appended there")
    return parser.parse_args()


def wanted(args: argparse.Namespace) -> dict[str, tuple[dict[int, float], str | None]]:
    """The cases: how many times slower the worker on each processor is, and how they meet."""
    both = {0: 1.0, 1: args.factor}
    together = {name: (both, name) for name in (*args.asynchronous, *args.synchronous)}
    return {"fast alone": ({0: 1.0}, None), "slow alone": ({1: args.factor}, None), **together}


# One worker ----------------------------------------------------------------------------------------------


def be(processor: int, factor: float, counter: Path, words: list[str]) -> int:
    """This process as a worker: pinned, slowed by ``factor``, its steps counted in a file."""
    os.sched_setaffinity(0, {processor})
    from shmtrain import cli
    from shmtrain.learner import Learner

    with counter.open("r+b") as file:
        steps = mmap.mmap(file.fileno(), 8)
    compute = Learner.compute

    def counted(self: Learner, *given: Any, **named: Any) -> float:
        start = time.process_time()  # the wall clock goes on while this process is stopped
        loss = compute(self, *given, **named)
        time.sleep((factor - 1.0) * (time.process_time() - start))
        steps[:] = struct.pack("q", struct.unpack("q", steps[:])[0] + 1)
        return loss

    Learner.compute = counted  # type: ignore[method-assign]
    return cli.main(words)


class Training:
    """The processes of one case, and the files that count their steps."""

    def __init__(self, counters: list[Path], processes: list[subprocess.Popen[bytes]]) -> None:
        self.counters, self.processes = counters, processes

    def steps(self) -> int:
        return sum(struct.unpack("q", path.read_bytes())[0] for path in self.counters)

    def begun(self) -> bool:
        """Whether all make steps. Raises SystemExit when one has ended."""
        if any(process.poll() is not None for process in self.processes):
            raise SystemExit("a worker has ended")
        return all(struct.unpack("q", path.read_bytes())[0] > 2 for path in self.counters)

    def send(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def training(folder: Path, name: str, speeds: dict[int, float], algorithm: str | None) -> Iterator[Training]:
    """The workers of one case, started, and stopped until they are wanted."""
    own = folder / name.replace(" ", "-")
    own.mkdir()
    (own / "net.prototxt").write_text(made_up_net())
    (own / "solver.prototxt").write_text(SOLVER)
    found = Training([], [])
    try:
        for rank, (processor, factor) in enumerate(speeds.items()):
            counter = own / f"steps{rank}"
            counter.write_bytes(bytes(8))
            found.counters.append(counter)
            command = [sys.executable, __file__, "--be", str(processor), str(factor), str(counter)]
            command += ["solver.prototxt", "--threads", "1", "--no-progress"]
            command += ["--algorithm", algorithm] if algorithm else []
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if algorithm:
                environment |= {
                    "TORCHELASTIC_RUN_ID": f"{folder.name}-{algorithm}", "RANK": str(rank),
                    "WORLD_SIZE": str(len(speeds)), "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(len(speeds)),
                }  # fmt: skip
            found.processes.append(
                subprocess.Popen(command, cwd=own, env=environment, stderr=subprocess.DEVNULL)
            )
        deadline = time.monotonic() + START
        while not found.begun():
            if time.monotonic() > deadline:
                raise SystemExit(f"{name}: not begun within {START:g} s")
            time.sleep(0.05)
        found.send(signal.SIGSTOP)
        yield found
    finally:
        end(found)


def end(case: Training) -> None:
    """End the processes as Ctrl-C does, by force where that does not help."""
    case.send(signal.SIGCONT)
    case.send(signal.SIGINT)
    deadline = time.monotonic() + END
    for process in case.processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def made_up_net() -> str:
    """The example's training net on images that cost nothing to read."""
    from prototxt import schema
    from prototxt.text import parse_net

    net = parse_net(str(EXAMPLE))
    kept = [layer for layer in net.layer if layer.type not in ("Data", "Accuracy")]
    return "\n".join([DATA, str(schema.NetParameter(layer=kept))])


# Rounds --------------------------------------------------------------------------------------------------


def measure(cases: dict[str, Training], window: float) -> dict[str, float]:
    """One window of every case: images a second."""
    names = list(cases)
    random.shuffle(names)
    found = {}
    for name in names:
        case = cases[name]
        before, start = case.steps(), time.perf_counter()
        case.send(signal.SIGCONT)
        time.sleep(window)
        case.send(signal.SIGSTOP)
        seconds = time.perf_counter() - start
        found[name] = round((case.steps() - before) * BATCH / seconds, 1)
    return found


def report(rounds: list[dict[str, float]], args: argparse.Namespace) -> None:
    """One line a case: the mean and the median of its windows, and the share of both alone by the means."""
    alone = sum(statistics.fmean(r[name] for r in rounds) for name in ("fast alone", "slow alone"))
    middle = sum(statistics.median(r[name] for r in rounds) for name in ("fast alone", "slow alone"))
    print(
        f"{len(rounds)} windows of {args.window:g} s a case, the second worker {args.factor:g} times slower;"
        " images a second"
    )
    for name in rounds[0]:
        mean, median = (of(r[name] for r in rounds) for of in (statistics.fmean, statistics.median))
        share = (
            "" if name.endswith("alone") else f"  {mean / alone:.3f} of both alone ({median / middle:.3f})"
        )
        print(f"{name:12} {mean:9,.0f} (median {median:7,.0f}){share}")


if __name__ == "__main__":
    raise SystemExit(main())
