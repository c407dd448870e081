"""One connection a thread, made when the thread first asks for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closeable(Protocol):
    def end(self) -> None: ...
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


class PerThread(Generic[C]):
    """What ``make`` gives, once for each thread; a thread's own goes when the thread ends."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._local = threading.local()
        self._all: weakref.WeakSet[C] = weakref.WeakSet()

    def get(self) -> C:
        """This thread's own."""
        mine: C | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = self._local.mine = self._make()
            with self._lock:
                self._all.add(mine)
        return mine

    def drop(self) -> None:
        """Close this thread's own; the next get makes another."""
        mine: C | None = self._local.__dict__.pop("mine", None)
        if mine is not None:
            mine.close()

    def all(self) -> list[C]:
        """Everybody's."""
        with self._lock:
            return list(self._all)

    def end(self) -> None:
        """End everybody's; each notices by itself."""
        for one in self.all():
            one.end()

    def close(self) -> None:
        """End everybody's; the descriptors go with the threads' references, not under a thread that reads."""
        with self._lock:
            self.each(lambda one: one.end())

    def each(self, act: Callable[[C], None]) -> None:
        """Do ``act`` to everybody's and forget them. No lock: a fork may have copied it locked."""
        for one in list(self._all):
            act(one)
        self._local = threading.local()
