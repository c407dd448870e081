"""``shmtrain compare``: what its figures mean, that it goes on when interrupted, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shmtrain.compare import command, tables
from shmtrain.compare.groups import Group, Mean, grouped, t95, target
from shmtrain.compare.plan import Case, Plan, Way, describe, ending, recall, solver_text, standing, ways
from shmtrain.compare.results import Broken, Result, read
from shmtrain.compare.runs import held
from shmtrain.config import TrainConfig
from shmtrain.options import ConfigError, MethodOptions, Options
from shmtrain.report import draw, page
from tests.shmtrain.jobs import DUMMY, ENDLESS, LAYERS, gone, write

NET = f"""name: "tiny" {DUMMY} {LAYERS}
layer {{
  name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include {{ phase: TEST }}
}}
"""
SOLVER = "max_iter: 12 test_iter: 2 test_interval: 5 display: 100 snapshot: 4\n"

# Runs that were never made: a folder with a record and metrics as a run leaves them -------------------------


def lay(
    runs: Path, name: str, workers: int, seed: int = 1, *, ends: list[dict[str, Any]], stand: float = 1.0,
    tests: Sequence[tuple[int, float, float, float]] = (), **record_too: Any,
) -> Path:  # fmt: skip
    """``tests``: (iteration, seconds, testing seconds, accuracy)."""
    folder = runs / f"{name}-w{workers}-s{seed}"
    folder.mkdir(parents=True)
    record = {
        "name": name, "workers": workers, "seed": seed, "arguments": [], "algorithm": name, "figures": [],
        "rate": "", "standing": stand, "load": 0.0, "seconds": 99.0, "code": 0,
        **record_too,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    lines: list[dict[str, Any]] = [{"kind": "start", "iteration": 0, "workers": workers, "batch": 10}]
    for iteration, seconds, testing, accuracy in tests:
        times = {"seconds": seconds, "testing_seconds": testing}
        lines.append(
            {"kind": "test", "iteration": iteration, "net": 0, "accuracy": accuracy, "loss": 1.0, **times}
        )
        lines.append({"kind": "train", "iteration": iteration, "mean_loss": 2.5 - 2 * accuracy, **times})
    for rank, end in enumerate(ends):
        whole = {"kind": "end", "iteration": 100, "stopped": False, "loop_testing_seconds": 0.0, **end}
        path = folder / ("run.jsonl" if rank == 0 else f"run.worker{rank}.jsonl")
        path.write_text("\n".join(map(json.dumps, [*(lines if rank == 0 else []), whole])) + "\n")
    return folder


def one(tmp_path: Path, **given: Any) -> Result:
    return read(lay(tmp_path, given.pop("name", "way"), given.pop("workers"), **given))


def test_the_time_of_a_test_counts_by_the_share_of_workers_that_stood_still(tmp_path: Path) -> None:
    ends = [
        {"steps": 50, "loop_seconds": 12.0, "loop_testing_seconds": 4.0},
        {"steps": 50, "loop_seconds": 12.0},
    ]
    together = one(tmp_path / "a", workers=2, ends=ends, stand=1.0, tests=[(50, 6.0, 2.0, 0.5)])
    apart = one(tmp_path / "b", workers=2, ends=ends, stand=0.5, tests=[(50, 6.0, 2.0, 0.5)])
    assert (together.seconds, apart.seconds) == (8.0, 10.0)
    assert (together.tests[0].seconds, apart.tests[0].seconds) == (4.0, 5.0)
    assert (together.images_per_second, apart.images_per_second) == (125.0, 100.0)


def test_computing_and_exchange_make_up_an_iteration(tmp_path: Path) -> None:
    """The second worker waited 4 s for the first one's test: that is neither computing nor exchange."""
    ends = [
        {"steps": 50, "loop_seconds": 12.0, "loop_testing_seconds": 4.0, "exchange_seconds": 2.0,
         "parts": {"rgw": 1.5, "wait": 0.5}, "hidden_parts": {"wwi": 3.0}},
        {"steps": 50, "loop_seconds": 12.0, "exchange_seconds": 6.0, "parts": {"rgw": 1.5, "wait": 4.5}},
    ]  # fmt: skip
    found = one(tmp_path, workers=2, ends=ends)
    assert found.iteration_seconds == pytest.approx(8.0 / 50)
    assert found.exchange_seconds == pytest.approx(2.0 / 50)
    assert found.parts == pytest.approx({"rgw": 1.5 / 50, "wait": 0.5 / 50})
    assert found.hidden == pytest.approx({"wwi": 1.5 / 50})
    assert found.share == pytest.approx(0.25)


