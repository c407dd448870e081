"""The workers of a job as an algorithm sees them: how many take part, who has gone, and how long to wait."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmtrain.group import Column, Progress, Rows, State
from smb.errors import WaitTimeout

if TYPE_CHECKING:
    from smb import Box

LOOK = 0.1  # seconds between two looks at who has died


@dataclass(frozen=True)
class Crowd:
    """One worker's view. ``wait_limit`` is the longest wait for others, in seconds.

    world    rows of the job's table, those of workers that may still come included
    workers  how many the job began with; 0: as many as rows
    joining  whether the others have begun without this worker
    """

    box: Box
    job: str
    rank: int
    world: int
    progress: Progress
    wait_limit: float
    workers: int = 0
    joining: bool = False

    @property
    def elastic(self) -> bool:
        """Whether others may come while this job runs."""
        return self.joining or 0 < self.workers < self.world

    def begin(self) -> None:
        """From now on the others wait for this worker."""
        self.progress.put(self.rank, Column.STATE, State.TRAINING)

    @property
    def rows(self) -> Rows:
        return self.progress.rows()

    @property
    def leads(self) -> bool:
        """Whether this is the lowest rank that has not died."""
        return self.rows.leader == self.rank

    def key(self, name: str) -> str:
        return f"{self.job}/{name}"

    def lock(self, name: str) -> AbstractContextManager[object]:
        """A lock of the job, released by its holder's death. Raises WaitTimeout naming the holder."""
        return self.box.lock(self.key(name), self.wait_limit)

    def wait(self, what: str) -> Wait:
        return Wait(self, what)


class Wait:
    """One wait for other workers: it ends with an error that names them when nothing comes for too long."""

    def __init__(self, crowd: Crowd, what: str) -> None:
        self._crowd, self._what = crowd, what
        self._since = time.monotonic()

    def check(self, missing: Iterable[int], rows: Rows) -> None:
        """Raise WaitTimeout naming ``missing`` when the limit is over. A test or snapshot takes its time."""
        ranks = list(missing)
        if any(rows.state(rank) is State.LEADING for rank in ranks):
            self._since = time.monotonic()
        limit = self._crowd.wait_limit
        if time.monotonic() - self._since > limit:
            raise WaitTimeout(f"{self._what}: nothing from {rows.names(ranks)} within {limit:g} s")
