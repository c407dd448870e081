"""Wrong usage ends with 2 and one message that says what was given and what is allowed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shmtrain.cli import main
from tests.shmtrain.jobs import NET, SOLVER, write


@pytest.fixture(autouse=True)
def in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "max_iter: 4\n")
    (tmp_path / "w.caffemodel").write_bytes(b"")
    monkeypatch.chdir(tmp_path)


USAGE = [
    ([], "the following arguments are required: SOLVER.prototxt"),
    (["nowhere.prototxt"], "nowhere.prototxt does not exist"),
    (
        ["train", "--solver=solver.prototxt"],
        "`caffe train --solver=F --snapshot=S` is `shmtrain F --snapshot S`",
    ),
    (
        ["sumary", "net.prototxt"],
        "'sumary' is neither a solver file here nor a command; did you mean 'summary'?",
    ),
    (["solver"], "'solver' is neither a solver file here nor a command (commands: test, time, "),
    (["solver.prototxt", "--join", "--workers", "2"], "--workers 2 with --join: it is one worker"),
    (["solver.prototxt", "--workers", "0"], "--workers 0: at least one worker is needed"),
    (["solver.prototxt", "--workers", "two"], "invalid int value: 'two'"),
    (["solver.prototxt", "--worker", "2"], "unrecognized arguments: --worker 2"),
    (["solver.prototxt", "more.prototxt"], "unrecognized arguments: more.prototxt"),
    (["solver.prototxt", "--alpha", "0"], "--alpha 0 is out of range: alpha must lie between 0 and 1"),
    (["solver.prototxt", "--alpha", "1.5"], "--alpha 1.5 is out of range"),
    (["solver.prototxt", "--moving-rate", "nan"], "--alpha nan is out of range"),
    (["solver.prototxt", "--tau", "0"], "--tau 0 is out of range: tau must be at least 1"),
    (["solver.prototxt", "--algorithm", "sgd"], "invalid choice: 'sgd' (choose from"),
    (["solver.prototxt", "--exchange", "fast"], "invalid choice: 'fast' (choose from"),
    (["solver.prototxt", "--termination", "first"], "invalid choice: 'first' (choose from"),
    (["solver.prototxt", "--lr-rule", "sqrt"], "--lr-rule 'sqrt' is none of none, linear, power:P"),
    (["solver.prototxt", "--warmup", "-1"], "--warmup -1 is below 0"),
    (["solver.prototxt", "--threads", "0"], "--threads 0: must be at least 1"),
    (["solver.prototxt", "--stuck", "0"], "--stuck 0: must be above 0 seconds"),
    (["solver.prototxt", "--stuck", "nan"], "--stuck nan: must be above 0 seconds"),
    (["solver.prototxt", "--weights", ""], "--weights '': is empty"),
    (["solver.prototxt", "--max-iter", "0"], "--max-iter 0: must be at least 1"),
    (["solver.prototxt", "--weights", "none.caffemodel"], "none.caffemodel does not exist"),
    (["solver.prototxt", "--snapshot", "none.solverstate"], "none.solverstate does not exist"),
    (["solver.prototxt", "--snapshot", "w.caffemodel"], "this is a weights file, use --weights"),
    (["solver.prototxt", "--weights", "w.caffemodel", "--resume"], "not allowed with argument"),
    (["solver.prototxt", "--sigint-effect", "kill"], "invalid choice: 'kill' (choose from"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=[" ".join(a) or "nothing" for a, _ in USAGE])
def test_wrong_usage_ends_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert said.splitlines()[-1].startswith("shmtrain: error: ")


def test_a_wrong_solver_file_ends_with_1_and_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    Path("solver.prototxt").write_text(SOLVER.replace("base_lr", "base_lrr") + "max_iter: 4")
    assert main(["solver.prototxt"]) == 1
    said = capsys.readouterr().err
    assert "solver.prototxt:3:1" in said
    assert "base_lr" in said


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_wrong_net_file_is_found_before_a_worker_starts(
    workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("net.prototxt").write_text(NET.replace("num_output", "num_outputs"))
    assert main(["solver.prototxt", "--workers", workers]) == 1
    assert "net.prototxt:13" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["unix:none.sock", "127.0.0.1", "nonsense"])
def test_a_box_that_does_not_answer_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solver.prototxt", "--workers", "2", "--smb", address]) == 1
    assert address.removeprefix("unix:") in capsys.readouterr().err


def test_a_socket_that_is_no_box_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("other.sock")
        assert main(["solver.prototxt", "--workers", "2", "--smb", "unix:other.sock"]) == 1
    assert "other.sock" in capsys.readouterr().err


def test_help_names_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    words = "time data --workers --smb --job --alpha --moving-rate --tau --exchange --termination --lr-rule"
    more = "--warmup --threads --snapshot --weights --resume --max-iter --log-dir --no-progress"
    assert [word for word in f"{words} {more}".split() if word not in said] == []
