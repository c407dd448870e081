"""Each synchronous algorithm, its workers in threads, against its equations; and what a death does to it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import smb
from shmtrain.exchange.base import Lockstep
from shmtrain.exchange.gloo import KNOCKS
from shmtrain.exchange.hybrid import group_of
from shmtrain.group import Column, State
from shmtrain.method import Method
from tests.shmtrain.crowds import (
    F64,
    RATE,
    Job,
    Recipe,
    close,
    gradient,
    in_threads,
    open_job,
    start,
    together,
)

METHOD = Method(beta=None, wait_limit=30.0, bucket_mib=0.001)  # of 262 floats: three buckets
STEPS, ALPHA, MU = 6, 0.3, 0.5
MEANS = ("sync", "allreduce")


def f64() -> F64:
    return start().astype(np.float64)


def mean_gradient(w: F64, ranks: Any, step: int) -> F64:
    ranks = list(ranks)
    total: F64 = sum((gradient(w, rank, step) for rank in ranks), np.zeros_like(w)) / len(ranks)
    return total


class Sgd:
    """One replica in float64."""

    def __init__(self) -> None:
        self.w, self.h = f64(), np.zeros(600)

    def step(self, g: F64, momentum: float = MU) -> None:
        self.h = momentum * self.h + RATE * g
        self.w = self.w - self.h


@pytest.mark.parametrize("algorithm", MEANS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_step_is_made_with_the_mean_gradient(address: str, algorithm: str, world: int) -> None:
    job, want = open_job(address, Recipe(algorithm, world, METHOD, momentum=MU)), Sgd()
    for step in range(STEPS):
        together(job.workers, 1)
        want.step(mean_gradient(want.w, range(world), step))
        for worker in job.workers:
            close(worker.weights, want.w)
        close(job.center, want.w)
    assert {worker.weights.tobytes() for worker in job.workers} == {job.workers[0].weights.tobytes()}
    end(job)


def end(job: Job) -> None:
    for future in [w.pool.submit(w.exchange.finish) for w in job.workers if w.pool]:
        future.result(30)
    for worker in job.workers:
        getattr(worker.exchange, "close", lambda: None)()


@pytest.mark.parametrize("algorithm", MEANS)
def test_batchnorms_accumulators_are_averaged(address: str, algorithm: str) -> None:
    """The last 101 of the vector: no rule touches them."""
    job = open_job(address, Recipe(algorithm, 2, METHOD, trained=499))

    def one(rank: int) -> None:
        worker = job.workers[rank]
        worker.forward()
        worker.weights[499:] = rank * 4.0
        worker.update()

    in_threads([lambda: one(0), lambda: one(1)])
    for worker in job.workers:
        np.testing.assert_array_equal(worker.weights[499:], 2.0)
    end(job)


@pytest.mark.parametrize("algorithm", MEANS)
def test_a_step_counts_as_many_iterations_as_it_had_workers(address: str, algorithm: str) -> None:
    job = open_job(address, Recipe(algorithm, 3, METHOD, iterations=7))
    exchanges = [worker.exchange for worker in job.workers]
    seen = []
    while all(isinstance(e, Lockstep) and e.upcoming is not None for e in exchanges):
        seen.append({e.upcoming for e in exchanges})  # type: ignore[attr-defined]
        together(job.workers, 1)
    assert seen == [{0}, {3}, {6}]
    assert {e.upcoming for e in exchanges} == {None}  # type: ignore[attr-defined]
    end(job)


@pytest.mark.parametrize("algorithm", MEANS)
def test_the_others_go_on_without_a_dead_worker(address: str, algorithm: str) -> None:
    job, want = open_job(address, Recipe(algorithm, 3, METHOD, momentum=MU)), Sgd()
    together(job.workers, 2)
    for step in range(2):
        want.step(mean_gradient(want.w, range(3), step))
    living = job.workers[:2]
    timer = threading.Timer(0.3, job.bury, [2])
    timer.start()
    together(living, 3)
    for step in range(2, 5):
        want.step(mean_gradient(want.w, range(2), step))
    for worker in living:
        close(worker.weights, want.w)
    assert job.workers[0].exchange.completed == 3 * 2 + 2 * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("algorithm", MEANS)
def test_who_does_not_come_is_named_within_the_limit(address: str, algorithm: str) -> None:
    method = replace(METHOD, wait_limit=1.0)
    job = open_job(address, Recipe(algorithm, 2, method))
    with pytest.raises(smb.WaitTimeout, match=r"nothing from worker 1 .* within 1 s"):
        job.workers[0].step()


def test_what_a_dead_worker_had_only_begun_to_write_is_in_no_mean(address: str) -> None:
    """Its seat is half written: the mean is that of those who have said that theirs is whole."""
    job, want = open_job(address, Recipe("sync", 2, METHOD)), Sgd()
    dead: Any = job.workers[1]
    dead.exchange._seats.write(0, np.full(600, 1e6, np.float32))
    job.bury(1)
    job.workers[0].step()
    want.step(mean_gradient(want.w, [0], 0), 0.0)
    close(job.workers[0].weights, want.w)


# While backward still computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["allreduce", "hybrid"])
def test_buckets_are_begun_as_backward_fills_them_and_end_in_the_same_mean(
    address: str, algorithm: str
) -> None:
    """Parameters come from the last to the first; three buckets of 262 floats begin before the end."""
    told: list[Any] = []
    recipe = Recipe(algorithm, 2, METHOD, ALPHA, 100, momentum=MU, when_ready=told.append)
    job, want, begun = open_job(address, recipe), Sgd(), []

    def one(worker: Any, call: Any) -> None:
        for _ in range(3):
            worker.forward()
            for start_, stop in [(450, 600), (100, 450), (0, 100)]:
                call(start_, stop)
                begun.append(len(worker.exchange._buckets._works))
            worker.update()

    calls = [(w, next(c for c in told if c.__self__ is w.exchange._buckets)) for w in job.workers]  # type: ignore[attr-defined]
    in_threads([lambda pair=pair: one(*pair) for pair in calls])  # type: ignore[misc]
    for step in range(3):
        want.step(mean_gradient(want.w, range(2), step))
    for worker in job.workers:
        close(worker.weights, want.w)
    assert sorted(set(begun)) == [1, 2, 3]
    end(job)


# Backup workers ------------------------------------------------------------------------------------------


def backups(address: str, world: int = 3, **more: Any) -> Job:
    method = replace(METHOD, backup_workers=1, **more)
    return open_job(address, Recipe("sync", world, method, momentum=MU))


def test_the_first_comers_make_the_step_and_the_late_one_takes_up_their_state(address: str) -> None:
    job, want = backups(address), Sgd()
    late = job.workers[2]
    together(job.workers[:2], 2)  # the third computes for as long
    for step in range(2):
        want.step(mean_gradient(want.w, [0, 1], step))
    for worker in job.workers[:2]:
        close(worker.weights, want.w)
    late.forward()
    taken: list[Any] = []

    def catch_up() -> None:
        late.update()
        taken.extend([late.weights.copy(), late.vectors.history[0].copy(), late.exchange.completed])  # type: ignore[attr-defined]
        late.steps = 2
        late.step()  # closes the step that worker 0 waits in

    in_threads([catch_up, job.workers[0].step])  # who stands in the open step hands the state over
    close(taken[0], want.w)
    close(taken[1], want.h)
    assert (late.exchange.stats.dropped, taken[2]) == (1, 4)
    want.step(mean_gradient(want.w, [0, 2], 2))
    close(late.weights, want.w)


def test_without_spare_workers_all_that_live_are_waited_for(address: str) -> None:
    job, want = backups(address), Sgd()
    job.bury(2)
    together(job.workers[:2], 3)
    for step in range(3):
        want.step(mean_gradient(want.w, [0, 1], step))
    for worker in job.workers[:2]:
        close(worker.weights, want.w)


def test_the_one_who_would_hand_over_dies_and_another_does(address: str) -> None:
    job = backups(address, 4)
    together(job.workers[:3], 1)
    job.bury(0)
    late = job.workers[3]
    late.forward()
    in_threads([late.update, job.workers[1].step, job.workers[2].step, lambda: late_joins(late)])
    np.testing.assert_array_equal(job.workers[1].weights, job.workers[2].weights)


def late_joins(late: Any) -> None:
    """Once the state is taken, step 1 as the third of three."""
    while late.steps == 0:
        threading.Event().wait(0.01)
    late.step()


def test_a_late_worker_finds_the_state_of_a_job_that_has_ended(address: str) -> None:
    job = backups(address)
    late = job.workers[2]
    together(job.workers[:2], 2)
    for worker in job.workers[:2]:
        worker.exchange.finish()
    late.step()
    np.testing.assert_array_equal(late.weights, job.workers[0].weights)


# Hybrid --------------------------------------------------------------------------------------------------


def test_groups_are_neighbours() -> None:
    assert [group_of(rank, 2, 5) for rank in range(5)] == [range(2)] * 2 + [range(2, 4)] * 2 + [range(4, 5)]


@pytest.mark.parametrize("tau", [1, 2])
def test_hybrid_averages_inside_a_group_and_its_root_exchanges(address: str, tau: int) -> None:
    """S2xA2, the groups in turns."""
    job = open_job(address, Recipe("hybrid", 4, METHOD, ALPHA, tau, momentum=MU))
    center, groups = f64(), [Sgd(), Sgd()]
    for step in range(STEPS):
        for number, group in enumerate(groups):
            ranks = range(2 * number, 2 * number + 2)
            together([job.workers[rank] for rank in ranks], 1)
            if step % tau == 0:
                d = ALPHA * (group.w - center)
                group.w = group.w - d
                center = center + d
            group.step(mean_gradient(group.w, ranks, step))
            for rank in ranks:
                close(job.workers[rank].weights, group.w)
        close(job.center, center)
    end(job)
    for group in groups:
        d = ALPHA * (group.w - center)
        center = center + d
    assert np.abs(job.center - center).max() < 0.2 * np.abs(center).max()  # in either order


def test_the_groups_share_the_jobs_iterations(address: str) -> None:
    job = open_job(address, Recipe("hybrid", 4, METHOD, ALPHA, iterations=8))
    first = {worker.exchange.upcoming for worker in job.workers}  # type: ignore[attr-defined]
    assert first == {0, 2}
    together(job.workers[:2], 1)
    together(job.workers[:2], 1)
    assert {w.exchange.upcoming for w in job.workers[:2]} == {6}  # type: ignore[attr-defined]
    together(job.workers[:2], 1)
    assert {w.exchange.upcoming for w in job.workers[:2]} == {None}  # type: ignore[attr-defined]
    together(job.workers[2:], 1)
    assert {w.exchange.upcoming for w in job.workers[2:]} == {None}  # type: ignore[attr-defined]
    end(job)


def test_a_dead_root_is_followed_by_the_next_of_its_group(address: str) -> None:
    job, center, want = (
        open_job(address, Recipe("hybrid", 3, replace(METHOD, group_size=3), ALPHA)),
        f64(),
        Sgd(),
    )
    together(job.workers, 2)
    job.bury(0)
    together(job.workers[1:], 2)
    for step in range(4):
        d = ALPHA * (want.w - center)
        want.w, center = want.w - d, center + d
        want.step(mean_gradient(want.w, range(3) if step < 2 else [1, 2], step), 0.0)
    for worker in job.workers[1:]:
        close(worker.weights, want.w)
    close(job.center, center)


def test_who_is_behind_when_a_group_comes_together_takes_over_the_state(address: str) -> None:
    """Worker 0 has finished the collective that worker 1 failed in, as after a death in its middle."""
    job = open_job(address, Recipe("allreduce", 3, METHOD, momentum=MU))
    together(job.workers, 1)
    ahead, behind, _ = job.workers
    replicas: Any = ahead.exchange._replicas  # type: ignore[attr-defined]
    replicas.replica.step += 1
    replicas.replica.done += 3
    replicas.upcoming = 6
    ahead.weights[:] += 1
    ahead.vectors.history[0][:] = 0.5
    job.bury(2)
    in_threads([ahead.step, lambda: behind.run(2)])
    np.testing.assert_array_equal(ahead.weights, behind.weights)
    assert ahead.exchange.completed == behind.exchange.completed == 8  # type: ignore[attr-defined]


# DiLoCo --------------------------------------------------------------------------------------------------


def test_diloco_makes_one_outer_nesterov_step_of_the_mean_change(address: str) -> None:
    tau, nu = 3, 0.7
    job = open_job(address, Recipe("diloco", 3, replace(METHOD, outer_lr=nu, outer_momentum=MU), tau=tau))
    theta, m, x = f64(), np.zeros(600), [f64() for _ in range(3)]
    for step in range(9):
        together(job.workers, 1)
        x = [w - RATE * gradient(w, rank, step) for rank, w in enumerate(x)]
        if (step + 1) % tau == 0:
            change = sum((theta - w for w in x), np.zeros(600)) / 3
            m = MU * m + change
            theta = theta - nu * (change + MU * m)
            x = [theta.copy() for _ in range(3)]
        for worker, w in zip(job.workers, x, strict=True):
            close(worker.weights, w)
        close(job.center, theta)
    end(job)


def test_diloco_ends_a_round_that_is_not_full(address: str) -> None:
    job = open_job(address, Recipe("diloco", 2, METHOD, tau=4, iterations=12))
    together(job.workers, 6)
    assert {w.exchange.upcoming for w in job.workers} == {None}  # type: ignore[attr-defined]
    before = job.center
    end(job)
    assert np.abs(job.center - before).max() > 0.01


# Workers that come later ---------------------------------------------------------------------------------


def slowly(weights: Any, rank: int, step: int) -> Any:
    """Time for another one to come."""
    time.sleep(0.002)
    return gradient(weights, rank, step)


@pytest.mark.parametrize("algorithm", ["sync", "allreduce", "hybrid"])
@pytest.mark.parametrize("lost", [False, True], ids=["a new row", "a lost one's row"])
def test_who_joins_takes_part_from_the_border_of_a_step_on(address: str, algorithm: str, lost: bool) -> None:
    """It takes the weights and the history of the others; then all make the same steps."""
    method = replace(METHOD, group_size=3)
    recipe = Recipe(algorithm, 3, method, ALPHA, momentum=MU, iterations=500, gradient=slowly)
    job = open_job(address, recipe, absent={2})
    together(job.workers, 1)
    rank = 2
    if lost:
        job.bury(1)
        job.workers, rank = job.workers[:1], 1
    going = [w.pool.submit(to_the_end, w) for w in job.workers if w.pool]
    late = job.open_late(address, recipe, rank)
    assert late.pool
    going.append(late.pool.submit(to_the_end, late))
    for future in going:
        future.result(60)
    assert 2 < late.steps < job.workers[0].steps
    assert len({worker.weights.tobytes() for worker in [*job.workers, late]}) == 1


def to_the_end(worker: Any) -> None:
    while worker.exchange.upcoming is not None:
        worker.step()


@pytest.mark.parametrize("algorithm", ["sync", "diloco", "allreduce", "hybrid"])
def test_one_that_dies_as_it_joins_holds_nobody_up(address: str, algorithm: str) -> None:
    """It has a row, is let in, and dies before it has made anything of the first step."""
    method = replace(METHOD, group_size=3)
    recipe = Recipe(algorithm, 3, method, ALPHA, 1, momentum=MU, iterations=400, gradient=slowly)
    job = open_job(address, recipe, absent={2})
    going = [w.pool.submit(to_the_end, w) for w in job.workers if w.pool]
    job.progress.take_row(2, 0)
    if algorithm in {"allreduce", "hybrid"}:
        job.box.attach("job/generations").write(np.array([KNOCKS]), offset=2)
        job.wait_until_training(2)
    else:
        job.progress.put(2, Column.STATE, State.TRAINING)
    time.sleep(0.1)  # they wait for it
    steps = [worker.steps for worker in job.workers]
    job.bury(2)
    for future in going:
        future.result(60)
    assert all(worker.steps > before for worker, before in zip(job.workers, steps, strict=True))
    assert job.workers[0].weights.tobytes() == job.workers[1].weights.tobytes()
