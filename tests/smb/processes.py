"""Daemons and clients in processes of their own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from smb.segment import Mapping

ROOT = Path(__file__).resolve().parent.parent.parent


def _path() -> str:
    """The checkout first, then what this process was given (in the RDMA guest it is where pyverbs lies)."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class Program:
    """A child process with its output; killed at the end of its ``with`` block."""

    def __init__(self, *words: str, more: dict[str, str] | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1", **(more or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *words], stdout=subprocess.PIPE, env=environment, cwd=ROOT
        )
        self.pid = self.process.pid
        self._printed = b""

    def line(self, seconds: float = 60) -> str:
        """The next line that it prints; "" at its end. Fails when none comes in time."""
        assert self.process.stdout
        number, end = self.process.stdout.fileno(), time.monotonic() + seconds
        probe = select.poll()
        probe.register(number, select.POLLIN)
        while b"\n" not in self._printed:
            assert probe.poll(max(0.0, 1000 * (end - time.monotonic()))), (
                f"printed no line within {seconds} s"
            )
            part = os.read(number, 1 << 16)
            if not part:
                break
            self._printed += part
        line, _, self._printed = self._printed.partition(b"\n")
        return line.decode().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """SIGSTOP it, and return once it no longer runs."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: state(self.pid) == "T", 10)

    def ended(self, seconds: float = 30) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(seconds)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)
        if self.process.stdout:
            self.process.stdout.close()


class ServeProcess(Program):
    """`smb serve` as a program."""

    def __init__(self, path: Path, *options: str) -> None:
        super().__init__("-m", "smb.cli", "serve", "--unix", str(path), *options)
        self.path, self.address = path, f"unix:{path}"
        self.addresses: list[str] = []
        self.more: dict[str, str] = {}  # what clients need in their environment

    def __enter__(self) -> ServeProcess:
        words = self.line().split()
        assert words[:3] == ["listening", "at", self.address]
        self.addresses = words[2:]
        return self


def client(address: str, code: str, *words: str, more: dict[str, str] | None = None) -> Program:
    """A client process that runs ``code`` with ``box``, ``smb`` and ``np`` at hand; ``more`` environment."""
    head = f"import sys, time, numpy as np, smb; box = smb.connect({address!r}, name='worker', timeout=10)\n"
    return Program("-c", head + code, *words, more=more)


def state(pid: int) -> str:
    """The kernel's letter for what a process does; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


@contextlib.contextmanager
def chunk_held(mapping: Mapping, chunk: int = 0) -> Iterator[threading.Event]:
    """Another thread holds a chunk's lock until the event is set, or at the end."""
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        mapping.hold_chunk(chunk, False)
        held.set()
        free.wait(20)
        mapping.release_chunk(chunk)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(10)
        try:
            yield free
        finally:
            free.set()
        holding.result(10)


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether ``condition`` comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
