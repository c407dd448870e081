"""The second thread of the paper's worker: it carries increments to the center while the worker computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmtrain.exchange.base import F32
from smb.errors import SmbError, WaitTimeout

if TYPE_CHECKING:
    from smb import Segment

TIMEOUT = 60.0


class UpdateThread:
    """Asleep until it is given an increment, which it writes to the worker's own segment and has accumulated.

    One thread calls start, wait and close. The array handed to ``start`` must not change until ``wait`` has
    returned.
    """

    def __init__(self, open_pair: Callable[[], tuple[Segment, Segment]]) -> None:
        """``open_pair`` gives the worker's own segment and the center, both of the same length.

        It is called in the update thread, which so gets a connection of its own.
        """
        self._open_pair = open_pair
        self._changed = threading.Condition()
        self._delta: F32 | None = None
        self._read = 0
        self._staleness: int | None = None
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="update", daemon=True)
        self._thread.start()

    def start(self, delta: F32, read: int) -> None:
        """Carry ``delta`` to the center; ``read`` is the version of the W_g that it was computed from."""
        with self._changed:
            self._delta, self._read = delta, read
            self._changed.notify_all()

    def wait(self, timeout: float = TIMEOUT) -> int | None:
        """Return when no increment is under way: the staleness of the last one, or None when told before.

        It counts the updates of others that the center took between this worker's read and its increment.

        Raises the update thread's own error, and WaitTimeout after ``timeout`` seconds.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: self._delta is None or self._error is not None, timeout)
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

    def _run(self) -> None:
        try:
            own, center = self._open_pair()
            while (delta := self._next()) is not None:
                own.write(delta)
                self._done(center.accumulate(own) - self._read - 1)
        except (SmbError, OSError) as error:
            self._failed(error)

    def _next(self) -> F32 | None:
        with self._changed:
            self._changed.wait_for(lambda: self._delta is not None or self._closing)
            return self._delta

    def _done(self, staleness: int) -> None:
        with self._changed:
            self._delta, self._staleness = None, staleness
            self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
