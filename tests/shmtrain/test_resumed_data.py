"""A training that goes on from a snapshot goes on in its data: it ends where the uninterrupted one ends."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from prototxt import caffemodel
from shmtrain.config import TrainConfig
from shmtrain.counting import LocalCounting
from shmtrain.exchange.none import NoExchange
from shmtrain.learner import Learner
from shmtrain.options import Options
from shmtrain.reports import Reports
from shmtrain.role import Alone
from shmtrain.trainer import Trainer
from tests.shmtrain.jobs import HDF5, LAYERS, write

SOLVER = 'iter_size: 2 random_seed: 3 snapshot_prefix: "{}" max_iter: {}\n'


def trained(folder: Path, prefix: str, iterations: int, options: Options) -> np.ndarray:
    """The weights after so many iterations of the job."""
    write(folder, SOLVER.format(prefix, iterations), f'name: "tiny"\n{HDF5}{LAYERS}')
    config = TrainConfig.load("solver.prototxt", options)
    learner = Learner.open(config, Alone(), Reports.silent().log)
    counting = LocalCounting(learner.iteration, iterations)
    trainer = Trainer(learner, NoExchange(learner.params.array), counting, Alone(), Reports.silent())
    trainer.run()
    trainer.close()
    (layer,) = [
        layer for layer in caffemodel.read_net(f"{prefix}_iter_{iterations}.caffemodel").layer if layer.blobs
    ]
    return caffemodel.blob_array(layer.blobs[0])


@pytest.mark.parametrize("how", [Options(resume=True), Options(snapshot="cut_iter_5.solverstate")])
def test_a_resumed_training_ends_as_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Options
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    with h5py.File("data.h5", "w") as file:  # 7 batches: the cut falls into the second turn
        file["data"], file["label"] = rng.normal(size=(56, 6)), rng.integers(0, 3, 56)
    Path("files.txt").write_text("data.h5\n")
    whole = trained(tmp_path, "whole", 9, Options())
    trained(tmp_path, "cut", 5, Options())
    np.testing.assert_array_equal(trained(tmp_path, "cut", 9, how), whole)
