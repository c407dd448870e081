"""One process of a group, started with KIND CONTROL GROUP ...; it does what the conductor says.

box  CONTROL GROUP RANK ADDRESS      a worker at the box
gloo CONTROL GROUP RANK WORLD STORE  a worker of torch.distributed, which meets the others at the file STORE
mpi  CONTROL GROUP                   a rank of mpiexec; rank 0 holds the center
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from shmtrain.bench.control import Line
from shmtrain.bench.job import F32, NOTHING, Job, floats
from shmtrain.bench.ways import Way, steps

TIMEOUT = 120.0  # seconds a call may take


class Contestant(Protocol):
    """One rank's part in all ops of a library."""

    rank: int  # of the line; workers count from ``first``
    first: int

    def way(self, job: Job) -> Way | None:
        """This rank's way; None: it has no part in this op, or serves."""

    def server(self, job: Job) -> Callable[[], None] | None:
        """What this rank does for the others' exchanges; None: nothing."""

    def vectors(self, job: Job) -> list[F32]:
        """What this rank holds after ``way``: a worker's weights, and the center where it lies."""


class AtBox:
    """A worker of the box."""

    first = 0

    def __init__(self, rank: int, address: str) -> None:
        import smb

        self.rank = rank
        self.box, self.second = (smb.connect(address, timeout=TIMEOUT) for _ in range(2))
        self.mine = floats(1)

    def way(self, job: Job) -> Way | None:
        from shmtrain.bench.box_ops import Fused, Paper

        if job.op == "compute":
            return None
        key = f"bench/{job.count}"
        if len(self.mine) != job.count:
            self.mine = floats(job.count)
        center = self.box.create(key, count=job.count, or_attach=True)
        if job.op == "paper":
            return Paper(self.box, self.second, key, f"{key}/{self.rank}", self.mine)
        return Fused(center, self.mine, int(job.variant))

    def server(self, job: Job) -> None:
        return None

    def vectors(self, job: Job) -> list[F32]:
        return [self.mine]


class WithGloo:
    """A worker of torch.distributed's gloo."""

    first = 0

    def __init__(self, rank: int, world: int, store: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.dist, self.torch = rank, dist, torch
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
        )
        self.mine = floats(1)

    def way(self, job: Job) -> Way:
        from shmtrain.bench.gloo_ops import Gloo

        if len(self.mine) != job.count:
            self.mine = floats(job.count)
        return Gloo(self.mine, job.variant)

    def server(self, job: Job) -> None:
        return None

    def vectors(self, job: Job) -> list[F32]:
        return [self.mine]


class WithMpi:
    """A rank under mpiexec. Windows are made once for each size."""

    first = 1

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank = int(self.comm.rank)
        self.workers = self.comm.Split(0 if self.rank else 1, self.rank)
        self.buffers: Any = None
        self.windows: dict[str, Any] = {}

    def _sized(self, count: int) -> None:
        from shmtrain.bench.mpi_ops import Buffers

        if self.buffers is None or self.buffers.count != count:
            for window in self.windows.values():
                window.Free()
            self.windows, self.buffers = {}, Buffers(count)

    def _window(self, op: str) -> Any:
        from mpi4py import MPI

        if op not in self.windows:
            make = MPI.Win.Allocate if op == "rma" else MPI.Win.Allocate_shared
            self.windows[op] = make(0 if self.rank else 4 * self.buffers.count, 4, comm=self.comm)
            if self.rank == 0:
                self._center(op)[:] = 0.0
            self.comm.Barrier()
        return self.windows[op]

    def _center(self, op: str) -> Any:
        import numpy as np

        window = self.windows[op]
        memory = window.tomemory() if op == "rma" else window.Shared_query(0)[0]
        return np.frombuffer(memory, np.float32)

    def way(self, job: Job) -> Way | None:
        from shmtrain.bench import mpi_ops

        self._sized(job.count)
        if job.op in ("rma", "window"):
            window = self._window(job.op)
        if self.rank == 0:
            return None
        if job.op == "server":
            return mpi_ops.Server(self.comm, self.buffers, job.variant, job.crowded)
        if job.op == "rma":
            return mpi_ops.Rma(window, self.buffers, job.variant)
        if job.op == "window":
            return mpi_ops.Window(self._center("window"), self.buffers)
        return mpi_ops.Allreduce(self.workers, self.buffers, job.variant)

    def server(self, job: Job) -> Callable[[], None] | None:
        from shmtrain.bench.mpi_ops import Center

        if self.rank or job.op != "server":
            return None
        center = Center(self.comm, self.buffers, job.variant, job.crowded)
        return lambda: center.serve(job.repeat * (self.comm.size - 1))

    def vectors(self, job: Job) -> list[F32]:
        return [self._center(job.op) if job.op in self.windows and self.rank == 0 else self.buffers.mine]


@contextlib.contextmanager
def kept_on(job: Job, place: int) -> Iterator[None]:
    """Worker ``place`` on its processor, if the job names any."""
    before = os.sched_getaffinity(0)
    if job.cpus:
        os.sched_setaffinity(0, {job.cpus[place % len(job.cpus)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def warmed(contestant: Contestant, job: Job) -> None:
    """One step that is not measured: it warms memory and caches, and is the library's own first time."""
    one = replace(job, repeat=1)
    way, server = contestant.way(one), contestant.server(one)
    if server:
        server()
    elif way is not None or job.overlap == NOTHING:
        work, close = steps(way, one)
        work()
        close()
        if way is not None:
            way.close()


def obey(line: Line, contestant: Contestant) -> None:
    """Do jobs until there are no more."""
    place = contestant.rank - contestant.first
    while (job := line.job()) is not None:
        with kept_on(job, place):
            if not job.check:
                warmed(contestant, job)
            way, server = contestant.way(job), contestant.server(job)
            idle = way is None and server is None and job.overlap != NOTHING
            work, close = (server or _nothing, _nothing) if server or idle else steps(way, job)
            if job.check:
                for vector in contestant.vectors(job):
                    vector[:] = place + 1  # the center is 0
            line.say(ready=True)
            line.go()
            began = time.monotonic()
            work()
            ended = time.monotonic()
            close()
            if way is not None:
                way.close()
        line.say(**({} if idle else {"began": began, "ended": ended}))
        if job.check:
            line.go()
            line.say(held=[float(vector.mean(dtype="float64")) for vector in contestant.vectors(job)])


def _nothing() -> None:
    """This rank has no part in it."""


def main(words: list[str]) -> int:
    kind, control, group, *rest = words
    contestant: Contestant
    if kind == "box":
        contestant = AtBox(int(rest[0]), rest[1])
    elif kind == "gloo":
        contestant = WithGloo(int(rest[0]), int(rest[1]), rest[2])
    else:
        contestant = WithMpi()
    obey(Line(control, group, contestant.rank), contestant)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
