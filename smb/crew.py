"""Threads that do the parts of one operation at several daemons at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from smb.errors import Away, NonFinite, OutOfMemory, Restarted, SmbError, TransportError, WaitTimeout
from smb.transport.base import named

T = TypeVar("T")
NAMED = (
    TransportError,
    Restarted,
    Away,
    OutOfMemory,
    WaitTimeout,
)  # errors of which one wants to know the daemon


class Crew:
    """Threads that do an operation's parts at several daemons at once, a part's in a thread of its daemon's.

    After TransportError of one daemon everything raises it: a box with a daemon missing is of no use.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.failed = ""
        # As many threads as callers have parts under way at once: nobody waits behind another's stuck chunk.
        self._pools = [ThreadPoolExecutor(1 << 12, f"smb-stripe-{i}") for i in range(1, len(addresses))]

    def at(self, daemon: int, work: Callable[[], T]) -> T:
        """``work`` in this thread; an error that says little without its daemon names it."""
        if self.failed:
            raise TransportError(self.failed)
        try:
            return work()
        except NAMED as error:
            address = self.addresses[daemon]
            mine = error if address in str(error) else named(error, f"daemon at {address}")
            if isinstance(error, TransportError):
                self.failed = str(mine)
            raise mine from error

    def all(self, daemons: Iterable[int], work: Callable[[int], T]) -> list[T]:
        """``work(daemon)`` for each of them at once; the results in order.

        It ends when all have ended, since they may use the caller's arrays. One error is raised: that of a
        daemon that failed before one about the request, of several bad chunks the first one's.
        """
        which = list(daemons)
        others = [self._pools[i - 1].submit(self.at, i, partial(work, i)) for i in which if i]
        own: Future[T] = Future()
        try:
            if 0 in which:
                own.set_result(self.at(0, partial(work, 0)))
        except SmbError as error:
            own.set_exception(error)
        finally:
            self._settle(others)
        rest = iter(others)
        futures = [next(rest) if i else own for i in which]
        errors = [error for error in (future.exception() for future in futures) if error]
        if errors:
            raise min(errors, key=_order)
        return [future.result() for future in futures]

    @staticmethod
    def _settle(futures: list[Future[T]]) -> None:
        try:
            wait(futures)
        except BaseException:  # interrupted: once more, then let go
            wait(futures)
            raise

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False)


def _order(error: BaseException) -> tuple[int, int]:
    if not isinstance(error, SmbError):
        return 0, 0
    if isinstance(error, TransportError):
        return 1, 0
    return (3, getattr(error, "chunk", 0)) if isinstance(error, NonFinite) else (2, 0)
