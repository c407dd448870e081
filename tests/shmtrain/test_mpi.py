"""The MPI ways against their equations, in numpy's float64, and as commands under mpirun."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tests.shmtrain.crowds import RATE, close, gradient, start
from tests.shmtrain.mpi import Mpi, found, need
from tests.shmtrain.mpi_program import ALPHA, MU, STEPS, TRAINED
from tests.shmtrain.test_exchange_convex import OPTIMUM

RANKS = 4
IN_STEP = ("mpi-allreduce", "mpi-star")
Results = list[Mapping[str, Any]]

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["mpich", "ompi"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return need(request.param)


@cache
def results(name: str, what: str, ranks: int) -> Results:
    """What each rank of the program has saved; one start for all tests of a library."""
    mpi = found(name)
    assert mpi is not None
    with TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        program = [sys.executable, "-m", "tests.shmtrain.mpi_program", what, f"{folder}/r"]
        done = mpi.run(ranks, program, Path(folder))
        assert done.returncode == 0, done.stderr
        return [dict(np.load(f"{folder}/r.{rank}.npz")) for rank in range(ranks)]


# In step -------------------------------------------------------------------------------------------------


class Sgd:
    """One replica in float64: its trained part by SGD with momentum, the rest as BatchNorm's accumulators."""

    def __init__(self) -> None:
        self.w, self.h = start().astype(np.float64), np.zeros(TRAINED)

    def step(self, ranks: list[int], step: int) -> None:
        g = np.mean([gradient(self.w, rank, step) for rank in ranks], axis=0)[:TRAINED]
        self.h = MU * self.h + RATE * g
        self.w[:TRAINED] -= self.h


@pytest.mark.parametrize("way", IN_STEP)
def test_a_step_is_made_with_the_mean_gradient_and_accumulators_are_averaged(mpi: Mpi, way: str) -> None:
    every, want = results(mpi.name, "equations", RANKS), Sgd()
    for step in range(STEPS):
        ranks = list(range(RANKS))
        moved = want.w[TRAINED:] + np.mean(ranks)
        want.step(ranks, step)
        want.w[TRAINED:] = moved
        for rank in every:
            close(rank[f"{way} weights"][step], want.w)
    assert len({rank[f"{way} weights"].tobytes() for rank in every}) == 1


@pytest.mark.parametrize("way", IN_STEP)
def test_a_step_counts_as_many_iterations_as_there_are_ranks(mpi: Mpi, way: str) -> None:
    for rank in results(mpi.name, "equations", RANKS):
        assert rank[f"{way} upcoming"].tolist() == [0, RANKS]


@pytest.mark.parametrize("way", IN_STEP)
def test_who_is_asked_to_stop_ends_all_with_that_step(mpi: Mpi, way: str) -> None:
    """Its gradient is not in it; nobody waits for it afterwards."""
    want, every = Sgd(), results(mpi.name, "equations", RANKS)
    for step in range(2):
        want.step(list(range(RANKS)), step)
    close(every[1][f"{way} left"], want.w)
    assert every[1][f"{way} left_done"] == 2 * RANKS
    want.step([0, 2, 3], 2)
    for rank in (every[0], every[2], every[3]):
        close(rank[f"{way} left"], want.w)
        assert (rank[f"{way} left_steps"], rank[f"{way} left_done"]) == (3, 3 * RANKS - 1)


# Elastic, with a server rank -----------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1, 2])
def test_workers_and_center_move_towards_one_another(mpi: Mpi, tau: int) -> None:
    """Rank 0 serves; workers 0, 1, 2 make their steps in turns. All begin with worker 0's weights."""
    server, *every = results(mpi.name, "equations", RANKS)
    center = start().astype(np.float64)
    x, h = [center.copy() for _ in every], [np.zeros(TRAINED) for _ in every]
    for step in range(STEPS):
        for worker in range(len(every)):
            if step % tau == 0:
                d = ALPHA * (x[worker] - center)
                x[worker], center = x[worker] - d, center + d
            h[worker] = MU * h[worker] + RATE * gradient(x[worker], worker, step)[:TRAINED]
            x[worker][:TRAINED] -= h[worker]
        for worker, rank in enumerate(every):
            close(rank[f"easgd-{tau} weights"][step], x[worker])
            close(rank[f"easgd-{tau} centers"][step], center)
    # Each brings its last steps at the end, but for the one whose weights are refused before.
    assert server[f"easgd-{tau} exchanges"] == 3 * (STEPS // tau) + 2


def test_weights_that_are_no_numbers_are_refused_and_the_center_stays_clean(mpi: Mpi) -> None:
    *_, last = results(mpi.name, "equations", RANKS)
    assert last["easgd-1 refused"] == 1
    np.testing.assert_array_equal(last["easgd-1 after"], last["easgd-1 centers"][-1])


def test_each_iteration_is_claimed_once(mpi: Mpi) -> None:
    _, *every = results(mpi.name, "equations", RANKS)
    assert sorted(np.concatenate([rank["claims claimed"] for rank in every])) == list(range(50))
    assert every[0]["claims completed"] == 50  # who leads waits for the others


def test_eight_workers_find_the_optimum(mpi: Mpi) -> None:
    every = results(mpi.name, "convex", 9)
    far = np.abs(start(n=50) - OPTIMUM).max()
    for way in IN_STEP:
        assert np.abs(every[0][way] - OPTIMUM).max() < 0.02 * far
    assert np.abs(every[1]["mpi-easgd"] - OPTIMUM).max() < 0.02 * far
