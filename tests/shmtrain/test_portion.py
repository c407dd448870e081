"""--batch global: the workers share the net's batch out; the job counts, tests and saves as one worker."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from prototxt.caffemodel import blob_array, read_net
from shmtrain.counting import LocalCounting, Portion, Portioned
from tests.shmtrain.jobs import HDF5, LAYERS, train, write

SOLVER = (
    "max_iter: 12 display: 4 average_loss: 1 snapshot: 8 snapshot_prefix: 'm' random_seed: 3\n"
    "momentum: 0.9 base_lr: 0.05 lr_policy: 'step' gamma: 0.5 stepsize: 5\n"
)


def files(folder: Path) -> None:
    folder.mkdir()
    write(folder, "", f'name: "tiny"\n{HDF5}{LAYERS}')
    (folder / "solver.prototxt").write_text(f'net: "net.prototxt"\n{SOLVER}')
    random = np.random.default_rng(5)
    with h5py.File(folder / "data.h5", "w") as file:
        file["data"] = random.normal(size=(240, 6)).astype(np.float32)
        file["label"] = random.integers(0, 3, 240).astype(np.float32)
    (folder / "files.txt").write_text("data.h5\n")


def weights(model: Path) -> np.ndarray:
    blobs = [blob for layer in read_net(model).layer for blob in layer.blobs]
    return np.concatenate([blob_array(blob).ravel() for blob in blobs])


@pytest.mark.parametrize("algorithm", ["sync", "allreduce"])
def test_the_mean_gradient_of_four_parts_makes_one_workers_steps(tmp_path: Path, algorithm: str) -> None:
    """Eight images in four parts of two: the same images, the same rates, the same snapshots' names."""
    one, four = tmp_path / "one", tmp_path / "four"
    files(one)
    files(four)
    assert train(one).process.returncode == 0
    job = train(four, "--workers", "4", "--algorithm", algorithm, "--batch", "global")
    assert job.process.returncode == 0, job.text
    names = sorted(path.name for path in one.glob("m_iter_*.caffemodel"))
    assert names == sorted(path.name for path in four.glob("m_iter_*.caffemodel"))
    for name in names:
        np.testing.assert_allclose(weights(four / name), weights(one / name), rtol=1e-5, atol=1e-6)
    said = "4 workers share 12 iterations of 8 images: effective batch 8 "
    assert said in (four / "m.log").read_text()
    assert "Learning rate for 4 workers: the solver's own rate" in (four / "m.log").read_text()
    lines = [[json.loads(line) for line in (folder / "m.jsonl").open()] for folder in (one, four)]
    rates = [[(m["iteration"], m["lr"]) for m in part if m["kind"] == "train"] for part in lines]
    assert rates[0] == rates[1]


def test_asynchronous_workers_take_as_many_images_as_one_worker(tmp_path: Path) -> None:
    """Three workers' parts of 8 images are 3 each: 32 steps make 12 iterations, resumed or not."""
    folder = tmp_path / "job"
    files(folder)
    options = ("--workers", "3", "--batch", "global")
    assert train(folder, *options, "--max-iter", "8").process.returncode == 0
    job = train(folder, *options, "--resume")
    assert job.process.returncode == 0, job.text
    ends = [json.loads(line) for path in folder.glob("m*.jsonl") for line in path.open()]
    ends = [end for end in ends if end["kind"] == "end"]
    assert max(end["iteration"] for end in ends) == 12
    assert sum(end["steps"] for end in ends) == 32  # of both runs: 22 came to 8 iterations, and a bit
    assert "Resuming from m_iter_8.solverstate" in job.text


def test_a_center_that_adds_up_steps_takes_a_part_of_the_rate_for_a_part_of_the_batch(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    files(folder)
    solver = folder / "solver.prototxt"
    solver.write_text(solver.read_text().replace("'step' gamma: 0.5 stepsize: 5", "'fixed'"))
    job = train(folder, "--workers", "2", "--algorithm", "downpour", "--batch", "global", "--max-iter", "400")
    assert job.process.returncode == 0, job.text
    log = (folder / "m.log").read_text()
    assert "Learning rate for 2 workers: the solver's own rate, and 4/8 of it for a step of 4 images" in log
    lines = [json.loads(line) for line in (folder / "m.jsonl").open()]
    rates = {line["lr"] for line in lines if line["kind"] == "train"}
    assert list(rates) == [pytest.approx(0.025)]


@pytest.mark.parametrize(("workers", "images"), [(1, 100), (4, 25), (16, 6), (200, 1)])
def test_steps_come_to_the_same_iterations_however_the_batch_is_shared_out(workers: int, images: int) -> None:
    portion = Portion(images, 100)
    steps = portion.steps(37)
    counting = Portioned(LocalCounting(0, steps), portion)
    claimed = []
    while (iteration := counting.claim()) is not None:
        claimed.append(iteration)
        counting.complete()
    assert counting.completed == 37
    assert claimed == sorted(claimed)
    assert set(claimed) == set(range(37))
    assert 0 <= steps * images - 3700 < images


def test_a_batch_of_no_file_cannot_be_shared_out(tmp_path: Path) -> None:
    write(tmp_path, "max_iter: 4\n")
    job = train(tmp_path, "--workers", "2", "--batch", "global")
    assert job.process.returncode == 1
    assert "--batch global needs one batch to share out" in job.text
    assert "no layer that reads batches from files" in job.text
