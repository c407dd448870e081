"""Many workers on few cores: how fast they start, what memory they take, how many images a second they train.

    python benchmarks/workers.py --data DIR [--workers 16] [--seconds 20] [--rounds 3]

DIR holds mnist_train_lmdb (``shmtrain data mnist --out DIR``). LeNet, batch 64, one torch thread each, an
exchange of all 431,080 floats (1.7 MB) every step. The rival is one process with one torch thread and no box;
the two take turns, and the ratio of a round's two rates is what counts. Memory is the sum of the processes'
proportional shares (PSS): pages that several share count once.

Targets for 16 workers: all ready in 4 s, under 1 GiB together, 1.5 times the images of one process.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

NET = Path(__file__).resolve().parent.parent / "examples" / "mnist" / "lenet_train_test.prototxt"
BATCH = 64
SOLVER = """
net: "{net}"
base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005 lr_policy: "fixed"
max_iter: 100000000 display: {display} snapshot_after_train: false
"""
SHOWN = re.compile(r"I\d{4} (\d\d:\d\d:\d\d\.\d+) .*\] Iteration (\d+) \(")


class Run:
    """A training and the time of each of its lines, in seconds since it was started."""

    def __init__(self, folder: Path, workers: int) -> None:
        options = ["--workers", str(workers), "--threads", "1", "--no-progress"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmtrain.cli", "solver.prototxt", *options],
            cwd=folder, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._new = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._new:
                self.lines.append((time.monotonic() - self.began, line))
                self._new.notify_all()

    def until(self, text: str, timeout: float = 120.0) -> float:
        """When the log first said ``text``."""
        deadline = time.monotonic() + timeout
        with self._new:
            while True:
                for at, line in self.lines:
                    if text in line:
                        return at
                if not self._new.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"no {text!r} in: {''.join(line for _, line in self.lines)}")

    def rate(self, seconds: float) -> float:
        """Images a second between the first and the last display of the next ``seconds``."""
        begun = len(self.lines)
        time.sleep(seconds)
        shown = [m for _, line in self.lines[begun:] if (m := SHOWN.match(line))]
        clock = [datetime.strptime(m[1], "%H:%M:%S.%f") for m in (shown[0], shown[-1])]
        return (int(shown[-1][2]) - int(shown[0][2])) * BATCH / (clock[1] - clock[0]).total_seconds()

    def workers(self) -> list[int]:
        return [int(m[1]) for _, line in self.lines if (m := re.search(r"Worker \d+ \(pid (\d+)\) of", line))]


@contextmanager
def training(folder: Path, workers: int) -> Iterator[Run]:
    run = Run(folder, workers)
    try:
        yield run
    finally:
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)


def pss(pid: int) -> float:
    """Proportional share of memory, MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def descendants(root: int) -> list[int]:
    """A process and all below it, as they are now."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(pid)
    found, todo = list[int](), [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def write(folder: Path, data: Path, display: int) -> None:
    net = NET.read_text().replace('"examples/mnist/', f'"{data}/')
    (folder / "net.prototxt").write_text(net)
    (folder / "solver.prototxt").write_text(SOLVER.format(net=folder / "net.prototxt", display=display))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before (0 is best)")
    ratios, starts = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, args.data.resolve(), display=10)
        for turn in range(args.rounds):
            with training(folder, 1) as one:
                one.until("Iteration 50 (")
                single = one.rate(args.seconds)
            with training(folder, args.workers) as many:
                many.until("Starting Optimization")
                starts.append(many.until("Starting Optimization"))
                time.sleep(3.0)
                rate = many.rate(args.seconds)
                if turn == 0:
                    memory(many)
            ratios.append(rate / single)
            print(
                f"round {turn}: ready in {starts[-1]:.1f} s; {rate:.0f} images/s, one process {single:.0f},"
                f" ratio {ratios[-1]:.2f}",
                flush=True,
            )
    print(f"{args.workers} workers: ready in {statistics.median(starts):.1f} s (target 4), ", end="")
    print(f"{statistics.median(ratios):.2f} times one process's images/s (target 1.5)")
    return 0


def memory(run: Run) -> None:
    workers = run.workers()
    everybody = descendants(run.process.pid)
    own = sum(map(pss, workers))
    rest = sum(map(pss, set(everybody) - set(workers)))
    print(f"memory: {len(workers)} workers {own:.0f} MiB (target 1024), the rest {rest:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
