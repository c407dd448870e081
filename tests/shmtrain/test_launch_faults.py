"""Workers, launcher and box die, hang, diverge or are asked to stop: the job ends well or says why."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import smb
from prototxt import caffemodel
from shmtrain import launch
from shmtrain.log import Log
from shmtrain.watch import Watched
from tests.shmtrain.jobs import ENDLESS, HDF5, LAYERS, Job, gone, running, stop, train, write

OutsideBox = tuple[subprocess.Popen[bytes], str]
LONG = f"max_iter: {ENDLESS} display: 200\n"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets and other files of the job lie here, and none may stay."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: a socket's path has 107 bytes
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    left = list(folder.rglob("*"))
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert left == []


def weights(path: Path) -> np.ndarray:
    (layer,) = [layer for layer in caffemodel.read_net(path).layer if layer.blobs]
    return caffemodel.blob_array(layer.blobs[0])


def rescued(folder: Path) -> list[Path]:
    return sorted(folder.glob("*_rescue_iter_*.caffemodel"))


def job_goes_on(job: Job) -> None:
    """Two more displays come than there are now."""
    seen = job.text.count("iter/s")
    deadline = time.monotonic() + 30
    while job.text.count("iter/s") < seen + 2:
        assert time.monotonic() < deadline, job.text
        time.sleep(0.05)


def test_a_killed_worker_is_named_and_the_rest_go_on(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "3") as job:
        pid = job.pid_of(1)
        job.trains()
        os.kill(pid, signal.SIGKILL)
        job.wait_for(rf"Worker 1 \(pid {pid}\) was killed by SIGKILL after \d+ iterations of its own")
        job_goes_on(job)
        assert stop(job) == 0
    assert "Optimization stopped early." in job.text


def test_when_the_leader_is_killed_the_next_rank_tests_and_saves(tmp_path: Path) -> None:
    write(tmp_path, LONG + "test_iter: 1 test_interval: 300 snapshot_prefix: 'model'\n")
    with running(tmp_path, "--workers", "2") as job:
        job.trains()
        os.kill(job.pid_of(0), signal.SIGKILL)
        job.wait_for("Worker 0 .* was killed by SIGKILL")
        second = tmp_path / "model.worker1.log"
        deadline = time.monotonic() + 20
        while "Testing net" not in second.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert stop(job) == 0
    assert len(list(tmp_path.glob("model_iter_*.caffemodel"))) == 1


def test_when_the_launcher_is_killed_every_worker_says_so_and_the_center_is_saved(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "3") as job:
        pids = [job.pid_of(rank) for rank in range(3)]
        job.trains()
        job.process.kill()
        assert all(gone(pid, 5.0) for pid in pids)
        job.end()
    for rank, pid in enumerate(pids):
        assert f"Worker {rank} (pid {pid}): " in job.text
        line = next(line for line in job.lines if f"Worker {rank} (pid {pid}): " in line)
        assert "died" in line or "gone" in line, line
    (model,) = rescued(tmp_path)
    assert (
        f"saved the center after {model.stem.rpartition('_')[2]} iterations of the job as {model.name}"
        in job.text
    )
    assert weights(model).shape == (3, 6)
    assert np.isfinite(weights(model)).all()


def test_a_worker_that_hangs_in_a_step_ends_with_the_launcher_too(tmp_path: Path) -> None:
    """The leader is stopped: it can't save the center, so the next rank does, in time."""
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2") as job:
        first, second = job.pid_of(0), job.pid_of(1)
        job.trains()
        os.kill(first, signal.SIGSTOP)
        job.process.kill()
        assert gone(second, 5.0)
        assert len(rescued(tmp_path)) == 1
        os.kill(first, signal.SIGCONT)
        assert gone(first, 5.0)
        job.end()
    assert len(rescued(tmp_path)) == 1


