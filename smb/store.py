"""The segments of one daemon: keys, lifetimes, sessions, memory. No sockets, no threads of its own."""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from smb import protocol
from smb.errors import Closed, KeyExists, NotPermitted, OutOfMemory, RequestError, UnknownKey, WaitTimeout
from smb.figures import Figures, Totals, told
from smb.limits import Limits
from smb.memory import Budget
from smb.rendezvous import Rendezvous, Session, Ticket
from smb.segment import Life, Mapping

TWO_THREADS = 32 << 20  # bytes from which populating pages with two threads pays


@dataclass(eq=False)
class Entry:
    """One segment as the daemon keeps it. ``mapping`` is None until its memory is populated."""

    number: int
    wanted: protocol.Create
    owner: Session | None
    mapping: Mapping | None = None
    published: bool = False
    named: bool = True  # False: freed, but somebody is still attached
    attached: dict[Session, int] = field(default_factory=dict)  # how often each
    born: float = field(default_factory=time.monotonic)
    pins: int = 0  # snapshots that copy it: the memory stays until they are done

    @property
    def key(self) -> str:
        return self.wanted.key

    @property
    def nbytes(self) -> int:
        return self.wanted.count * protocol.DTYPES[self.wanted.dtype]

    def settled(self) -> bool:
        """Whether its creation is over, well or not."""
        return self.published or not self.named

    def stat(self) -> protocol.Stat:
        w = self.wanted
        version = self.mapping.version if self.mapping else 0
        owner = self.owner.pid if self.owner else 0
        age = time.monotonic() - self.born
        return protocol.Stat(
            w.key, w.count, w.dtype, w.lifetime, w.meta, version, self.nbytes, len(self.attached), owner, age
        )


def difference(have: protocol.Create | protocol.Opened, want: protocol.Create) -> str:
    """How a segment differs from the one that is wanted; nothing when it does not."""
    part = protocol.stripe_of(have.meta)
    if part and not protocol.stripe_of(want.meta):
        return str(part)
    for name in ("count", "dtype", "lifetime", "meta"):
        a, b = getattr(have, name), getattr(want, name)
        if a != b:
            return meta_difference(a, b) if name == "meta" else f"{name} {a}, not {b}"
    return ""


def meta_difference(have: bytes, want: bytes) -> str:
    return f"other meta: {have[:60]!r} ({len(have)} bytes), not {want[:60]!r} ({len(want)} bytes)"


