"""Who launched a process, from its environment alone; Slurm is tested so and no other way."""

from __future__ import annotations

import pytest

from shmtrain.environment import (
    Launched,
    Placed,
    launched,
    notation,
    numbers,
    tasks_per_node,
    where,
    workers_here,
)
from shmtrain.options import ConfigError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run/7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-host-77@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "4",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        (TORCHRUN, Launched("torchrun", 3, 4, 1, 2, "run-7")),
        (OPEN_MPI, Launched("mpirun (Open MPI)", 2, 3, 0, 1, "prterun-host-77@1")),
        (MPICH, Launched("mpirun (MPICH)", 1, 2, 1, 2)),
        (SRUN, Launched("srun", 5, 7, 1, 2, "123.4")),
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
    ids=["torchrun", "open-mpi", "mpich", "srun", "a shell", "another program's"],
)
def test_rank_world_and_job_come_from_the_environment(
    environment: dict[str, str], want: Launched | None
) -> None:
    assert launched(environment) == want


def test_a_batch_script_of_slurm_is_no_task() -> None:
    script = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert launched(script) is None


@pytest.mark.parametrize("inner", [TORCHRUN, OPEN_MPI, MPICH], ids=["torchrun", "open-mpi", "mpich"])
def test_a_launcher_that_srun_has_started_is_the_one_that_counts(inner: dict[str, str]) -> None:
    assert launched({**SRUN, **inner}) == launched(inner)


def test_pmi_of_srun_is_not_mpirun() -> None:
    place = launched({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7", "PMIX_NAMESPACE": "slurm.pmix.123.4"})
    assert place is not None
    assert (place.launcher, place.rank) == ("srun", 5)


@pytest.mark.parametrize("run", ["none", ""])
def test_a_torchrun_without_a_run_id_has_no_name(run: str) -> None:
    place = launched({**TORCHRUN, "TORCHELASTIC_RUN_ID": run})
    assert place is not None
    assert place.job is None


def test_a_restart_by_torchrun_is_a_job_of_its_own() -> None:
    place = launched({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert place is not None
    assert place.job == "run-7.2"


def test_slurm_promises_threads() -> None:
    place = launched({**SRUN, "SLURM_CPUS_PER_TASK": "8"})
    assert place is not None
    assert place.threads == 8


def test_one_host_is_where_all_ranks_are_local() -> None:
    place = launched(MPICH)
    assert place is not None
    assert place.one_host
    other = launched(TORCHRUN)
    assert other is not None
    assert not other.one_host


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, r"RANK is 'x', not a number"),
        ({**TORCHRUN, "RANK": "4"}, r"torchrun: rank 4 of 4"),
        ({**TORCHRUN, "RANK": "\u00b2"}, r"RANK is '\u00b2', not a number"),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, r"WORLD_SIZE is '9{80}', not a number"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, r"of 5: these variables do not fit together"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x9999999999)"}, r"not as in 2\(x3\),1"),
        ({k: v for k, v in MPICH.items() if k != "PMI_SIZE"}, r"PMI_SIZE is ''"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, r"not as in 2\(x3\),1"),
        ({**SRUN, "SLURM_NODEID": "4"}, r"SLURM_NODEID is 4, SLURM_STEP_TASKS_PER_NODE has 4 nodes"),
    ],
)
def test_half_an_environment_is_told(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launched(environment)


def test_slurms_short_form_of_tasks() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]


# With the command line -----------------------------------------------------------------------------------


def test_each_process_of_a_launch_is_one_worker() -> None:
    assert workers_here(None, "seasgd", MPICH) == (launched(MPICH), 2)
    assert workers_here(None, "seasgd", {}) == (None, 1)
    assert workers_here(3, "seasgd", {}) == (None, 3)


def test_workers_in_a_launch_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match=r"--workers 4: this is process 1 of 2 that mpirun \(MPICH\) has"):
        workers_here(4, "seasgd", MPICH)


def test_a_launch_of_one_process_may_start_workers() -> None:
    """As in a shell that srun has given."""
    alone = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    alone |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert workers_here(4, "seasgd", alone) == (None, 4)
    assert workers_here(None, "seasgd", alone) == (launched(alone), 1)


@pytest.mark.parametrize("environment", [{}, TORCHRUN], ids=["a shell", "torchrun"])
def test_the_mpi_ways_need_mpirun(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"mpi-star meets by MPI: start it by `mpirun -n N shmtrain"):
        workers_here(None, "mpi-star", environment)


def test_the_server_rank_is_no_worker() -> None:
    assert workers_here(None, "mpi-easgd", MPICH) == (launched(MPICH), 1)
    one = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(ConfigError, match="start at least 2 processes"):
        workers_here(None, "mpi-easgd", one)


# In the log ----------------------------------------------------------------------------------------------


def test_the_log_says_which_ranks_are_where() -> None:
    places = [
        Placed(rank, "b" if rank in (2, 5) else "a", "tcp" if rank == 2 else "shm") for rank in range(6)
    ]
    assert where(places) == "ranks 0-1, 3-4 on a by shm, rank 2 on b by tcp, rank 5 on b by shm"
    assert numbers([7]) == "rank 7"


def test_groups_have_the_papers_notation() -> None:
    assert notation([(0, 1, 2, 3), (4, 5, 6, 7)]) == "S4xA2"
    assert notation([(0, 1, 2, 3), (4, 5, 6)]) == "S4+3xA2"
