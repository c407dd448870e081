"""Who launched this process, read from its environment: torchrun, mpirun of MPICH or Open MPI, or srun.

Each process of such a launch is one worker. Looked for in this order, since one launcher may start another
(mpirun starts its own daemons by srun, and their ranks see the variables of both):

torchrun  TORCHELASTIC_RUN_ID with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
Open MPI  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; PMIX_NAMESPACE is the same for all its ranks
MPICH     PMI_RANK, PMI_SIZE with MPI_LOCALRANKID, MPI_LOCALNRANKS (Intel MPI and MVAPICH, too)
srun      SLURM_STEP_ID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE; a batch
          script itself has no SLURM_STEP_NUM_TASKS

Loads no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shmtrain.method import METHODS
from shmtrain.options import MAX_THREADS, ConfigError

Environment = Mapping[str, str]
BAD_IN_KEYS = re.compile(r"[^A-Za-z0-9._:@+=,-]")
TORCHRUN = "torchrun"
NUMBER = r"\d{1,10}"  # Slurm numbers its own steps from 2^32 downwards
MOST_NODES = 1 << 17
NO_RUN_ID = "none"  # torchrun's, where none was given


@dataclass(frozen=True)
class Launched:
    """This process's place in a launch.

    launcher     how messages call it
    rank, world  this process and how many there are; local_* those of this host
    job          the same for all processes of this launch and no other's; None where nothing tells
    threads      processors that the launcher promised to each process; None where it did not say
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    job: str | None = None
    threads: int | None = None

    @property
    def one_host(self) -> bool:
        return self.local_world == self.world


def workers_here(
    told: int | None, algorithm: str, environment: Environment = os.environ
) -> tuple[Launched | None, int]:
    """This process's place, None where it is to start the workers itself; and how many workers there are.

    told  --workers, None where it was not given

    A launcher that started one process is none, where --workers is given. Raises ConfigError.
    """
    place, entry = launched(environment), METHODS[algorithm]
    if place is not None and place.world == 1 and told is not None and entry.box:
        place = None
    if not entry.box and (place is None or place.launcher == TORCHRUN):
        raise ConfigError(
            f"--algorithm {algorithm} meets by MPI: start it by `mpirun -n N shmtrain ... --algorithm"
            f" {algorithm}`" + (f", not by {TORCHRUN}" if place else "")
        )
    if place is None:
        return None, 1 if told is None else told
    if told is not None:
        raise ConfigError(
            f"--workers {told}: this is process {place.rank} of {place.world} that {place.launcher} has"
            " started, and each of them is one worker: leave --workers out"
        )
    if place.world - entry.server < 1:
        raise ConfigError(f"--algorithm {algorithm} has a server rank: start at least 2 processes")
    return place, place.world - entry.server


def launched(environment: Environment = os.environ) -> Launched | None:
    """Who launched this process; None when nobody did but a shell. Raises ConfigError for half an answer."""
    for mark, read in LAUNCHERS.items():
        if mark in environment:
            found = read(environment)
            if not (found.rank < found.world and found.local_rank < found.local_world <= found.world):
                raise ConfigError(
                    f"{found.launcher}: rank {found.rank} of {found.world}, local rank {found.local_rank} of"
                    f" {found.local_world}: these variables do not fit together"
                )
            return found
    return None


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(NUMBER, text, re.ASCII):
        raise ConfigError(
            f"the environment's {name} is {text[:80]!r}, not a number: who launched this process?"
        )
    return int(text)


def _key(text: str) -> str:
    """``text`` as part of a key in the box."""
    return BAD_IN_KEYS.sub("-", text)[:100]


def _torchrun(e: Environment) -> Launched:
    """A restart after a failure is a job of its own: what was left of the one before must not be met."""
    run = e["TORCHELASTIC_RUN_ID"]
    again = e.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = None if run in ("", NO_RUN_ID) else _key(run) + (f".{again}" if again != "0" else "")
    return Launched(
        TORCHRUN, _number(e, "RANK"), _number(e, "WORLD_SIZE"), _number(e, "LOCAL_RANK"),
        _number(e, "LOCAL_WORLD_SIZE"), job,
    )  # fmt: skip


def _open_mpi(e: Environment) -> Launched:
    prefix = "OMPI_COMM_WORLD_"
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, world, local_rank, local_world = (_number(e, prefix + name) for name in names)
    space = e.get("PMIX_NAMESPACE")
    return Launched("mpirun (Open MPI)", rank, world, local_rank, local_world, _key(space) if space else None)


def _mpich(e: Environment) -> Launched:
    return Launched(
        "mpirun (MPICH)", _number(e, "PMI_RANK"), _number(e, "PMI_SIZE"), _number(e, "MPI_LOCALRANKID"),
        _number(e, "MPI_LOCALNRANKS"),
    )  # fmt: skip


def _srun(e: Environment) -> Launched:
    node = _number(e, "SLURM_NODEID")
    tasks = tasks_per_node(e.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(tasks):
        raise ConfigError(f"srun: SLURM_NODEID is {node}, SLURM_STEP_TASKS_PER_NODE has {len(tasks)} nodes")
    threads = min(_number(e, "SLURM_CPUS_PER_TASK"), MAX_THREADS) if e.get("SLURM_CPUS_PER_TASK") else None
    return Launched(
        "srun", _number(e, "SLURM_PROCID"), _number(e, "SLURM_STEP_NUM_TASKS"), _number(e, "SLURM_LOCALID"),
        tasks[node], f"{_number(e, 'SLURM_JOB_ID')}.{_number(e, 'SLURM_STEP_ID')}", threads,
    )  # fmt: skip


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` as [2, 2, 2, 1]. Raises ConfigError."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(rf"({NUMBER})(?:\(x({NUMBER})\))?", part, re.ASCII)
        if found is None or len(counts) + int(found[2] or 1) > MOST_NODES:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {text[:80]!r}, not as in 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


@dataclass(frozen=True)
class Placed:
    """A worker's place as it has told it: how it reaches what it shares, and on which host.

    machine  the same for those that share memory, whatever they call their host
    """

    rank: int
    host: str
    transport: str
    pid: int = 0
    machine: str = ""

    @property
    def name(self) -> str:
        return f"Worker {self.rank} (pid {self.pid} on {self.host})"


def where(places: Iterable[Placed]) -> str:
    """``ranks 0-3 on host a by shm, rank 4 on host b by tcp``; neighbours that are alike share a part."""
    alike: dict[tuple[str, str], list[int]] = {}
    for place in sorted(places, key=lambda p: p.rank):
        alike.setdefault((place.host, place.transport), []).append(place.rank)
    return ", ".join(
        f"{numbers(ranks)} on {host} by {transport}" for (host, transport), ranks in alike.items()
    )


def numbers(ranks: Sequence[int]) -> str:
    """``rank 4`` or ``ranks 0-3, 6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def notation(groups: Sequence[Sequence[int]]) -> str:
    """``S4xA2``: two groups of four that meet asynchronously; ``S4+3xA2`` where they differ."""
    sizes = sorted({len(group) for group in groups}, reverse=True)
    return f"S{'+'.join(map(str, sizes))}xA{len(groups)}"


LAUNCHERS: dict[str, Callable[[Environment], Launched]] = {
    "TORCHELASTIC_RUN_ID": _torchrun,
    "OMPI_COMM_WORLD_RANK": _open_mpi,
    "MPI_LOCALNRANKS": _mpich,
    "SLURM_STEP_NUM_TASKS": _srun,
}
