"""A worker's place in its job, as the training loop sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol


class Role(Protocol):
    """Which worker this is. ``leads`` may move to another worker when the leader dies.

    rank, world  this worker and how many started; job names the training run
    leads        this worker tests the center, saves it and writes the job's log
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def job(self) -> str: ...

    @property
    def leads(self) -> bool: ...

    def leave(self) -> bool:
        """End before the job does; False when nobody else would be left to go on with it."""

    def leading(self) -> AbstractContextManager[None]:
        """Around a test or a snapshot: this worker makes no steps meanwhile and is not stuck."""


@dataclass(frozen=True)
class Alone:
    """The only worker of its job; or one whose place is the same for as long as the job lives."""

    rank: int = 0
    world: int = 1
    job: str = "local"
    leads: bool = True

    def leave(self) -> bool:
        return False

    def leading(self) -> AbstractContextManager[None]:
        return nullcontext()
