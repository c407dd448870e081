"""The MPI libraries of this machine, for tests that start ranks.

$MPICH_EXEC and $OMPI_EXEC name their mpiexec; else the one beside this interpreter or on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"mpich": "libmpi.so.12", "ompi": "libmpi.so.40"}
LIMIT = 100.0  # seconds of one mpiexec


@dataclass(frozen=True)
class Mpi:
    """One library: ``name`` is mpich or ompi."""

    name: str
    mpiexec: str

    @property
    def environment(self) -> dict[str, str]:
        """What mpi4py needs to load this library and no other."""
        library = Path(self.mpiexec).resolve().parent.parent / "lib" / LIBRARIES[self.name]
        named = {"MPI4PY_LIBMPI": str(library)} if library.exists() else {}
        return {**os.environ, **named, "OMP_NUM_THREADS": "1"}

    def command(self, ranks: int, words: Sequence[str], *options: str) -> list[str]:
        more = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if self.name == "ompi" else []
        return [self.mpiexec, *more, *options, "-n", str(ranks), *words]

    def run(self, ranks: int, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run ranks to their end, in ``folder`` and with this checkout's modules."""
        environment = {**self.environment, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            self.command(ranks, words),
            cwd=folder,
            env=environment,
            timeout=LIMIT,
            capture_output=True,
            text=True,
        )


@cache
def _kind(mpiexec: str) -> str | None:
    told = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=30).stdout
    return "mpich" if "HYDRA" in told.upper() else "ompi" if "Open MPI" in told or "prte" in told else None


@cache
def found(name: str) -> Mpi | None:
    """The library called ``name``, where mpi4py and its mpiexec are here."""
    if find_spec("mpi4py") is None:
        return None
    named = os.environ.get({"mpich": "MPICH_EXEC", "ompi": "OMPI_EXEC"}[name])
    beside = str(Path(sys.executable).parent / "mpiexec")
    for mpiexec in filter(None, (named, shutil.which(beside), shutil.which("mpiexec"))):
        if _kind(mpiexec) == name:
            return Mpi(name, mpiexec)
    return None


def need(name: str) -> Mpi:
    mpi = found(name)
    if mpi is None:
        pytest.skip(f"needs mpi4py and the mpiexec of {name}")
    return mpi
