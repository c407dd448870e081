"""Threads that do the parts of one operation at several daemons at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
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


class Hand:
    """A thread that does one piece of work after the other, until nobody refers to this."""

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future

    def __del__(self) -> None:
        self._work.put(None)


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while work := queue.get():
        work()
        del work  # and with it the caller's arrays


class Crew:
    """Does an operation's parts at several daemons at once.

    Each thread that calls has a hand of its own for each daemon but the first, whose part it does itself: so
    its operations keep to one connection a daemon, and nobody waits behind another's stuck chunk.

    After TransportError of one daemon everything raises it: a box with a daemon missing is of no use.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.failed = ""
        self._callers = threading.local()

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
        which, hands = list(daemons), self._hands()
        others = [hands[i].submit(partial(self.at, i, partial(work, i))) for i in which if i]
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

    def _hands(self) -> dict[int, Hand]:
        """The calling thread's own."""
        mine: dict[int, Hand] | None = getattr(self._callers, "hands", None)
        if mine is None:
            names = {i: f"smb-stripe-{i}" for i in range(1, len(self.addresses))}
            mine = self._callers.hands = {i: Hand(name) for i, name in names.items()}
        return mine

    def close(self) -> None:
        """Let everybody's hands go, once they have done what is under way."""
        self._callers = threading.local()


def _order(error: BaseException) -> tuple[int, int]:
    if not isinstance(error, SmbError):
        return 0, 0
    if isinstance(error, TransportError):
        return 1, 0
    return (3, getattr(error, "chunk", 0)) if isinstance(error, NonFinite) else (2, 0)
