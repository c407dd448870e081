"""Processes that torchrun or mpirun has started meet; deaths are named though no launcher of ours looks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import smb
from shmtrain import launch_marks, launch_rank
from shmtrain.config import TrainConfig
from shmtrain.environment import Launched
from shmtrain.grace import LastingProgress
from shmtrain.group import Column, State
from shmtrain.log import Log
from shmtrain.options import ConfigError, Options
from tests.shmtrain.jobs import ENDLESS, PROGRAM, Job, gone, started, write
from tests.shmtrain.mpi import need
from tests.shmtrain.test_launch_faults import job_goes_on, rescued, weights

LONG = f"max_iter: {ENDLESS} display: 200\n"
PLACE = Launched("mpirun (MPICH)", 0, 2, 0, 2)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The ranks meet in here, and leave nothing."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    left = [path for path in folder.rglob("*") if "shmtrain" in path.name]
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert left == []


@contextmanager
def launched(folder: Path, command: list[str], environment: dict[str, str]) -> Iterator[Job]:
    """What another launcher than ours starts; at the end its workers are killed, too."""
    with started(folder, command, environment) as job:
        try:
            yield job
        finally:
            for pid in map(int, re.findall(r"Worker \d+ \(pid (\d+)\) of", job.text)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# Whole launches ------------------------------------------------------------------------------------------


# What srun does to its tasks, one of which may die without the others being ended.
SRUN = """
export SLURM_JOB_ID=77 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=3 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=3
for rank in 0 1 2; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done
wait
"""


def test_the_living_name_a_dead_worker_and_the_box_that_died_with_the_first_rank(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    command = ["bash", "-c", SRUN, "srun", sys.executable, *PROGRAM]
    with launched(tmp_path, command, dict(os.environ)) as job:
        pids = [job.pid_of(rank) for rank in range(3)]
        host = socket.gethostname()
        places = rf"ranks 0-2 on {host} by shm; memory box in rank 0"
        job.wait_for(rf"Job 77\.3, launched by srun: {places}")
        job.trains()
        os.kill(pids[1], signal.SIGKILL)
        job.wait_for(rf"Worker 1 \(pid {pids[1]}( on {host})?\) is gone after \d+ iterations of its own", 30)
        job_goes_on(job)
        os.kill(pids[0], signal.SIGKILL)
        job.wait_for(rf"Worker 2 \(pid {pids[2]}\): the memory box is gone")
        assert gone(pids[2], 10)
        job.end(20)
    (model,) = rescued(tmp_path)
    assert weights(model).shape == (3, 6)


def test_workers_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with launched(tmp_path, [*torchrun, *PROGRAM], dict(os.environ)) as job:
        pids = [job.pid_of(rank) for rank in range(2)]
        job.wait_for(r"launched by torchrun: ranks 0-1 on \S+ by shm; memory box in rank 0")
        job.trains()
        job.process.kill()
        assert all(gone(pid, 10.0) for pid in pids)
        job.end()
    assert re.search(rf"Worker 0 \(pid {pids[0]}\): torchrun \(pid {job.process.pid}\) died", job.text), (
        job.text
    )
    assert len(rescued(tmp_path)) >= 1


@pytest.mark.mpi
def test_a_rank_that_fails_ends_all_ranks_of_an_mpi_way(tmp_path: Path) -> None:
    """The server of mpi-easgd, two workers, one of them killed in the middle."""
    mpi = need("mpich")
    before = set(Path("/dev/shm").iterdir())
    write(tmp_path, LONG)
    options = ["--algorithm", "mpi-easgd", "--log-dir", "."]
    with launched(tmp_path, mpi.command(3, [sys.executable, *PROGRAM, *options]), mpi.environment) as job:
        job.wait_for(
            r"Launched by mpirun \(MPICH\): ranks 0-2 on \S+ by MPI \(MPICH .*; rank 0 holds the center"
        )
        job.trains()
        (victim,) = [pid for pid in children(job.process.pid) if "solver.worker1.log" in open_files(pid)]
        os.kill(victim, signal.SIGKILL)
        assert job.end(20) != 0
    assert "mpi-easgd, alpha 0.45, tau 1" in job.text
    for left in set(Path("/dev/shm").iterdir()) - before:
        if left.name.startswith("mpich_shm_"):  # MPICH's own memory: it leaves that when a rank is killed
            left.unlink()


def children(pid: int) -> list[int]:
    """All processes that a process has started, and they."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(child) for path in lists for child in path.read_text().split()]
    return direct + [grandchild for child in direct for grandchild in children(child)]


def open_files(pid: int) -> set[str]:
    return {Path(os.readlink(fd)).name for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}


# The job's name and its box ------------------------------------------------------------------------------


