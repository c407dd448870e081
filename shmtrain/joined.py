"""The workers of a job that its launcher has not started: they have joined it, from anywhere.

Each has a mark in the box that goes with its session (launch_marks): the launcher buries those whose mark has
gone, so that the others need not wait for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress

import smb
from shmtrain.environment import Placed
from shmtrain.grace import DROPPED
from shmtrain.group import Progress, Rows, State
from shmtrain.launch_marks import MISSED, is_coming, machine, marks
from shmtrain.log import Log

LOOK = 0.5  # seconds


class Joined:
    """Seen by the launcher, which calls ``look`` every now and then."""

    def __init__(self, box: smb.Box, job: str, progress: Progress, log: Log) -> None:
        self._box, self._job, self._progress, self._log = box, job, progress, log
        self._places: dict[int, Placed] = {}
        self._named: set[int] = set()  # pids of those that the log has told of
        self._missing: dict[int, int] = {}
        self._looked = 0.0
        self._strangers: set[int] = set()
        self.ended_well = False

    def working(self) -> bool:
        """Whether one of them has not ended yet."""
        return bool(self._strangers)

    def look(self, rows: Rows, own: Collection[int]) -> None:
        """Name those that come and those that are gone; ``own`` are the launcher's workers that live."""
        ranks = {rank for rank in range(len(rows.table)) if rank not in own and _there(rows.state(rank))}
        self.ended_well |= any(rows.state(rank) is State.CLOSED for rank in self._strangers)
        self._strangers = ranks
        now = time.monotonic()
        if not ranks or now - self._looked < LOOK:
            return
        self._looked = now
        with suppress(*DROPPED):
            here = {placed.rank: placed for placed in marks(self._box, self._job)}
            for rank in ranks:
                self._judge(rank, rows, here.get(rank))

    def _judge(self, rank: int, rows: Rows, mark: Placed | None) -> None:
        if mark is not None:
            self._missing.pop(rank, None)
            self._places[rank] = mark
            if rank in rows.working and mark.pid not in self._named:
                self._named.add(mark.pid)
                self._log.info(f"{mark.name} has joined: {len(rows.working)} workers train now")
            return
        pid = rows.pid(rank)
        if rows.state(rank) is State.JOINING and is_coming(self._box, self._job, rank, pid):
            return
        self._missing[rank] = self._missing.get(rank, 0) + 1
        if self._missing[rank] >= MISSED:
            known = self._places.get(rank)
            name = known.name if known and known.pid == pid else f"Worker {rank} (pid {pid})"
            self._progress.bury(rank)
            self._missing.pop(rank, None)
            self._log.error(
                f"{name}, which had joined, is gone after {rows.done(rank)} iterations of its own"
            )

    def tell(self, number: int) -> None:
        """Send a signal to those on this machine; others end with the job."""
        for rank in self._strangers:
            place = self._places.get(rank)
            if place is not None and place.machine == machine():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(place.pid, number)


def _there(state: State) -> bool:
    """Whether a worker is at work in this row, or on its way."""
    return State.STARTING <= state < State.CLOSED or state is State.JOINING
