"""Answers the requests of protocol.py's table out of a store; every transport's control path ends here."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smb import protocol
from smb.errors import Closed, NotPermitted, NotSupported, RangeError, RequestError, UnknownKey, WaitTimeout
from smb.keeper import Keeper
from smb.lease import Lease
from smb.rendezvous import Session, Ticket
from smb.report import report
from smb.restoring import Restoring
from smb.segment import Mapping
from smb.snapshot import newest
from smb.store import Entry, Store

log = logging.getLogger(__name__)
SLICE = 0.2  # seconds between two looks at whether anybody still waits


@dataclass(frozen=True)
class Answer:
    """A good reply. The client may map ``entry``; ``undo`` is called when the reply cannot be delivered."""

    record: object
    entry: Entry | None = None
    readonly: bool = False
    undo: Callable[[], None] | None = None


class Service:
    """One daemon's operations. ``answer`` may be called from any thread and may wait."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lease = Lease(store)
        self.restoring = Restoring(store)
        self.keeper = Keeper(store, self.lease.judge, self.restoring.settled)
        self._operations: dict[type, Callable[[Ticket, Any], Answer]] = {
            protocol.Bye: self._bye,
            protocol.Create: self._create,
            protocol.Publish: self._publish,
            protocol.Attach: self._attach,
            protocol.Detach: self._detach,
            protocol.Free: self._free,
            protocol.StatOf: lambda _, r: Answer(store.stat(r.key)),
            protocol.ListOf: lambda _, r: Answer(store.list(r.prefix)),
            protocol.Sessions: lambda _, r: Answer(store.session_rows()),
            protocol.Add: self._add,
            protocol.Await: self._await,
            protocol.Barrier: self._barrier,
            protocol.Lock: self._lock,
            protocol.Unlock: self._unlock,
            protocol.Stuck: self._stuck,
            protocol.Mend: self._mend,
            protocol.Status: lambda _, r: Answer(report(store)),
            protocol.HandBack: self._hand_back,
            protocol.HandCounter: self._hand_counter,
            protocol.Inherit: self._inherit,
            protocol.SnapshotNow: self._snapshot,
            protocol.RestoreFrom: self._restore,
            protocol.VersionOf: self._version,
            protocol.WaitVersion: self._wait_version,
            protocol.Combine: self._combine,
            protocol.Adagrad: self._adagrad,
            protocol.Reduce: self._reduce,
        }

    def also(self, operations: dict[type, Callable[[Ticket, Any], Answer]]) -> None:
        """Answer these too."""
        self._operations.update(operations)

    def answer(self, ticket: Ticket, request: object) -> Answer:
        """Do what ``request`` asks in the ticket's session. Raises RequestError."""
        operation = self._operations.get(type(request))
        if operation is None:
            raise NotSupported(f"{type(request).__name__} is for clients that do not map their segments")
        self.restoring.admit(ticket, request)
        ticket.session.requests += 1
        return operation(ticket, request)

    def _bye(self, ticket: Ticket, request: protocol.Bye) -> Answer:
        self.store.end_session(ticket.session)
        return Answer(protocol.Done())

    def _opened(self, session: Session, entry: Entry, created: bool, readonly: bool = False) -> Answer:
        w = entry.wanted
        record = protocol.Opened(entry.number, created, w.count, w.dtype, w.lifetime, w.meta)

        def undo() -> None:
            if created:
                self.store.abandon(entry, session)
            else:
                self.store.detach(session, entry.number)

        return Answer(record, entry, readonly, undo)

    def _create(self, ticket: Ticket, request: protocol.Create) -> Answer:
        entry, created = self.store.create(ticket, request)
        return self._opened(ticket.session, entry, created)

    def _publish(self, ticket: Ticket, request: protocol.Publish) -> Answer:
        self.store.publish(ticket.session, request.segment)
        return Answer(protocol.Done())

    def _attach(self, ticket: Ticket, request: protocol.Attach) -> Answer:
        entry = self.store.attach(ticket.session, request)
        return self._opened(ticket.session, entry, False, request.readonly)

    def _detach(self, ticket: Ticket, request: protocol.Detach) -> Answer:
        self.store.detach(ticket.session, request.segment)
        return Answer(protocol.Done())

    def _free(self, ticket: Ticket, request: protocol.Free) -> Answer:
        self.store.free(request.key, ticket.session)
        return Answer(protocol.Done())

    def _add(self, ticket: Ticket, request: protocol.Add) -> Answer:
        value = self.store.rendezvous.add(ticket.session, request.key, request.amount)
        return Answer(protocol.Value(value, self.store.rendezvous.updates(request.key)))

    def _await(self, ticket: Ticket, request: protocol.Await) -> Answer:
        value = self.store.rendezvous.await_counter(ticket, request.key, request.value, request.timeout)
        return Answer(protocol.Value(value, self.store.rendezvous.updates(request.key)))

    def _barrier(self, ticket: Ticket, request: protocol.Barrier) -> Answer:
        self.store.rendezvous.barrier(ticket, request.name, request.parties, request.timeout)
        return Answer(protocol.Done())

    def _lock(self, ticket: Ticket, request: protocol.Lock) -> Answer:
        self.store.rendezvous.acquire(ticket, request.name, request.token, request.timeout)

        def undo() -> None:
            self.store.rendezvous.release(ticket.session, request.name, request.token)

        return Answer(protocol.Done(), undo=undo)

    def _unlock(self, ticket: Ticket, request: protocol.Unlock) -> Answer:
        self.store.rendezvous.release(ticket.session, request.name, request.token)
        return Answer(protocol.Done())

    def _mend(self, ticket: Ticket, request: protocol.Mend) -> Answer:
        self.store.mend(ticket.session, request.segment)
        return Answer(protocol.Done())

    def _hand_back(self, ticket: Ticket, request: protocol.HandBack) -> Answer:
        entry = self.restoring.hand_back(ticket.session, request, ticket.descriptors)
        return replace(self._opened(ticket.session, entry, False), entry=None)  # it has the memory

    def _hand_counter(self, ticket: Ticket, request: protocol.HandCounter) -> Answer:
        self.restoring.hand_counter(ticket.session, request)
        return Answer(protocol.Done())

    def _inherit(self, ticket: Ticket, request: protocol.Inherit) -> Answer:
        self.restoring.inherit(ticket.session, request)
        return Answer(protocol.Done())

    def _snapshot(self, ticket: Ticket, request: protocol.SnapshotNow) -> Answer:
        folder = self._own_folder(ticket, request.folder) if request.folder else None
        return Answer(self.keeper.take(folder))

    def _restore(self, ticket: Ticket, request: protocol.RestoreFrom) -> Answer:
        snapshot = newest(self._own_folder(ticket, request.folder), log.warning)
        if snapshot is None:
            raise UnknownKey(f"no snapshot in {request.folder}")
        loaded, records = self.restoring.load(snapshot), snapshot.description.segments
        return Answer(protocol.SnapshotDone(str(snapshot.path), loaded, sum(r.nbytes for r in records)))

    @staticmethod
    def _own_folder(ticket: Ticket, folder: str) -> Path:
        """A folder that a client names: only one that has this user's rights anyway may."""
        if ticket.session.remote:
            raise NotPermitted("only a client on the daemon's host may name a folder there")
        if not os.path.isabs(folder):
            raise RequestError(f"folder {folder!r}: an absolute path is expected")
        return Path(folder)

    def _version(self, ticket: Ticket, request: protocol.VersionOf) -> Answer:
        mapping = self.store.attached(ticket.session, request.segment).mapping
        return Answer(protocol.Applied(mapping.version if mapping else 0))

    def _wait_version(self, ticket: Ticket, request: protocol.WaitVersion) -> Answer:
        mapping = self.store.attached(ticket.session, request.segment).mapping
        assert mapping is not None  # only its creator is attached before it has one, and waits for that
        end = time.monotonic() + request.timeout
        while not mapping.wait(request.version, max(0.0, min(SLICE, end - time.monotonic()))):
            if ticket.gone or ticket.session.ended:
                raise Closed(ticket.gone or "the session is over")
            if time.monotonic() >= end:
                now, limit = mapping.version, request.timeout
                raise WaitTimeout(f"version is {now}, not yet {request.version}, after {limit:g} s")
        return Answer(protocol.Applied(mapping.version))

    def _operand(self, ticket: Ticket, number: int) -> Mapping:
        """A segment that a vector operation works on."""
        entry = self.store.attached(ticket.session, number)
        assert entry.mapping is not None  # only its creator is attached before it has one, and waits for that
        return entry.mapping

    def _combine(self, ticket: Ticket, request: protocol.Combine) -> Answer:
        remote = ticket.session.remote
        if remote is None:
            raise NotSupported("Combine is for clients that do not map their segments")
        target = self._operand(ticket, request.segment)
        source = self._operand(ticket, request.source) if request.source else None
        if request.offset + request.count > target.count:
            what = f"{request.count} elements at offset {request.offset}"
            raise RangeError(f"{request.how}: {what} run past the segment ({target.count} elements)")
        with remote.update(request.segment):
            version = target.combine(
                request.how, request.scalar, source, request.offset, request.count, request.counts
            )
        return Answer(protocol.Applied(version))

    def _adagrad(self, ticket: Ticket, request: protocol.Adagrad) -> Answer:
        remote = ticket.session.remote
        if remote is None:
            raise NotSupported("Adagrad is for clients that do not map their segments")
        numbers = (request.segment, request.sums, request.gradient)
        target, sums, gradient = (self._operand(ticket, number) for number in numbers)
        end = request.offset + request.count
        if end > min(one.count for one in (target, sums, gradient)):
            raise RangeError(
                f"adagrad: {request.count} elements at offset {request.offset} run past a segment"
            )
        with remote.update(request.segment), remote.update(request.sums):
            version = target.adagrad(
                sums, gradient, request.rate, request.scale, request.epsilon, request.offset, request.count,
                request.counts,
            )  # fmt: skip
        return Answer(protocol.Applied(version))

    def _reduce(self, ticket: Ticket, request: protocol.Reduce) -> Answer:
        other = self._operand(ticket, request.other) if request.other else None
        return Answer(protocol.Scalar(self._operand(ticket, request.segment).reduce(request.how, other)))

    def _stuck(self, ticket: Ticket, request: protocol.Stuck) -> Answer:
        entry = self.store.attached(ticket.session, request.segment)
        return Answer(self.lease.judge(entry, request.chunk, request.thread))
