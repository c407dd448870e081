"""A worker among others: hooks in order, tests and snapshots of the center, its own state beside it."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from prototxt import caffemodel
from shmtrain.config import TrainConfig
from shmtrain.exchange.base import F32, ExchangeStats
from shmtrain.learner import Learner
from shmtrain.log import Log
from shmtrain.metrics import Metrics
from shmtrain.options import Options
from shmtrain.reports import Reports
from shmtrain.snapshot import read_state
from shmtrain.trainer import Summary, Trainer

NET = """
name: "line"
layer { name: "d" type: "DummyData" top: "x" top: "t" dummy_data_param {
  shape { dim: 4 dim: 3 } shape { dim: 4 dim: 1 } data_filler { value: 1 } data_filler { value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {
  num_output: 1 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""
SOLVER = """net: "net.prototxt" base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 random_seed: 3
snapshot_prefix: "s" test_iter: 2 test_interval: 4 display: 4 max_iter: 12 snapshot: 6 """


@dataclass
class Recorded:
    """An exchange that writes down its calls; its center is all ``value``."""

    value: float = 0.25
    calls: list[str] = field(default_factory=list)
    stats: ExchangeStats = field(default_factory=ExchangeStats)

    def before_forward(self, step: int) -> None:
        self.calls.append(f"before {step}")

    def gradients_ready(self, step: int) -> None:
        self.calls.append(f"ready {step}")

    def after_update(self, step: int) -> None:
        self.calls.append(f"after {step}")

    def center(self, out: F32) -> None:
        self.calls.append("center")
        out.fill(self.value)

    def finish(self) -> None:
        self.calls.append("finish")


class EveryOther:
    """The counting of a worker that gets every second iteration of the job."""

    def __init__(self, first: int, end: int) -> None:
        self._next, self._end = first, end
        self.completed = 0

    def claim(self) -> int | None:
        return self._next if self._next < self._end else None

    def complete(self) -> int:
        self._next += 2
        self.completed = min(self._next, self._end)
        return self.completed


@dataclass(frozen=True)
class Place:
    rank: int
    leads: bool
    world: int = 2
    job: str = "job"

    def leading(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "s.prototxt").write_text(SOLVER)
    return tmp_path


def train(place: Place, exchange: Recorded, options: Options | None = None) -> tuple[Summary, Learner]:
    config = TrainConfig.load("s.prototxt", options or Options(workers=2))
    with Reports(Log([], "train.log"), Metrics()) as reports:
        learner = Learner.open(config, place, reports.log)
        counting = EveryOther(learner.iteration + place.rank, config.schedule.max_iter)
        trainer = Trainer(learner, exchange, counting, place, reports)
        summary = trainer.run()
        trainer.close()
    return summary, learner


def test_the_exchange_is_called_in_order_in_each_step_and_finished_once() -> None:
    exchange = Recorded()
    train(Place(1, leads=False), exchange)
    steps = [f"{call} {step}" for step in range(6) for call in ("before", "ready", "after")]
    assert exchange.calls == [*steps, "finish"]


def test_the_leader_tests_and_saves_the_center_and_trains_on_its_own_weights() -> None:
    summary, learner = train(Place(0, leads=True), Recorded(0.25))
    # y = 3 x 0.25 + 0.25 for all items: the loss is (1 - 1)^2 / 2
    assert [score.values["loss"] for score in summary.scores] == [[0.0]]
    model = caffemodel.read_net("s_iter_12.caffemodel")
    saved = [caffemodel.blob_array(blob) for layer in model.layer for blob in layer.blobs]
    assert saved
    assert all((array == 0.25).all() for array in saved)
    assert not (learner.params.array == 0.25).any()


def test_intervals_of_the_job_are_named_after_their_multiples() -> None:
    train(Place(0, leads=True), Recorded())
    log = Path("train.log").read_text()
    assert re.findall(r"Iteration (\d+), Testing", log) == ["0", "4", "8", "12"]
    assert re.findall(r"Iteration (\d+), lr", log) == ["0", "4", "8"]
    assert sorted(p.name for p in Path().glob("s_iter_*.solverstate")) == [
        "s_iter_12.solverstate",
        "s_iter_6.solverstate",
    ]


def test_the_others_save_their_own_state_and_nothing_else() -> None:
    train(Place(1, leads=False), Recorded())
    assert sorted(p.name for p in Path().glob("s_iter_*")) == [
        "s_iter_12.worker1.npz",
        "s_iter_6.worker1.npz",
    ]
    assert "Testing net" not in Path("train.log").read_text()


def test_each_worker_goes_on_with_its_own_history_and_steps() -> None:
    _, leader = train(Place(0, leads=True), Recorded())
    _, other = train(Place(1, leads=False), Recorded(), Options(workers=2, seed=9))
    place = Place(1, leads=False)
    config = TrainConfig.load("s.prototxt", Options(workers=2, resume=True))
    again = Learner.open(config, place, Log())
    assert (again.iteration, again.updater.count) == (12, 6)
    np.testing.assert_array_equal(again.updater.history[0], other.updater.history[0])
    assert not np.array_equal(again.updater.history[0], leader.updater.history[0])


def test_a_worker_that_the_snapshot_lacks_starts_with_no_history_and_says_so() -> None:
    train(Place(0, leads=True), Recorded())
    config = TrainConfig.load("s.prototxt", Options(workers=3, resume=True))
    with Log([], "new.log") as log:
        third = Learner.open(config, Place(2, leads=False, world=3), log)
    assert (third.updater.history[0] == 0).all()
    assert "No history of worker 2" in Path("new.log").read_text()
    assert third.iteration == 12


def test_one_worker_goes_on_from_the_snapshot_of_two() -> None:
    train(Place(0, leads=True), Recorded())
    state = read_state("s_iter_12.solverstate")
    alone = Learner.open(
        TrainConfig.load("s.prototxt", Options(resume=True)), Place(0, leads=True, world=1), Log()
    )
    np.testing.assert_array_equal(alone.updater.history[0][:3], state.history[0].ravel())
    assert (alone.params.array == 0.25).all()
