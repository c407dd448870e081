"""One process of a launch by torchrun, mpirun or srun: it is one worker of the job."""

from __future__ import annotations

from shmtrain.config import TrainConfig
from shmtrain.environment import Launched
from shmtrain.handover import Console
from shmtrain.method import METHODS


def run(config: TrainConfig, console: Console, place: Launched) -> int:
    """Train as this worker; the exit code."""
    if not METHODS[config.sharing.algorithm].box:
        from shmtrain import launch_mpi

        return launch_mpi.run(config, console, place)
    return 0
