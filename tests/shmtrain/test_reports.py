"""Log, metrics and progress bar: their formats, and that a failing file never ends a training."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shmtrain.config import TrainConfig
from shmtrain.log import Log, number, outputs
from shmtrain.metrics import Metrics, ranked
from shmtrain.progress import Bar, Look
from shmtrain.reports import Reports
from tests.shmtrain.jobs import write


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1 + 0.2, "0.3"), (2.302586, "2.30259"), (1e-5, "1e-05"), (431080.0, "431080"), (0.0, "0"),
        (123456789.0, "1.23457e+08"), (float("nan"), "nan"), (float("inf"), "inf"), (3.0, "3"),
    ],
)  # fmt: skip
def test_numbers_have_six_digits_as_a_c_stream_prints_them(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_line_has_the_form_of_the_originals_log_library() -> None:
    stream = io.StringIO()
    with Log([stream]) as log:
        log.info("one")
        log.warning("two")
        log.error("three")
    form = re.compile(r"([IWE])(\d{2})(\d{2}) \d{2}:\d{2}:\d{2}\.\d{6} +\d+ test_reports\.py:\d+\] (\w+)\n")
    assert [(m[1], m[4]) for m in form.finditer(stream.getvalue())] == [
        ("I", "one"),
        ("W", "two"),
        ("E", "three"),
    ]
    assert form.sub("", stream.getvalue()) == ""


def test_output_lines_have_a_bracket_only_for_a_loss() -> None:
    lines = outputs(["accuracy", "loss"], [0.5, 2.0], [0.0, 0.25])
    assert lines == ["#0: accuracy = 0.5", "#1: loss = 2 (* 0.25 = 0.5 loss)"]


class Full(io.StringIO):
    """A stream on a full disk."""

    name = "full.log"

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_on_a_full_disk_is_dropped_with_one_line_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = io.StringIO()
    log = Log([Full(), good])
    log.info("one")
    log.info("two")
    assert good.getvalue().count("\n") == 2
    assert capsys.readouterr().err.count("full.log") == 1


def test_a_full_disk_does_not_make_a_finished_training_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with Log(path="/dev/full") as log:
        log.info("one")
    metrics = Metrics("/dev/full")
    metrics.write("train", 1, {"loss": 1.0})
    metrics.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["the log stops here", "the metrics stop here"]


def test_a_training_outlives_the_reader_of_its_log() -> None:
    """``shmtrain solver.prototxt 2>&1 | head -1``: nobody reads stderr any more."""
    script = (
        "import sys; from shmtrain.log import Log; log = Log([sys.stderr])\n"
        "for line in 'abc': log.info(line)\n"
        "sys.exit(3)"
    )
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        ended = subprocess.run([sys.executable, "-c", script], stderr=nobody, check=False)
    assert ended.returncode == 3


def test_metrics_are_one_json_object_a_line_and_have_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "m.jsonl"
    metrics = Metrics(str(path))
    metrics.write("train", 5, {"loss": float("nan"), "lr": 0.1, "list": [1.0, float("inf")]})
    metrics.close()
    metrics.close()
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record["time"] > 0
    assert {k: record[k] for k in ("kind", "iteration", "loss", "lr", "list")} == {
        "kind": "train", "iteration": 5, "loss": None, "lr": 0.1, "list": [1.0, None],
    }  # fmt: skip


def test_metrics_become_tensorboard_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tensorboard=str(tmp_path))
    metrics.write("train", 7, {"loss": 0.5, "name": "text is left out"})
    metrics.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(7, 0.5)]
    assert events.Tags()["scalars"] == ["train/loss"]


def test_each_worker_has_files_of_its_own() -> None:
    assert ranked("a/b.log", 0) == "a/b.log"
    assert ranked("a/b.log", 3) == "a/b.worker3.log"


def test_the_bar_shows_loss_rate_speed_exchange_and_staleness() -> None:
    stream = io.StringIO()
    bar = Bar(100, 0, images=64, stream=stream, enabled=True)
    bar.update(100, Look(loss=0.25, rate=0.01, exchange=0.0015, staleness=3))
    bar.close()
    text = stream.getvalue()
    for part in ("100/100", "loss 0.25", "lr 0.01", "images/s", "exchange 1.50 ms", "staleness 3"):
        assert part in text


def test_the_bar_ends_at_what_the_whole_job_did() -> None:
    stream = io.StringIO()
    bar = Bar(100, 0, images=64, stream=stream, enabled=True)
    bar.update(97, Look(loss=0.25, rate=0.01))  # this worker's last one
    bar.update(98, Look(loss=0.5, rate=0.01))  # too soon after the one before to be drawn
    bar.close(100)
    assert "100/100" in stream.getvalue()
    assert "loss 0.5" in stream.getvalue()


def test_the_bar_is_silent_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    bar = Bar(100, 0, images=64, stream=stream)
    bar.update(50, Look(loss=0.25, rate=0.01))
    bar.close()
    assert not bar.shown
    assert stream.getvalue() == ""


@pytest.mark.parametrize("text", ["solver_mode: GPU", "solver_mode: CPU", ""])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_file_that_asks_for_a_gpu_is_told_once_that_it_gets_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    terminal: bool,
) -> None:
    """By the first worker alone, and beside a progress bar, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    write(tmp_path, f"max_iter: 4 {text}\n")
    config = TrainConfig.load("solver.prototxt")
    for rank in range(2):
        Reports.open(config, rank).close()
    line = "The solver file says solver_mode: GPU: training on the CPU"
    assert capsys.readouterr().err.count(line) == text.count("GPU")
    assert (tmp_path / "solver.log").read_text().count(line) == text.count("GPU")
    assert "GPU" not in (tmp_path / "solver.worker1.log").read_text()
