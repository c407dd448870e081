"""The workers of one job, as each of them sees the others: a table in the box with a row a worker.

The paper's control buffer: each worker writes its own row, all read. The launcher writes a dead one's row.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from smb.errors import NotSupported

if TYPE_CHECKING:
    from smb import Box, Segment

I64 = npt.NDArray[np.int64]

PATIENCE = 60.0
POLL = 0.02


def rows_lock(job: str) -> str:
    """The name of the lock under which rows are read and then written."""
    return f"{job}/rows"


class State(IntEnum):
    """Where a worker stands. ABSENT is before its process has reached the box."""

    ABSENT = 0
    STARTING = 1
    READY = 2
    WAITING = 3  # for the leader's warm start: makes no steps, and is not stuck
    TRAINING = 4
    LEADING = 5  # busy with a test or a snapshot of the center, likewise
    FINISHED = 6
    CLOSED = 7
    DEAD = 8
    FREE = 9  # a row that nobody has had yet
    LEFT = 10  # ended before the job, with all it had learned brought to the center
    JOINING = 11  # comes while others train: has a row, and nobody waits for it yet


class Column(IntEnum):
    """A row: all int64. ``LOST`` counts claimed iterations that died with their worker.

    PACE    microseconds of one of its steps, without what it met others for; 0: not known
    CREDIT  steps that one that came later counts as having made, where others wait for the slowest
    START   the job's iteration that this run began at
    LEAVES  whether it has been told to leave: one that is told later must not count on it to go on
    FAULT   a number that stands for the error that it ends by, the same for the same error; 0 for none
    """

    STATE = 0
    PID = 1
    CLAIMED = 2
    DONE = 3
    LOST = 4
    PACE = 5
    CREDIT = 6
    START = 7
    LEAVES = 8
    FAULT = 9


COLUMNS = len(Column)
ABSENT = frozenset({State.DEAD, State.FREE, State.LEFT, State.JOINING})
VACANT = (State.DEAD, State.LEFT, State.FREE)  # in the order in which their rows are taken


@dataclass(frozen=True)
class Rows:
    """One reading of the table, (workers, COLUMNS) int64."""

    table: I64

    def state(self, rank: int) -> State:
        return State(int(self.table[rank, Column.STATE]))

    def states(self) -> list[State]:
        return [self.state(rank) for rank in range(len(self.table))]

    def pid(self, rank: int) -> int:
        return int(self.table[rank, Column.PID])

    def pace(self, rank: int) -> int:
        return int(self.table[rank, Column.PACE])

    def start(self, rank: int) -> int:
        return int(self.table[rank, Column.START])

    def credit(self, rank: int) -> int:
        return int(self.table[rank, Column.CREDIT])

    def done(self, rank: int) -> int:
        return int(self.table[rank, Column.DONE])

    @property
    def total(self) -> int:
        """Iterations of this run that are done or died with their worker."""
        return int(self.table[:, Column.DONE].sum() + self.table[:, Column.LOST].sum())

    @property
    def leader(self) -> int:
        """The lowest rank that has not died or left: it tests the center and saves it; 0 without one."""
        return next((rank for rank, state in enumerate(self.states()) if state not in ABSENT), 0)

    def leaves(self, rank: int) -> bool:
        """Whether a worker has been told to leave, and may be on its way."""
        return bool(self.table[rank, Column.LEAVES])

    def gone(self, rank: int) -> bool:
        """Whether a worker makes no more steps: it has died or ended, and its row stays as it is."""
        return self.state(rank) >= State.FINISHED

    @property
    def active(self) -> int:
        """Workers that take part. One that has ended with the job counts: its share lies in the center."""
        return sum(state is not State.ABSENT and state not in ABSENT for state in self.states())

    @property
    def began(self) -> int:
        """Rows that a worker has or has had."""
        return sum(state is not State.FREE for state in self.states())

    @property
    def working(self) -> list[int]:
        """The ranks that make steps, or will in a moment."""
        return [r for r, state in enumerate(self.states()) if State.READY <= state < State.FINISHED]

    @property
    def vacant(self) -> int | None:
        """The row for one that joins: a dead worker's, else one that somebody has left, else a new one."""
        states = self.states()
        return next((states.index(state) for state in VACANT if state in states), None)

    def speeds(self) -> str:
        """What each worker has made a second by itself, and the slowest of several; empty when not known."""
        paces = {rank: self.pace(rank) for rank in range(len(self.table)) if self.pace(rank)}
        if len(paces) < 2:
            return ""
        slowest, fastest = max(paces, key=lambda r: paces[r]), min(paces.values())
        each = ", ".join(f"worker {rank} {1e6 / pace:.3g}" for rank, pace in paces.items())
        return (
            f"Steps a second without the exchanges: {each}; the slowest is worker {slowest}, which needs"
            f" {paces[slowest] / fastest:.2f} times as long as the fastest"
        )

    def names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"worker {rank} (pid {self.pid(rank)})" for rank in ranks)

    def below(self, state: State) -> list[int]:
        """The ranks that have not come so far."""
        return [rank for rank, at in enumerate(self.states()) if at < state]


