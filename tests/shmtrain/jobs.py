"""Jobs for the tests: a tiny net, a solver file, and ``shmtrain`` as a process with a log to wait for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DUMMY = """
layer {
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {
    shape { dim: 8 dim: 6 } shape { dim: 8 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 }
  }
}
"""
HDF5 = """
layer {
  name: "data" type: "HDF5Data" top: "data" top: "label"
  hdf5_data_param { source: "files.txt" batch_size: 8 }
}
"""
LAYERS = """
layer {
  name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
NET = f'name: "tiny"\n{DUMMY}{LAYERS}'

SOLVER = """
net: "net.prototxt"
base_lr: 0.01
lr_policy: "fixed"
"""

ENDLESS = 100_000_000
PROGRAM = ("-m", "shmtrain.cli", "solver.prototxt", "--threads", "1")


def write(folder: Path, solver: str, net: str = NET) -> Path:
    """The files of a job in ``folder``; the solver's path."""
    (folder / "net.prototxt").write_text(net)
    path = folder / "solver.prototxt"
    path.write_text(SOLVER + solver)
    return path


@dataclass
class Job:
    """A running ``shmtrain``; ``lines`` is what it has said on stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._new = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._new:
                self.lines.append(line.rstrip("\n"))
                self._new.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 90.0) -> re.Match[str]:
        """The first match of ``pattern`` in the log, which may still have to come."""
        deadline = time.monotonic() + timeout
        with self._new:
            while not (found := re.search(pattern, self.text)):
                left = deadline - time.monotonic()
                assert left > 0, f"no {pattern!r} within {timeout} s in:\n{self.text}"
                self._new.wait(left)
        return found

    def pid_of(self, rank: int) -> int:
        return int(self.wait_for(rf"Worker {rank} \(pid (\d+)\) of")[1])

    def trains(self) -> None:
        """Wait until the leader has shown an iteration, which it does after all workers have started."""
        self.wait_for(r"Iteration \d+ \(")

    def end(self, timeout: float = 90.0) -> int:
        """Wait for the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Job]:
    """``shmtrain solver.prototxt OPTIONS`` in ``folder``; killed at the end if it still runs."""
    with started(folder, [sys.executable, *PROGRAM, *options]) as job:
        yield job


@contextmanager
def started(
    folder: Path, command: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Iterator[Job]:
    """The same with any command."""
    process = subprocess.Popen(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    job = Job(process)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        job._reader.join(10)


def train(folder: Path, *options: str, timeout: float = 90.0) -> Job:
    """Run a job to its end."""
    with running(folder, *options) as job:
        job.end(timeout)
        return job


def gone(pid: int, timeout: float = 5.0) -> bool:
    """Whether a process ends in time; a zombie has ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def stop(job: Job) -> int:
    """Ctrl-C, and the exit code."""
    job.process.send_signal(signal.SIGINT)
    return job.end()
