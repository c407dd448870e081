"""Every algorithm by its command: 2 to 4 processes on a tiny net, to the end; and what deaths do to it."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from shmtrain.method import METHODS, method
from shmtrain.options import MethodOptions
from tests.shmtrain.jobs import ENDLESS, running, stop, train, write
from tests.shmtrain.test_launch_faults import job_goes_on, weights

LONG = f"max_iter: {ENDLESS} display: 40\n"
SHORT = "max_iter: 40 display: 20 momentum: 0.9 snapshot_prefix: 'm' test_iter: 1 test_interval: 20\n"
OPTIONS: dict[str, list[str]] = {
    "seasgd": ["--tau", "2", "--warm-start", "8", "--exchange", "overlapped"],
    "easgd": ["--beta", "0.8", "--staleness", "inverse"],
    "eamsgd": ["--tau", "2"],
    "downpour": ["--n-fetch", "2", "--n-push", "2", "--server", "adagrad"],
    "sync": ["--backup-workers", "1"],
    "allreduce": [],
    "hybrid": ["--group-size", "2"],
    "diloco": ["--tau", "5"],
    "local": [],
}


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


def test_every_algorithm_is_tried_here() -> None:
    """But for those that meet by MPI: test_mpi.py has them."""
    assert OPTIONS.keys() == {name for name, entry in METHODS.items() if entry.box}


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_job_ends_and_says_what_a_step_means(tmp_path: Path, algorithm: str) -> None:
    write(tmp_path, SHORT)
    job = train(tmp_path, "--workers", "3", "--algorithm", algorithm, *OPTIONS[algorithm])
    assert job.process.returncode == 0, job.text
    assert f"effective batch {16 if algorithm == 'sync' else 24} ({algorithm}" in job.text
    assert METHODS[algorithm].title in job.text
    assert "Learning rate for 3 workers" in job.text
    assert "Optimization Done." in job.text
    assert ("S2xA2" in job.text) == (algorithm == "hybrid")
    (model,) = tmp_path.glob("m_iter_*.caffemodel")
    assert np.isfinite(weights(model)).all()
    if algorithm not in ("hybrid", "sync"):
        assert model.name == "m_iter_40.caffemodel"


@pytest.mark.parametrize("algorithm", ["seasgd", "easgd", "hybrid"])
def test_increments_travel_in_a_wire_type_over_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    write(tmp_path, SHORT)
    with smb.serve(unix=tmp_path / "s", tcp="127.0.0.1:0", token=b"a token for this test") as daemon:
        token = tmp_path / "token"
        token.write_bytes(b"a token for this test")
        token.chmod(0o600)
        monkeypatch.setenv("SMB_TOKEN_FILE", str(token))
        options = ["--smb", daemon.addresses[1], "--algorithm", algorithm, "--wire", "int8"]
        job = train(tmp_path, "--workers", "2", *options)
    assert job.process.returncode == 0, job.text
    assert "wire int8" in job.text
    errors = re.findall(r"quantising error ([\d.e-]+) of the increments", job.text)
    assert len(errors) == 1  # the first worker's log tells of itself
    assert 0 < float(errors[0]) < 0.05
    (model,) = tmp_path.glob("m_iter_40.caffemodel")
    assert np.isfinite(weights(model)).all()


@pytest.mark.parametrize("algorithm", ["downpour", "sync", "allreduce", "hybrid", "diloco"])
def test_a_killed_worker_does_not_hang_the_others(tmp_path: Path, algorithm: str) -> None:
    """The first one: it leads, and is a group's root."""
    write(tmp_path, LONG + "snapshot_prefix: 'm'\n")
    with running(tmp_path, "--workers", "3", "--algorithm", algorithm) as job:
        job.trains()
        pid = job.pid_of(0)
        os.kill(pid, signal.SIGKILL)
        job.wait_for(rf"Worker 0 \(pid {pid}\) was killed by SIGKILL")
        goes_on(tmp_path / "m.worker1.log")
        assert stop(job) == 0, job.text
    assert len(list(tmp_path.glob("m_iter_*.caffemodel"))) == 1


def goes_on(log: Path, timeout: float = 30.0) -> None:
    """Two more displays come than there are now."""
    seen, deadline = shown(log), time.monotonic() + timeout
    while shown(log) < seen + 2:
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.05)


