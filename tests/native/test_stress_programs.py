"""The C++ stress programs under the sanitizers, and the same bits from every instruction set."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZERS = {
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
COMPILER = os.environ.get("CXX", "g++")

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]


def build(root: Path, program: str, flags: list[str]) -> str:
    command = [sys.executable, str(root / "native" / "stress" / "build.py"), program, *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_everything_at_once_on_one_segment_is_clean(root: Path, sanitizer: str) -> None:
    done = run(build(root, "segment_stress", SANITIZERS[sanitizer]), "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all held" in done.stdout


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_max_pooling_stays_within_its_buffers_and_agrees_with_the_definition(
    root: Path, sanitizer: str
) -> None:
    done = run(build(root, "pooling_edges", SANITIZERS[sanitizer]))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert " 0 wrong" in done.stdout


@pytest.mark.parametrize(
    ("sanitizer", "fault", "verdict"),
    [
        ("thread", "race", "WARNING: ThreadSanitizer: data race"),
        ("address", "overrun", "ERROR: AddressSanitizer: heap-buffer-overflow"),
        ("address", "shift", "runtime error: shift exponent 40 is too large"),
    ],
)
def test_a_planted_fault_is_caught(root: Path, sanitizer: str, fault: str, verdict: str) -> None:
    done = run(build(root, "segment_stress", SANITIZERS[sanitizer]), "1", "--plant", fault)
    assert done.returncode != 0
    assert verdict in done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 machine")
def test_every_instruction_set_gives_the_same_bits(root: Path) -> None:
    has = Path("/proc/cpuinfo").read_text().split()
    flags = {"-march=x86-64": "sse2", "-march=x86-64-v3": "avx2", "-march=x86-64-v4": "avx512vl"}
    usable = [flag for flag, feature in flags.items() if feature in has]
    printed = {
        flag: run(build(root, "kernel_variants", ["-O3", "-DSMB_NO_CLONES", flag])).stdout for flag in usable
    }
    assert len(printed) > 1, "only one instruction set to compare on this machine"
    assert len(set(printed.values())) == 1, printed
    assert next(iter(printed.values())).count("\n") == 12
