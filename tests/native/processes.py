"""Other processes for the tests of what several processes share."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

LIMIT = 60.0  # seconds after which a child is taken for hanging


class Child:
    """A forked process that runs one function and ends; killed at the end of its ``with`` block."""

    def __init__(self, work: Callable[[], object]) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def stop(self) -> None:
        """SIGSTOP it, and return once it no longer runs."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = LIMIT) -> int:
        """Its exit code, negative for a signal; it is killed when it takes longer."""
        end = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                end = float("inf")
            else:
                time.sleep(0.001)
        return self.status

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                self.kill()


@contextlib.contextmanager
def children(works: Sequence[Callable[[], object]]) -> Iterator[list[Child]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Child(work)) for work in works]


def wait_for(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    """Return when the condition holds; fail when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.001)


def open_descriptors() -> int:
    gc.collect()  # what other tests left would go in the midst of this one
    return len(list(Path("/proc/self/fd").iterdir()))
