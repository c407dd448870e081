"""``smb bench`` measures what it says and writes it down."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from smb import bench
from tests.smb.processes import ROOT, ServeProcess


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smb.cli", "bench", "--seconds", "0.05", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)


def test_every_combination_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / ("scratch" * 12)  # too long for a socket, as a scheduler's folder may be
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    table, picture = tmp_path / "t.csv", tmp_path / "p.png"
    words = ["--sizes", "4K", "--operations", "read,exchange", "--csv", str(table), "--plot", str(picture)]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    asked = {
        (op, via, "4096", n) for op in ("read", "exchange") for via in ("shm", "tcp") for n in ("1", "2")
    }
    assert {(r["operation"], r["transport"], r["size"], r["processes"]) for r in rows} == asked
    assert len(rows) == len(asked) == len(done.stdout.splitlines()) - 1
    for row in rows:
        per_second = int(row["calls"]) / float(row["seconds"])
        assert float(row["gib_per_s"]) == pytest.approx(per_second * 4096 / 2**30, rel=0.5, abs=1e-3)
        assert 0 < float(row["p50_us"]) <= float(row["p99_us"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_daemon_that_runs_is_measured_and_left_clean(process: ServeProcess) -> None:
    import smb

    done = run("--address", process.address, "--sizes", "1K", "--processes", "1", "--operations", "write")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["write", "shm"]
    with smb.connect(process.address) as box:
        assert box.list() == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--operations", "fly"], 2, "'fly' is none of read, write, accumulate, exchange"),
        (["--transports", "rdma"], 2, "'rdma' is none of shm, tcp; for others give --address"),
        (["--processes", "0"], 2, "'0' is no whole number above 0"),
        (["--address", "unix:/nowhere/s"], 1, "/nowhere/s"),
        (["--sizes", "4K,1T"], 1, "--sizes 1.0 TiB: its processes and the segment take 3.0 TiB in all, but"),
    ],
)
def test_a_mistake_is_told(words: list[str], code: int, message: str) -> None:
    done = run(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("Traceback") == 0
    assert code == 2 or len(done.stderr.splitlines()) == 1


def test_without_matplotlib_a_plot_is_refused_before_the_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(bench.SmbError, match=r"--plot needs matplotlib: `pip install 'shmtrain\[plot\]'`"):
        bench.plot([], str(tmp_path / "p.png"))
