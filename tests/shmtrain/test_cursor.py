"""--data cursor: the workers of a job read each record once an epoch, while others come and go."""

from __future__ import annotations

import os
import signal
from collections import Counter as Multiset
from pathlib import Path

import h5py
import numpy as np
import pytest

import smb
from prototxt.caffemodel import blob_array, read_net
from shmtrain.config import TrainConfig
from shmtrain.cursor import Cursor
from shmtrain.exchange.termination import MAX_QUOTA, SharedCounting, open_counting
from shmtrain.options import ConfigError, Options
from tests.shmtrain.jobs import running, train, write
from tests.shmtrain.test_elastic import joining
from tests.shmtrain.test_exchange_termination import places
from tests.smb.processes import wait_for

RECORDS, BATCH = 6_000, 2

# each record moves a weight of its own by 1, so that the center counts how often it was read
TALLY = f"""
name: "tally"
layer {{
  name: "data" type: "HDF5Data" top: "record"
  hdf5_data_param {{ source: "files.txt" batch_size: {BATCH} }}
}}
layer {{
  name: "tally" type: "Embed" bottom: "record" top: "ones"
  embed_param {{ num_output: 1 input_dim: {RECORDS} bias_term: false weight_filler {{ type: "constant" }} }}
}}
layer {{ name: "sum" type: "Reduction" bottom: "ones" top: "sum" loss_weight: 1 }}
"""
SOLVER = f"max_iter: {RECORDS // BATCH} display: 50 snapshot_after_train: true base_lr: 1\n"


def files(folder: Path) -> None:
    write(folder, SOLVER, TALLY)
    solver = folder / "solver.prototxt"
    solver.write_text(solver.read_text().replace("base_lr: 0.01\n", ""))
    with h5py.File(folder / "data.h5", "w") as file:
        file["record"] = np.arange(RECORDS, dtype=np.float32)
    (folder / "files.txt").write_text("data.h5\n")


def test_an_epoch_is_read_exactly_once_while_one_joins_and_one_leaves(tmp_path: Path, address: str) -> None:
    files(tmp_path)
    options = ["--workers", "2", "--smb", address, "--job", "J", "--data", "cursor"]
    with running(tmp_path, *options, "--algorithm", "downpour", "--staleness", "none") as job:
        first, second = job.pid_of(0), job.pid_of(1)
        job.trains()
        log = tmp_path / "solver.worker1.log"
        assert wait_for(lambda: "Starting Optimization" in log.read_text(), 60)
        for pid in (first, second):  # they wait for the third, which takes seconds to start
            os.kill(pid, signal.SIGSTOP)
        with joining(tmp_path, address) as third:
            job.wait_for(r"Worker 2 .* has joined")
            os.kill(second, signal.SIGTERM)
            for pid in (first, second):
                os.kill(pid, signal.SIGCONT)
            job.wait_for(rf"Worker 1 \(pid {second}\) has left the job after \d+ iterations of its own")
            assert job.end(60) == 0
            assert third.end() == 0
    saved = read_net(tmp_path / f"solver_iter_{RECORDS // BATCH}.caffemodel")
    (tally,) = [layer for layer in saved.layer if layer.name == "tally"]
    assert Multiset((-blob_array(tally.blobs[0])).ravel().tolist()) == {1.0: RECORDS}


def test_an_epoch_in_parts_of_the_batch_by_one_reader_is_read_exactly_once(tmp_path: Path) -> None:
    files(tmp_path)
    options = ("--workers", "2", "--data", "cursor", "--share-data", "--batch", "global")
    job = train(tmp_path, *options, "--algorithm", "downpour", "--staleness", "none")
    assert job.process.returncode == 0, job.text
    saved = read_net(tmp_path / f"solver_iter_{RECORDS // BATCH}.caffemodel")
    (tally,) = [layer for layer in saved.layer if layer.name == "tally"]
    assert Multiset((-blob_array(tally.blobs[0])).ravel().tolist()) == {0.5: RECORDS}  # a part of the rate


def test_what_a_worker_had_claimed_when_it_died_is_all_that_is_lost(box: smb.Box) -> None:
    counter = box.counter("job/iterations")
    batches: list[int] = []
    here, dead = (open_counting("counter", place, lambda: counter) for place in places(box, 2, 0, 2000))
    assert isinstance(here, SharedCounting)
    assert isinstance(dead, SharedCounting)
    numbers = {}
    for counting in (here, dead):
        cursor = Cursor(iter_size=2)
        cursor.follow(counting)
        numbers[counting] = cursor.options()["claims"]
    steps = 0
    while here.claim() is not None:
        assert numbers[here](2 * steps + 4) is not None or here.upcoming(steps + 2) is None
        batches += [numbers[here](2 * steps), numbers[here](2 * steps + 1)]
        here.complete()
        if steps < 5:
            dead.claim()
            batches += [numbers[dead](2 * steps), numbers[dead](2 * steps + 1)]
        steps += 1
    read = Multiset(batches)
    assert set(read.values()) == {1}
    assert len(set(range(4000)) - set(read)) <= 2 * MAX_QUOTA
    assert max(read) == 3999


def test_one_that_leaves_computes_what_it_has_claimed_and_no_more(box: smb.Box) -> None:
    counter = box.counter("job/iterations")
    (place,) = places(box, 1, 100, 10_000)
    counting = open_counting("counter", place, lambda: counter)
    assert isinstance(counting, SharedCounting)
    cursor = Cursor(iter_size=1)
    cursor.follow(counting)
    number = cursor.options()["claims"]
    assert [counting.claim(), number(0), number(MAX_QUOTA)] == [100, 100, 100 + MAX_QUOTA]
    counting.leave()
    assert number(2 * MAX_QUOTA) is None
    left = [counting.claim() for _ in range(2 * MAX_QUOTA)]
    assert left == [*range(101, 100 + 2 * MAX_QUOTA), None]
    assert counter.value == 2 * MAX_QUOTA  # a job that goes on begins behind what was claimed


def test_who_does_not_claim_cannot_read_by_the_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "max_iter: 10\n")
    for options in (
        Options(workers=2, algorithm="sync", data="cursor"),
        Options(workers=2, termination="mean", data="cursor"),
    ):
        with pytest.raises(ConfigError, match="--data cursor needs workers that claim"):
            TrainConfig.load(str(path), options)
