"""Workers come and go while a job runs: by `shmtrain --join`, by SIGTERM, by kill -9."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import smb
from shmtrain import joined, launch, launch_join, launch_marks
from shmtrain.algorithm_state import AlgorithmState
from shmtrain.config import TrainConfig
from shmtrain.group import Progress, State
from shmtrain.log import Log
from shmtrain.method import Method
from shmtrain.options import ConfigError, Options
from shmtrain.snapshot import SnapshotError
from tests.shmtrain.crowds import Recipe, open_job, together
from tests.shmtrain.jobs import ENDLESS, Job, gone, running, stop, write

LONG = f"max_iter: {ENDLESS} display: 500\n"


def joining(folder: Path, address: str | None = None) -> AbstractContextManager[Job]:
    """``shmtrain --join`` as a process; killed at the end if it still runs."""
    where = [] if address is None else ["--smb", address]
    return running(folder, *where, "--job", "J", "--join")


def test_workers_join_leave_and_take_a_lost_ones_place(tmp_path: Path, address: str) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--smb", address, "--job", "J") as job:
        first, second = job.pid_of(0), job.pid_of(1)
        job.trains()
        with joining(tmp_path, address) as third:
            pid = third.process.pid
            job.wait_for(rf"Worker 2 \(pid {pid} on .*\) has joined: 3 workers train now")
            os.kill(second, signal.SIGTERM)
            job.wait_for(rf"Worker 1 \(pid {second}\) has left the job after \d+ iterations of its own")
            third.process.send_signal(signal.SIGTERM)
            assert third.end() == 0
            assert f"Worker 2 (pid {pid}) has left the job after" in third.text
        with joining(tmp_path, address) as instead:
            job.wait_for(rf"Worker 1 \(pid {instead.process.pid} on .*\) has joined: 2 workers train now")
            os.kill(first, signal.SIGKILL)
            job.wait_for(rf"Worker 0 \(pid {first}\) was killed by SIGKILL")
            with joining(tmp_path, address) as leader:
                job.wait_for(rf"Worker 0 \(pid {leader.process.pid} on .*\) has joined: 2 workers train now")
                instead.process.kill()
                job.wait_for(r"Worker 1 .*, which had joined, is gone after \d+ iterations of its own")
                assert stop(job) == 0  # the one that is left ends and saves: it leads
                assert leader.end() == 0
                assert re.search(
                    r"Worker 0 \(pid \d+\) has ended with the job after \d+ iterations", leader.text
                )
    assert list(tmp_path.glob("solver_iter_*.caffemodel"))


def test_a_second_ctrl_c_ends_one_that_has_joined_and_hangs(tmp_path: Path) -> None:
    """In a box that the launcher holds itself: it is found by the job's name."""
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--job", "J") as job:
        job.trains()
        with joining(tmp_path) as second:
            job.wait_for("has joined: 3 workers train now")
            second.process.send_signal(signal.SIGSTOP)
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert job.process.poll() is None
            job.process.send_signal(signal.SIGINT)
            assert job.end(10) == 1
            assert gone(second.process.pid)
    assert "Asked twice to stop" in job.text


def test_a_forced_end_does_not_wait_for_another_machine(tmp_path: Path) -> None:
    others = Mock()
    others.working.side_effect = [True, False]
    job = launch._Launch(Mock(), Mock(), Log(), others)
    job._forced = True
    with job._signals:
        job._watch()
    others.look.assert_not_called()


def test_who_cannot_join_is_told_why(tmp_path: Path, address: str) -> None:
    write(tmp_path, LONG)
    with joining(tmp_path, address) as job:
        assert job.end() == 1
    assert f"Cannot join: no job 'J' runs in the box at {address}" in job.text


def test_who_cannot_find_its_job_is_told_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("a", "b", "open"):
        (tmp_path / f"shmtrain-{name}").mkdir(mode=0o700)
    (tmp_path / "shmtrain-open").chmod(0o755)  # where anybody may have put the socket
    (tmp_path / "shmtrain-open" / "box.sock").touch()
    with pytest.raises(ConfigError, match=f"no job 'J' of yours .*looked in {tmp_path}"):
        launch_join._find("J")
    with ExitStack() as stack:
        for name in ("a", "b"):
            path = f"unix:{tmp_path}/shmtrain-{name}/box.sock"
            stack.enter_context(smb.serve(unix=path.removeprefix("unix:")))
            Progress.create(stack.enter_context(smb.connect(path)), "J", 2)
            if name == "a":
                assert launch_join._find("J") == path
        with pytest.raises(
            ConfigError, match=r"2 jobs are called 'J': choose one by --smb unix:\S+ or unix:"
        ):
            launch_join._find("J")


def test_one_told_to_leave_before_it_trains_gives_its_row_back(
    tmp_path: Path, box: smb.Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LONG)
    monkeypatch.chdir(tmp_path)
    config = TrainConfig.load("solver.prototxt", Options(workers=2, smb=box.address, job="J"))
    progress = Progress.create(box, "J", 2, **launch_join.room(config, 0))
    with joining(tmp_path, box.address) as job:
        job.wait_for(r"Worker 2 \(pid \d+\) joins job J")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0, job.text
    assert "Told to leave: this worker ends before it has trained" in job.text
    assert progress.rows().state(2) is State.LEFT