def config(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> TrainConfig:
    monkeypatch.chdir(folder)
    write(folder, "max_iter: 10\n")
    return TrainConfig.load("solver.prototxt", Options(workers=2, **options))  # type: ignore[arg-type]


def test_a_box_outside_needs_a_name_where_the_launcher_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config(tmp_path, monkeypatch, smb="unix:x")
    with pytest.raises(ConfigError, match=r"mpirun \(MPICH\) does not tell one launch .*--job"):
        launch_rank.job_of(plain, PLACE)
    assert launch_rank.job_of(plain, replace(PLACE, job="123.0")) == "123.0"
    named = config(tmp_path, monkeypatch, smb="unix:x", job="mine")
    assert launch_rank.job_of(named, replace(PLACE, job="123.0")) == "mine"


def test_a_launch_with_a_box_of_its_own_needs_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_rank.job_of(config(tmp_path, monkeypatch), PLACE) == "solver"


def test_several_hosts_need_a_box_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="over several hosts they need a box that all can reach"):
        launch_rank.job_of(config(tmp_path, monkeypatch), replace(PLACE, local_world=1))


def test_ranks_do_not_meet_in_a_folder_that_others_can_enter(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(FileExistsError):
        launch_rank._make_private(folder)
    assert launch_rank._connected(folder, folder / "box.sock", "me") is None
    folder.chmod(0o700)
    launch_rank._make_private(folder)  # what a killed launch has left


def test_what_killed_launches_have_left_is_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_rank, "FIRST_RANK", -1.0)
    folders = [tmp_path / f"shmtrain-{os.getuid()}-{name}" for name in ("dead", "living", "no-socket")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as living:
        dead.bind(str(folders[0] / launch_rank.SOCKET))  # bound, and nobody listens
        living.bind(str(folders[1] / launch_rank.SOCKET))
        living.listen()
        launch_rank._sweep(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_a_first_rank_that_does_not_come_is_named_in_time(
    tmp_path: Path, box: smb.Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_rank, "FIRST_RANK", 0.3)
    with pytest.raises(smb.WaitTimeout, match=r"the first rank has not opened its job 'j' within 0\.3 s"):
        launch_rank._open_job(box, "j", replace(PLACE, rank=1), config(tmp_path, monkeypatch))


def test_a_name_that_is_taken_is_refused(
    tmp_path: Path, box: smb.Box, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = config(tmp_path, monkeypatch)
    launch_rank._open_job(box, "j", PLACE, mine)
    with smb.connect(address) as other:
        with pytest.raises(smb.KeyExists, match="job 'j' runs in this box already"):
            launch_rank._open_job(other, "j", PLACE, mine)
        second = replace(PLACE, rank=1)
        launch_rank._open_job(other, "j", second, mine)
        LastingProgress.attach(other, "j").put(1, Column.STATE, State.TRAINING)
        with pytest.raises(smb.KeyExists, match="worker 1 of job 'j' runs in this box already"):
            launch_rank._open_job(other, "j", second, mine)


# Marks ---------------------------------------------------------------------------------------------------


def test_marks_of_other_programs_are_passed_over(box: smb.Box) -> None:
    for rank, meta in enumerate(
        [b"", b"no json", b"[]", b'{"host": "a\\n", "transport": "shm", "pid": 1, "machine": "m"}']
    ):
        box.create(f"j/mark/{rank}", count=1, dtype="uint8", meta=meta)
    assert launch_marks.marks(box, "j") == []


def test_who_does_not_come_to_the_grouping_is_named(box: smb.Box) -> None:
    with pytest.raises(smb.WaitTimeout, match=r"nothing from ranks 0-1 in 0\.1 s"):
        launch_marks.all_marks(box, "j", 2, 0.1)


def test_only_the_lowest_that_lives_buries(
    box: smb.Box, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three workers the second loses its mark: worker 0 buries it, and says so once."""
    monkeypatch.setattr(launch_marks, "LOOK", 60.0)  # they look when they are told to
    progress = LastingProgress.create(box, "j", 3)
    log = Log([sys.stderr])
    first, second, third = (
        launch_marks.Witness(lambda: smb.connect(address), "j", rank, marked=3, stuck=60, told=log)
        for rank in range(3)
    )
    for rank in range(3):
        progress.put(rank, Column.STATE, State.TRAINING)
        progress.put(rank, Column.PID, os.getpid())
    first._look()
    third._look()
    second.close()
    for _ in range(3):
        third._look()
    assert progress.rows().state(1) is State.TRAINING
    for _ in range(3):
        first._look()
    assert progress.rows().state(1) is State.DEAD
    assert progress.rows().leader == 0
    for witness in (first, third):
        witness.close()
    told = capsys.readouterr().err
    assert told.count(f"Worker 1 (pid {os.getpid()} on {socket.gethostname()}) is gone") == 1
