"""Sessions, and what they wait for together: barriers, named locks, counters. No I/O.

Everything here and in store.py happens under one lock, the store's. A request that has to wait does so with
a Ticket, so that whoever learns that its client is gone can end the wait and free its place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from smb.errors import Closed, OutOfMemory, RangeError, RequestError, WaitTimeout
from smb.figures import Figures
from smb.remote import Remote

MAX_NAMES = 100_000  # counters, barriers and locks of one daemon, against a client that makes them forever
INT64 = range(-(2**63), 2**63)


@dataclass(eq=False)
class Session:
    """A client's standing with the daemon; it outlives a connection.

    It ends with its process, or without shared memory (``remote``) when a lease passes in silence.
    """

    number: int
    secret: int
    pid: int
    name: str
    pidfd: int | None = None  # None: the daemon's own process, or remote
    remote: Remote | None = None
    returns: bool = False  # whether the client hands its memory to the next daemon when this one dies
    ended: bool = False
    tickets: set[Ticket] = field(default_factory=set)
    born: float = field(default_factory=time.monotonic)
    requests: int = 0  # control requests that it made
    paired: bool = False  # has had an RDMA queue pair
    past: Figures = field(default_factory=Figures)  # what it did in segments that it left

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"pid {self.pid}{name}" + (
            f" at {self.remote.where}" if self.remote and self.remote.where else ""
        )


class Ticket:
    """One request that may wait. ``give_up`` ends the wait from another thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gone = ""  # why nobody waits for the answer any more
        self.condition: threading.Condition | None = None
        self.about = ""  # what it waits for, and since when
        self.since = 0.0
        self.descriptors: list[int] = []  # that came with the request; the connection's to close

    def give_up(self, why: str) -> None:
        """The caller holds the store's lock."""
        self.gone = self.gone or why
        if self.condition:
            self.condition.notify_all()

    def wait(
        self, condition: threading.Condition, ready: Callable[[], bool], deadline: float, about: str = ""
    ) -> bool:
        """Wait under the store's lock until ``ready()``; False when time.monotonic() passes ``deadline``.

        Raises Closed when the ticket was given up before it was ready.
        """
        self.condition, self.about, self.since = condition, about, time.monotonic()
        self.session.tickets.add(self)
        try:
            condition.wait_for(
                lambda: ready() or self.gone or self.session.ended, max(0.0, deadline - time.monotonic())
            )
        finally:
            self.condition = None
            self.session.tickets.discard(self)
        if self.gone or self.session.ended:
            raise Closed(self.gone or "the session is over")
        return ready()


class _Barrier:
    def __init__(self, lock: threading.RLock, parties: int) -> None:
        self.parties, self.waiting = parties, list[Session]()
        self.open = False
        self.condition = threading.Condition(lock)


class _Lock:
    def __init__(self, lock: threading.RLock) -> None:
        self.owner: tuple[Session, int] | None = None
        self.queue = deque[tuple[Session, int]]()
        self.condition = threading.Condition(lock)

    def pass_on(self) -> None:
        self.owner = self.queue.popleft() if self.queue else None
        self.condition.notify_all()


class _Counter:
    def __init__(self, lock: threading.RLock) -> None:
        self.value = 0
        self.updates = 0  # how often it was changed
        self.users = dict[Session, int]()  # what each added
        self.condition = threading.Condition(lock)


