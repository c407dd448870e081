"""``shmtrain bench``: the opponents do the same work, on the same vectors, and a dead one is named."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmtrain.bench import groups, report
from shmtrain.bench.cli import main
from shmtrain.bench.computing import Busy, computing
from shmtrain.bench.contest import BOX, COMPUTE, Measure, hold, measures, placed
from shmtrain.bench.errors import BenchError
from shmtrain.bench.groups import Group, Hall, hall
from shmtrain.bench.job import F32, NOTHING, PUSH, SEQUENTIAL, WHOLE, Job, pieces
from shmtrain.bench.mpi import Mpi, named
from shmtrain.bench.run import Row
from shmtrain.bench.ways import Late, Way, steps


class Halves(Way):
    """Moves its weights by one: half of it before computing, half after."""

    def __init__(self) -> None:
        self.weights = np.zeros(8, np.float32)
        self.order: list[str] = []

    @property
    def mine(self) -> F32:
        return self.weights

    def exchange(self) -> None:
        self.order.append("exchange")
        self.weights += 1

    def begin(self) -> None:
        self.order.append("begin")

    def end(self) -> None:
        self.order.append("end")
        self.weights += 1


@pytest.mark.parametrize(("overlap", "order"), [(SEQUENTIAL, ["exchange"]), (PUSH, ["begin", "end"])])
def test_a_job_exchanges_as_often_as_it_says_in_the_order_that_it_names(
    overlap: str, order: list[str]
) -> None:
    way = Halves()
    work, close = steps(way, Job("fused", "1", 8, overlap, repeat=3))
    work()
    close()
    assert way.order == order * 3
    np.testing.assert_array_equal(way.weights, 3)


def test_an_exchange_in_the_second_thread_moves_the_weights_by_what_the_copy_moved() -> None:
    way = Halves()
    way.weights[:] = 5
    late = Late(way)
    late.begin()
    late.weights += 100  # the local update meanwhile
    late.end()
    late.close()
    np.testing.assert_array_equal(late.weights, 106)
    assert way.order == ["exchange"]


def test_without_an_exchange_only_the_computing_is_left() -> None:
    way = Halves()
    work, _ = steps(way, Job(COMPUTE, "", 8, NOTHING, repeat=3))
    work()
    assert not way.order


def test_computing_looks_at_messages_while_it_works_and_while_it_waits() -> None:
    looks: list[int] = []
    for kind, amount in (("busy", 1000.0), ("wait", 0.01)):
        looks.append(0)

        def look() -> None:
            looks[-1] += 1

        computing(Job("fused", "", 8, PUSH, kind, amount), look)()
    assert min(looks) >= 2


def test_the_busy_loop_knows_its_rate() -> None:
    assert Busy().rate(0.02) > 1000


def test_pieces_cover_the_vector_once() -> None:
    assert [(p.start, p.stop) for p in pieces(10, 4)] == [(0, 4), (4, 8), (8, 10)]


def test_every_way_of_every_library_is_measured_in_every_part() -> None:
    found = [m for part in ("sequential", "busy", "wait") for m in measures(part, ["mpich", "ompi"], True, 1)]
    ways = {(m.library, m.op) for m in found} - {(BOX, COMPUTE)}
    mpi = {(lib, op) for lib in ("mpich", "ompi") for op in ("server", "rma", "window", "allreduce")}
    assert ways == mpi | {(BOX, "fused"), (BOX, "paper"), ("gloo", "allreduce")}
    for kind in ("busy", "wait"):
        assert {m.op for m in found if m.computing == kind} == {op for _, op in ways} | {COMPUTE}


def test_who_waits_naps_only_where_processors_are_short_and_is_pinned_only_where_they_are_not() -> None:
    server = Measure("mpich", "server", "fused")
    assert not placed(server, server.job(8), 1, [0, 1]).crowded
    assert placed(server, server.job(8), 1, [0, 1]).cpus == (0, 1)
    crowded = placed(server, server.job(8), 2, [0, 1])
    assert crowded.crowded
    assert crowded.cpus == ()


@pytest.mark.parametrize(
    ("measure", "held"),
    [
        (Measure("mpich", "server", "fused"), [1.0, 2.0, 0.0]),  # nobody moved
        (Measure("mpich", "rma", "held"), [0.95, 1.9, 0.05]),  # an update got lost
        (Measure("gloo", "allreduce", "whole"), [1.0, 2.0]),  # no sum
        (Measure(BOX, "fused", "1"), [1.0, 1.9]),
    ],
)
def test_a_way_that_does_not_do_its_work_is_refused(measure: Measure, held: list[float]) -> None:
    with pytest.raises(BenchError, match="wrong weights"):
        hold(measure, 2, held)


def row(library: str, op: str, uncovered: float, variant: str = "v", step: float | None = None) -> Row:
    value = uncovered if step is None else step
    return Row(64.0, 2, library, op, variant, SEQUENTIAL, "none", value, uncovered, 0.0, 3)


def test_the_rivals_best_variant_counts() -> None:
    rows = [
        row(BOX, "fused", 10.0),
        row("ompi", "server", 50.0, "slow"),
        row("ompi", "server", 39.0, "quick"),
    ]
    line = next(line for line in report.bars(rows) if "ompi send/recv" in line)
    assert "(quick)" in line
    assert "3.90" in line
    assert line.endswith("short")


def test_a_ratio_that_reaches_its_bar_passes() -> None:
    rows = [row(BOX, "fused", 10.0), row("ompi", "rma", 30.0)]
    assert next(line for line in report.bars(rows) if "RMA" in line).endswith("PASS")


def test_what_both_cover_within_the_noise_gets_no_verdict() -> None:
    def over(library: str, op: str, uncovered: float, spread: float) -> Row:
        overlap = NOTHING if op == COMPUTE else PUSH
        return Row(64.0, 2, library, op, "v", overlap, "wait", 100 + uncovered, uncovered, spread, 3)

    rows = [over(BOX, COMPUTE, 0, 1.5), over(BOX, "fused", 0.1, 0), over("ompi", "server", 1.0, 0)]
    line = next(line for line in report.bars(rows) if "send/recv" in line)
    assert "within the noise" in line
    rows[2] = over("ompi", "server", 4.0, 0)
    line = next(line for line in report.bars(rows) if "send/recv" in line)
    assert line.endswith("PASS")  # at least 4 / 1.5


@pytest.fixture
def place() -> Iterator[Hall]:
    with hall() as opened:
        yield opened


def test_a_rank_that_dies_is_named_with_what_it_was_to_do(
    place: Hall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import smb

    monkeypatch.setattr(groups, "LIMIT", 3.0)
    with smb.serve(unix=str(tmp_path / "box")):
        group = place.box(2, f"unix:{tmp_path}/box")
        victim = group.peers[1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match=rf"box: rank 1 \(pid {victim.pid}\) died .*fused"):
            group.run(Job("fused", "1", 1000))


def test_a_rank_that_is_silent_is_named_and_ended(
    place: Hall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import smb

    with smb.serve(unix=str(tmp_path / "box")):
        group: Group = place.box(1, f"unix:{tmp_path}/box")
        os.kill(group.peers[0].pid, signal.SIGSTOP)
        monkeypatch.setattr(groups, "LIMIT", 0.3)
        monkeypatch.setattr(groups, "END", 0.2)
        with pytest.raises(BenchError, match=r"no answer of rank 0 \(pid \d+\) within 0.3 s"):
            group.run(Job("fused", "1", 1000))
        group.close()
    assert group.processes[0].returncode == -signal.SIGKILL


def test_a_library_that_does_not_start_tells_what_it_said(place: Hall) -> None:
    with pytest.raises(BenchError, match=r"(?s)mpich: start of 2 ranks ended with code 2.*cannot open"):
        place.mpi(Mpi("mpich", "x", "/bin/sh"), 1)  # a shell that is to run the file "-n"


def test_a_launcher_of_no_known_library_is_refused() -> None:
    with pytest.raises(BenchError, match="neither MPICH nor Open MPI"):
        Mpi.found(sys.executable, sys.executable)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "33"], "1 to 32"),
        (["--sizes", "0"], "0.001 to 65536"),
        (["--against", "nccl"], "none of mpi, gloo"),
        (["--rounds", "0"], "at least 1"),
        (["--mpi-python", "x"], "belong together"),
        (["--read", "/nonexistent/r.csv", "--csv", "/nonexistent/x.csv"], "/nonexistent/x.csv"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_more_than_the_machines_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--against", "gloo", "--sizes", "60000", "--workers", "2"]) == 1
    assert "are free" in capsys.readouterr().err


def test_another_file_is_not_read_as_a_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("mib,workers\n1,2\n")
    assert main(["--read", str(other)]) == 1
    assert "not the CSV of a comparison" in capsys.readouterr().err


@pytest.mark.slow
def test_one_run_compares_the_box_with_all_that_is_here_and_draws_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """gloo always; each MPI that $MPICH_PYTHON and its like name, or that this interpreter has."""
    words = ["--sizes", "0.5", "--workers", "2", "--rounds", "1", "--repeat", "1", "--compute-ms", "2"]
    rows, drawn = tmp_path / "rows.csv", tmp_path / "rows.svg"
    assert main([*words, "--csv", str(rows), "--plot", str(drawn)]) == 0
    out = capsys.readouterr().out
    for name in [mpi.name for mpi in named()]:
        for label in ("send/recv", "RMA", "allreduce", "shared window"):
            assert f"{name} {label}" in out
    for text in ("box fused exchange", "the paper's own sequence", "gloo allreduce", "load of the machine"):
        assert text in out
    with rows.open() as file:
        found = list(csv.DictReader(file))
    assert {row["overlap"] for row in found} == {SEQUENTIAL, PUSH, WHOLE, NOTHING}
    assert all(float(row["step"]) > 0 for row in found)
    assert drawn.stat().st_size > 1000
    assert main(["--read", str(rows)]) == 0
    again = capsys.readouterr().out
    assert again.strip() == out[: out.index("load of the machine")].strip()
