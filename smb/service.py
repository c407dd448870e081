"""Answers the requests of protocol.py's table out of a store; every transport's control path ends here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smb import protocol
from smb.errors import Closed, NotSupported, WaitTimeout
from smb.lease import Lease
from smb.rendezvous import Session, Ticket
from smb.segment import Mapping
from smb.store import Entry, Store

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
            protocol.VersionOf: self._version,
            protocol.WaitVersion: self._wait_version,
            protocol.Combine: self._combine,
            protocol.Reduce: self._reduce,
        }

    def answer(self, ticket: Ticket, request: object) -> Answer:
        """Do what ``request`` asks in the ticket's session. Raises RequestError."""
        operation = self._operations.get(type(request))
        if operation is None:
            raise NotSupported(f"{type(request).__name__} is for clients that do not map their segments")
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
        self.store.free(request.key)
        return Answer(protocol.Done())

    def _add(self, ticket: Ticket, request: protocol.Add) -> Answer:
        return Answer(protocol.Value(self.store.rendezvous.add(ticket.session, request.key, request.amount)))

    def _await(self, ticket: Ticket, request: protocol.Await) -> Answer:
        value = self.store.rendezvous.await_counter(ticket, request.key, request.value, request.timeout)
        return Answer(protocol.Value(value))

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
        with remote.update(request.segment):
            version = target.combine(
                request.how, request.scalar, source, request.offset, request.count, request.counts
            )
        return Answer(protocol.Applied(version))

    def _reduce(self, ticket: Ticket, request: protocol.Reduce) -> Answer:
        other = self._operand(ticket, request.other) if request.other else None
        return Answer(protocol.Scalar(self._operand(ticket, request.segment).reduce(request.how, other)))

    def _stuck(self, ticket: Ticket, request: protocol.Stuck) -> Answer:
        entry = self.store.attached(ticket.session, request.segment)
        return Answer(self.lease.judge(entry, request.chunk, request.thread))