def test_of_a_groups_workers_those_wait_for_a_test_whose_group_the_leader_is_in(tmp_path: Path) -> None:
    waits = {"steps": 10, "loop_seconds": 9.0, "exchange_seconds": 5.0, "parts": {"collective": 5.0}}
    leads = {"steps": 10, "loop_seconds": 9.0, "loop_testing_seconds": 4.0, "exchange_seconds": 1.0}
    goes_on = {**waits, "exchange_seconds": 1.0, "parts": {"collective": 1.0}}
    found = one(tmp_path, workers=4, stand=0.5, ends=[leads, waits, goes_on, goes_on])
    assert found.exchange_seconds == pytest.approx(0.1)
    assert found.parts == pytest.approx({"collective": 3 * 0.1 / 4})
    assert found.iteration_seconds == pytest.approx((0.5 + 0.5 + 0.9 + 0.9) / 4)


def test_bytes_and_staleness_are_those_of_all_workers(tmp_path: Path) -> None:
    ends = [
        {
            "steps": 1,
            "loop_seconds": 1.0,
            "bytes_sent": 300,
            "bytes_received": 100,
            "staleness": {"0": 3, "2": 1},
        },
        {"steps": 1, "loop_seconds": 1.0, "bytes_sent": 500, "staleness": {"2": 4}, "dropped": 1},
    ]
    found = one(tmp_path, workers=2, ends=ends)
    assert (found.bytes, found.bytes_per_iteration, found.dropped) == (900, 9.0, 1)
    assert found.staleness == {0: 3, 2: 5}
    assert found.mean_staleness == 10 / 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"code": 1}, "ended with 1"),
        ({"code": -9, "limit": 5.0}, "took more than 5 s"),
        ({"ends": [{"steps": 1, "loop_seconds": 1.0}]}, "1 of 2 workers"),
        ({"ends": [{"steps": 1, "loop_seconds": 1.0, "stopped": True}] * 2}, "stopped early"),
    ],
)
def test_a_run_that_did_not_come_to_its_end_is_none(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Broken, match=words):
        one(tmp_path, workers=2, **{"ends": [{"steps": 1, "loop_seconds": 1.0}] * 2, **given})


@pytest.mark.parametrize(
    ("record", "metrics"),
    [
        ("", None), ("{", None), ("[]", None), ("{}", None), ('{"code": 0}', None),
        ('{"code": 0, "workers": []}', None),
        (None, "{"), (None, "[]"), (None, '{"kind": "end"}'), (None, "7"),
    ],
)  # fmt: skip
def test_a_run_whose_files_are_damaged_is_none(
    record: str | None, metrics: str | None, tmp_path: Path
) -> None:
    folder = lay(tmp_path, "way", 1, ends=[{"steps": 1, "loop_seconds": 1.0}])
    assert read(folder).workers == 1
    if record is not None:
        (folder / "run.json").write_text(record)
    if metrics is not None:
        (folder / "run.jsonl").write_text(metrics)
    with pytest.raises(Broken, match=r"damaged|not whole|came to the end"):
        read(folder)


def test_an_interval_is_students() -> None:
    mean = Mean.of([1.0, 2.0, 3.0])
    assert (mean.value, mean.half) == (2.0, pytest.approx(2.4841, abs=1e-3))
    assert Mean.of([5.0]).half is None
    assert [t95(n) for n in (1, 10, 30)] == pytest.approx([12.706, 2.228, 2.042], abs=0.01)


