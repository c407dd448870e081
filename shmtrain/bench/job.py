"""What the conductor asks of a group's ranks, and how vectors lie in memory."""

from __future__ import annotations

import json
import mmap
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
ALPHA = 0.05
MIB = 1 << 20

# How an exchange may overlap with computing:
SEQUENTIAL = "sequential"  # not at all
PUSH = "push"  # the center is read before computing, the increment travels meanwhile: the paper's two threads
WHOLE = "whole"  # all of it travels meanwhile, and acts one step late
NOTHING = "nothing"  # no exchange: what the computing alone takes


@dataclass(frozen=True)
class Job:
    """So many exchanges of one kind, each followed by computing.

    op, variant  which way; "compute" is none
    count        float32 elements of the vector
    overlap      SEQUENTIAL, PUSH, WHOLE or NOTHING
    computing    "none", "busy" (the processor works) or "wait" (it sleeps, as while a GPU works)
    amount       of computing a step: busy: calls of the loop (computing.py); wait: seconds
    repeat       exchanges of each worker
    cpus         worker i stays on cpus[i]; empty: anywhere
    crowded      more processes than processors: who waits for a message sleeps in between
    check        tell what the vectors hold afterwards
    """

    op: str
    variant: str
    count: int
    overlap: str = SEQUENTIAL
    computing: str = "none"
    amount: float = 0.0
    repeat: int = 4
    cpus: tuple[int, ...] = ()
    crowded: bool = False
    check: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "cpus": tuple(values["cpus"])})

    def __str__(self) -> str:
        computing = "" if self.computing == "none" else f", computing: {self.computing}"
        return f"{self.op} ({self.variant}), {4 * self.count / MIB:.4g} MiB, {self.overlap}{computing}"


def floats(count: int, value: float = 0.0) -> F32:
    """(count,) float32 on private 4 KiB pages, all present: the box's memory is on such pages too."""
    memory = mmap.mmap(-1, max(count * 4, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.float32, count)
    array[:] = value
    return array


def pieces(count: int, elements: int) -> list[slice]:
    """[0, count) in slices of ``elements``, the last one shorter."""
    return [slice(at, min(at + elements, count)) for at in range(0, count, elements)]
