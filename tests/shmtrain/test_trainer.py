"""The loop prints what the original printed, line by line, and keeps its counts, signals and snapshots."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmtrain.config import TrainConfig
from shmtrain.counting import LocalCounting
from shmtrain.exchange.none import NoExchange
from shmtrain.learner import Learner
from shmtrain.log import Log
from shmtrain.metrics import Metrics
from shmtrain.options import Options
from shmtrain.reports import Reports
from shmtrain.role import Alone
from shmtrain.signals import before_training
from shmtrain.snapshot import SnapshotError
from shmtrain.trainer import Diverged, Interval, Smoothed, Summary, Trainer

NET = """
name: "line"
layer { name: "d" type: "DummyData" top: "x" top: "t" dummy_data_param {
  shape { dim: 4 dim: 3 } shape { dim: 4 dim: 1 }
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {
  num_output: 1 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""
SOLVER = """net: "net.prototxt"
base_lr: 0.05
lr_policy: "fixed"
momentum: 0.9
random_seed: 3
snapshot_prefix: "s"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path


def trainer_for(config: TrainConfig) -> Trainer:
    """A trainer alone, with its log in train.log and its metrics in train.jsonl of the working directory."""
    reports = Reports(Log([], "train.log"), Metrics("train.jsonl"))
    learner = Learner.open(config, Alone(), reports.log)
    counting = LocalCounting(learner.iteration, config.schedule.max_iter)
    return Trainer(learner, NoExchange(learner.params.array), counting, Alone(), reports)


def train(
    text: str, options: Options | None = None, before: Callable[[Trainer], None] | None = None
) -> Summary:
    Path("s.prototxt").write_text(SOLVER + text)
    trainer = trainer_for(TrainConfig.load("s.prototxt", options))
    try:
        if before is not None:
            before(trainer)
        return trainer.run()
    finally:
        trainer.close()
        trainer.reports.close()


def log_lines() -> list[str]:
    """The messages of train.log, without their prefix; the lines of the solver's parameters left out."""
    return [line.split("] ", 1)[1] for line in Path("train.log").read_text().splitlines() if "] " in line]


# Against the original's logs -----------------------------------------------------------------------------

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
TIMING = re.compile(r"\([^)]* iter/s, [^)]*\)")


def essential(lines: list[str]) -> list[str]:
    """The lines that a log of ours must have too; losses are masked, iterations and rates are not.

    The weights that the original's runs began with are not kept, so their losses cannot come again.
    """
    kept = [TIMING.sub("()", line).rstrip() for line in lines if "Ignoring source layer" not in line]
    return [
        re.sub(r"(= |loss: )" + NUMBER.pattern, r"\1n", line) if "lr =" not in line else line for line in kept
    ]


@pytest.mark.parametrize(
    ("log", "options"),
    [
        ("train_resume", Options(snapshot="full_iter_6.solverstate")),
        ("train_finetune", Options(weights=("full_iter_6.caffemodel",))),
    ],
)
def test_the_log_of_a_run_agrees_with_the_originals_line_by_line(
    log: str, options: Options, shared: Path, folder: Path
) -> None:
    golden = shared / "golden" / "cli"
    for name in ("smallnet.prototxt", "full.solver.prototxt", "train_list.txt", "train.h5",
                 "full_iter_6.caffemodel", "full_iter_6.solverstate"):  # fmt: skip
        (folder / name).symlink_to(golden / name)
    for name in ("full_iter_6.caffemodel", "full_iter_6.solverstate"):
        (folder / name).unlink()
        (folder / name).write_bytes((golden / name).read_bytes())
    config = TrainConfig.load("full.solver.prototxt", options)
    trainer = trainer_for(config)
    trainer.run()
    trainer.close()
    trainer.reports.close()
    theirs = [
        line.split("] ", 1)[1] for line in (golden / f"{log}.log").read_text().splitlines() if "] " in line
    ]
    start = theirs.index("Solving smallnet")
    ours = log_lines()
    assert re.fullmatch(r"Wait for data: p50 \d+ us, p99 \d+ us a step, .*", ours.pop())  # our own
    got = essential(ours[ours.index("Solving smallnet") :])
    assert got == essential(theirs[start:-1])  # the last line is the original's command's, not the solver's


def test_the_originals_log_parser_reads_our_log(folder: Path) -> None:
    """Its own regular expressions, and its reading of the date."""
    train("max_iter: 6\ndisplay: 2\ntest_iter: 2\ntest_interval: 3\n")
    text = Path("train.log").read_text()
    for line in (line for line in text.splitlines() if "] " in line):
        day = line.split()[0]
        assert 1 <= int(day[1:3]) <= 12
        assert 1 <= int(day[3:]) <= 31
    rows = re.findall(
        r"Iteration (\d+) .*loss = (\S+)\n.*Train net output #(\d+): (\S+) = ([\.\deE+-]+)", text
    )
    assert [row[0] for row in rows] == ["0", "2", "4"]
    assert re.findall(r"Iteration (\d+), lr = ([-+]?[0-9]*\.?[0-9]+([eE]?[-+]?[0-9]+)?)", text)
    assert len(re.findall(r"Test net output #(\d+): (\S+) = ([\.\deE+-]+)", text)) == 3


# Counts --------------------------------------------------------------------------------------------------


def snapshots(folder: Path) -> list[int]:
    return sorted(int(p.stem.rsplit("_", 1)[1]) for p in folder.glob("s_iter_*.solverstate"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("snapshot: 5", [5, 10]),
        ("snapshot: 4", [4, 8, 10]),
        ("", [10]),
        ("snapshot_after_train: false", []),
        ("snapshot: 4 snapshot_after_train: false", [4, 8]),
    ],
)
def test_snapshots_are_made_at_multiples_and_once_at_the_end(
    text: str, wanted: list[int], folder: Path
) -> None:
    train(f"max_iter: 10\n{text}\n")
    assert snapshots(folder) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("", ["0", "5", "10"]), ("test_initialization: false", ["5", "10"])],
)
def test_tests_come_at_multiples_and_at_both_ends(text: str, wanted: list[str], folder: Path) -> None:
    train(f"max_iter: 10\ntest_iter: 1\ntest_interval: 5\n{text}\n")
    assert re.findall(r"Iteration (\d+), Testing net", Path("train.log").read_text()) == wanted


def test_several_test_nets_are_each_averaged_over_their_own_batches(folder: Path) -> None:
    summary = train("max_iter: 2\ntest_iter: 1\ntest_iter: 3\ntest_interval: 2\ntest_compute_loss: true\n")
    assert [score.net for score in summary.scores] == [0, 1]
    assert all(score.loss is not None for score in summary.scores)
    assert "Testing net (#1)" in Path("train.log").read_text()


def test_an_interval_is_due_once_when_its_multiple_is_passed() -> None:
    every_five = Interval(5, -1)
    assert [every_five.passed(n) for n in (0, 3, 4, 6, 7, 12, 23)] == [0, None, None, 5, None, 10, 20]
    never = Interval(0, -1)
    assert [never.passed(n) for n in range(4)] == [None] * 4
    resumed = Interval(5, 9)
    assert [resumed.passed(n) for n in (10, 11)] == [10, None]


def test_the_shown_loss_is_the_mean_of_the_last_losses() -> None:
    smoothed = Smoothed(3)
    losses = [4.0, 2.0, 6.0, 1.0, 5.0]
    got = [smoothed.add(loss) for loss in losses]
    want = [np.mean(losses[max(0, i - 2) : i + 1]) for i in range(5)]
    np.testing.assert_allclose(got, want)


def test_a_loss_that_is_not_finite_spoils_only_its_window() -> None:
    smoothed = Smoothed(2)
    for loss in (1.0, float("inf"), 2.0):
        smoothed.add(loss)
    assert smoothed.add(4.0) == 3.0


def test_iter_size_takes_the_mean_gradient_of_its_batches(folder: Path) -> None:
    """Constant data: two equal batches of an iteration must train as one does."""
    constant = NET.replace('data_filler { type: "gaussian" }', 'data_filler { type: "constant" value: 0.3 }')
    Path("net.prototxt").write_text(constant)
    losses = [train(f"max_iter: 5\niter_size: {size}\nsnapshot_after_train: false\n").loss for size in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# Signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("effect", "ignored"), [("snapshot", True), ("none", True), ("stop", False)])
def test_a_hangup_while_nothing_can_be_saved_ends_nothing_unless_it_shall(effect: str, ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        before_training(effect)
        assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def at(iteration: int, action: Callable[[], object]) -> Callable[[Trainer], None]:
    """Do ``action`` during the job's ``iteration``."""

    def install(trainer: Trainer) -> None:
        count = iter(range(10_000))

        def ready() -> None:
            if next(count) == iteration:
                action()

        trainer.callbacks.append((lambda: None, ready))

    return install


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_twice() -> None:
    interrupt()
    interrupt()


def test_an_interrupt_ends_after_the_iteration_with_a_snapshot_and_no_test(folder: Path) -> None:
    summary = train("max_iter: 100\ntest_iter: 1\ntest_interval: 8\n", before=at(7, interrupt))
    assert (summary.iterations, summary.stopped) == (8, True)
    assert snapshots(folder) == [8]
    assert log_lines()[-1] == "Optimization stopped early."
    assert re.findall(r"Iteration (\d+), Testing net", Path("train.log").read_text()) == ["0"]


def test_an_interrupt_without_snapshot_after_train_saves_nothing(folder: Path) -> None:
    train("max_iter: 100\nsnapshot_after_train: false\n", before=at(7, interrupt))
    assert snapshots(folder) == []


def test_a_hangup_makes_a_snapshot_and_goes_on(folder: Path) -> None:
    summary = train("max_iter: 10\n", before=at(3, lambda: os.kill(os.getpid(), signal.SIGHUP)))
    assert (summary.iterations, summary.stopped) == (10, False)
    assert snapshots(folder) == [4, 10]


def test_the_effects_of_the_signals_can_be_chosen(folder: Path) -> None:
    summary = train("max_iter: 10\n", Options(sigint_effect="snapshot"), before=at(3, interrupt))
    assert summary.iterations == 10
    assert snapshots(folder) == [4, 10]


def test_a_second_interrupt_gets_out_at_once(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("max_iter: 100\n", before=at(3, interrupt_twice))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Failures ------------------------------------------------------------------------------------------------


def test_a_training_that_diverges_is_named_with_iteration_and_layer(folder: Path) -> None:
    with pytest.raises(
        Diverged, match=r"at iteration \d+ the loss is (nan|inf) and parameter \d of layer 'ip'"
    ):
        train("max_iter: 10000\n", before=lambda trainer: _raise_rate(trainer, 1e6))


def _raise_rate(trainer: Trainer, rate: float) -> None:
    trainer.learner.config = trainer.learner.config.with_base_lr(rate)


def test_a_snapshot_that_fails_on_the_way_is_logged_and_the_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmtrain import learner as module

    whole = module.Learner.save

    def failing(self: Learner, iteration: int, weights: None = None) -> str:
        if iteration == 4:
            raise SnapshotError("cannot write snapshot s_iter_4.caffemodel: No space left on device")
        return whole(self, iteration, weights)

    monkeypatch.setattr(module.Learner, "save", failing)
    summary = train("max_iter: 6\nsnapshot: 2\n")
    assert summary.iterations == 6
    assert snapshots(folder) == [2, 6]
    assert any("No space left" in line and "s_iter_2.solverstate" in line for line in log_lines())


def test_a_final_snapshot_that_fails_fails_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Learner, iteration: int, weights: None = None) -> str:
        raise SnapshotError("no space")

    monkeypatch.setattr(Learner, "save", failing)
    with pytest.raises(SnapshotError):
        train("max_iter: 3\n")


# Going on ------------------------------------------------------------------------------------------------


def test_resume_goes_on_from_the_newest_snapshot_and_starts_anew_without_one(folder: Path) -> None:
    train("max_iter: 4\n", Options(resume=True))
    summary = train("max_iter: 9\n", Options(resume=True))
    assert (summary.iterations, summary.steps) == (9, 5)
    assert any("Resuming from s_iter_4.solverstate" in line for line in log_lines())
    assert any("starting anew" in line for line in log_lines())


def test_metrics_are_json_lines_of_train_test_and_snapshot(folder: Path) -> None:
    import json

    train("max_iter: 4\ndisplay: 2\ntest_iter: 1\ntest_interval: 4\n")
    records = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records]
    assert kinds == ["start", "test", "train", "train", "snapshot", "test", "end"]
    assert {"loss", "lr", "images_per_second"} <= records[2].keys()
    assert records[-1]["steps"] == 4


# debug_info ----------------------------------------------------------------------------------------------


def test_debug_info_shows_every_layer_as_the_original_does(shared: Path, folder: Path) -> None:
    golden = shared / "golden" / "cli"
    for name in ("smallnet.prototxt", "dbg.solver.prototxt", "train_list.txt", "train.h5"):
        (folder / name).symlink_to(golden / name)
    trainer = trainer_for(TrainConfig.load("dbg.solver.prototxt"))
    trainer.run()
    trainer.close()
    trainer.reports.close()
    want = _debug_places((golden / "train_debug_info.log").read_text())
    got = _debug_places(Path("train.log").read_text())
    assert got == want[: len(got)]  # theirs ends with one more forward pass, for the last loss
    assert len(got) > 40


def _debug_places(text: str) -> list[str]:
    """Layer and blob of each line, in order, with the numbers left out."""
    return [re.sub(r"\S+$", "", line) for line in re.findall(r"\[(?:For|Back)ward\] Layer .*: \S+", text)]


def test_debug_info_gives_mean_absolute_values(folder: Path) -> None:
    values = 'data_filler { type: "constant" value: -2 }'
    Path("net.prototxt").write_text(NET.replace('data_filler { type: "gaussian" }', values))
    train("max_iter: 2\ndisplay: 2\ndebug_info: true\nsnapshot_after_train: false\n")
    lines = [line for line in log_lines() if "[Forward] Layer d, top blob x data" in line]
    assert lines == ["    [Forward] Layer d, top blob x data: 2"]