def crowd(tmp_path: Path) -> list[Group]:
    """One worker and two ways of two, two seeds each; the second seed of ``slow`` never gets beyond 0.7."""
    end = {"steps": 50, "loop_seconds": 10.0, "bytes_sent": 1 << 20, "staleness": {"0": 9, "1": 1}}
    for seed in (1, 2):
        good = [(0, 0.0, 0.0, 0.1), (50, 5.0, 0.0, 0.9), (100, 9.0, 0.0, 0.98 + 0.01 * seed)]
        lay(tmp_path, "alone", 1, seed, ends=[{"steps": 100, "loop_seconds": 16.0}], tests=good)
        lay(tmp_path, "quick", 2, seed, ends=[end, end], tests=good)
        slow = [(0, 0.0, 0.0, 0.1), (50, 5.0, 0.0, 0.7), (100, 9.0, 0.0, 0.95 if seed == 1 else 0.7)]
        lay(tmp_path, "slow", 2, seed, ends=[end, end], tests=slow)
    return grouped([read(folder) for folder in sorted(tmp_path.iterdir())], ["quick", "slow"])


def test_seeds_are_taken_together_and_one_worker_comes_first(tmp_path: Path) -> None:
    groups = crowd(tmp_path)
    assert [(g.name, g.workers, len(g.results)) for g in groups] == [
        ("alone", 1, 2), ("quick", 2, 2), ("slow", 2, 2),
    ]  # fmt: skip
    assert [round(g.accuracy.value, 3) for g in groups if g.accuracy] == [0.995, 0.995, 0.825]
    reached, seconds = groups[2].time_to(0.9)
    assert reached == 1
    assert seconds is not None
    assert seconds.values == (9.0,)
    assert target(groups) == 0.82
    assert [p.iteration for p in groups[1].tested()] == [0, 50, 100]


def test_the_report_shows_every_seed_gain_and_time_to_accuracy(tmp_path: Path) -> None:
    memory = {"ways": {"quick": ["seasgd"], "slow": ["seasgd", "--tau", "9"]}, "options": ["--threads", "1"]}
    text = tables.report(crowd(tmp_path), memory, 0.9, {"slow-w4-s1": "ended with 1"}, ["speed.png"])
    rows = {line.split(" | ")[0].strip("| "): line for line in reversed(text.splitlines()) if line[:1] == "|"}
    assert "1: 99.00, 2: 100.00" in rows["quick, 2 workers"]
    assert "1: 95.00, 2: 70.00" in rows["slow, 2 workers"]
    assert "-17.00" in rows["slow, 2 workers"]
    assert re.search(r"\| quick, 2 workers \| 100 \| 1\.60 \| 80% \| 10\.0 \| 5\.0 \|", text)
    assert "9.0 (1 of 2 seeds)" in text
    assert "seasgd --tau 9" in text
    assert "every run: --threads 1" in text
    assert "- `slow-w4-s1` ended with 1" in text


def test_the_pictures_are_drawn_and_the_page_needs_no_other_file(tmp_path: Path) -> None:
    groups = crowd(tmp_path / "runs")
    names = draw(groups, tmp_path)
    assert names == [f"{name}.png" for name in ("accuracy", "speed", "curves-2", "time", "staleness")]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    text = tables.report(groups, {"ways": {"quick": ["seasgd"]}, "options": []}, None, {}, names)
    html = page(text, tmp_path)
    assert html.count('src="data:image/svg+xml;base64,') == len(names)
    assert html.count("<table>") == text.count("| --- |")
    assert "<code>quick</code>" in html
    assert ".png" not in html


# What is run ---------------------------------------------------------------------------------------------


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SOLVER, NET)
    return "solver.prototxt"


