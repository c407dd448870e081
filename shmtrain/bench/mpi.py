"""One MPI library: how its ranks are started, and measured without a conductor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmtrain.bench.errors import BenchError

ASKED = 30.0  # seconds that a program may take to tell its name
LIMIT = 300.0  # seconds of one mpiexec
NAMES = ("mpich", "ompi")
# A rank's interpreter may have numpy and mpi4py alone: what the package itself imports is left out.
BARE = """\
import runpy, sys, types
sys.modules["shmtrain"] = package = types.ModuleType("shmtrain")
package.__path__ = [sys.argv.pop(1)]
runpy.run_module("shmtrain.bench." + sys.argv.pop(1), run_name="__main__")
"""


def bare(module: str) -> tuple[str, ...]:
    """The words after the interpreter that run a module of this package."""
    return "-c", BARE, str(Path(__file__).resolve().parent.parent), module


class Mpi:
    """An MPI library and an interpreter with numpy and mpi4py for it."""

    def __init__(self, name: str, python: str, mpiexec: str) -> None:
        """``name`` is "mpich" or "ompi": their launchers take other words."""
        self.name, self.python, self.mpiexec = name, python, mpiexec

    @classmethod
    def found(cls, python: str, mpiexec: str) -> Mpi:
        """Asks the launcher which library it is of. Raises BenchError when it is of neither, or fails."""
        try:
            done = subprocess.run(
                [mpiexec, "--version"], capture_output=True, text=True, timeout=ASKED, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchError(f"{mpiexec} --version: {error}") from error
        said = done.stdout + done.stderr
        for name, marks in (
            ("mpich", ("HYDRA", "MPICH")),
            ("ompi", ("Open MPI", "OpenRTE", "PRTE", "prterun")),
        ):
            if any(mark in said for mark in marks):
                return cls(name, python, mpiexec)
        raise BenchError(f"{mpiexec} is the launcher of neither MPICH nor Open MPI; it says {said[:200]!r}")

    def command(self, ranks: int, bind: bool = True) -> list[str]:
        """mpiexec and its options; each rank on a processor of its own where there are enough and bind."""
        crowded = ranks > (os.cpu_count() or 1)
        bound = bind and not crowded
        if self.name == "mpich":
            return [self.mpiexec, *(("-bind-to", "core") if bound else ()), "-n", str(ranks)]
        patient = ["--mca", "mpi_yield_when_idle", "1"] if crowded else []
        words = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "core" if bound else "none"]
        return [self.mpiexec, *words, *patient, "-n", str(ranks)]

    def lines(self, ranks: int, words: Sequence[str], **more: str) -> list[dict[str, Any]]:
        """What the ranks of mpi_lines.py print; ``more`` is added to their environment. Raises BenchError."""
        done = subprocess.run(
            [*self.command(ranks), self.python, *bare("mpi_lines"), *words],
            env=environment(more),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode:
            raise BenchError(f"{self.name} failed: {done.stderr[-2000:] or done.stdout[-2000:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def named() -> list[Mpi]:
    """The libraries that $MPICH_PYTHON, $MPICH_EXEC, $OMPI_PYTHON and $OMPI_EXEC name; else the one here.

    The one here needs mpi4py here and a mpiexec beside the interpreter or in PATH.
    """
    found = []
    for name in NAMES:
        python, mpiexec = (os.environ.get(f"{name}_{what}".upper()) for what in ("python", "exec"))
        if python and mpiexec:
            found.append(Mpi(name, python, mpiexec))
    return found or own()


def own() -> list[Mpi]:
    """The library of this interpreter, if there is one."""
    from importlib.util import find_spec

    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    return [Mpi.found(sys.executable, mpiexec)] if mpiexec and find_spec("mpi4py") else []


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """A rank's: it finds this package, and computes with one thread."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(more or {})}