class Rendezvous:
    """The barriers, locks and counters of one daemon. Safe for any number of threads."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._barriers: dict[str, _Barrier] = {}
        self._locks: dict[str, _Lock] = {}
        self._counters: dict[str, _Counter] = {}

    def _room(self) -> None:
        if len(self._barriers) + len(self._locks) + len(self._counters) >= MAX_NAMES:
            raise OutOfMemory(f"{MAX_NAMES} counters, barriers and locks exist, which is the limit")

    # Barriers

    def barrier(self, ticket: Ticket, name: str, parties: int, timeout: float) -> None:
        """Wait until ``parties`` have come. WaitTimeout; RequestError when others expect another number."""
        deadline = time.monotonic() + timeout
        with self._lock:
            barrier = self._barriers.get(name)
            if barrier is None:
                self._room()
                barrier = self._barriers[name] = _Barrier(self._lock, parties)
            if barrier.parties != parties:
                raise RequestError(f"barrier {name!r} waits for {barrier.parties}, not for {parties}")
            barrier.waiting.append(ticket.session)
            if len(barrier.waiting) == parties:
                barrier.open = True
                del self._barriers[name]  # the next to come starts a new round
                barrier.condition.notify_all()
                return
            self._wait_at(barrier, ticket, name, deadline, timeout)

    def _wait_at(self, barrier: _Barrier, ticket: Ticket, name: str, deadline: float, timeout: float) -> None:
        opened = False
        try:
            opened = ticket.wait(barrier.condition, lambda: barrier.open, deadline, f"barrier {name}")
            if not opened:
                there = ", ".join(str(session) for session in barrier.waiting[:16])
                came = f"{len(barrier.waiting)} of {barrier.parties} came in {timeout:g} s"
                raise WaitTimeout(f"barrier {name!r}: {came}: {there}")
        finally:
            if not opened and not barrier.open:
                barrier.waiting.remove(ticket.session)
                if not barrier.waiting:
                    del self._barriers[name]

    # Locks

    def acquire(self, ticket: Ticket, name: str, token: int, timeout: float) -> None:
        """Take the lock for (session, token), in the order of asking. WaitTimeout names the holder."""
        claim, deadline = (ticket.session, token), time.monotonic() + timeout
        with self._lock:
            lock = self._locks.get(name)
            if lock is None:
                self._room()
                lock = self._locks[name] = _Lock(self._lock)
            if claim == lock.owner or claim in lock.queue:
                raise RequestError(f"lock {name!r} was asked for with this token already")
            if lock.owner is None:
                lock.owner = claim
                return
            lock.queue.append(claim)
            taken = False
            try:
                about = f"lock {name} of {lock.owner[0]}"
                taken = ticket.wait(lock.condition, lambda: lock.owner == claim, deadline, about)
                if not taken:
                    raise WaitTimeout(f"lock {name!r} was not free in {timeout:g} s: held by {lock.owner[0]}")
            finally:
                if not taken:
                    self._withdraw(name, lock, claim)

    def _withdraw(self, name: str, lock: _Lock, claim: tuple[Session, int]) -> bool:
        if claim in lock.queue:
            lock.queue.remove(claim)
        elif lock.owner == claim:
            lock.pass_on()
        else:
            return False
        if lock.owner is None:
            self._locks.pop(name, None)
        return True

    def release(self, session: Session, name: str, token: int) -> None:
        """Release what (session, token) holds, or withdraw it from the queue."""
        with self._lock:
            lock = self._locks.get(name)
            if lock is None or not self._withdraw(name, lock, (session, token)):
                raise RequestError(f"lock {name!r} is not held by this client")

    # Counters

    def _counter(self, session: Session, key: str) -> _Counter:
        counter = self._counters.get(key)
        if counter is None:
            self._room()
            counter = self._counters[key] = _Counter(self._lock)
        counter.users.setdefault(session, 0)
        return counter

    def add(self, session: Session, key: str, amount: int) -> int:
        """Add to the counter; the value before. A counter lives as long as any session that used it."""
        with self._lock:
            counter = self._counter(session, key)
            before = counter.value
            if before + amount not in INT64:
                raise RangeError(f"counter {key!r}: {before} + {amount} leaves 64 bits")
            counter.value += amount
            counter.users[session] += amount
            if amount:
                counter.updates += 1
                counter.condition.notify_all()
            return before

    def await_counter(self, ticket: Ticket, key: str, value: int, timeout: float) -> int:
        """Wait until the counter is at least ``value``; what it then is. Raises WaitTimeout."""
        deadline = time.monotonic() + timeout
        with self._lock:
            counter = self._counter(ticket.session, key)
            about = f"counter {key} to reach {value}"
            if not ticket.wait(counter.condition, lambda: counter.value >= value, deadline, about):
                raise WaitTimeout(f"counter {key!r} is {counter.value}, not yet {value}, after {timeout:g} s")
            return counter.value

    def updates(self, key: str) -> int:
        """How often the counter was changed."""
        with self._lock:
            counter = self._counters.get(key)
            return counter.updates if counter else 0

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._counters

    def restore(self, session: Session, key: str, value: int, updates: int) -> None:
        """Take a value from an earlier daemon's time, unless a newer one is there."""
        with self._lock:
            counter = self._counter(session, key)
            if updates > counter.updates:
                counter.value, counter.updates = value, updates
                counter.condition.notify_all()

    def counters(self) -> list[tuple[str, int, int]]:
        """Key, value and number of updates of each."""
        with self._lock:
            return [(key, c.value, c.updates) for key, c in self._counters.items()]

    def progress(self) -> dict[Session, tuple[str, int]]:
        """The counter to which each session added most, and how much. The caller holds the lock."""
        best: dict[Session, tuple[str, int]] = {}
        for key, counter in self._counters.items():
            for session, added in counter.users.items():
                if added > best.get(session, ("", 0))[1]:
                    best[session] = (key, added)
        return best

    # Sessions

    def end(self, session: Session) -> None:
        """Release what the session holds; its waiting requests were given up before."""
        with self._lock:
            for name, lock in list(self._locks.items()):
                lock.queue = deque(claim for claim in lock.queue if claim[0] is not session)
                if lock.owner and lock.owner[0] is session:
                    lock.pass_on()
                if lock.owner is None:
                    del self._locks[name]
            for key, counter in list(self._counters.items()):
                counter.users.pop(session, None)
                if not counter.users:
                    del self._counters[key]