def test_one_worker_is_run_once_for_all_ways_and_without_their_options() -> None:
    plan = Plan(
        Path("out"), "s", (Way("a", "seasgd", ("--alpha", "0.2")), Way("b", "sync")), (1, 2), (1, 2),
        ("--threads", "1"),
    )  # fmt: skip
    cases = list(plan.cases())
    assert [c.name for c in cases[:3]] == ["alone-w1-s1", "a-w2-s1", "b-w2-s1"]
    assert len(cases) == 6
    assert plan.arguments(cases[0]) == ["--seed", "1", "--threads", "1"]
    assert plan.arguments(cases[1])[-4:] == ["--threads", "1", "--alpha", "0.2"]


def test_the_last_test_is_of_the_last_iteration_and_nothing_is_snapshot(solver: str, tmp_path: Path) -> None:
    assert [ending(*pair) for pair in ((10000, 500), (12, 5), (20, 500), (97, 10))] == [500, 4, 20, 97]
    (tmp_path / "copy.prototxt").write_text(solver_text(solver, tmp_path, None, None))
    config = TrainConfig.load(tmp_path / "copy.prototxt")
    assert (config.schedule.test_interval, config.schedule.display) == (4, 1)
    assert (config.snapshots.interval, config.snapshots.after_train) == (0, False)


def test_who_stands_still_while_the_leader_tests(solver: str) -> None:
    def share(algorithm: str, **method: Any) -> float:
        options = Options(workers=4, algorithm=algorithm, method=MethodOptions(**method))
        return standing(TrainConfig.load(solver, options).sharing)

    assert [share("seasgd"), share("allreduce"), share("hybrid"), share("diloco")] == [0.25, 1.0, 0.5, 1.0]
    assert [share("sync", backup_workers=1), share("diloco", asynchronous=True)] == [0.25, 0.25]


def test_who_shares_the_batch_out_trains_at_the_solvers_rate(solver: str) -> None:
    told = describe(TrainConfig.load(solver, Options(workers=4, batch="global")).sharing)
    assert (told["rate"], told["figures"][-1]) == ("the solver's own rate", "batch global")


