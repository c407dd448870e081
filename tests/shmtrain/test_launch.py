"""Whole jobs of a few workers: what they count, say, save and leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import stat
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from prototxt import caffemodel
from shmtrain.snapshot import read_state
from tests.shmtrain.jobs import ENDLESS, Job, running, stop, train, write


def steps(folder: Path, name: str = "solver") -> list[int]:
    """Each worker's own iterations of the newest run, from its metrics."""
    files = sorted(folder.glob(f"{name}*.jsonl"), key=lambda p: (len(p.name), p.name))
    last = [json.loads(file.read_text().splitlines()[-1]) for file in files]
    assert {record["kind"] for record in last} == {"end"}
    return [record["steps"] for record in last]


def weights(path: Path) -> np.ndarray:
    (layer,) = [layer for layer in caffemodel.read_net(path).layer if layer.blobs]
    return caffemodel.blob_array(layer.blobs[0])


def test_three_workers_make_max_iter_iterations_and_one_model(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 100 display: 10 snapshot: 40 test_iter: 2 test_interval: 50\n")
    job = train(tmp_path, "--workers", "3", "--seed", "7")
    assert job.process.returncode == 0, job.text
    assert sum(steps(tmp_path)) == 100
    models = {p.name for p in tmp_path.glob("*.caffemodel")}
    assert models == {f"solver_iter_{n}.caffemodel" for n in (40, 80, 100)}
    assert read_state(str(tmp_path / "solver_iter_100.solverstate")).iteration == 100
    assert [line for line in job.lines if "Testing net" in line][-1].endswith(
        "Iteration 100, Testing net (#0)"
    )
    assert "Optimization Done." in job.text


def test_the_log_says_at_the_start_how_the_job_is_done(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 30 moving_rate: 0.125 update_interval: 3\n")
    job = train(tmp_path, "--workers", "2", "--job", "night", "--termination", "mean", "--exchange", "paper")
    assert job.process.returncode == 0, job.text
    said = (tmp_path / "solver.log").read_text()
    assert re.search(r"Job night: 2 workers, launcher pid \d+, memory box in the launcher at unix:/\S+", said)
    for rank in range(2):
        assert re.search(rf"Worker {rank} \(pid \d+\) of 2: center \w+ \(21 floats\) by transport shm", said)
    assert "2 workers share 30 iterations of 8 images (seasgd, paper, alpha 0.125, tau 3" in said or (
        "effective batch 16" in said and "alpha 0.125, tau 3, termination mean" in said
    )
    assert "Learning rate for 2 workers: the solver's rate x 2^0.75 = x 1.68 after 50 warm-up steps" in said


def test_a_temporary_folder_too_long_for_sockets_does_not_stop_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scheduler's scratch folder is; the fork server's socket would lie there as well as the box's."""
    scratch = tmp_path / ("scratch" * 12)
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    write(tmp_path, "max_iter: 4\n")
    job = train(tmp_path, "--workers", "2")
    assert job.process.returncode == 0, job.text


def test_one_worker_without_a_box_is_the_originals_loop(tmp_path: Path) -> None:
    """No exchange, no rule for the rate, no other process."""
    write(tmp_path, f"max_iter: {ENDLESS} display: 100\n")
    with running(tmp_path) as job:
        job.trains()
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        assert stop(job) == 0
    commands = [c for c in children if "forkserver" in command(c)]
    assert commands == []
    assert "memory box" not in job.text
    assert "lr = 0.01" in job.text


def command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_one_worker_with_a_box_exchanges(tmp_path: Path, address: str) -> None:
    write(tmp_path, "max_iter: 20\n")
    job = train(tmp_path, "--smb", address)
    assert job.process.returncode == 0, job.text
    assert "memory box outside at" in job.text
    assert steps(tmp_path) == [20]


def test_two_jobs_share_a_box_and_leave_nothing_in_it(tmp_path: Path, address: str, box: smb.Box) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        write(folder, "max_iter: 200\n")
    options = ("--workers", "2", "--smb", address)
    with running(folders[0], *options) as one, running(folders[1], *options) as two:
        assert [one.end(), two.end()] == [0, 0]
    assert [sum(steps(folder)) for folder in folders] == [200, 200]
    assert box.list() == []


def test_a_job_name_that_runs_already_is_refused(tmp_path: Path, address: str) -> None:
    write(tmp_path, f"max_iter: {ENDLESS} display: 100\n")
    other = tmp_path / "other"
    other.mkdir()
    write(other, "max_iter: 20\n")
    with running(tmp_path, "--workers", "2", "--smb", address, "--job", "night") as job:
        job.trains()
        second = train(other, "--workers", "2", "--smb", address, "--job", "night")
        assert second.process.returncode == 1
        assert "job 'night' runs in this box already; choose another --job" in second.text
        assert stop(job) == 0


def test_a_center_of_another_net_is_refused(tmp_path: Path, address: str, box: smb.Box) -> None:
    box.create("night/center", count=21, lifetime="attached", meta=b"somebody else's")
    write(tmp_path, "max_iter: 20\n")
    job = train(tmp_path, "--workers", "2", "--smb", address, "--job", "night")
    assert job.process.returncode == 1
    assert re.search(r"Worker \d \(pid \d+\): center 'night/center' in the box is another net's", job.text)


@pytest.mark.parametrize("when", ["", "snapshot: 20", "snapshot: 20 snapshot_after_train: false"])
def test_the_final_model_is_the_center(tmp_path: Path, address: str, box: smb.Box, when: str) -> None:
    """Somebody else keeps the center attached: what is saved is what it holds when all have ended.

    A snapshot that is due at the last iteration is no exception: other workers' last updates come after it.
    """
    write(tmp_path, f"max_iter: 60 {when}\n")
    center = box.create("night/center", count=21, lifetime="attached", meta=fingerprint(tmp_path))
    center.write(np.linspace(-1, 1, 21, dtype=np.float32))
    job = train(tmp_path, "--workers", "2", "--smb", address, "--job", "night")
    assert job.process.returncode == 0, job.text
    np.testing.assert_array_equal(weights(tmp_path / "solver_iter_60.caffemodel").ravel(), center.read()[:18])


def fingerprint(folder: Path) -> bytes:
    from prototxt import Net
    from shmtrain.params import Params

    with Net(folder / "net.prototxt") as net:
        return Params(net).fingerprint()


def test_workers_that_did_not_create_the_center_begin_with_it(
    tmp_path: Path, address: str, box: smb.Box
) -> None:
    """At a rate of 0 each worker keeps what it began with, and so does the center."""
    write(tmp_path, "max_iter: 8 snapshot: 4\n")
    solver = tmp_path / "solver.prototxt"
    solver.write_text(solver.read_text().replace("0.01", "0.0"))
    center = box.create("night/center", count=21, lifetime="attached", meta=fingerprint(tmp_path))
    start = np.linspace(-1, 1, 21, dtype=np.float32)
    center.write(start)
    job = train(tmp_path, "--workers", "3", "--smb", address, "--job", "night")
    assert job.process.returncode == 0, job.text
    np.testing.assert_array_equal(center.read(), start)


def test_a_job_resumes_from_its_snapshot_with_another_number_of_workers(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 100 snapshot: 50\n")
    assert train(tmp_path, "--workers", "2", "--max-iter", "50").process.returncode == 0
    job = train(tmp_path, "--workers", "3", "--resume")
    assert job.process.returncode == 0, job.text
    assert "Resuming from solver_iter_50.solverstate" in job.text
    assert sum(steps(tmp_path)) == 50
    assert (tmp_path / "solver_iter_100.caffemodel").exists()


def test_the_papers_rules_end_a_job(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 60 test_iter: 1 test_interval: 1000\n")
    job = train(tmp_path, "--workers", "2", "--termination", "fastest")
    assert job.process.returncode == 0, job.text
    assert max(steps(tmp_path)) in (30, 31)  # 31: the other one passed the test in the same moment
    tested = [int(at) for at in re.findall(r"Iteration (\d+), Testing net", job.text)]
    assert tested[-1] == sum(steps(tmp_path))  # at the end, whatever its iteration is
    assert tested in ([0, tested[-1]], tested[-1:])  # a leader that starts late may find the job done


def test_a_long_test_phase_does_not_stop_the_others(tmp_path: Path) -> None:
    """What worker 0 shows after a test phase is far on: worker 1 has trained meanwhile."""
    write(tmp_path, "max_iter: 9000 test_iter: 3000 test_interval: 2000 display: 100\n")
    job = train(tmp_path, "--workers", "2")
    assert job.process.returncode == 0, job.text
    assert sum(steps(tmp_path)) == 9000
    shown = [int(at) for at in re.findall(r"Iteration (\d+) \(", job.text)]
    assert max(np.diff(shown)) >= 500  # 100 or 200, had the other one waited


@pytest.fixture(scope="module")
def long_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job of two workers that trains while it is looked at."""
    folder = tmp_path_factory.mktemp("job")
    write(folder, f"max_iter: {ENDLESS} display: 100\n")
    with running(folder, "--workers", "2") as job:
        job.trains()
        yield job
        assert stop(job) == 0


def test_the_box_of_a_job_is_private_to_the_user(long_job: Job) -> None:
    socket = Path(long_job.wait_for(r"memory box in the launcher at unix:(\S+)")[1])
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700


def test_the_launcher_loads_no_torch(long_job: Job) -> None:
    """It stays beside the workers for the whole training: tens of MiB against hundreds."""
    assert "libtorch" not in Path(f"/proc/{long_job.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{long_job.pid_of(0)}/maps").read_text()


def test_the_terminals_ctrl_c_reaches_each_worker_once(long_job: Job) -> None:
    """A terminal signals the whole process group; a worker that got it twice would end at once, unsaved."""
    groups = {os.getpgid(long_job.pid_of(rank)) for rank in range(2)}
    assert os.getpgid(long_job.process.pid) not in groups
    assert len(groups) == 2


def test_every_worker_takes_the_threads_it_is_given(tmp_path: Path) -> None:
    code = "from shmtrain.config import TrainConfig; from shmtrain.options import Options\n"
    code += "from shmtrain.handover import worker_threads\n"
    code += (
        "print(*(worker_threads(TrainConfig.load('solver.prototxt', Options(workers=n))) for n in (2, 64)))"
    )
    write(tmp_path, "max_iter: 20\n")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(max(1, len(os.sched_getaffinity(0)) // 2)), "1"]


def test_on_a_terminal_a_bar_and_the_result_are_shown(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 60 test_iter: 1 test_interval: 60\n")
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    words = [sys.executable, "-m", "shmtrain.cli", "solver.prototxt", "--workers", "2", "--threads", "1"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's end
            while data := os.read(screen, 65536):
                shown += data
    os.close(screen)
    assert process.returncode == 0, shown.decode()
    assert "60/60" in shown.decode()
    assert re.search(r"images/s, exchange [\d.]+ ms, staleness", shown.decode())
    assert re.search(r"trained 60 iterations in [\d.]+ s; test net #0: loss [\d.e-]+; ", shown.decode())
    assert "Optimization Done." in (tmp_path / "solver.log").read_text()
