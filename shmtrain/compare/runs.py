"""Runs one training after the other, each a process tree of its own, and remembers what came of it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmtrain.compare.plan import RUNS, Case, Plan, describe, replace_text
from shmtrain.compare.results import RECORD, Broken, read
from shmtrain.options import ConfigError

OUTPUT = "output.txt"
LOCK = "lock"
PATIENCE = 30.0  # seconds that a training may take to end when it is asked to
ERRORS = 3  # of a failed run's lines, shown


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """The folder is this process's, and its runs': the descriptor of the lock. Raises ConfigError."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{folder} is in use by another comparison, or by a run that it left") from None
        yield lock.fileno()


@dataclass(frozen=True)
class Runner:
    """Runs the cases of a plan.

    lock   descriptor that every run holds while it lives
    limit  seconds after which a run is ended
    """

    plan: Plan
    lock: int
    limit: float

    def folder(self, case: Case) -> Path:
        return self.plan.folder / RUNS / case.name

    def whole(self, case: Case) -> bool:
        """Whether this very run has been made, to its end."""
        try:
            return bool(read(self.folder(case)).record.get("arguments") == self.plan.arguments(case))
        except Broken:
            return False

    def run(self, case: Case) -> str:
        """Make the run anew; '' or, in words, why it failed."""
        folder = self.folder(case)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        record: dict[str, Any] = {
            "name": case.way.name, "workers": case.workers, "seed": case.seed,
            "arguments": self.plan.arguments(case),
            **describe(self.plan.sharing(case)), "load": round(os.getloadavg()[0], 2), "begun": time.time(),
        }  # fmt: skip
        start = time.monotonic()
        try:
            record["code"] = self._train(folder, self.plan.command(case))
        except subprocess.TimeoutExpired:
            record |= {"code": -signal.SIGKILL, "limit": self.limit}
        record["seconds"] = round(time.monotonic() - start, 2)
        replace_text(folder / RECORD, json.dumps(record, indent=1))
        try:
            read(folder)
        except Broken as error:
            return str(error)
        return ""

    def _train(self, folder: Path, command: list[str]) -> int:
        """The exit code. A run that takes too long (TimeoutExpired) or is interrupted is ended."""
        command = [*command, "--no-progress", "--log-dir", str(folder)]
        with (folder / OUTPUT).open("w") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                pass_fds=[self.lock],
            )  # fmt: skip
            try:
                return process.wait(self.limit)
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a training that still runs: as two Ctrl-C do, and by force when that does not help."""
    for number, patience in ((signal.SIGINT, 1.0), (signal.SIGINT, PATIENCE), (signal.SIGKILL, PATIENCE)):
        if process.poll() is not None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def errors(folder: Path) -> list[str]:
    """The last errors of a run's output, else its last lines."""
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    found = [line for line in lines if line.startswith(("E", "shmtrain: "))]
    return (found or lines)[-ERRORS:]