def test_when_all_workers_are_killed_the_job_fails(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2") as job:
        pids = [job.pid_of(rank) for rank in range(2)]
        job.trains()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert job.end() == 1
    assert "All workers have died" in job.text


def test_data_that_no_worker_can_read_is_said_in_full_once(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 10\n", HDF5 + LAYERS)
    job = train(tmp_path, "--workers", "3")
    assert job.process.returncode == 1
    assert job.text.count("cannot read the list of HDF5 files") == 1, job.text
    assert len(re.findall(r"Worker \d \(pid \d+\): ends by the same error as worker \d", job.text)) == 2


def test_a_stopped_worker_is_named_and_named_again_when_it_goes_on(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--stuck", "1") as job:
        pid = job.pid_of(1)
        job.trains()
        os.kill(pid, signal.SIGSTOP)
        job.wait_for(rf"Worker 1 \(pid {pid}\) is stuck: no step for \d+ s after \d+ iterations of its own")
        job_goes_on(job)
        os.kill(pid, signal.SIGCONT)
        job.wait_for(rf"Worker 1 \(pid {pid}\) goes on")
        assert stop(job) == 0


def test_a_worker_that_stays_stopped_does_not_keep_the_job_from_ending(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--stuck", "1") as job:
        pid = job.pid_of(1)
        job.trains()
        os.kill(pid, signal.SIGSTOP)
        job.wait_for(r"Worker 1 .* is stuck")
        job.process.send_signal(signal.SIGINT)
        job.wait_for(r"worker 1 \(pid \d+\); ending without")
        assert job.end(40) == 0
        assert gone(pid)
    assert list(tmp_path.glob("solver_iter_*.caffemodel"))


def test_a_worker_whose_values_are_no_numbers_is_refused_and_named(tmp_path: Path) -> None:
    """Every second record is NaN: worker 1's. The center stays finite and worker 0 ends the job."""
    write(tmp_path, "max_iter: 400 display: 100\n", HDF5 + LAYERS)
    data = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)
    data[1::2] = np.nan
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["data"], file["label"] = data, np.ones(64, np.float32)
    (tmp_path / "files.txt").write_text("data.h5\n")
    job = train(tmp_path, "--workers", "2")
    assert job.process.returncode == 0, job.text
    assert re.search(r"Worker 1 \(pid \d+\): .*center.* by worker 1 .*NaN or Inf", job.text), job.text
    assert re.search(r"Worker 1 \(pid \d+\) failed with exit code 1 after 1 iterations of its own", job.text)
    assert np.isfinite(weights(tmp_path / "solver_iter_400.caffemodel")).all()


def test_sigterm_stops_as_ctrl_c_does(tmp_path: Path) -> None:
    write(tmp_path, LONG + "test_iter: 1 test_interval: 100000000\n")
    with running(tmp_path, "--workers", "2") as job:
        job.trains()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
    assert "Optimization stopped early." in job.text
    assert job.text.count("Testing net") == 1  # the first one; none after the stop
    models = list(tmp_path.glob("solver_iter_*.caffemodel"))
    assert len(models) == 1
    assert models[0].with_suffix(".solverstate").exists()


def test_a_second_ctrl_c_ends_a_job_that_hangs(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2") as job:
        pids = [job.pid_of(rank) for rank in range(2)]
        job.trains()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        assert job.end(10) == 1
        assert all(gone(pid) for pid in pids)
    assert "Asked twice to stop" in job.text


def test_sighup_saves_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2") as job:
        job.trains()
        job.process.send_signal(signal.SIGHUP)
        job.wait_for("Snapshotting solver state")
        job_goes_on(job)
        assert stop(job) == 0
    assert len(list(tmp_path.glob("solver_iter_*.caffemodel"))) == 2


def test_a_stop_before_the_first_iteration_is_not_lost(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2") as job:
        job.wait_for("Job solver-.* 2 workers")
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 0


@pytest.fixture
def outside_box() -> Iterator[OutsideBox]:
    """`smb serve` as a process, and its address."""
    path = Path(os.environ["TMPDIR"]) / "s"
    daemon = subprocess.Popen([sys.executable, "-m", "smb.cli", "serve", "--unix", str(path)])
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield daemon, f"unix:{path}"
    daemon.kill()
    daemon.wait()
    path.unlink(missing_ok=True)


def test_when_an_outside_box_dies_the_center_is_saved_and_the_job_fails(
    tmp_path: Path, outside_box: OutsideBox
) -> None:
    write(tmp_path, LONG)
    daemon, address = outside_box
    with running(tmp_path, "--workers", "2", "--smb", address, "--box-grace", "1") as job:
        pids = [job.pid_of(rank) for rank in range(2)]
        job.trains()
        daemon.kill()
        assert job.end(15) == 1
        assert all(gone(pid) for pid in pids)
    for rank in range(2):
        assert f"Worker {rank} (pid {pids[rank]}): the memory box is gone" in job.text
    assert len(rescued(tmp_path)) == 1


def test_a_center_that_takes_long_to_save_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the box is gone, what the workers save may be hundreds of megabytes, and their disk slow."""
    monkeypatch.setattr(launch, "LAST_ONES", 0.1)
    job = launch._Launch(Mock(), Mock(), Log(), Mock())
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.6,))
    process.start()
    job._workers = [Watched(0, process)]
    with job._signals:
        assert job._outlive(smb.TransportError("it died")) == 1
    process.join(5)
    assert process.exitcode == 0


def test_the_workers_do_not_outlive_the_launcher_where_the_box_lives_on(
    tmp_path: Path, outside_box: OutsideBox
) -> None:
    """Nothing else would tell them."""
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--smb", outside_box[1]) as job:
        pids = [job.pid_of(rank) for rank in range(2)]
        job.trains()
        job.process.kill()
        assert all(gone(pid, 5.0) for pid in pids)
        job.end()
    for rank in range(2):
        assert f"Worker {rank} (pid {pids[rank]}): the launcher (pid {job.process.pid}) died" in job.text
    assert rescued(tmp_path)
