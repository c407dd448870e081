"""A process of a job whose workers meet by MPI alone: there is no box. mpirun or srun has started it.

Where one rank fails it ends them all, and so does mpirun where one dies: MPI has no way to go on.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shmtrain.config import TrainConfig
from shmtrain.counting import Portioned
from shmtrain.environment import Launched, Placed, where
from shmtrain.exchange import open_exchange
from shmtrain.exchange.base import Lockstep
from shmtrain.handover import Console, worker_threads
from shmtrain.heap import keep_heap
from shmtrain.learner import Learner
from shmtrain.lifeline import Lifeline, open_parent
from shmtrain.log import Log
from shmtrain.method import METHODS
from shmtrain.options import ConfigError
from shmtrain.reports import Reports, begin_files
from shmtrain.role import Alone
from shmtrain.trainer import Trainer
from shmtrain.worker import FAILURES, at_sigterm, loop, vectors

if TYPE_CHECKING:
    from shmtrain.exchange.mpi_ranks import Ranks


def run(config: TrainConfig, console: Console, place: Launched) -> int:
    """Train as this rank; the exit code. Raises ConfigError where there is no MPI."""
    ranks = _ranks(config, place)
    name = f"Rank {ranks.rank} (pid {os.getpid()})"
    if ranks.rank == 0:
        begin_files(config, [0])  # before the ranks meet: those of worker 0 may be another rank's
    with Log([sys.stderr], config.run.log if ranks.rank == 0 else None) as told:
        parent = f"{place.launcher}'s process (pid {os.getppid()})"
        try:
            with Lifeline(open_parent(), parent, lambda reason: told.error(f"{name}: {reason}")):
                _take_part(config, console, place, ranks, told)
                ranks.goodbye()
        except (*FAILURES, ValueError) as error:
            told.error(f"{name}: {error}; ending all ranks")
            ranks.abort()
        except BaseException:
            traceback.print_exc()
            ranks.abort()
    return 0


def _ranks(config: TrainConfig, place: Launched) -> Ranks:
    """Join the others. Raises ConfigError when mpi4py is missing, or belongs to another MPI than mpirun."""
    try:
        from shmtrain.exchange.mpi_ranks import Ranks
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"--algorithm {config.sharing.algorithm} needs mpi4py and an MPI library"
            f" (pip install 'shmtrain[mpi]'): {error}"
        ) from error
    ranks = Ranks.world(config.sharing.method.wait_limit)
    if ranks.size != place.world:
        raise ConfigError(
            f"{place.launcher} has started {place.world} processes, but mpi4py's library ({ranks.library()})"
            f" sees {ranks.size}: it is another MPI than mpirun's; MPI4PY_LIBMPI=/path/to/libmpi.so names one"
        )
    return ranks


def _take_part(config: TrainConfig, console: Console, place: Launched, ranks: Ranks, told: Log) -> None:
    server = METHODS[config.sharing.algorithm].server
    hosts = ranks.hosts()
    if ranks.rank == 0:
        lines = [Placed(rank, host, "MPI") for rank, host in enumerate(hosts)]
        told.info(
            f"Launched by {place.launcher}: {where(lines)} ({ranks.library()}"
            f"{'; rank 0 holds the center' if server else ''}"
            f"{'; more ranks than processors: who waits gives way' if ranks.crowded else ''})"
        )
    if server and ranks.rank == 0:
        from shmtrain.exchange.mpi_easgd import serve

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it serves until all workers have ended
        count = serve(ranks, config.sharing.alpha)
        told.info(f"Rank 0 (pid {os.getpid()}): the center has taken part in {count} exchanges")
        return
    worker = ranks.rank - server
    _train(config, console, place, ranks, Alone(worker, config.sharing.workers, "mpi", worker == 0))


def _train(config: TrainConfig, console: Console, place: Launched, ranks: Ranks, role: Alone) -> None:
    from shmtrain.exchange.mpi_ranks import RankMeeting

    sharing = config.sharing
    keep_heap()
    torch.set_num_threads(worker_threads(config, place))
    if role.rank:
        begin_files(config, [role.rank])
    with Reports.open(config, role.rank, console.progress) as reports, ExitStack() as stack:
        learner = Learner.open(config, role, reports.log)
        stack.callback(learner.close)
        meeting = RankMeeting(
            ranks=ranks,
            vectors=vectors(learner),
            iterations=learner.steps_left,
            alpha=sharing.alpha,
            tau=sharing.tau,
        )
        exchange = open_exchange(sharing.algorithm, meeting)
        assert isinstance(exchange, Lockstep)
        steps = learner.portion.steps
        counting = StepCounting(exchange, steps(learner.iteration), steps(config.schedule.max_iter))
        trainer = Trainer(learner, exchange, Portioned(counting, learner.portion), role, reports)
        at_sigterm(trainer, "stop")
        loop(trainer, console)
        exchange.close()  # type: ignore[attr-defined]  # all MPI ways have it


@dataclass
class StepCounting:
    """Counts as the exchange says, where no table of workers does."""

    exchange: Lockstep
    start: int
    max_iter: int
    leaving: bool = False

    def leave(self) -> None:
        """All ranks end then: MPI goes on without none of them."""
        self.leaving = True

    def claim(self) -> int | None:
        upcoming = None if self.leaving else self.exchange.upcoming
        return None if upcoming is None else self.start + upcoming

    def complete(self) -> int:
        return self.completed

    @property
    def completed(self) -> int:
        return min(self.start + self.exchange.completed, self.max_iter)
