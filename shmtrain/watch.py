"""What the launcher watches: the signals that come to it, and the steps of its workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any

from shmtrain.group import Rows, State

STOP = (signal.SIGINT, signal.SIGTERM)
ALL = (*STOP, signal.SIGHUP)


class Signals:
    """While entered, counts what came; a wait on ``fd`` ends when something comes. Main thread only."""

    def __init__(self) -> None:
        self.stops = 0
        self.snapshots = 0
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._came) for number in ALL}
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self.fd)
        os.close(self._write)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if number in STOP:
            self.stops += 1
        else:
            self.snapshots += 1


@contextmanager
def blocked() -> Iterator[None]:
    """Processes started meanwhile hear none of ALL; what comes to this one is told afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    """For a process started so: ignore the terminal's signals, end at SIGTERM, and hear them again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL)


class Steps:
    """One worker, called ``name`` in messages, and when its steps last grew."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self._seen: tuple[State, int] | None = None
        self._since = 0.0
        self._named = False

    def stuck(self, rows: Rows, patience: float) -> str | None:
        """A line, once, when the worker trains without a step for ``patience`` s; when it goes on, too."""
        state, done, now = rows.state(self.rank), rows.done(self.rank), time.monotonic()
        if (state, done) != self._seen:
            back, self._seen, self._since, self._named = self._named, (state, done), now, False
            return f"{self.name} goes on" if back else None
        moving = state is State.TRAINING or (state is State.READY and not rows.below(State.READY))
        if not moving or self._named or now - self._since < patience:
            return None
        self._named = True
        return (
            f"{self.name} is stuck: no step for {now - self._since:.0f} s after {done} iterations of its own"
        )


class Watched(Steps):
    """One worker process of ours."""

    def __init__(self, rank: int, process: BaseProcess) -> None:
        super().__init__(rank, f"Worker {rank} (pid {process.pid})")
        self.process = process
        self.ended = False
        self.told = False  # that it shall stop

    def end(self) -> str:
        """How it ended, in words."""
        code = self.process.exitcode or 0
        if code >= 0:
            return f"failed with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def send(self, number: int) -> None:
        """Send a signal; nothing when the process is gone."""
        pid = self.process.pid
        if pid is not None and not self.ended:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
