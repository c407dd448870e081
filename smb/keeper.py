"""Writes one daemon's snapshots: every so often, on request, and when the daemon ends."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from smb import protocol
from smb.errors import RequestError, SmbError
from smb.rendezvous import Session
from smb.snapshot import (
    CounterRecord,
    Description,
    SegmentRecord,
    SessionRecord,
    SnapshotError,
    prepare,
    process_start,
    proof,
    write,
)
from smb.store import Entry, Store

log = logging.getLogger(__name__)
GLANCE = 0.2  # seconds between two looks at whether the daemon ends
Judge = Callable[[Entry, int, int], object]


class Keeper:
    """Snapshots of one store. Any thread may call; one is written at a time.

    judge   is told of a client that keeps a chunk locked which is to be copied (see smb/lease.py)
    settled  waits so many seconds until nothing is restoring; whether that is so
    folder  where they lie, once ``keep_in`` has said so
    """

    def __init__(self, store: Store, judge: Judge, settled: Callable[[float], bool]) -> None:
        self._store, self._judge, self._settled = store, judge, settled
        self.folder: Path | None = None
        self._held = -1  # the folder, locked
        self._every: float | None = None
        self._turn = threading.Lock()
        self._written: tuple[Any, ...] = ()  # what the last one in the folder was of
        self._failing = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep_in(self, folder: Path, every: float | None) -> None:
        """Take the folder; no other daemon may have it. ``every`` as in ServeOptions. Raises RequestError."""
        folder = prepare(folder)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            raise RequestError(f"another daemon keeps its snapshots in {folder}") from error
        self.folder, self._every, self._held = folder, every, held

    def start(self) -> None:
        """Begin to write one every so often, the first one at once."""
        if self.folder and self._every:
            self._thread = threading.Thread(target=self._run, name="smb-keeper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the last one. The store still has everything; twice is fine."""
        first = not self._stop.is_set()
        self._stop.set()
        if self._thread:
            self._thread.join()
        if first and self.folder and self._settled(0.0):
            self._keep()
        self.orphan()

    def orphan(self) -> None:
        """Let the folder go; in a forked child the parent keeps it."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _run(self) -> None:
        assert self._every is not None
        while not self._settled(GLANCE):  # before that it would lack what is restoring
            if self._stop.is_set():
                return
        self._keep()
        while not self._stop.wait(self._every):
            self._keep()

    def _keep(self) -> None:
        """One in the folder, unless nothing has changed; a failure is logged, and the daemon goes on."""
        try:
            self._take(self.folder, changed_only=True)
        except SmbError as error:
            log.error("%s; the older snapshots stay as they are", error)
            self._failing = True
        except Exception:
            log.exception("snapshot into %s", self.folder)
            self._failing = True
        else:
            if self._failing:
                log.warning("snapshots into %s succeed again", self.folder)
            self._failing = False

    def take(self, folder: Path | None = None) -> protocol.SnapshotDone:
        """Write one now. Raises RequestError without a folder, SnapshotError."""
        target = prepare(folder) if folder else self.folder
        if target is None:
            raise RequestError("the daemon keeps no snapshots (`smb serve --snapshot-dir`): name a folder")
        return self._take(target, changed_only=False)

    def _take(self, folder: Path | None, changed_only: bool) -> protocol.SnapshotDone:
        assert folder is not None
        with self._turn:
            if self._store.closed:
                raise RequestError("the daemon is closing")
            numbers, entries = self._store.pin()
            try:
                started, description = time.monotonic(), self._describe(numbers, entries)
                state = (replace(description, taken=0.0, numbers=0, segments=()), *_work(entries))
                if changed_only and state == self._written:
                    return protocol.SnapshotDone("", 0, 0)
                path = write(folder, description, partial(self._copy, {e.number: e for e in entries}))
            finally:
                self._store.unpin(entries)
            if folder == self.folder:
                self._written = state
        nbytes = sum(segment.nbytes for segment in description.segments)
        log.info("snapshot %s: %d bytes in %.2f s", path, nbytes, time.monotonic() - started)
        return protocol.SnapshotDone(str(path), len(entries), nbytes)

    def _describe(self, numbers: int, entries: list[Entry]) -> Description:
        store = self._store
        with store.lock:
            segments = tuple(map(_segment, entries))
            counters = tuple(CounterRecord(*row) for row in store.rendezvous.counters())
            sessions = tuple(
                SessionRecord(
                    s.number, proof(s.secret), s.pid if s.pidfd is not None and s.returns else 0, 0, s.name
                )
                for s in store.sessions()
            )
        sessions = tuple(replace(s, start=process_start(s.pid)) if s.pid else s for s in sessions)
        return Description(time.time(), numbers, segments, counters, sessions)

    def _copy(self, entries: dict[int, Entry], segment: SegmentRecord, into: Any, first: int) -> None:
        """One chunk, as it is between two operations."""
        entry = entries[segment.number]
        assert entry.mapping is not None
        if entry.mapping.on_stuck is None:
            entry.mapping.on_stuck = partial(self._stuck, entry)
        try:
            entry.mapping.read(into, first)
        except SmbError as error:
            raise SnapshotError(f"no snapshot: segment {segment.key!r}: {error}") from error

    def _stuck(self, entry: Entry, chunk: int, thread: int, _: float) -> None:
        self._judge(entry, chunk, thread)


def _session(session: Session) -> SessionRecord:
    pid = session.pid if session.pidfd is not None and session.returns else 0  # who is waited for
    return SessionRecord(session.number, proof(session.secret), pid, 0, session.name)


def _segment(entry: Entry) -> SegmentRecord:
    assert entry.mapping is not None
    w, owner = entry.wanted, entry.owner.number if entry.owner else 0
    age = time.monotonic() - entry.born
    version = entry.mapping.version
    return SegmentRecord(entry.number, w.key, w.count, w.dtype, w.lifetime, w.meta.hex(), version, age, owner)


def _work(entries: list[Entry]) -> tuple[tuple[int, int, int, int], ...]:
    """What changes with every write: to tell whether there is anything new to keep."""
    return tuple(
        (e.number, e.mapping.version, e.mapping.work_done(), e.owner.number if e.owner else 0)
        for e in entries
        if e.mapping
    )
