"""The ops of mpi_ops.py measured by the ranks of one mpiexec alone, without a conductor, over any transport.

Arguments: ``--ops server,rma,allreduce,window --mib 16,64 --repeat 3``. Prints one JSON object a line: op,
variant, MiB, workers, seconds of each exchange (the wall time of a round in which each worker makes one
exchange, divided by the workers; rank 0 is the server, and takes part in the sum).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from shmtrain.bench.mpi_ops import Allreduce, Buffers, Center, MpiWay, Rma, Server, Window

WAYS: dict[str, type[MpiWay]] = {"server": Server, "rma": Rma, "allreduce": Allreduce, "window": Window}


def part(comm: Any, name: str, buffers: Buffers, window: Any) -> Callable[[str], Callable[[], None]]:
    """This rank's part in one round of an op, by variant."""

    def of(variant: str) -> Callable[[], None]:
        if name == "allreduce":
            return Allreduce(comm, buffers, variant).exchange
        if comm.rank == 0:
            center = Center(comm, buffers, variant)
            return (lambda: center.serve(comm.size - 1)) if name == "server" else lambda: None
        if name == "server":
            return Server(comm, buffers, variant).exchange
        if name == "rma":
            return Rma(window, buffers, variant).exchange
        return Window(np.frombuffer(window.Shared_query(0)[0], np.float32), buffers).exchange

    return of


def made(comm: Any, name: str, count: int) -> Any:
    """The window of an op that needs one."""
    if name not in ("rma", "window"):
        return None
    make = MPI.Win.Allocate if name == "rma" else MPI.Win.Allocate_shared
    window: Any = make(count * 4 if comm.rank == 0 else 0, 4, comm=comm)
    if comm.rank == 0:
        np.frombuffer(window.tomemory(), np.float32)[:] = 0.0
    comm.Barrier()
    return window


def measured(comm: Any, run: Callable[[], None], repeat: int) -> list[float]:
    """Seconds of each round as the last rank saw it; the first round only warms up."""
    times = []
    for _ in range(repeat + 1):
        comm.Barrier()
        began = time.perf_counter()
        run()
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
        buffers = Buffers((mib << 20) // 4)
        for name in ops:
            window = made(comm, name, buffers.count)
            of = part(comm, name, buffers, window)
            share = 1 if name == "allreduce" else workers
            for variant in WAYS[name].variants:
                times = measured(comm, of(variant), repeat)
                yield {
                    "op": name,
                    "variant": variant,
                    "mib": mib,
                    "workers": workers,
                    "seconds": [t / share for t in times],
                }
            if window is not None:
                window.Free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", default=",".join(WAYS))
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
