"""Workers come and go while a job runs: by `shmtrain --join`, by SIGTERM, by kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.shmtrain.jobs import ENDLESS, Job, running, stop, write

LONG = f"max_iter: {ENDLESS} display: 500\n"


@contextmanager
def joining(folder: Path, address: str, *options: str) -> Iterator[Job]:
    """``shmtrain --join`` as a process; killed at the end if it still runs."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "shmtrain.cli", "solver.prototxt", "--threads", "1", "--smb", address,
            "--job", "J", "--join", *options,
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    job = Job(process)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        job._reader.join(10)


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
    assert list(tmp_path.glob("solver_iter_*.caffemodel"))


def test_who_cannot_join_is_told_why(tmp_path: Path, address: str) -> None:
    write(tmp_path, LONG)
    with joining(tmp_path, address) as job:
        assert job.end() == 1
    assert f"Cannot join: no job 'J' runs in the box at {address}" in job.text