@pytest.mark.parametrize(
    ("algorithms", "variants", "words"),
    [
        (["seasgdd"], [], "did you mean 'seasgd'"),
        (["seasgd"], ["seasgd=seasgd --tau 2"], "seasgd: named twice"),
        ([], ["tau 2"], "must be NAME=ALGORITHM"),
        ([], ["../x=seasgd"], "must be NAME=ALGORITHM"),
        ([], ["x=seasgd --workers 3"], "--workers is chosen by compare itself"),
        ([], ['x=seasgd "'], "x=seasgd \"': No closing quotation"),
        ([], ["x=seasgd --seed=3"], "--seed=3 is chosen by compare itself"),
    ],
)
def test_ways_that_cannot_be_are_refused(algorithms: list[str], variants: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ways(algorithms, variants)


def test_a_wrong_option_of_a_way_is_told_before_the_first_run(
    solver: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([solver, "--variant", "x=seasgd --n-push 2", "--workers", "1,2", "--out", "o"])
    assert end.value.code == 2
    assert "x, 2 workers, seed 1: --n-push is an option of downpour" in capsys.readouterr().err
    assert not Path("o/runs").exists()
    assert not Path("o/comparison.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-iter", "3000000000"], "max_iter 3000000000 must be from 0 to"),
        (["--test-interval", "-1"], "test_interval -1 must be from 0 to"),
        (["--limit", "nan"], "--limit nan: must be above 0"),
        (["--limit", "0"], "--limit 0: must be above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_the_first_run(
    solver: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([solver, "--workers", "1", "--out", "o", *options])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
    assert not Path("o/runs").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"x"'])
def test_what_is_no_comparison_is_told(
    solver: str, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "comparison.json").write_text(content)
    for words in (["--report-only"], [solver, "--workers", "1"]):
        with pytest.raises(SystemExit):
            command.main([*words, "--out", str(tmp_path)])
        assert "is damaged, or not a comparison's" in capsys.readouterr().err


def test_a_folder_refuses_the_results_of_another_comparison(solver: str, tmp_path: Path) -> None:
    """More ways may be added; other options, another solver or another net, and the same name may not."""

    def remembered(text: str, *ways: Way, common: tuple[str, ...] = ()) -> dict[str, Any]:
        return recall(Plan(tmp_path, solver, ways, (2,), (1,), common), text)

    text, a, b = solver_text(solver, tmp_path, None, None), Way("a", "seasgd"), Way("b", "sync")
    (tmp_path / "comparison.json").write_text(json.dumps(remembered(text, a)))
    assert remembered(text, b)["ways"] == {"a": ["seasgd"], "b": ["sync"]}
    assert remembered(solver_text(solver, tmp_path / "link", None, None), a)  # by another path
    for words, told in (("solver differ", text.replace("12", "13")), ("options differ", text)):
        with pytest.raises(ConfigError, match=words):
            remembered(told, a, common=() if told != text else ("--threads", "1"))
    with pytest.raises(ConfigError, match="knows a as seasgd"):
        remembered(text, Way("a", "seasgd", ("--tau", "2")))
    (tmp_path / "net.prototxt").write_text(NET + "\n")
    with pytest.raises(ConfigError, match="nets differ"):
        remembered(text, a)


def test_two_comparisons_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(ConfigError, match="in use by another comparison"), held(tmp_path):
        pass


# Runs that are made --------------------------------------------------------------------------------------


def compare(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "shmtrain.cli", "compare", "solver.prototxt", *words, "--out", "out"],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_comparison_goes_past_a_failed_run_and_goes_on_with_what_is_broken(tmp_path: Path) -> None:
    write(tmp_path, SOLVER, NET)
    words = ["--workers", "1,2", "--seeds", "1", "--variant", "paper=seasgd --exchange paper"]
    code, text = compare(tmp_path, *words, "--variant", f"lost=seasgd --smb unix:{tmp_path}/none")
    assert code == 1, text
    assert "lost, 2 workers, seed 1: FAILED, ended with 1" in text
    with (tmp_path / "out" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["way"], r["workers"], r["iterations"]) for r in rows] == [
        ("alone", "1", "12"),
        ("paper", "2", "12"),
    ]
    assert all(float(rows[1][part]) > 0 for part in ("T_rgw", "T_ulw", "bytes", "exchange_share"))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| paper, 2 workers |" in text
    assert "- `lost-w2-s1` ended with 1" in text
    assert not list(tmp_path.rglob("*.caffemodel"))

    runs = tmp_path / "out" / "runs"
    metrics = runs / "alone-w1-s1" / "run.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    before = (runs / "paper-w2-s1" / "run.json").read_bytes()
    code, text = compare(tmp_path, *words)
    assert code == 0, text
    assert "paper, 2 workers, seed 1: there already" in text
    assert "1 worker, seed 1: accuracy" in text
    assert (runs / "paper-w2-s1" / "run.json").read_bytes() == before


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A comparison whose first run does not end."""
    write(tmp_path, f"max_iter: {ENDLESS} display: 100\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "shmtrain.cli", "compare", "solver.prototxt", "--algorithms", "seasgd",
         "--workers", "2", "--seeds", "1", "--out", "out"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield process
    process.kill()
    process.wait()


def test_an_interrupted_comparison_leaves_no_training_and_no_whole_run(
    endless: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    output = tmp_path / "out" / "runs" / "seasgd-w2-s1" / "output.txt"
    deadline = time.monotonic() + 60
    pids: list[int] = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        told = output.read_text() if output.exists() else ""
        pids = [int(pid) for pid in re.findall(r"Worker \d \(pid (\d+)\) of", told)]
    assert len(pids) == 2
    endless.send_signal(signal.SIGTERM)
    assert endless.wait(60) == 1
    assert all(gone(pid) for pid in pids)
    with pytest.raises(Broken):
        read(output.parent)


def test_an_unnamed_seed_is_counted_from_one() -> None:
    assert Case(Way("a", "seasgd"), 2, 3).name == "a-w2-s3"
    assert (command._seeds("3"), command._seeds("7,5")) == ([1, 2, 3], [5, 7])
