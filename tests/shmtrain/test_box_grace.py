"""The memory box of a job outside the launcher dies: its workers train on, and meet again when it is back."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import smb
from shmtrain.grace import Grace, LastingProgress, LastingTickets, Missing
from shmtrain.group import Column, State
from tests.shmtrain.jobs import ENDLESS, Job, gone, running, stop, write
from tests.smb.processes import ServeProcess, wait_for

LONG = f"max_iter: {ENDLESS} display: 20\n"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets, tokens and snapshots lie here; a short path."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def shown(job: Job) -> int:
    """The last iteration of the job that the leader has shown."""
    return max(int(line.split("Iteration ")[1].split(" ")[0]) for line in job.lines if "iter/s" in line)


def goes_on(job: Job, displays: int = 2, seconds: float = 30) -> None:
    seen, end = job.text.count("iter/s"), time.monotonic() + seconds
    while job.text.count("iter/s") < seen + displays:
        assert time.monotonic() < end, job.text
        assert job.process.poll() is None, job.text
        time.sleep(0.05)


def versions(address: str) -> dict[str, int]:
    with smb.connect(address) as box:
        return {row.key.rpartition("/")[2]: row.version for row in box.stats()}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_four_workers_train_on_when_the_daemon_is_killed_and_meet_again(
    tmp_path: Path, place: Path, transport: str
) -> None:
    write(tmp_path, LONG)
    options = ["--snapshot-dir", str(place / "snaps"), "--snapshot-every", "0.3"]
    address = f"unix:{place / 's'}"
    if transport == "tcp":
        address = f"tcp://127.0.0.1:{free_port()}"
        options += ["--tcp", address.removeprefix("tcp://")]
    with (
        ServeProcess(place / "s", *options) as first,
        running(tmp_path, "--workers", "4", "--smb", address, "--box-grace", "30") as job,
    ):
        job.trains()
        goes_on(job)
        before = shown(job)
        with smb.connect(first.address) as box:
            box.snapshot()  # that knows the job: over TCP nothing else brings it back
        first.kill()
        goes_on(job)  # alone
        with ServeProcess(place / "s", *options) as second:
            goes_on(job)
            meets = versions(second.address)["center"]
            assert wait_for(lambda: versions(second.address)["center"] > meets + 10, 30), job.text
            goes_on(job)
            assert shown(job) > before
            assert stop(job) == 0
    workers = {job.pid_of(rank) for rank in range(4)}
    assert all(gone(pid) for pid in workers)
    assert len(list(tmp_path.glob("solver_iter_*.caffemodel"))) == 1
    away = [line for line in job.lines if "training on without the others" in line]
    assert away
    assert len(away) <= 4  # each says so once


@pytest.mark.parametrize(
    ("by_tcp", "saved"), [(0, "saved the center after"), (1, "saved this worker's weights, since the center")]
)
def test_when_no_box_comes_back_in_time_the_center_is_saved_and_the_job_fails(
    tmp_path: Path, place: Path, by_tcp: int, saved: str
) -> None:
    write(tmp_path, LONG)
    with (
        ServeProcess(place / "s", "--tcp", "127.0.0.1:0", "--lease", "2") as daemon,
        running(tmp_path, "--workers", "2", "--smb", daemon.addresses[by_tcp], "--box-grace", "2") as job,
    ):
        job.trains()
        daemon.kill()
        goes_on(job, 1, 2.0)
        assert job.end(20) == 1
    assert len(list(tmp_path.glob("*_rescue_iter_*.caffemodel"))) == 1
    assert "the memory box is gone" in job.text
    assert saved in job.text


def test_a_grace_that_is_no_time_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    for wrong in ("-1", "nan"):
        done = subprocess.run(
            [sys.executable, "-m", "shmtrain.cli", str(tmp_path / "solver.prototxt"), "--box-grace", wrong],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "--box-grace" in done.stderr


# The parts -----------------------------------------------------------------------------------------------


class Flaky:
    """A box whose operations fail as told."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.value = 0
        self.table = np.zeros(2 * len(Column), np.int64)

    def fail(self) -> None:
        if self.error:
            raise self.error

    def add(self, amount: int = 1) -> int:
        self.fail()
        self.value += amount
        return self.value - amount

    def read(self, out: np.ndarray) -> None:
        self.fail()
        out[:] = self.table

    def write(self, array: np.ndarray, offset: int) -> None:
        self.fail()
        self.table[offset : offset + len(array)] = array


def test_iterations_claimed_on_credit_are_settled_when_the_box_is_back() -> None:
    box = Flaky()
    tickets = LastingTickets(box)  # type: ignore[arg-type]
    assert tickets.add(4) == 0
    box.error = smb.Away("gone")
    assert [tickets.add(4), tickets.add(4)] == [4, 8]
    box.error = None
    assert tickets.add(4) == 12
    assert box.value == 16


@pytest.mark.parametrize("error", [smb.Away("gone"), smb.Restarted("dropped")])
def test_a_workers_row_is_written_again_when_the_next_box_has_an_older_table(error: smb.SmbError) -> None:
    box = Flaky()
    progress = LastingProgress(box, 2)  # type: ignore[arg-type]
    progress.put(1, Column.STATE, State.TRAINING)
    progress.put(1, Column.DONE, 5)
    box.error = error
    progress.put(1, Column.DONE, 6)
    assert progress.rows().done(1) == 6
    box.error, box.table[:] = None, 0
    progress.put(1, Column.DONE, 7)
    rows = progress.rows()
    assert (rows.state(1), rows.done(1), rows.state(0)) == (State.TRAINING, 7, State.ABSENT)


def test_a_missed_exchange_is_told_once_and_the_last_one_is_insisted_on() -> None:
    class Meets:
        def __init__(self) -> None:
            self.errors: list[smb.SmbError] = []
            self.stats = type("Stats", (), {"count": 0})()
            self.finished = 0

        def before_forward(self, step: int) -> None:
            self.stats.count += 1
            if self.errors:
                raise self.errors.pop()

        def finish(self) -> None:
            self.before_forward(0)
            self.finished += 1

    box, exchange = Mock(patient=True), Meets()
    lines: list[str] = []
    grace = Grace(box, "Worker 0", lines.append)
    grace.begin()
    missing = Missing(exchange, grace)  # type: ignore[arg-type]
    assert not box.patient
    exchange.errors = [smb.Away("gone")] * 3
    for step in range(5):
        missing.before_forward(step)
    assert [line.partition(": ")[2] for line in lines] == [
        "gone; training on without the others",
        "the memory box is back",
    ]
    exchange.errors = [smb.Restarted("dropped")]
    missing.finish()
    assert exchange.finished == 1
    assert box.patient
    assert lines[2:] == ["Worker 0: dropped"]
