"""The installed commands work in any folder, a checkout without built extensions among them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
        dummy_data_param { shape { dim: 2 dim: 3 } shape { dim: 2 dim: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 1 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'net: "net.prototxt"\nbase_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 4\nsnapshot_after_train: false\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with packages of our names that end whoever imports them."""
    for package in ("smb", "shmtrain", "prototxt"):
        (tmp_path / package).mkdir()
        text = "raise SystemExit('taken from the working directory')\n"
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "shmtrain"
    if not command.exists():
        command = Path(shutil.which("shmtrain") or "shmtrain")
    return subprocess.run([command, *words], cwd=folder, capture_output=True, text=True, timeout=100)


def test_two_workers_train_beside_sources_of_the_same_name(folder: Path) -> None:
    done = run(folder, "solver.prototxt", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "taken from" not in done.stderr


def test_an_lmdb_is_read_and_summed_up_there(folder: Path, root: Path) -> None:
    made = run(folder, "data", "mnist", "--from", str(root / "examples" / "mnist" / "digits"), "--out", ".")
    assert made.returncode == 0, made.stderr
    (lmdb, *_) = sorted(folder.glob("*test_lmdb"))
    done = run(folder, "data", "ls", str(lmdb))
    assert done.returncode == 0, done.stderr
    assert "2000" in done.stdout
