"""The same elastic exchange by MPI, as fast as we can make it: ranks run this under mpiexec.

    PYTHONPATH=. mpiexec -n 2 python benchmarks/exchange_mpi.py --ops server,rma,allreduce,window --mib 16,64

Rank 0 is the server of the center; every other rank is a worker with weights of its own. All ranks compute
with the box's kernels (smb._native), in place, on 4 KiB pages, and leave out the box's check for NaN. Each op
is measured in each of its variants; the best is what counts:

    server     send/recv with a server rank.
               fused: the worker sends x, the server moves both in one pass and sends x back
               (the receive is posted before)
               pull: the worker receives the center, keeps its own side, sends d, the server accumulates
               piped: as fused in 1 MiB pieces, non-blocking both ways, two under way
    rma        Get, pull, Accumulate on a window of rank 0; lock: a lock each, held: lock_all once and flush
    allreduce  the sum of all ranks' weights, in place and out of place
    window     the user's own loop over MPI_Win_allocate_shared memory, no locks

Prints one JSON object a line: op, variant, MiB, workers, seconds of each exchange (the wall time of a round
in which each worker makes one exchange, divided by the workers).
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from smb import _native

ALPHA = 0.05
PIECE = (1 << 20) // 4  # elements of a piece in the piped variant
AHEAD = 2
READY, DATA, BACK, ACK = range(4)
F32 = Any


def floats(count: int) -> F32:
    """Zeros on 4 KiB pages, present."""
    memory = mmap.mmap(-1, count * 4)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.float32)
    array[:] = 0.5
    return array


class Server:
    """Exchange by send and recv. Rank 0 serves all workers, whoever comes first."""

    variants = ("fused", "pull", "piped")

    def __init__(self, comm: Any, count: int) -> None:
        self.comm, self.rank, self.workers = comm, comm.rank, comm.size - 1
        self.mine = floats(count)
        self.other = floats(count)
        self.token = np.zeros(1, np.int32)

    def run(self, variant: str) -> None:
        if self.rank:
            getattr(self, f"{variant}_worker")()
        else:
            getattr(self, f"{variant}_server")()

    def fused_worker(self) -> None:
        # A receive into other can be posted before x leaves; the two buffers then change places.
        back = self.comm.Irecv(self.other, 0, BACK)
        self.comm.Send(self.mine, 0, DATA)
        back.Wait()
        self.mine, self.other = self.other, self.mine

    def fused_server(self) -> None:
        status = MPI.Status()
        for _ in range(self.workers):
            self.comm.Recv(self.other, MPI.ANY_SOURCE, DATA, status)
            _native.exchange(self.other, self.mine, ALPHA, check=False)
            self.comm.Send(self.other, status.source, BACK)

    def pull_worker(self) -> None:
        self.comm.Send(self.token, 0, READY)
        self.comm.Recv(self.other, 0, BACK)
        _native.elastic_pull(self.mine, self.other, ALPHA, out=self.other)
        self.comm.Send(self.other, 0, DATA)
        self.comm.Recv(self.token, 0, ACK)

    def pull_server(self) -> None:
        status = MPI.Status()
        for _ in range(self.workers):
            self.comm.Recv(self.token, MPI.ANY_SOURCE, READY, status)
            arrival = self.comm.Irecv(self.other, status.source, DATA)
            self.comm.Send(self.mine, status.source, BACK)
            arrival.Wait()
            _native.accumulate(self.mine, self.other)
            self.comm.Send(self.token, status.source, ACK)

    def pieces(self) -> list[slice]:
        return [slice(at, min(at + PIECE, self.mine.size)) for at in range(0, self.mine.size, PIECE)]

    def piped_worker(self) -> None:
        self.comm.Send(self.token, 0, READY)
        pieces = self.pieces()
        sends = [self.comm.Isend(self.mine[piece], 0, DATA) for piece in pieces[:AHEAD]]
        # x may not be received into while it is being sent: the answer to a piece comes after its arrival.
        for i, piece in enumerate(pieces):
            sends[i].Wait()
            if i + AHEAD < len(pieces):
                sends.append(self.comm.Isend(self.mine[pieces[i + AHEAD]], 0, DATA))
            self.comm.Recv(self.mine[piece], 0, BACK)

    def piped_server(self) -> None:
        status = MPI.Status()
        for _ in range(self.workers):
            self.comm.Recv(self.token, MPI.ANY_SOURCE, READY, status)
            worker, pieces, answers = status.source, self.pieces(), []
            arrivals = [self.comm.Irecv(self.other[p], worker, DATA) for p in pieces[: AHEAD + 1]]
            for i, piece in enumerate(pieces):
                arrivals[i].Wait()
                if i + AHEAD + 1 < len(pieces):
                    arrivals.append(self.comm.Irecv(self.other[pieces[i + AHEAD + 1]], worker, DATA))
                _native.exchange(self.other[piece], self.mine[piece], ALPHA, check=False)
                answers.append(self.comm.Isend(self.other[piece], worker, BACK))
            MPI.Request.Waitall(answers)


class Rma:
    """Exchange by one-sided Get and Accumulate on rank 0's window."""

    variants = ("held", "lock")

    def __init__(self, comm: Any, count: int) -> None:
        self.rank, self.count = comm.rank, count
        self.window = MPI.Win.Allocate(count * 4 if comm.rank == 0 else 0, 4, comm=comm)
        if comm.rank == 0:
            np.frombuffer(self.window.tomemory(), np.float32)[:] = 0.5
        self.mine, self.other = floats(count), floats(count)
        comm.Barrier()

    def run(self, variant: str) -> None:
        if self.rank == 0:
            return
        if variant == "held":
            self.window.Lock_all(MPI.MODE_NOCHECK)
        else:
            self.window.Lock(0, MPI.LOCK_SHARED)
        self.window.Get(self.other, 0)
        self.window.Flush(0)
        _native.elastic_pull(self.mine, self.other, ALPHA, out=self.other)
        self.window.Accumulate(self.other, 0, op=MPI.SUM)
        if variant == "held":
            self.window.Flush(0)
            self.window.Unlock_all()
        else:
            self.window.Unlock(0)


