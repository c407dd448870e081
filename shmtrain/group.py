"""The workers of one job, as each of them sees the others: a table in the box with a row a worker.

The paper's control buffer: each worker writes its own row, all read. The launcher writes a dead one's row.
"""

from __future__ import annotations

import time
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


class Column(IntEnum):
    """A row: all int64. ``LOST`` counts claimed iterations that died with their worker."""

    STATE = 0
    PID = 1
    CLAIMED = 2
    DONE = 3
    LOST = 4


COLUMNS = len(Column)


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

    def done(self, rank: int) -> int:
        return int(self.table[rank, Column.DONE])

    @property
    def total(self) -> int:
        """Iterations of this run that are done or died with their worker."""
        return int(self.table[:, Column.DONE].sum() + self.table[:, Column.LOST].sum())

    @property
    def leader(self) -> int:
        """The lowest rank that has not died: it tests the center and saves it; 0 when all are dead."""
        return next((rank for rank, state in enumerate(self.states()) if state is not State.DEAD), 0)

    def gone(self, rank: int) -> bool:
        """Whether a worker makes no more steps: it has died or ended, and its row stays as it is."""
        return self.state(rank) >= State.FINISHED

    @property
    def active(self) -> int:
        """Workers that have come and not died. One that has ended counts: its share lies in the center."""
        return sum(state not in (State.ABSENT, State.DEAD) for state in self.states())

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
    def create(cls, box: Box, job: str, workers: int) -> Progress:
        """A new job's table, all zero; it lives as long as this process. Raises KeyExists."""
        zeros = np.zeros(workers * COLUMNS, np.int64)
        segment = box.create(_key(job), count=zeros.size, dtype="int64", lifetime="owner", initial=zeros)
        return cls(segment, workers)

    @classmethod
    def attach(cls, box: Box, job: str, workers: int) -> Progress:
        return cls(box.attach(_key(job)), workers)

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


class Member:
    """This worker's place in the job: whether it leads, and when the others are done."""

    def __init__(
        self, progress: Progress, rank: int, world: int, job: str, warn: Callable[[str], None]
    ) -> None:
        """``warn`` takes a line for the log."""
        self.progress, self.rank, self.world, self.job = progress, rank, world, job
        self._warn = warn

    @property
    def leads(self) -> bool:
        """Whether this worker tests and saves the center; moves to the lowest living rank."""
        return self.rank == 0 or self.progress.rows().leader == self.rank

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
        nothing moves for ``patience`` seconds the leader names the others that are missing and ends.
        """
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
