"""--share-data: one reader process feeds the workers of a machine; deaths are named, nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import h5py
import numpy as np

from tests.shmtrain.jobs import ENDLESS, HDF5, LAYERS, running, stop, write

LONG = f"max_iter: {ENDLESS} display: 200\n"


def job_files(folder: Path, solver: str) -> None:
    write(folder, solver, f'name: "tiny"\n{HDF5}{LAYERS}')
    rng = np.random.default_rng(0)
    with h5py.File(folder / "data.h5", "w") as file:
        file["data"] = rng.normal(size=(64, 6)).astype(np.float32)
        file["label"] = rng.integers(0, 3, 64).astype(np.float32)
    (folder / "files.txt").write_text("data.h5\n")


def readers(folder: Path) -> set[int]:
    """The reader processes of this job: all work in its folder, few others do."""
    found = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"prototxt.data.reader" in command and Path(f"/proc/{pid}/cwd").readlink() == folder:
                found.add(pid)
        except OSError:
            continue
    return found


def test_one_reader_serves_all_and_a_killed_worker_stops_nobody(tmp_path: Path) -> None:
    job_files(tmp_path, LONG)
    with running(tmp_path, "--workers", "3", "--share-data") as job:
        job.trains()
        assert len(readers(tmp_path)) == 1
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.wait_for(r"[Ww]orker 1 .*(died|killed|SIGKILL)")
        seen, deadline = job.text.count("iter/s"), time.monotonic() + 30
        while job.text.count("iter/s") < seen + 2:
            assert time.monotonic() < deadline, job.text
            time.sleep(0.05)
        stop(job)
    assert not readers(tmp_path)


def test_a_shared_reader_that_dies_ends_the_job_with_its_name(tmp_path: Path) -> None:
    job_files(tmp_path, LONG)
    with running(tmp_path, "--workers", "2", "--share-data") as job:
        job.trains()
        (reader,) = readers(tmp_path)
        os.kill(reader, signal.SIGKILL)
        assert job.end(60) != 0
    assert "ended in SIGKILL (out of memory, or killed by hand)" in job.text
    assert f"the shared reader of {tmp_path}/files.txt is gone" in job.text
