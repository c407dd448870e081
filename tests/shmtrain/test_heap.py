"""What a step frees serves the next step; who sets malloc by the environment is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmtrain.heap import keep_heap
from tests.shmtrain.jobs import LAYERS, SOLVER

ROOT = Path(__file__).resolve().parents[2]
SIDE = 1024  # of the images; a batch of 4 is 16 MB
NET = f"""
layer {{
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {{ shape {{ dim: 4 dim: 1 dim: {SIDE} dim: {SIDE} }} shape {{ dim: 4 }} }}
}}
layer {{ name: "a" type: "Power" bottom: "data" top: "a" power_param {{ scale: 2 }} }}
layer {{ name: "b" type: "TanH" bottom: "a" top: "b" }}
""" + LAYERS.replace('bottom: "data"', 'bottom: "b"')
PROGRAM = """
import resource, sys
from shmtrain.cli import main
from shmtrain.learner import Learner
faults, update = [], Learner.update
def noting(*args):
    update(*args)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
Learner.update = noting
code = main(["solver.prototxt", "--no-progress", "--threads", "1"])
print(*(after - before for before, after in zip(faults, faults[1:])))
sys.exit(code)
"""
UNSET = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}


def test_a_training_step_takes_no_pages_anew_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER + "max_iter: 16 snapshot_after_train: false")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path, env={**UNSET, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    faults = sorted(map(int, done.stdout.split()[4:]))
    assert faults[len(faults) // 2] < 4 * 4 * SIDE * SIDE // os.sysconf("SC_PAGESIZE") // 4


@pytest.mark.parametrize(
    ("environment", "set_"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4:glibc.malloc.trim_threshold=131072"}, False),
    ],
)
def test_who_sets_malloc_by_the_environment_is_left_alone(environment: dict[str, str], set_: bool) -> None:
    if not set_:
        assert not keep_heap(environment)
        return
    assert keep_heap(environment) == ("glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or ""))


def test_nothing_is_set_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError(name)

    monkeypatch.setattr(os, "confstr", unknown)
    assert not keep_heap({})