class Allreduce:
    """The synchronous sum of the same bytes."""

    variants = ("in place", "out of place")

    def __init__(self, comm: Any, count: int) -> None:
        self.comm = comm
        self.mine, self.other = floats(count), floats(count)

    def run(self, variant: str) -> None:
        if variant == "in place":
            self.comm.Allreduce(MPI.IN_PLACE, self.mine)
        else:
            self.comm.Allreduce(self.mine, self.other)


class Window:
    """A loop of one's own over a shared window: the honest limit on one host. No locks."""

    variants = ("fused",)

    def __init__(self, comm: Any, count: int) -> None:
        self.rank = comm.rank
        self.window = MPI.Win.Allocate_shared(count * 4 if comm.rank == 0 else 0, 4, comm=comm)
        memory, _ = self.window.Shared_query(0)
        self.center = np.frombuffer(memory, np.float32)
        if comm.rank == 0:
            self.center[:] = 0.5
        self.mine = floats(count)
        comm.Barrier()

    def run(self, variant: str) -> None:
        if self.rank:
            _native.exchange(self.mine, self.center, ALPHA, check=False)


OPS: dict[str, Callable[[Any, int], Any]] = {
    "server": Server,
    "rma": Rma,
    "allreduce": Allreduce,
    "window": Window,
}


def measured(comm: Any, run: Callable[[str], None], variant: str, repeat: int) -> list[float]:
    """Seconds of each round as the last rank saw it; the first round only warms up."""
    times = []
    for _ in range(repeat + 1):
        comm.Barrier()
        began = time.perf_counter()
        run(variant)
        if comm.rank == 0 or comm.size > 2:
            comm.Barrier()  # all workers' exchanges make the round
        elapsed = time.perf_counter() - began
        if comm.rank == 1 and comm.size == 2:
            comm.Barrier()
        times.append(elapsed)
    return times[1:]


def lines(comm: Any, ops: list[str], sizes: list[int], repeat: int) -> Iterator[dict[str, object]]:
    workers = comm.size - 1
    for mib in sizes:
        for name in ops:
            op = OPS[name](comm, (mib << 20) // 4)
            for variant in op.variants:
                times = measured(comm, op.run, variant, repeat)
                share = 1 if name == "allreduce" else workers
                yield {
                    "op": name,
                    "variant": variant,
                    "mib": mib,
                    "workers": workers,
                    "seconds": [t / share for t in times],
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--mib", default="16,64")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    comm = MPI.COMM_WORLD
    sizes = [int(size) for size in given.mib.split(",")]
    for line in lines(comm, given.ops.split(","), sizes, given.repeat):
        if comm.rank == 1:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
