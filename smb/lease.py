"""A living holder of a chunk lock that lets others wait: after the lease it is killed, or at least named.

The lock is never stolen from the living: the holder's process is killed, and the kernel passes the lock on.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from smb.protocol import Verdict
from smb.rendezvous import Session
from smb.store import Entry, Store

log = logging.getLogger(__name__)
FORGET = 10.0  # seconds without a report after which an observation is over


@dataclass
class _Observation:
    ticks: int  # processor time of the holding thread, so that one that works is not taken for a stuck one
    since: float
    last: float


def _ticks(pid: int, thread: int) -> int | None:
    """Processor time of a thread in clock ticks; None when the process has no such living thread."""
    try:
        text = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(") ")[2].split()
    return None if fields[0] in "ZX" else int(fields[11]) + int(fields[12])


class Lease:
    """Judges reported holders of one daemon's chunk locks by what the daemon itself sees."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, int, int], _Observation] = {}

    def judge(self, entry: Entry, chunk: int, thread: int) -> Verdict:
        """A client reports that ``thread`` holds ``chunk``; kill the holder once its lease is over."""
        with self._store.lock:
            mapping = entry.mapping
            held = mapping is not None and (chunk, thread) in mapping.holders()
            pids = {session.pid: session for session in self._store.sessions() if not session.remote}
        holder = next((s for pid, s in pids.items() if _ticks(pid, thread) is not None), None)
        if not held or holder is None:
            return Verdict(False, 0.0, "" if not held else f"thread {thread} of no session")
        seconds = self._observe((entry.number, chunk, thread), _ticks(holder.pid, thread) or 0)
        if seconds < self._store.lease:
            return Verdict(False, seconds, str(holder))
        return Verdict(self._kill(holder, entry, chunk, seconds), seconds, str(holder))

    def _observe(self, place: tuple[int, int, int], ticks: int) -> float:
        """For how long this thread has held this lock without any work done."""
        now = time.monotonic()
        with self._lock:
            self._seen = {p: o for p, o in self._seen.items() if now - o.last < FORGET}
            seen = self._seen.get(place)
            if seen is None or seen.ticks != ticks:
                seen = self._seen[place] = _Observation(ticks, now, now)
            seen.last = now
            return now - seen.since

    def _kill(self, holder: Session, entry: Entry, chunk: int, seconds: float) -> bool:
        what = f"{holder} has held chunk {chunk} of segment {entry.key!r} for {seconds:.1f} s"
        with self._store.lock:  # the descriptor is open as long as the session has not ended
            if holder.pidfd is None or holder.pid == os.getpid():
                log.warning("%s; it is the daemon's own process, or over", what)
                return False
            try:
                signal.pidfd_send_signal(holder.pidfd, signal.SIGKILL)
            except OSError as error:
                log.warning("%s and cannot be killed: %s", what, error)
                return False
        log.warning("%s: killed", what)
        return True
