"""The second thread of a worker: it carries increments to the center while the worker computes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from shmtrain.exchange.base import F32, ExchangeStats
from smb.errors import SmbError, WaitTimeout

if TYPE_CHECKING:
    from smb import Segment

TIMEOUT = 60.0
OpenPair = Callable[[], "tuple[Segment, Segment]"]
Job = TypeVar("Job")


class _Second(ABC, Generic[Job]):
    """A thread that is asleep until it is given a job. One thread calls its methods.

    stats  where the parts of its jobs are timed; the worker puts its own there
    """

    def __init__(self) -> None:
        self.stats = ExchangeStats()
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._staleness: int | None = None
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="update", daemon=True)
        self._thread.start()

    def wait(self, timeout: float = TIMEOUT) -> int | None:
        """Return when no increment is under way: the staleness of the last one, or None when told before.

        It counts the updates of others that the center took between this worker's read and its increment.

        Raises the update thread's own error, and WaitTimeout after ``timeout`` seconds.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: self._job is None or self._error is not None, timeout)
            if self._error is not None:
                raise self._error
            if not idle:
                raise WaitTimeout(f"the center did not take an increment within {timeout:g} s")
            staleness, self._staleness = self._staleness, None
            return staleness

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(TIMEOUT)

    def _give(self, job: Job) -> None:
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._open()
            while (job := self._next()) is not None:
                self._done(self._carry(job))
        except (SmbError, OSError) as error:
            self._failed(error)

    @abstractmethod
    def _open(self) -> None:
        """In the second thread, before the first job."""

    @abstractmethod
    def _carry(self, job: Job) -> int:
        """Do one job; the staleness."""

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self._closing)
            return self._job

    def _done(self, staleness: int) -> None:
        with self._changed:
            self._job, self._staleness = None, staleness
            self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


class UpdateThread(_Second[tuple[F32, int]]):
    """Writes increments to the worker's own segment and has them accumulated.

    The array handed to ``start`` must not change until ``wait`` has returned.
    """

    def __init__(self, open_pair: OpenPair, ahead: F32 | None = None) -> None:
        """``open_pair`` gives the worker's own segment and the center, both of the same length.

        It is called in the update thread, which so gets a connection of its own. The center is read into
        ``ahead``, if given, after each increment.
        """
        self._open_pair, self._ahead = open_pair, ahead
        self._version: int | None = None  # of what was read ahead
        super().__init__()

    def start(self, delta: F32, read: int) -> None:
        """Carry ``delta`` to the center; ``read`` is the version of the W_g that it was computed from."""
        self._give((delta, read))

    def found(self, out: F32) -> int | None:
        """After ``wait``: the center as it was read ahead into ``out``, and its version; None without one."""
        version, self._version = self._version, None
        if version is not None and self._ahead is not None:
            np.copyto(out, self._ahead)
        return version

    def _open(self) -> None:
        self._own, self._center = self._open_pair()

    def _carry(self, job: tuple[F32, int]) -> int:
        delta, read = job
        with self.stats.part("wwi", sent=delta.nbytes, hidden=True):
            self._own.write(delta)
        with self.stats.part("ugw", hidden=True):
            staleness = self._center.accumulate(self._own) - read - 1
        if self._ahead is not None:
            version = self._center.version
            with self.stats.part("rgw", received=delta.nbytes, hidden=True):
                self._center.read(self._ahead)
            self._version = version
        return staleness


class WholeExchange(_Second[tuple[F32, float]]):
    """Exchanges a copy of the weights; the worker takes what the copy has moved by."""

    def __init__(self, open_pair: OpenPair, threads: int = 1) -> None:
        """``open_pair`` as for UpdateThread."""
        self._open_pair, self._threads = open_pair, threads
        self._moved: F32 | None = None
        self._before: F32 | None = None
        super().__init__()

    def start(self, local: F32, alpha: float) -> None:
        """Begin to exchange a copy of ``local``, which may change at once."""
        if self._before is None:
            self._before = np.empty_like(local)
        np.copyto(self._before, local)
        self._give((self._before.copy(), alpha))

    def take(self, local: F32) -> int | None:
        """Wait for the exchange begun last, and move ``local`` by it; its staleness, None without one."""
        with self.stats.part("wait"):
            staleness = self.wait()
        if self._moved is not None and self._before is not None:
            with self.stats.part("ulw"):
                self._before -= self._moved
                local -= self._before
            self._moved = None
        return staleness

    def _open(self) -> None:
        _, self._center = self._open_pair()

    def _carry(self, job: tuple[F32, float]) -> int:
        copy, alpha = job
        with self.stats.part("exchange", sent=copy.nbytes, received=copy.nbytes, hidden=True):
            self._center.exchange(copy, alpha, threads=self._threads)
        self._moved = copy
        return self._center.staleness
