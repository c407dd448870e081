"""The first N of N + b: who comes too late in a step is not waited for, and takes up the others' state.

The table's own row says which steps are closed. Under the job's lock a worker joins a step that is open,
and closes it when enough have joined; a lock passes on when its holder dies. Who finds its step closed
asks for the state. Whoever stands in an open step then writes it, before it goes on: its weights are
those at the start of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

import numpy.typing as npt

from shmtrain.exchange.base import F32
from shmtrain.exchange.replica import Replica
from shmtrain.exchange.seats import I64, WORK, Seats

ALL = sys.maxsize  # as ``need``
WANTS = 2  # column of a worker's row: asks for the state
NOT_WHOLE = -1
NOTHING = -1


class Own(IntEnum):
    """Columns of the table's own row. STATE: at the start of which step the state was written; 0: nobody."""

    CLOSED = 0
    STATE = 1
    DONE = 2
    COUNT = 3


class FirstComers:
    """One worker's part. ``need`` workers make a step; when fewer live, all of them do.

    With ``ALL`` every living one is needed: a step is then of those that have come by the time it closes.
    """

    def __init__(self, seats: Seats, replica: Replica, need: int) -> None:
        self._seats, self._crowd, self._replica, self._need = seats, seats.crowd, replica, need
        crowd, size = seats.crowd, sum(a.size for a in replica.arrays)
        self._state = crowd.box.create(
            crowd.key("state"), count=max(size, 1), lifetime="attached", or_attach=True
        )

    def mean(self, vector: F32, out: F32) -> list[int] | None:
        """The mean of the first comers' vectors of this step, and their ranks; None: too late for it."""
        return self.collect(out) if self.offer(vector) else None

    def offer(self, vector: npt.NDArray[Any], work: int = 1) -> bool:
        """Bring this step's vector, and say what work is in it; False: too late for it.

        work  NOTHING: this worker waits for the step's end with the others, and its vector is left out
        """
        step, rank = self._replica.step, self._crowd.rank
        self._seats.write(step, vector)
        with self._lock():
            table = self._seats.table()
            if table[-1, Own.CLOSED] > step:
                return False
            self._seats.put(rank, WORK + step % 2, work)
            self._seats.put(rank, step % 2, step + 1)
            self._serve()
            self._close_when_enough()
        return True

    def collect(self, out: F32) -> list[int]:
        """After ``offer``: wait until the step is closed; its members' mean, and who they are."""
        with self._seats.stats.part("wait"):
            closed = self._closed(self._replica.step)
        bring = [rank for rank, work in zip(closed, self.work(closed), strict=True) if work != NOTHING]
        members = bring or closed
        self._seats.average(self._replica.step, members, out)
        return members

    def work(self, members: list[int]) -> list[int]:
        """What each of them said of its work of this step."""
        column = self._seats.table()[:-1, WORK + self._replica.step % 2]
        return [int(column[rank]) for rank in members]

    def join(self) -> None:
        """Of a worker that comes later: the state at the start of the open step, in which it takes part."""
        self._crowd.begin()
        self._replica.step = int(self._seats.table()[-1, Own.CLOSED]) - 1
        self.take()

    def take(self) -> None:
        """After a step that was too late: the state at the start of the open step, from whoever has it."""
        self._seats.put(self._crowd.rank, WANTS, 1)
        wait = self._crowd.wait(f"the state after step {self._replica.step}")
        while True:
            version = self._seats.version
            rows = self._crowd.rows
            others = [r for r in range(self._crowd.world) if r != self._crowd.rank and not rows.gone(r)]
            if self._taken(alone=not others):
                return
            wait.check(others, rows)
            self._seats.sleep(version)

    def leave(self) -> None:
        """At the end: the state stays behind for those that are late."""
        with self._lock():
            if self._seats.table()[-1, Own.STATE] < self._replica.step:
                self._write_state()

    def _taken(self, alone: bool) -> bool:
        """Whether the state was there and has been read; who is alone goes on with its own."""
        with self._lock():
            own = self._seats.table()[-1]
            if own[Own.STATE] <= self._replica.step and not alone:
                return False
            if own[Own.STATE] > self._replica.step:
                self._read_state(own)
            else:
                self._replica.step = int(own[Own.CLOSED])
                self._replica.done = max(self._replica.done, self._crowd.rows.total)
            self._seats.put(self._crowd.rank, WANTS, 0)
            return True

    def _closed(self, step: int) -> list[int]:
        """Wait until the step is closed: its members."""
        wait = self._crowd.wait(f"step {step}")
        while True:
            version = self._seats.version
            rows, table = self._crowd.rows, self._seats.table()
            members = self._members(table, step)
            if table[-1, Own.CLOSED] > step:
                return members or [self._crowd.rank]  # so late that the row says no more: the next step tells
            with self._lock():
                self._serve()
                self._close_when_enough()
            missing = [r for r in range(self._crowd.world) if r not in members and not rows.gone(r)]
            wait.check(missing, rows)
            self._seats.sleep(version)

    # With the lock held ----------------------------------------------------------------------------------

    def _lock(self) -> AbstractContextManager[object]:
        return self._crowd.lock("first-comers")

    @staticmethod
    def _members(table: I64, step: int) -> list[int]:
        return [rank for rank, last in enumerate(table[:-1, step % 2]) if last == step + 1]

    def _close_when_enough(self) -> None:
        step, rows, table = self._replica.step, self._crowd.rows, self._seats.table()
        members = self._members(table, step)
        missing = [r for r in range(self._crowd.world) if r not in members and not rows.gone(r)]
        if table[-1, Own.CLOSED] <= step and (len(members) >= self._need or not missing):
            self._seats.put(self._crowd.world, Own.CLOSED, step + 1)

    def _serve(self) -> None:
        """Write the state when somebody asks for it and has not got one as new."""
        table = self._seats.table()
        open_ = table[-1, Own.CLOSED] <= self._replica.step
        if open_ and table[:-1, WANTS].any() and table[-1, Own.STATE] < self._replica.step:
            self._write_state()

    def _write_state(self) -> None:
        own, replica = self._crowd.world, self._replica
        self._seats.put(own, Own.STATE, NOT_WHOLE)  # until it is: the writer may die
        self._each(self._state.write)
        self._seats.put(own, Own.DONE, replica.done)
        self._seats.put(own, Own.COUNT, replica.count)
        self._seats.put(own, Own.STATE, replica.step)

    def _read_state(self, own: I64) -> None:
        self._each(self._state.read)
        self._replica.step, self._replica.done = int(own[Own.STATE]), int(own[Own.DONE])
        self._replica.count = int(own[Own.COUNT])

    def _each(self, operation: Callable[..., object]) -> None:
        offset = 0
        for array in self._replica.arrays:
            operation(array, offset=offset)
            offset += array.size
