"""Workers of one job in one process: each with vectors of its own, on a problem whose gradients are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import smb
from shmtrain.crowd import Crowd
from shmtrain.exchange import open_exchange
from shmtrain.exchange.base import F32, Exchange, Meeting, Vectors
from shmtrain.group import Column, Progress, State
from shmtrain.method import METHODS, Method

F64 = npt.NDArray[np.float64]
N, RATE, JOB = 600, 0.05, "job"


def start(seed: int = 0, n: int = N) -> F32:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def gradient(weights: npt.NDArray[Any], rank: int, step: int) -> Any:
    """That of a quadratic bowl of the worker's own, and noise: known, the same in both precisions."""
    noise = start(1000 + 100 * rank + step, len(weights)).astype(weights.dtype)
    return weights * (0.5 + rank) + noise


def close(got: npt.NDArray[Any], want: F64) -> None:
    """The measure of all equations: 1e-6 of the largest weight."""
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@dataclass
class Counted:
    count: int = 0


@dataclass
class Worker:
    """One worker: vectors, SGD with momentum, and its exchange."""

    rank: int
    vectors: Vectors
    exchange: Exchange
    momentum: float
    gradient: Callable[[npt.NDArray[Any], int, int], Any] = gradient
    rate: float = RATE
    steps: int = 0
    pool: ThreadPoolExecutor | None = None  # its own thread: what it opened must not end with another one

    @property
    def weights(self) -> F32:
        return self.vectors.weights

    def forward(self) -> None:
        """Up to the gradient."""
        self.exchange.before_forward(self.steps)
        trained = self.vectors.trained
        at = self.weights
        self.vectors.gradient[:trained] = self.gradient(at, self.rank, self.steps)[:trained]

    def update(self) -> None:
        self.exchange.gradients_ready(self.steps)
        (history,), trained = self.vectors.history, self.vectors.trained
        history[:] = (
            np.float32(self.momentum) * history + np.float32(self.rate) * self.vectors.gradient[:trained]
        )
        self.weights[:trained] -= history
        if self.vectors.updates:
            self.vectors.updates.count += 1
        self.exchange.after_update(self.steps)
        self.steps += 1

    def step(self) -> None:
        self.forward()
        self.update()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


@dataclass
class Job:
    """The workers of one job at a box; ``center`` reads it."""

    box: smb.Box
    progress: Progress
    workers: list[Worker] = field(default_factory=list)

    @property
    def center(self) -> F32:
        return np.asarray(self.box.attach(f"{JOB}/center").read())

    def bury(self, rank: int) -> None:
        self.progress.put(rank, Column.STATE, State.DEAD)

    def open_late(self, address: str, recipe: Recipe, rank: int) -> Worker:
        """One that joins the others at row ``rank``, in a thread of its own."""
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"worker-{rank}")
        worker = pool.submit(open_worker, address, recipe, rank, len(self.workers), True).result(30)
        worker.pool = pool
        return worker

    def wait_until_training(self, rank: int) -> None:
        """The others know from then on that it takes part."""
        deadline = time.monotonic() + 10
        while self.progress.rows().state(rank) is not State.TRAINING:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@dataclass(frozen=True)
class Recipe:
    """How a job's workers are opened."""

    algorithm: str
    world: int = 2
    method: Method = field(default_factory=lambda: Method(beta=None, wait_limit=30.0))
    alpha: float = 0.3
    tau: int | None = None
    momentum: float = 0.0
    n: int = N
    trained: int | None = None
    iterations: int = 1_000_000
    gradient: Callable[[npt.NDArray[Any], int, int], Any] = gradient
    rate: float = RATE
    way: str = "fused"
    when_ready: Any = None


def open_job(address: str, recipe: Recipe, absent: frozenset[int] | set[int] = frozenset()) -> Job:
    """All workers of a job but ``absent``, opened at once: some algorithms wait for one another in that."""
    box = smb.connect(address)
    progress = Progress.create(box, JOB, recipe.world)
    box.create(f"{JOB}/center", count=recipe.n, initial=start(n=recipe.n), lifetime="attached")
    job = Job(box, progress)
    for rank in absent:
        progress.put(rank, Column.STATE, State.FREE)
    ranks = [rank for rank in range(recipe.world) if rank not in absent]
    pools = [ThreadPoolExecutor(1, thread_name_prefix=f"worker-{rank}") for rank in ranks]
    for rank in ranks:
        progress.put(rank, Column.STATE, State.TRAINING)
    began = len(ranks)
    opening = [
        pool.submit(open_worker, address, recipe, rank, began)
        for rank, pool in zip(ranks, pools, strict=True)
    ]
    job.workers = [future.result(30) for future in opening]
    for worker, pool in zip(job.workers, pools, strict=True):
        worker.pool = pool
    return job


def open_worker(address: str, recipe: Recipe, rank: int, began: int, joining: bool = False) -> Worker:
    box = smb.connect(address, name=f"worker {rank}")
    progress = Progress.attach(box, JOB)
    if joining:
        assert progress.rows().vacant == rank
        progress.take_row(rank, 0)
    trained = recipe.n if recipe.trained is None else recipe.trained
    vectors = Vectors(
        weights=start(n=recipe.n),
        gradient=np.zeros(recipe.n, np.float32),
        trained=trained,
        statistics=trained,
        history=(np.zeros(trained, np.float32),),
        momentum=recipe.momentum,
        updates=Counted(),
        when_ready=recipe.when_ready,
    )

    def open_pair() -> tuple[smb.Segment, smb.Segment]:
        other = smb.connect(address)
        center = other.attach(f"{JOB}/center")
        return other.create(f"{JOB}/delta/{rank}", count=center.count, lifetime="owner"), center

    meeting = Meeting(
        center=box.attach(f"{JOB}/center"),
        vectors=vectors,
        alpha=lambda: recipe.alpha,
        tau=METHODS[recipe.algorithm].tau if recipe.tau is None else recipe.tau,
        way=recipe.way,
        method=recipe.method,
        crowd=Crowd(box, JOB, rank, recipe.world, progress, recipe.method.wait_limit, began, joining),
        threads=1,
        iterations=recipe.iterations,
        base_rate=recipe.rate,
        open_pair=open_pair,
        joined=lambda: progress.put(rank, Column.STATE, State.FINISHED),
    )
    exchange = open_exchange(recipe.algorithm, meeting)
    return Worker(rank, vectors, exchange, recipe.momentum, recipe.gradient, recipe.rate)


def in_threads(calls: Sequence[Callable[[], None]], timeout: float = 60.0) -> None:
    """Run all at once; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert errors or not thread.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]


def together(workers: Sequence[Worker], steps: int) -> None:
    """Each worker in a thread of its own."""
    running = [w.pool.submit(w.run, steps) for w in workers if w.pool]
    for future in running:
        future.result(60)