def _key(job: str) -> str:
    return f"{job}/progress"


class Progress:
    """The table in its segment ``JOB/progress``. A reading is never torn: it is one chunk."""

    def __init__(self, segment: Segment, workers: int) -> None:
        self._segment = segment
        self._workers = workers
        self._latest = np.zeros(workers * COLUMNS, np.int64)

    @classmethod
    def create(
        cls,
        box: Box,
        job: str,
        workers: int,
        *,
        spare: int = 0,
        meta: bytes = b"",
        lifetime: str = "owner",
    ) -> Progress:
        """A new job's table; it lives as long as this process, or as ``lifetime`` says. Raises KeyExists.

        spare  rows for workers that join later; meta: what they should know of the job
        """
        table = np.zeros((workers + spare, COLUMNS), np.int64)
        table[workers:, Column.STATE] = State.FREE
        segment = box.create(
            _key(job),
            count=table.size,
            dtype="int64",
            lifetime=lifetime,
            initial=table.reshape(-1),
            meta=meta,
        )
        return cls(segment, len(table))

    @classmethod
    def attach(cls, box: Box, job: str) -> Progress:
        segment = box.attach(_key(job))
        return cls(segment, segment.count // COLUMNS)

    @property
    def size(self) -> int:
        """Rows, those that are free included."""
        return self._workers

    @property
    def meta(self) -> bytes:
        return self._segment.meta

    def rows(self) -> Rows:
        table = np.empty(self._workers * COLUMNS, np.int64)
        self._segment.read(table)
        self._latest = table
        return Rows(table.reshape(self._workers, COLUMNS))

    def rescue(self) -> Rows:
        """The rows when the box is dead: from the mapping alone, or as they were last seen over a network."""
        table = np.empty(self._workers * COLUMNS, np.int64)
        try:
            self._segment.rescue(table)
        except NotSupported:
            table = self._latest
        return Rows(table.reshape(self._workers, COLUMNS))

    def put(self, rank: int, column: Column, value: int) -> None:
        self._latest[rank * COLUMNS + column] = value
        self._segment.write(np.array([value], np.int64), offset=rank * COLUMNS + column)

    def bury(self, rank: int) -> None:
        """Mark a worker dead; what it had claimed and not done counts as lost. For the launcher."""
        rows = self.rows()
        lost = int(rows.table[rank, Column.CLAIMED]) - rows.done(rank)
        self.put(rank, Column.LOST, max(lost, 0))
        self.put(rank, Column.STATE, State.DEAD)

    def fault(self, rank: int, error: str) -> int | None:
        """Note the error that a worker ends by; the rank of another that it had ended before, if any.

        The caller holds the job's lock of the rows.
        """
        number = zlib.crc32(error.encode()) + 1
        column = self.rows().table[:, Column.FAULT]
        same = [other for other in map(int, np.flatnonzero(column == number)) if other != rank]
        self.put(rank, Column.FAULT, number)
        return same[0] if same else None

    def take_row(self, rank: int, pid: int) -> None:
        """A vacant row becomes that of one that joins. The caller holds the job's lock of the rows.

        What the worker before had done there stays counted.
        """
        rows = self.rows()
        row = rows.table[rank].copy()
        row[Column.DONE] += row[Column.LOST]
        row[Column.CLAIMED], row[Column.LOST], row[Column.PACE] = row[Column.DONE], 0, 0
        row[Column.STATE], row[Column.PID] = State.JOINING, pid
        row[Column.LEAVES] = row[Column.FAULT] = 0
        others = [rows.done(other) + rows.credit(other) for other in rows.working]
        row[Column.CREDIT] = max(min(others, default=0) - int(row[Column.DONE]), 0)
        row[Column.START] = next((start for start in map(int, rows.table[:, Column.START]) if start), 0)
        self._latest[rank * COLUMNS : (rank + 1) * COLUMNS] = row
        self._segment.write(row, offset=rank * COLUMNS)


class Member:
    """This worker's place in the job: whether it leads, and when the others are done."""

    def __init__(
        self, progress: Progress, rank: int, world: int, job: str, warn: Callable[[str], None]
    ) -> None:
        """``warn`` takes a line for the log."""
        self.progress, self.rank, self.world, self.job = progress, rank, world, job
        self.leaving = False
        self._warn = warn

    @property
    def leads(self) -> bool:
        """Whether this worker tests and saves the center; moves to the lowest living rank."""
        return self.progress.rows().leader == self.rank

    def leave(self) -> bool:
        """End before the job does; False when nobody else would be left to go on with it.

        Said before it is asked who stays: of several that are told at once, the last one to say so sees all.
        """
        self.progress.put(self.rank, Column.LEAVES, 1)
        rows = self.progress.rows()
        self.leaving = any(not rows.leaves(rank) for rank in rows.working)
        return self.leaving

    def enter(self, state: State) -> None:
        self.progress.put(self.rank, Column.STATE, state)

    def wait_for_all(self, patience: float = PATIENCE) -> None:
        """Begin together: nobody trains, and so writes a snapshot, while another one still looks for it."""
        self.enter(State.READY)
        waiting = _Waiting(patience)
        while late := (rows := self.progress.rows()).below(State.READY):
            if waiting.too_long(rows):
                self._warn(f"Not started within {patience:g} s: {rows.names(late)}; beginning without")
                return
            time.sleep(POLL)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Around a test or a snapshot of the center: no steps are made meanwhile, and none are missed."""
        before = self.progress.rows().state(self.rank)
        self.enter(State.LEADING)
        try:
            yield
        finally:
            self.enter(before)

    def join(self, patience: float = PATIENCE) -> None:
        """Wait after the last iteration: the leader for the end of all others, the others for the leader's.

        A leader that dies meanwhile is followed by the next rank, whose wait then ends as the leader's. When
        nothing moves for ``patience`` seconds the leader names the others that are missing and ends. Who
        leaves the job waits for nobody.
        """
        if self.leaving:
            return
        self.enter(State.FINISHED)
        waiting = _Waiting(patience)
        while True:
            rows = self.progress.rows()
            if rows.leader != self.rank:
                if rows.state(rows.leader) is State.CLOSED:
                    return
            elif not (others := rows.below(State.FINISHED)):
                return
            elif waiting.too_long(rows):
                self._warn(f"No step for {patience:g} s: {rows.names(others)}; ending without")
                return
            time.sleep(POLL)


class _Waiting:
    """How long the table has not changed."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: bytes = b""
        self._since = 0.0

    def too_long(self, rows: Rows) -> bool:
        now, table = time.monotonic(), rows.table.tobytes()
        if table != self._seen:
            self._seen, self._since = table, now
        return now - self._since > self._patience
