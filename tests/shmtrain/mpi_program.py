"""What the ranks of test_mpi.py do: the MPI ways on small problems; each saves what it had as FILE.RANK.npz.

mpiexec -n 4 python -m tests.shmtrain.mpi_program equations FILE
mpiexec -n 9 python -m tests.shmtrain.mpi_program convex FILE
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from shmtrain.exchange import mpi_star, open_exchange
from shmtrain.exchange.base import Vectors
from shmtrain.exchange.mpi_easgd import serve
from shmtrain.exchange.mpi_ranks import RankMeeting, Ranks
from smb.errors import NonFinite
from tests.shmtrain.crowds import Worker, start
from tests.shmtrain.test_exchange_convex import slope

N, TRAINED, STEPS, MU, ALPHA = 600, 499, 6, 0.5, 0.3
LIMIT = 15.0  # seconds that a rank waits for the others
COMM = MPI.COMM_WORLD
Saved = dict[str, Any]


def open_worker(name: str, comm: Any, *, n: int = N, trained: int = TRAINED, **more: Any) -> Worker:
    """This rank of ``comm`` with vectors of its own; the first rank's start is everybody's."""
    worker = comm.rank - (name == "mpi-easgd")
    vectors = Vectors(
        weights=start(7 * worker, n),
        gradient=np.zeros(n, np.float32),
        trained=trained,
        statistics=trained,
        history=(np.zeros(trained, np.float32),),
    )
    limits = {"iterations": 1_000_000, "alpha": ALPHA, **more}
    exchange = open_exchange(name, RankMeeting(ranks=Ranks(comm, LIMIT), vectors=vectors, **limits))
    return Worker(worker, vectors, exchange, MU)


def in_step(name: str, comm: Any) -> Saved:
    """STEPS steps; before each, this rank's accumulators move by its rank."""
    worker = open_worker(name, comm)
    exchange: Any = worker.exchange
    seen = []
    for _ in range(STEPS):
        worker.forward()
        worker.weights[TRAINED:] += comm.rank
        worker.update()
        seen.append(worker.weights.copy())
    exchange.close()
    short = open_worker(name, comm, iterations=comm.size + 1)
    exchange = short.exchange
    upcoming = []
    while (iteration := exchange.upcoming) is not None:
        upcoming.append(iteration)
        short.step()
    exchange.finish()
    exchange.close()
    return {"weights": np.array(seen), "upcoming": upcoming, **leaving(name, comm)}


def leaving(name: str, comm: Any) -> Saved:
    """Rank 1 leaves after two steps: the others make a third one without it, and end."""
    worker = open_worker(name, comm)
    exchange: Any = worker.exchange
    worker.run(2)
    while comm.rank != 1 and exchange.upcoming is not None:
        worker.step()
    exchange.finish()
    exchange.close()
    return {"left": worker.weights.copy(), "left_steps": worker.steps, "left_done": exchange.completed}


def elastic(comm: Any, tau: int) -> Saved:
    """Workers in turns: each makes its step when the one before it has made its own."""
    workers = comm.Split(comm.rank > 0)
    if comm.rank == 0:
        return {"exchanges": serve(Ranks(comm, LIMIT), ALPHA)}
    worker = open_worker("mpi-easgd", comm, tau=tau)
    exchange: Any = worker.exchange
    weights, centers = [], []
    for _ in range(STEPS):
        for turn in range(workers.size):
            if turn == workers.rank:
                worker.step()
            workers.Barrier()
        weights.append(worker.weights.copy())
        centers.append(np.empty(N, np.float32))
        exchange.center(centers[-1])
        workers.Barrier()
    refused = 0
    if workers.rank == workers.size - 1:
        worker.weights[5] = np.nan
        try:
            exchange.before_forward(0)
        except NonFinite:
            refused = 1
    workers.Barrier()
    after = np.empty(N, np.float32)
    exchange.center(after)
    workers.Barrier()
    worker.weights[5] = 0
    exchange.finish()
    exchange.close()
    return {"weights": weights, "centers": centers, "refused": refused, "after": after}


def claimed(comm: Any, iterations: int = 50) -> Saved:
    """Each claims until nothing is left."""
    workers = comm.Split(comm.rank > 0)
    if comm.rank == 0:
        serve(Ranks(comm, LIMIT), ALPHA)
        return {}
    worker = open_worker("mpi-easgd", comm, iterations=iterations)
    exchange: Any = worker.exchange
    got = []
    while (iteration := exchange.upcoming) is not None:
        got.append(iteration)
        worker.step()
    exchange.finish()
    workers.Barrier()
    exchange.close()
    return {"claimed": got, "completed": exchange.completed}


def equations() -> Saved:
    mpi_star.PIECE = 100  # so that a vector has several
    saved: Saved = {}
    for name, results in {
        "mpi-allreduce": in_step("mpi-allreduce", COMM),
        "mpi-star": in_step("mpi-star", COMM),
        "easgd-1": elastic(COMM, 1),
        "easgd-2": elastic(COMM, 2),
        "claims": claimed(COMM),
    }.items():
        saved |= {f"{name} {key}": value for key, value in results.items()}
    crowded = Ranks(COMM, LIMIT)
    return {**saved, "crowded": crowded.crowded}


def convex() -> Saved:
    """Eight workers, the last rank left out where there is no server."""
    saved: Saved = {}
    eight = COMM.Split(COMM.rank < 8)
    for name in ("mpi-allreduce", "mpi-star"):
        if COMM.rank < 8:
            saved[name] = optimum(open_worker(name, eight, n=50, trained=50), 80)
    alpha = 0.9 / 8
    if COMM.rank == 0:
        serve(Ranks(COMM, 60.0), alpha)
    else:
        saved["mpi-easgd"] = optimum(open_worker("mpi-easgd", COMM, n=50, trained=50), 80)
    return saved


def optimum(worker: Worker, steps: int) -> Any:
    worker.gradient, worker.rate, worker.momentum = slope, 0.3, 0.0
    worker.run(steps)
    exchange: Any = worker.exchange
    exchange.finish()
    out = np.empty_like(worker.weights)
    exchange.center(out)
    exchange.close()
    return out


if __name__ == "__main__":
    results = {"equations": equations, "convex": convex}[sys.argv[1]]()
    np.savez(f"{sys.argv[2]}.{COMM.rank}.npz", **results)