class Store:
    """All that one daemon holds. Every method may be called from any thread.

    memory_limit  bytes that all segments together may take; None: what the machine has
    lease         seconds after which the living holder of a chunk lock that others wait for counts as stuck
    limits        of sessions and segments
    huge_pages    for the segments that are made here
    """

    def __init__(
        self,
        memory_limit: int | None = None,
        lease: float = 30.0,
        budget: Budget | None = None,
        limits: Limits | None = None,
        huge_pages: bool = False,
    ) -> None:
        self.lease = lease
        self.limits = limits or Limits()
        self.huge_pages = huge_pages
        self.lock = threading.RLock()
        self.rendezvous = Rendezvous(self.lock)
        self.budget = budget or Budget(memory_limit)
        self.life = Life.create()
        self.totals = Totals()
        self.closed = False
        self._changed = threading.Condition(self.lock)  # a creation ended, well or not
        self._by_key: dict[str, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._sessions: dict[int, Session] = {}
        self._numbers = int(time.time()) << 24  # so that of two memories the one with the higher is the newer

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def number_from(self, least: int) -> None:
        """Give out numbers above ``least`` only: those of an earlier daemon."""
        with self.lock:
            self._numbers = max(self._numbers, least)

    # Sessions

    def open_session(self, pid: int, name: str, pidfd: int | None = None) -> Session:
        with self.lock:
            if self.closed:
                raise Closed("the daemon is closing")
            if len(self._sessions) >= self.limits.clients:
                raise OutOfMemory(f"{self.limits.clients} clients are there, the limit (--max-clients)")
            session = Session(secrets.randbits(63) + 1, secrets.randbits(63) + 1, pid, name, pidfd)
            self._sessions[session.number] = session
            return session

    def join_session(self, number: int, secret: int, pid: int | None) -> Session:
        """The session that another connection of the same client opened.

        pid  of the process that maps its segments, by the kernel's word; None for a client that does not
        """
        with self.lock:
            session = self._sessions.get(number)
            if session is None:
                raise Closed(f"no session {number}: the daemon was restarted, or the session's lease ended")
            remote = session.remote is not None
            if remote != (pid is None) or not secrets.compare_digest(str(session.secret), str(secret)):
                raise NotPermitted(f"no session {number} with this secret")
            if pid is not None and session.pid != pid:
                raise NotPermitted(
                    f"session {number} belongs to pid {session.pid}, not to {pid} (connect after a fork)"
                )
            return session

    def end_session(self, session: Session) -> int:
        """Bury a client: repair its chunk locks, free what it owns, give up its waits. Twice is fine.

        Returns how many chunks it left locked or half written.
        """
        if session.remote:
            session.remote.revoke()  # before the lock, which what is under way may need to come to its end
        with self.lock:
            if session.ended:
                return 0
            session.ended = True
            self._sessions.pop(session.number, None)
            for ticket in list(session.tickets):
                ticket.give_up("the session is over")
            self.rendezvous.end(session)
            repaired = 0
            for entry in list(self._by_number.values()):
                if session in entry.attached and entry.mapping:
                    repaired += entry.mapping.repair()
                self._leave(entry, session)
            beyond = session.remote.figures() if session.remote else Figures()
            self.totals.bury(Figures.sum([session.past, beyond]), session.requests)
            self._changed.notify_all()
            if session.pidfd is not None:
                os.close(session.pidfd)
                session.pidfd = None
            return repaired

    def _forget(self, entry: Entry, session: Session) -> None:
        """The session is no longer attached; what it did there stays counted."""
        if entry.attached.pop(session, None) is not None and entry.mapping:
            line = told(entry.mapping, session.number)
            if line:
                session.past.add(line[0])
                entry.mapping.forget_tally(session.number)

    def _leave(self, entry: Entry, session: Session) -> None:
        self._forget(entry, session)
        if entry.owner is session:
            entry.owner = None
            if entry.wanted.lifetime == "owner" or not entry.published:
                self._unname(entry)
        self._settle(entry)

    def sessions(self) -> list[Session]:
        with self.lock:
            return list(self._sessions.values())

    def session_rows(self) -> protocol.SessionList:
        with self.lock:
            rows = []
            for session in self._sessions.values():
                keys = sorted(e.key for e in self._by_number.values() if session in e.attached)
                rows.append(
                    protocol.SessionRow(session.pid, session.name, tuple(protocol.KeyRow(k) for k in keys))
                )
            return protocol.SessionList(tuple(rows))

    # Creation

    def create(self, ticket: Ticket, wanted: protocol.Create) -> tuple[Entry, bool]:
        """Make the segment, or join an equal one when or_attach says so; (entry, created).

        Between reservation and publication the name is taken but nobody can attach; who asks with or_attach
        waits. The memory is populated outside the lock.
        """
        entry = self._reserve_or_join(ticket, wanted)
        if entry.mapping:
            return entry, False
        try:
            threads = 2 if entry.nbytes >= TWO_THREADS else 1
            mapping = Mapping.create(
                wanted.count, wanted.dtype, prefault_threads=threads, huge_pages=self.huge_pages
            )
        except (OSError, MemoryError) as error:
            self.abandon(entry, ticket.session)
            raise OutOfMemory(f"segment {wanted.key!r} of {entry.nbytes} bytes: {error}") from error
        except BaseException:
            self.abandon(entry, ticket.session)
            raise
        with self.lock:
            entry.mapping = mapping
            if entry.number not in self._by_number:  # the client died meanwhile
                mapping.close()
                raise Closed("the session is over")
            if wanted.publish:
                self._publish(entry)
            return entry, True

    def _reserve_or_join(self, ticket: Ticket, wanted: protocol.Create) -> Entry:
        deadline = time.monotonic() + wanted.timeout
        key = wanted.key
        with self.lock:
            while (entry := self._by_key.get(key)) is not None and not entry.published:
                if not wanted.or_attach:
                    raise KeyExists(f"segment {key!r} is being created by {entry.owner}")
                if not ticket.wait(self._changed, partial(Entry.settled, entry), deadline):
                    raise WaitTimeout(
                        f"segment {key!r}: {entry.owner} has not published it in {wanted.timeout:g} s"
                    )
            if ticket.session.ended:
                raise Closed("the session is over")
            return self._join(ticket.session, entry, wanted) if entry else self._reserve(ticket, wanted)

    def _join(self, session: Session, entry: Entry, wanted: protocol.Create) -> Entry:
        if not wanted.or_attach:
            raise KeyExists(f"segment {entry.key!r} exists already")
        unlike = difference(entry.wanted, wanted)
        if unlike:
            raise KeyExists(f"segment {entry.key!r} exists with {unlike}")
        return self._enter(entry, session)

    def _reserve(self, ticket: Ticket, wanted: protocol.Create) -> Entry:
        if len(self._by_number) >= self.limits.segments:
            raise OutOfMemory(f"{self.limits.segments} segments exist, which is the limit (--max-segments)")
        entry = Entry(self._number(), wanted, ticket.session)
        held = self._by_number.values()
        used, pending = sum(e.nbytes for e in held), sum(e.nbytes for e in held if not e.mapping)
        self.budget.check(wanted.key, entry.nbytes, used, pending)
        self._by_key[wanted.key] = self._by_number[entry.number] = entry
        return self._enter(entry, ticket.session)

    def _publish(self, entry: Entry) -> None:
        entry.published = True
        self._changed.notify_all()

    def publish(self, session: Session, number: int) -> None:
        """Give the name that create(publish=False) reserved to everybody."""
        with self.lock:
            entry = self._of(session, number)
            if entry.owner is not session or entry.published or not entry.mapping:
                raise RequestError(f"segment {entry.key!r} does not wait to be published by this client")
            self._publish(entry)

    def abandon(self, entry: Entry, session: Session) -> None:
        """Take a creation back, unless others have joined it."""
        with self.lock:
            self._leave(entry, session)
            if not entry.attached:
                self._unname(entry)
                self._settle(entry)
            self._changed.notify_all()

    # Memory that was made elsewhere

    def find(self, key: str) -> Entry | None:
        """The segment of this key, whether published or not."""
        with self.lock:
            return self._by_key.get(key)

    def has(self, key: str) -> bool:
        return self.find(key) is not None

    def check_budget(self, what: str, nbytes: int) -> None:
        """Raise OutOfMemory unless so many more bytes fit."""
        with self.lock:
            held = self._by_number.values()
            used, pending = sum(e.nbytes for e in held), sum(e.nbytes for e in held if not e.mapping)
            self.budget.check(what, nbytes, used, pending)

    def install(self, session: Session, wanted: protocol.Create, mapping: Mapping, age: float) -> Entry:
        """A published segment of memory there is; ``session`` owns it and is attached. Raises KeyExists."""
        with self.lock:
            if self.closed or session.ended:
                raise Closed("the session is over")
            if wanted.key in self._by_key:
                raise KeyExists(f"segment {wanted.key!r} exists already")
            entry = Entry(self._number(), wanted, session, mapping, published=True)
            entry.born -= age
            self._by_key[wanted.key] = self._by_number[entry.number] = entry
            self._changed.notify_all()
            return self._enter(entry, session)

    def enter(self, entry: Entry, session: Session) -> None:
        """Attach once more. The caller holds the lock."""
        self._enter(entry, session)

    def pin(self) -> tuple[int, list[Entry]]:
        """The last number given out, and all published segments, whose memory stays until ``unpin``."""
        with self.lock:
            entries = [e for e in self._by_key.values() if e.published and e.mapping]
            for entry in entries:
                entry.pins += 1
            return self._numbers, entries

    def unpin(self, entries: list[Entry]) -> None:
        with self.lock:
            for entry in entries:
                entry.pins -= 1
                self._settle(entry)

    def entries(self) -> list[Entry]:
        """All segments, whether published or not."""
        with self.lock:
            return list(self._by_number.values())

    # Attachment

    def _enter(self, entry: Entry, session: Session) -> Entry:
        entry.attached[session] = entry.attached.get(session, 0) + 1
        return entry

    def _of(self, session: Session, number: int) -> Entry:
        entry = self._by_number.get(number)
        if entry is None or session not in entry.attached:
            raise UnknownKey(f"this client is attached to no segment {number}")
        return entry

    def is_attached(self, session: Session, number: int) -> bool:
        with self.lock:
            entry = self._by_number.get(number)
            return entry is not None and session in entry.attached

    def attached(self, session: Session, number: int) -> Entry:
        with self.lock:
            return self._of(session, number)

    def mend(self, session: Session, number: int) -> None:
        """Make chunks whole that dead writers left locked or half-written."""
        with self.lock:
            entry = self._of(session, number)
            if entry.mapping:
                entry.mapping.repair()

    def _published(self, key: str) -> Entry:
        entry = self._by_key.get(key)
        if entry is None or not entry.published:
            raise UnknownKey(f"no segment {key!r}{self._alike(key)}")
        return entry

    def _alike(self, key: str) -> str:
        keys = [k for k, e in self._by_key.items() if e.published and k[:1] == key[:1]]
        return f" (known: {', '.join(sorted(keys)[:8])})" if keys else ""

    def attach(self, session: Session, request: protocol.Attach) -> Entry:
        with self.lock:
            entry = self._published(request.key)
            if request.compare and entry.wanted.meta != request.meta:
                other = meta_difference(entry.wanted.meta, request.meta)
                raise KeyExists(f"segment {request.key!r} exists with {other}")
            if session.ended:
                raise Closed("the session is over")
            return self._enter(entry, session)

    def detach(self, session: Session, number: int) -> None:
        """Leave once; a creation that was never published is taken back."""
        with self.lock:
            entry = self._of(session, number)
            entry.attached[session] -= 1
            if not entry.attached[session]:
                self._forget(entry, session)
                if not entry.published:
                    self._unname(entry)
                    self._changed.notify_all()
            self._settle(entry)

    def free(self, key: str, session: Session | None = None) -> None:
        """Take the key away; those attached keep the memory until they detach.

        NotPermitted when ``session`` does not own a segment that is to live as long as its owner.
        """
        with self.lock:
            entry = self._published(key)
            if session and entry.wanted.lifetime == "owner" and entry.owner not in (session, None):
                raise NotPermitted(f"segment {key!r} belongs to {entry.owner}, who alone may free it")
            self._unname(entry)
            self._settle(entry)

    def _unname(self, entry: Entry) -> None:
        if entry.named:
            entry.named = False
            del self._by_key[entry.key]

    def _settle(self, entry: Entry) -> None:
        """Let go of what nobody can reach any more."""
        if not entry.attached and entry.published and entry.wanted.lifetime == "attached":
            self._unname(entry)
        if entry.named or entry.attached or entry.pins:
            return
        self._by_number.pop(entry.number, None)
        if entry.mapping:
            entry.mapping.close()

    # Looking

    def stat(self, key: str) -> protocol.Stat:
        with self.lock:
            return self._published(key).stat()

    def list(self, prefix: str) -> protocol.Listing:
        with self.lock:
            entries = [e for k, e in sorted(self._by_key.items()) if e.published and k.startswith(prefix)]
            return protocol.Listing(tuple(entry.stat() for entry in entries))

    def close(self) -> None:
        """End every session and free everything; clients see the daemon as dead. Twice is fine."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.life.close()
        for session in self.sessions():
            self.end_session(session)
        with self.lock:
            for entry in list(self._by_number.values()):
                self._unname(entry)
                entry.attached.clear()
                self._settle(entry)