@pytest.mark.parametrize("looks_before", [0, launch_marks.MISSED + 1])
def test_one_that_comes_is_waited_for_until_it_dies(
    box: smb.Box, address: str, monkeypatch: pytest.MonkeyPatch, looks_before: int
) -> None:
    monkeypatch.setattr(joined, "LOOK", 0.0)
    progress = Progress.create(box, "J", 1, spare=1)
    launcher = joined.Joined(box, "J", progress, Log())
    with smb.connect(address) as other:
        launch_marks.announce(other, "J", 1)
        progress.take_row(1, os.getpid())
        for _ in range(looks_before):
            launcher.look(progress.rows(), own={0})
        assert progress.rows().state(1) is State.JOINING
    for _ in range(launch_marks.MISSED + 1):
        launcher.look(progress.rows(), own={0})
    assert not launcher.working()
    assert progress.rows().state(1) is State.DEAD


# What a snapshot keeps of the algorithm ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "more", "names"),
    [
        ("diloco", {"wire": "int8"}, ({"outer momentum"}, {"quantising error"})),
        (
            "diloco",
            {"wire": "int8", "asynchronous": True, "outer_buffer": 3},
            ({"outer momentum", "gathered changes"}, {"quantising error"}),
        ),
        (
            "downpour",
            {"server": "adagrad", "n_push": 3},
            ({"squares"}, {"changes not pushed", "gradients not pushed"}),
        ),
    ],
)
def test_the_algorithms_state_goes_on_with_other_workers(
    address: str, tmp_path: Path, algorithm: str, more: dict[str, Any], names: tuple[set[str], set[str]]
) -> None:
    """Three go on from what two have saved: the job's part at all, each one's own, the third's from zero."""
    common, kept = names
    recipe = Recipe(algorithm, 2, Method(beta=None, wait_limit=30.0, **more), tau=2)
    job = open_job(address, recipe)
    together(job.workers, 8)
    stem = str(tmp_path / "m_iter_16")
    before = [state_of(worker, recipe) for worker in job.workers]
    for worker, (state, _, _) in zip(job.workers, before, strict=True):
        state.save(stem, leads=worker.rank == 0)
    assert {frozenset(c) for _, c, _ in before} == {frozenset(common)}
    assert {frozenset(k) for _, _, k in before} == {frozenset(kept)}
    assert all(np.abs(array).max() > 0 for array in before[0][1].values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.shmtrain.crowds.JOB", "again")
        again = open_job(address, replace(recipe, world=3))
        lines: list[str] = []
        for worker in again.workers:
            state_of(worker, recipe)[0].restore(stem, lines.append)
        for rank, worker in enumerate(again.workers):
            _, mine, own = state_of(worker, recipe)
            for name in common:
                np.testing.assert_array_equal(mine[name], before[0][1][name])
            for name in kept:
                np.testing.assert_array_equal(own[name], before[rank][2][name] if rank < 2 else 0)
    assert [line for line in lines if "starts at zero" in line and "worker2" in line]


@pytest.mark.parametrize(("place", "value"), [(10, 99), (8, 1)], ids=["method", "encrypted"])
def test_an_algorithms_state_that_no_zip_reader_takes_is_told(
    address: str, tmp_path: Path, place: int, value: int
) -> None:
    recipe = Recipe("diloco", 1, Method(beta=None, wire="int8"), tau=1)
    (worker,) = open_job(address, recipe).workers
    stem, path = str(tmp_path / "m"), tmp_path / "m.algorithm.npz"
    state, _, _ = state_of(worker, recipe)
    state.save(stem, leads=True)
    data = bytearray(path.read_bytes())
    for entry in re.finditer(rb"PK\x01\x02", bytes(data)):  # in the zip's directory
        data[entry.start() + place] = value
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=r"m\.algorithm\.npz: not an algorithm's state"):
        state.restore(stem, print)


def state_of(worker: Any, recipe: Recipe) -> tuple[AlgorithmState, dict[str, Any], dict[str, Any]]:
    exchange = worker.exchange
    state = AlgorithmState(recipe.algorithm, exchange, exchange._meeting.crowd, b"net")
    common = {
        name: np.array(v if isinstance(v, np.ndarray) else v.read()) for name, v in exchange.common().items()
    }
    return state, common, {name: array.copy() for name, array in exchange.kept().items()}


def test_half_of_eight_workers_are_killed_at_once_and_the_rest_end_the_job(tmp_path: Path) -> None:
    """A whole group, and the roots of two others."""
    write(
        tmp_path,
        "max_iter: 6000 display: 100 test_iter: 1 test_interval: 6000 test_initialization: false\n",
    )
    with running(tmp_path, "--workers", "8", "--algorithm", "hybrid", "--group-size", "2") as job:
        pids = [job.pid_of(rank) for rank in range(8)]
        job.trains()
        lost = [0, 1, 2, 4]
        for rank in lost:
            os.kill(pids[rank], signal.SIGKILL)
        for rank in lost:
            job.wait_for(rf"Worker {rank} \(pid {pids[rank]}\) was killed by SIGKILL")
        assert job.end() == 0, job.text
    assert "Test net output #0: loss = " in (tmp_path / "solver.worker3.log").read_text()
    assert len(list(tmp_path.glob("solver_iter_*.caffemodel"))) == 1
