"""What the launcher hands to a worker process. Plain data; loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shmtrain.config import TrainConfig
from shmtrain.environment import Launched
from shmtrain.lifeline import HandedDown

WAITED_OUT = 3  # a worker's exit code: others did not come, and it cannot go on without them


@dataclass(frozen=True)
class Console:
    """How a run shows itself.

    progress  a bar on the terminal, where there is one
    stuck     seconds without a step after which a worker is named
    """

    progress: bool = True
    stuck: float = 60.0


@dataclass(frozen=True)
class BoxPlace:
    """Where the memory box is. ``folder`` is the launcher's own: when that is killed, others remove it."""

    address: str
    embedded: bool
    folder: str


@dataclass(frozen=True)
class Handover:
    """One worker's place in the job.

    tickets   what the job's counter stood at when the job began
    launcher  a pidfd of the launcher; pid is its number, for messages
    place     this worker's place in the launch, where another launcher than ours has started it
    joining   whether the job runs already: ``rank`` is a row that this worker has taken in its table
    """

    config: TrainConfig
    console: Console
    rank: int
    job: str
    box: BoxPlace
    tickets: int
    launcher: HandedDown
    pid: int
    place: Launched | None = None
    joining: bool = False

    @property
    def launched_by(self) -> str:
        return f"{self.place.launcher if self.place else 'the launcher'} (pid {self.pid})"

    @property
    def world(self) -> int:
        return self.config.sharing.workers

    @property
    def center_key(self) -> str:
        return f"{self.job}/center"

    @property
    def delta_key(self) -> str:
        """The segment of this worker alone, for increments."""
        return f"{self.job}/delta/{self.rank}"


def counter_key(job: str) -> str:
    """The counter that max_iter is shared by."""
    return f"{job}/iterations"


def worker_threads(config: TrainConfig, place: Launched | None = None) -> int:
    """torch threads of each worker: as told, else the cores this process may use, shared by the workers.

    place  where another launcher than ours has started them, and may have promised cores to each
    """
    if told := config.run.threads or (place.threads if place else None):
        return told
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // (place.local_world if place else config.sharing.workers))


def work(handover: Handover) -> None:
    """What a worker process runs: the launcher can name it without loading torch."""
    from shmtrain.worker import main

    main(handover)
