"""How a worker learns that what it hangs on has died, and what it then does.

Under forkserver the launcher is not a worker's parent: it is watched by a pidfd that it hands down. A thread
waits on it, so that a worker that computes a long step, or hangs in one, ends in time all the same.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from types import TracebackType
from typing import Any


class HandedDown:
    """A descriptor on its way to a worker: pickled only while multiprocessing starts the process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.fd),)


def _received(held: Any) -> HandedDown:
    return HandedDown(held.detach())


def open_parent() -> int:
    """A pidfd of this process's parent, which launched it; of itself where that is in another namespace."""
    parent = os.getppid()
    with suppress(OSError):
        if parent:
            return os.pidfd_open(parent)
    return os.pidfd_open(os.getpid())


class Lifeline:
    """Watches one process; ends this one through ``orphaned`` when that dies.

    ``orphaned(reason)`` is called once, in the watching thread or in that of ``cut``, whichever is first;
    the other waits for ever. It says what happened, saves what it can and must not return: the process ends
    with status 1 when it does.
    """

    def __init__(self, pidfd: int, what: str, orphaned: Callable[[str], None]) -> None:
        self._pidfd, self._what, self._orphaned = pidfd, what, orphaned
        self._once = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def cut(self, reason: str) -> None:
        """What this worker hangs on is gone; does not return."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()  # the other thread ends the process
        try:
            self._orphaned(reason)
        finally:
            os._exit(1)

    def close(self) -> None:
        """Stop watching; closing twice is fine."""
        if self._wake_write >= 0:
            os.close(self._wake_write)
            self._wake_write = -1
            self._thread.join(10)
            os.close(self._wake_read)

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._wake_read, select.POLLHUP)
        if any(fd == self._pidfd for fd, _ in poll.poll()):
            self.cut(f"{self._what} died")
