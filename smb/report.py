"""What a daemon says about itself: the figures behind `smb top` and the metrics. No I/O.

What its clients do by data requests the daemon counts itself. Clients that map their segments work past it:
they count for themselves, in a line of each segment's control file, and the daemon takes their word.
Read-only mappings, and clients beyond the lines that a segment has, are not counted.
"""

from __future__ import annotations

import os
import time

from smb import protocol
from smb.figures import NOT_KNOWN, Figures, told
from smb.rendezvous import Session
from smb.store import Entry, Store

MOST = 10_000  # clients that one report names


def _transport(session: Session) -> str:
    """How its operations reach the segments."""
    if session.remote is None:
        return "local" if session.pidfd is None else "shm"
    if session.paired:
        return "rdma"
    return "tcp" if session.remote.where else "unix"


def _figures(session: Session, entries: list[Entry]) -> tuple[Figures, int, bool]:
    """Its figures, its latest staleness or NOT_KNOWN, and whether these are all that it did.

    entries  the segments that it is attached to
    """
    total, staleness, counted = Figures.sum([session.past]), NOT_KNOWN, True
    if session.remote is not None:
        total.add(session.remote.figures())
        return total, staleness, not session.paired  # nobody sees one-sided reads and writes
    for entry in entries:
        line = told(entry.mapping, session.number)
        if line is None:
            counted = False
        else:
            total.add(line[0])
            staleness = max(staleness, line[1])
    return total, staleness, counted


def _row(session: Session, entries: list[Entry], counter: tuple[str, int]) -> protocol.ClientRow:
    now = time.monotonic()
    done, staleness, counted = _figures(session, entries)
    about, since = next(((t.about, t.since) for t in session.tickets if t.about), ("", now))
    remote = session.remote
    return protocol.ClientRow(
        session.number,
        session.pid,
        session.name,
        _transport(session),
        remote.where if remote else "",
        max(0.0, now - session.born),
        max(0.0, now - remote.last_heard) if remote else 0.0,
        len(entries),
        session.requests,
        counted,
        *done.sendable(),
        staleness,
        about[:100],
        max(0.0, now - since),
        counter[0],
        min(counter[1], 2**63 - 1),
    )


def _attached(entries: list[Entry]) -> dict[Session, list[Entry]]:
    found: dict[Session, list[Entry]] = {}
    for entry in entries:
        for session in entry.attached:
            found.setdefault(session, []).append(entry)
    return found


def report(store: Store) -> protocol.Report:
    """The daemon's figures as of now."""
    with store.lock:
        entries, totals = store.entries(), store.totals
        attached, progress = _attached(entries), store.rendezvous.progress()
        rows = [_row(s, attached.get(s, []), progress.get(s, ("", 0))) for s in store.sessions()]
        now = [Figures(row.operations, row.bytes_in, row.bytes_out) for row in rows]
        return protocol.Report(
            os.getpid(),
            time.monotonic() - totals.born,
            sum(entry.nbytes for entry in entries),
            store.budget.limit or 0,
            len(entries),
            totals.sessions,
            totals.requests + sum(row.requests for row in rows),
            *Figures.sum([totals.past(), *now]).sendable(),
            tuple(rows[:MOST]),
        )
