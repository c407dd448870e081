"""What a daemon has from the one before it: a snapshot, and the memory that surviving clients hand back.

For WINDOW seconds after its start a daemon takes memory back. As long as clients of the snapshot live in this
host and have not come back, a key of the snapshot is *restoring*: requests wait until its memory is handed
back, or until the window is over and the snapshot's values are loaded. What is restored has one lease in
which its clients may come back; then "owner" and "attached" segments without them go, as at a client's death.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial

from smb import protocol
from smb.errors import KeyExists, NotPermitted, ProtocolError, RequestError, SmbError, UnknownKey
from smb.rendezvous import Session, Ticket
from smb.segment import Mapping
from smb.snapshot import SegmentRecord, SessionRecord, Snapshot, process_start, proof
from smb.store import Entry, Store, difference

log = logging.getLogger(__name__)
JOIN = 5.0  # seconds that a thread may take to end
LOADING = 600.0  # seconds that reading a snapshot may take
WINDOW = 10.0  # seconds after a daemon's start in which it takes memory back
WAITING = (protocol.Create, protocol.Attach, protocol.StatOf, protocol.Free)  # they name a key
LOOKING = (protocol.ListOf, protocol.Sessions, protocol.SnapshotNow)  # they want all of it
CLAIMING = (protocol.Lock, protocol.Barrier, protocol.Add, protocol.Await)  # of what clients hand back first
RETURNING = (protocol.Inherit, protocol.HandBack, protocol.HandCounter, protocol.Detach, protocol.Bye)


class Restoring:
    """One store's past. Every method may be called from any thread."""

    def __init__(self, store: Store, window: float = WINDOW) -> None:
        self._store, self._window = store, window
        self._changed = threading.Condition(store.lock)
        self._until = time.monotonic() + window  # memory is taken back until then
        self._snapshot: Snapshot | None = None
        self._pending: dict[str, SegmentRecord] = {}  # restoring
        self._missing = set[int]()  # sessions of the snapshot whose processes live and have not come back
        self._known: dict[int, SessionRecord] = {}
        self._heirs: dict[int, int] = {}  # session of this life -> the one of the last that it goes on for
        self._returning = set[int]()  # sessions that are just handing back
        self._crashed = False
        self._grace: Session | None = None  # holds what is restored
        self._thread: threading.Thread | None = None
        self._timers: list[threading.Timer] = []

    # The start -------------------------------------------------------------------------------------------

    def begin(self, snapshot: Snapshot | None, crashed: bool = False) -> None:
        """Before anybody is let in: take a verified snapshot up, or begin empty.

        crashed  whether the daemon before this one left its socket: its clients may be on their way
        """
        with self._store.lock:
            self._until = time.monotonic() + self._window
            self._crashed = crashed
            if snapshot is None:
                return
            self._snapshot, description = snapshot, snapshot.description
            self._store.number_from(description.numbers)
            self._known = {session.number: session for session in description.sessions}
            self._missing = {s.number for s in description.sessions if _lives(s)}
            self._pending = {segment.key: segment for segment in description.segments}
            self._grace = self._store.open_session(0, "restored")
            for counter in description.counters:
                self._store.rendezvous.restore(self._grace, counter.key, counter.value, counter.updates)
            waits = bool(self._missing)
        while not waits and self._pending:  # what does not fit must be known before anybody relies on it
            self._load_one(next(iter(self._pending.values())))
        self._thread = threading.Thread(target=self._run, name="smb-restoring", daemon=True)
        self._thread.start()

    def load(self, snapshot: Snapshot) -> int:
        """Load a verified snapshot into a box that runs; how many segments. All or nothing.

        Raises KeyExists when keys or counters of it exist, OutOfMemory, SnapshotError.
        """
        store, description = self._store, snapshot.description
        with store.lock:
            taken = [s.key for s in description.segments if store.has(s.key) or s.key in self._pending]
            taken += [c.key for c in description.counters if store.rendezvous.has(c.key)]
        if taken:
            raise KeyExists(f"of {snapshot.path} exist already: {', '.join(taken[:8])} ({len(taken)} in all)")
        store.check_budget(str(snapshot.path), sum(s.nbytes for s in description.segments))
        holder, loaded = store.open_session(0, "restored"), []
        try:
            for segment in description.segments:
                mapping = snapshot.load(segment.key, store.huge_pages)
                loaded.append(store.install(holder, segment.wanted(), mapping, segment.age))
            for counter in description.counters:
                store.rendezvous.restore(holder, counter.key, counter.value, counter.updates)
        except BaseException:
            for entry in loaded:
                store.free(entry.key)
            store.end_session(holder)
            raise
        timer = threading.Timer(store.lease, store.end_session, [holder])
        timer.daemon = True
        with store.lock:
            self._timers = [*(t for t in self._timers if t.is_alive()), timer]
            timer.start()
        return len(loaded)

    def _run(self) -> None:
        """Ends the window, then the lease of grace."""
        with self._store.lock:
            self._changed.wait_for(self._settled, max(0.0, self._until - time.monotonic()))
            self._missing.clear()
        self._load_rest()
        with self._store.lock:
            self._changed.wait_for(lambda: self._store.closed, self._store.lease)
        if self._grace:
            self._store.end_session(self._grace)

    def _settled(self) -> bool:
        return self._store.closed or not self._missing

    def _load_rest(self) -> None:
        """Load what nobody has handed back; what cannot be loaded is named and is lost."""
        while True:
            with self._store.lock:
                record = next(iter(self._pending.values()), None)
            if record is None or self._store.closed:
                break
            try:
                self._load_one(record)
            except SmbError as error:
                log.error("segment %r is lost: %s", record.key, error)
            with self._store.lock:
                self._pending.pop(record.key, None)
                self._changed.notify_all()
        with self._store.lock:
            self._changed.notify_all()

    def _load_one(self, record: SegmentRecord) -> None:
        assert self._snapshot is not None
        assert self._grace is not None
        self._store.check_budget(record.key, record.nbytes)
        mapping = self._snapshot.load(record.key, self._store.huge_pages)
        self._install(self._grace, record, mapping)

    def _install(self, grace: Session, record: SegmentRecord, mapping: Mapping) -> None:
        with self._store.lock:
            if record.key not in self._pending:  # its memory came while the file was read
                mapping.close()
                return
            entry = self._store.install(grace, record.wanted(), mapping, record.age)
            heirs = [s for s in self._store.sessions() if self._heirs.get(s.number) == record.owner != 0]
            entry.owner = heirs[0] if heirs else grace
            del self._pending[record.key]
            self._changed.notify_all()

    def settled(self, timeout: float) -> bool:
        """Wait until nothing is restoring any more, or the store is closed; whether that is so."""
        with self._store.lock:
            return self._changed.wait_for(lambda: not self._pending or self._store.closed, timeout)

    def close(self) -> None:
        with self._store.lock:
            self._changed.notify_all()
            timers = self._timers
        for timer in timers:
            timer.cancel()
        if self._thread:
            self._thread.join(JOIN)

    # Requests --------------------------------------------------------------------------------------------

    def admit(self, ticket: Ticket, request: object) -> None:
        """Let a request wait for what is restoring. Raises Closed when its client goes meanwhile."""
        with self._store.lock:
            if time.monotonic() >= self._until and not self._pending:
                return
            returning = ticket.session.number in self._returning
            if isinstance(request, RETURNING) or (returning and not isinstance(request, protocol.Attach)):
                return
            if returning:  # it attaches to what it cannot hand back, after all that it can
                self._missing.discard(self._heirs.get(ticket.session.number, 0))
                self._changed.notify_all()
            if isinstance(request, WAITING):
                ready = partial(self._ready, request.key, isinstance(request, protocol.Attach))
            elif isinstance(request, (*LOOKING, *CLAIMING)):
                ready = partial(self._over, isinstance(request, LOOKING))
            else:
                return
            deadline = self._until + (LOADING if self._pending else 0.0)
            ticket.wait(self._changed, ready, deadline, "what is being restored")

    def _ready(self, key: str, attach: bool) -> bool:
        """Whether it is settled what the key means."""
        if key in self._pending:
            return False
        waiting = bool(self._missing) or (attach and self._crashed)
        return self._store.has(key) or not waiting or time.monotonic() >= self._until

    def _over(self, everything: bool) -> bool:
        return (not self._missing or time.monotonic() >= self._until) and not (everything and self._pending)

    def inherit(self, session: Session, request: protocol.Inherit) -> None:
        """The session goes on for one of the last daemon's, and owns what that owned.

        Session 0 only says that the client will do so when this daemon dies.
        """
        with self._store.lock:
            session.returns = True
            if request.session and not request.done:
                self._returning.add(session.number)
            else:
                self._returning.discard(session.number)
            known = self._known.get(request.session)
            if known is None:
                return
            if known.proof != proof(request.secret):
                raise NotPermitted(f"no session {request.session} of the last daemon with this secret")
            self._heirs[session.number] = known.number
            if request.done:
                self._missing.discard(known.number)
                self._changed.notify_all()
            snapshot = self._snapshot
            for record in snapshot.description.segments if snapshot else ():
                entry = self._store.find(record.key)
                if entry and record.owner == known.number and entry.owner is self._grace:
                    entry.owner = session

    def hand_back(self, session: Session, request: protocol.HandBack, descriptors: Sequence[int]) -> Entry:
        """Take a segment's memory back from a client; the descriptors stay the caller's.

        Raises ProtocolError for files that are not what a segment's are, KeyExists when it comes too late
        or is older than what the snapshot has.
        """
        if session.pidfd is None or len(descriptors) != 2:
            raise NotPermitted("only a client on this host that maps its segments can hand one back")
        wanted = protocol.Create(
            request.key, request.count, request.dtype, request.lifetime, request.meta, False, True, 0.0
        )
        try:
            control, payload = descriptors
            mapping = Mapping.attach(control, payload, request.count, request.dtype)
        except OSError as error:
            raise ProtocolError(f"segment {request.key!r}: its memory cannot be mapped: {error}") from error
        try:
            repaired = mapping.repair()
            with self._store.lock:
                entry = self._adopt(session, request, wanted, mapping)
        except BaseException:
            mapping.close()
            raise
        if entry.mapping is not mapping:
            mapping.close()
        elif repaired:
            log.warning("segment %r: %d chunks repaired that the dead left", request.key, repaired)
        return entry

    def _adopt(
        self, session: Session, request: protocol.HandBack, wanted: protocol.Create, mapping: Mapping
    ) -> Entry:
        key, record = request.key, self._pending.get(request.key)
        entry = self._store.find(key)
        if entry and entry.mapping and _same(entry.mapping, mapping):
            other = difference(entry.wanted, wanted)
            if other:
                raise KeyExists(f"segment {key!r} was handed back before with {other}")
            self._store.enter(entry, session)
        elif entry or time.monotonic() >= self._until:
            raise self._late(session, key, "the key has other memory by now" if entry else "")
        elif record and request.segment < record.number:
            raise self._late(session, key, "it is older than the snapshot's")
        else:
            for gone in mapping.tallies():  # lines of the dead daemon's sessions
                mapping.forget_tally(gone)
            entry = self._store.install(session, wanted, mapping, record.age if record else 0.0)
            entry.owner = self._grace
            self._pending.pop(key, None)
        if request.owned:
            entry.owner = session
        self._changed.notify_all()
        return entry

    def _late(self, session: Session, key: str, why: str) -> RequestError:
        why = why or f"{self._window:g} s after the daemon's start are over"
        log.warning("%s hands segment %r back too late: %s", session, key, why)
        return KeyExists(f"segment {key!r}: its memory came back too late: {why}")

    def hand_counter(self, session: Session, request: protocol.HandCounter) -> None:
        """Take a counter's last value that a client saw, when it is newer than what the daemon has."""
        with self._store.lock:
            if time.monotonic() >= self._until:
                raise UnknownKey(f"counter {request.key!r} came back too late")
            self._store.rendezvous.restore(session, request.key, request.value, request.updates)
            self._changed.notify_all()


def _lives(session: SessionRecord) -> bool:
    return session.pid > 0 and session.pid != os.getpid() and process_start(session.pid) == session.start


def _same(one: Mapping, other: Mapping) -> bool:
    """Whether two mappings are of one memory file."""
    a, b = os.fstat(one.payload_fd), os.fstat(other.payload_fd)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