def shown(log: Path) -> int:
    return len(re.findall(r"Iteration \d+ \(", log.read_text())) if log.exists() else 0


@pytest.mark.parametrize("algorithm", ["sync", "allreduce", "hybrid"])
def test_a_stopped_worker_is_waited_for_and_named_when_it_takes_too_long(
    tmp_path: Path, algorithm: str
) -> None:
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--algorithm", algorithm, "--stuck", "1") as job:
        job.trains()
        pid = job.pid_of(1)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for(rf"Worker 1 \(pid {pid}\) is stuck: no step for")
        os.kill(pid, signal.SIGCONT)
        job_goes_on(job)
        assert stop(job) == 0


def test_a_wait_over_its_limit_ends_the_job_and_names_the_worker(tmp_path: Path) -> None:
    """The one that did not come does not end the job alone, stopped or not: its work would be no one's."""
    write(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--algorithm", "sync", "--wait-limit", "1") as job:
        job.trains()
        pid = job.pid_of(1)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for(rf"Worker 0 .*: nothing from worker 1 \(pid {pid}\) within 1 s")
        assert job.end(30) == 1
    assert f"Worker 1 (pid {pid}) did not come to the others in time: the job fails" in job.text


WRONG = {
    "another's option": (
        ["--algorithm", "easgd", "--n-push", "2"],
        "--n-push is an option of downpour, not of easgd",
    ),
    "alpha where there is none": (["--algorithm", "sync", "--alpha", "0.2"], "--alpha is an option of"),
    "alpha and beta": (["--alpha", "0.2", "--beta", "0.9"], "--alpha and --beta exclude one another"),
    "a rule for the end": (["--algorithm", "sync", "--termination", "mean"], "--termination is an option of"),
    "too many backups": (
        ["--workers", "2", "--algorithm", "sync", "--backup-workers", "2"],
        "--backup-workers 2 of 2 workers leaves none to wait for",
    ),
    "a policy": (["--staleness", "drop"], "--staleness 'drop' is none of none, inverse"),
    "a misspelt policy": (["--staleness", "invers"], "did you mean 'inverse'?"),
    "staleness without asynchrony": (
        ["--algorithm", "diloco", "--staleness", "inverse"],
        "need --asynchronous",
    ),
    "a group of none": (["--algorithm", "hybrid", "--group-size", "0"], "--group-size 0: must be at least 1"),
    "momentum 1": (
        ["--algorithm", "diloco", "--outer-momentum", "1"],
        "--outer-momentum 1: must lie in [0, 1)",
    ),
    "a wire within one host": (["--workers", "2", "--wire", "int8"], "--wire int8 is for a box on a network"),
    "a wire for the paper's way": (
        ["--smb", "tcp://127.0.0.1:1", "--wire", "int8", "--exchange", "paper"],
        "--wire int8 needs --exchange fused, not paper",
    ),
    "no limit": (["--wait-limit", "0"], "--wait-limit 0: must be above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    from shmtrain.cli import main

    write(tmp_path, SHORT)
    monkeypatch.chdir(tmp_path)
    options, said = WRONG[case]
    with pytest.raises(SystemExit) as ended:
        main(["solver.prototxt", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_defaults_are_those_that_converge() -> None:
    """Four workers on the small digits: downpour's plain pushes, an asynchronous momentum of 0.9 diverge."""
    told = MethodOptions(asynchronous=True)
    assert method("downpour", 4, False, MethodOptions()).staleness == "inverse"
    assert method("diloco", 4, False, MethodOptions()).outer_momentum == 0.6
    assert method("diloco", 4, False, told).outer_momentum == 0.5


def test_a_warm_start_lets_the_first_worker_begin_alone(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 60 display: 1 snapshot_prefix: 'm'\n")
    job = train(tmp_path, "--workers", "2", "--warm-start", "20", "--algorithm", "downpour")
    assert job.process.returncode == 0, job.text
    metrics = (tmp_path / "m.worker1.jsonl").read_text()
    begun = [int(n) for n in re.findall(r'"iteration": ?(\d+)', metrics)]
    assert min((n for n in begun if n > 0), default=60) >= 16, metrics
