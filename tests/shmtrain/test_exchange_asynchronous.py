"""Each asynchronous algorithm through a box, step by step, against its equations in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from shmtrain.exchange.staleness import Staleness
from shmtrain.group import Column, State
from shmtrain.method import Method, method, moving_rate
from shmtrain.options import ConfigError, MethodOptions
from tests.shmtrain.crowds import F64, RATE, Recipe, close, gradient, open_job, start

METHOD = Method(beta=None, wait_limit=30.0)
STEPS, ALPHA = 8, 0.3


def f64(n: int = 600) -> F64:
    return start(n=n).astype(np.float64)


@dataclass
class Lines:
    """What an algorithm's equations work on: the center, and each worker's weights and momentum."""

    center: F64
    x: list[F64]
    v: list[F64]

    @classmethod
    def of(cls, world: int) -> Lines:
        return cls(f64(), [f64() for _ in range(world)], [np.zeros(600) for _ in range(world)])


@pytest.mark.parametrize("tau", [1, 3])
def test_easgd_takes_the_gradient_at_the_weights_before_the_move(address: str, tau: int) -> None:
    job, want = open_job(address, Recipe("easgd", 3, METHOD, ALPHA, tau)), Lines.of(3)
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.step()
            x = want.x[rank]
            if step % tau == 0:
                d = ALPHA * (x - want.center)
                want.x[rank] = x - d
                want.center = want.center + d
            want.x[rank] = want.x[rank] - RATE * gradient(x, rank, step)
            close(worker.weights, want.x[rank])
        close(job.center, want.center)


@pytest.mark.parametrize("tau", [1, 2])
def test_eamsgd_follows_algorithm_2(address: str, tau: int) -> None:
    delta = 0.9
    job, want = open_job(address, Recipe("eamsgd", 2, METHOD, ALPHA, tau, momentum=delta)), Lines.of(2)
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.step()
            x = want.x[rank]
            if step % tau == 0:
                d = ALPHA * (x - want.center)
                want.x[rank] = x - d
                want.center = want.center + d
            v = want.v[rank]
            want.v[rank] = delta * v - RATE * gradient(x + delta * v, rank, step)
            want.x[rank] = want.x[rank] + want.v[rank]
            close(worker.weights, want.x[rank])
        close(job.center, want.center)


def test_eamsgd_without_momentum_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="eamsgd needs the solver's rule SGD and a momentum"):
        open_job(address, Recipe("eamsgd", 1, METHOD))


@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (2, 3), (3, 2)])
def test_downpour_fetches_and_pushes_in_its_own_intervals(address: str, fetch: int, push: int) -> None:
    method = replace(METHOD, n_fetch=fetch, n_push=push)
    job, want = open_job(address, Recipe("downpour", 3, method)), Lines.of(3)
    owed = [np.zeros(600) for _ in range(3)]
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.step()
            if step % fetch == 0:
                want.x[rank] = want.center.copy()
            g = gradient(want.x[rank], rank, step)
            want.x[rank] = want.x[rank] - RATE * g
            owed[rank] = owed[rank] + g
            if (step + 1) % push == 0:
                want.center = want.center - RATE * owed[rank]
                owed[rank] = np.zeros(600)
            close(worker.weights, want.x[rank])
        close(job.center, want.center)
    for rank, worker in enumerate(job.workers):
        worker.exchange.finish()  # what was not pushed yet
        want.center = want.center - RATE * owed[rank]
    close(job.center, want.center)


@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (2, 3)])
def test_downpours_adagrad_divides_by_the_squares_of_all_pushes(address: str, fetch: int, push: int) -> None:
    gamma = 0.02
    method = replace(METHOD, n_fetch=fetch, n_push=push, server="adagrad", server_rate=gamma)
    job, want = open_job(address, Recipe("downpour", 2, method)), Lines.of(2)
    squares, owed = np.zeros(600), [np.zeros(600) for _ in range(2)]
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.step()
            if step % fetch == 0:
                want.x[rank] = want.center.copy()
            g = gradient(want.x[rank], rank, step)
            want.x[rank] = want.x[rank] - RATE * g
            owed[rank] = owed[rank] + g
            if (step + 1) % push == 0:
                squares = squares + owed[rank] ** 2
                want.center = want.center - gamma * owed[rank] / np.sqrt(squares)
                owed[rank] = np.zeros(600)
        close(job.center, want.center)


@pytest.mark.parametrize("server", ["sgd", "adagrad"])
def test_downpour_pushes_what_no_rule_touches_as_change(address: str, server: str) -> None:
    """BatchNorm's accumulators: the last 100 of the vector."""
    method = replace(METHOD, server=server)
    job = open_job(address, Recipe("downpour", 2, method, trained=500))
    before = job.center
    for rank, worker in enumerate(job.workers):
        worker.forward()
        worker.weights[500:] += np.float32(rank + 1)
        worker.update()
    np.testing.assert_allclose(job.center[500:], before[500:] + 3, rtol=1e-6)


def test_asynchronous_diloco_follows_delayed_nesterov(address: str) -> None:
    tau, nu, mu, buffer = 2, 0.7, 0.9, 3
    method = replace(METHOD, asynchronous=True, outer_lr=nu, outer_momentum=mu, outer_buffer=buffer)
    job, want = open_job(address, Recipe("diloco", 2, method, tau=tau)), Lines.of(2)
    base, gathered, momentum, pushes = [f64(), f64()], np.zeros(600), np.zeros(600), 0
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.step()
            want.x[rank] = want.x[rank] - RATE * gradient(want.x[rank], rank, step)
            if (step + 1) % tau == 0:
                g = base[rank] - want.x[rank]
                gathered = gathered + g
                pushes += 1
                if pushes % buffer == 0:
                    momentum = mu * momentum + gathered / buffer
                    want.center = want.center - nu * (mu * momentum + g / buffer)
                    gathered = np.zeros(600)
                else:
                    want.center = want.center - nu * g / buffer
                want.x[rank], base[rank] = want.center.copy(), want.center.copy()
            close(worker.weights, want.x[rank])
        close(job.center, want.center)


def test_local_workers_never_meet(address: str) -> None:
    job, want = open_job(address, Recipe("local", 2, METHOD)), Lines.of(2)
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.step()
            want.x[rank] = want.x[rank] - RATE * gradient(want.x[rank], rank, step)
            close(worker.weights, want.x[rank])
    close(job.center, f64())
    tested = np.empty(600, np.float32)
    job.workers[0].exchange.center(tested)
    close(tested, want.x[0])
    for worker in job.workers:
        worker.exchange.finish()
    close(job.center, want.x[0])


@pytest.mark.parametrize("tau", [1, 2])
def test_an_overlapped_exchange_reaches_the_weights_when_the_next_begins(address: str, tau: int) -> None:
    job, want = open_job(address, Recipe("seasgd", 2, METHOD, ALPHA, tau, way="overlapped")), Lines.of(2)
    owed = [np.zeros(600), np.zeros(600)]
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.forward()
            worker.exchange._update.wait()  # type: ignore[attr-defined]  # the order of the two is known so
            worker.update()
            if step % tau == 0:
                want.x[rank] = want.x[rank] - owed[rank]
                owed[rank] = ALPHA * (want.x[rank] - want.center)
                want.center = want.center + owed[rank]
            want.x[rank] = want.x[rank] - RATE * gradient(want.x[rank], rank, step)
            close(worker.weights, want.x[rank])
        close(job.center, want.center)
    for rank, worker in enumerate(job.workers):
        worker.exchange.finish()
        x = want.x[rank] - owed[rank]
        d = ALPHA * (x - want.center)
        want.center = want.center + d
        close(worker.weights, x - d)
    close(job.center, want.center)


def test_a_center_read_ahead_is_that_after_the_workers_own_increment(address: str) -> None:
    job, want = open_job(address, Recipe("seasgd", 2, METHOD, ALPHA, way="read-ahead")), Lines.of(2)
    ahead: list[F64 | None] = [None, None]
    for step in range(STEPS):
        for rank, worker in enumerate(job.workers):
            worker.forward()
            worker.exchange._wait()  # type: ignore[attr-defined]
            worker.update()
            read = ahead[rank]
            d = ALPHA * (want.x[rank] - (want.center if read is None else read))
            want.center = want.center + d
            ahead[rank] = want.center
            want.x[rank] = want.x[rank] - d
            want.x[rank] = want.x[rank] - RATE * gradient(want.x[rank], rank, step)
            close(worker.weights, want.x[rank])
        close(job.center, want.center)


def test_alpha_follows_those_that_take_part(address: str) -> None:
    job = open_job(address, Recipe("seasgd", 4, METHOD))
    assert moving_rate("seasgd", job.progress.rows().active, Method()) == pytest.approx(0.9 / 4)
    job.bury(1)
    assert moving_rate("seasgd", job.progress.rows().active, Method()) == pytest.approx(0.9 / 3)
    job.progress.put(1, Column.STATE, State.TRAINING)  # another one in its place
    job.progress.put(2, Column.STATE, State.FINISHED)  # its share lies in the center
    assert moving_rate("seasgd", job.progress.rows().active, Method()) == pytest.approx(0.9 / 4)
    assert moving_rate("hybrid", 4, Method()) == pytest.approx(0.9 / 2)


@pytest.mark.parametrize(
    ("algorithm", "told", "exchange", "alpha"),
    [
        ("seasgd", {}, "fused", 0.2),
        ("seasgd", {}, "paper", 0.9 / 16),  # increments made from an older center: N alpha stays below 1
        ("seasgd", {"beta": 0.9}, "fused", 0.9 / 16),
        ("hybrid", {"group_size": 1}, "fused", 0.2),
        ("easgd", {}, "fused", 0.9 / 16),
    ],
)
def test_alpha_of_many_workers_is_bounded_below_where_an_exchange_is_one_operation(
    algorithm: str, told: dict[str, Any], exchange: str, alpha: float
) -> None:
    filled = method(algorithm, 16, False, MethodOptions(**told), exchange)
    assert moving_rate(algorithm, 16, filled) == pytest.approx(alpha)
    assert moving_rate(algorithm, 2, filled) == pytest.approx(0.45)


def test_alpha_is_larger_where_the_workers_share_a_batch_out() -> None:
    """Their steps are noisier."""
    for exchange, alpha in (("fused", 0.5), ("paper", 0.9 / 16)):
        filled = method("seasgd", 16, False, MethodOptions(), exchange, batch="global")
        assert moving_rate("seasgd", 16, filled) == pytest.approx(alpha)


# Staleness -----------------------------------------------------------------------------------------------

WEIGHTS = {
    "none": [1, 1, 1, 1],
    "inverse": [1, 1 / 2, 1 / 3, 1 / 4],
    "exponential:0.5": [1, np.exp(-0.5), np.exp(-1), np.exp(-1.5)],
    "drop:1": [1, 1, 0, 0],
    "bounded:4": [1, 1, 1, 1],
}


def overtaken(address: str, algorithm: str, policy: str, staleness: int) -> tuple[F64, F64, float]:
    """Worker 0 takes a step while worker 1 makes ``staleness`` updates: its weights and the center's move."""
    method = replace(METHOD, staleness=policy)
    job = open_job(address, Recipe(algorithm, 2, method, ALPHA))
    first, second = job.workers
    first.exchange.before_forward(0)
    for _ in range(staleness):
        second.step()
    before, mine = job.center.astype(np.float64), first.weights.astype(np.float64)
    g = np.ones(600, np.float32)
    first.vectors.gradient[:] = g
    first.exchange.gradients_ready(0)
    first.weights[:] -= np.float32(RATE) * g
    first.exchange.after_update(0)
    assert first.exchange.stats.staleness == staleness
    assert first.exchange.stats.histogram[staleness] >= 1
    return job.center - before, mine - before, first.exchange.stats.dropped


@pytest.mark.parametrize("policy", WEIGHTS)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_policy_scales_what_downpour_pushes(address: str, policy: str, staleness: int) -> None:
    moved, _, dropped = overtaken(address, "downpour", policy, staleness)
    weight = WEIGHTS[policy][staleness]
    np.testing.assert_allclose(moved, -RATE * weight, atol=1e-6)
    assert dropped == (weight == 0)


@pytest.mark.parametrize("policy", WEIGHTS)
@pytest.mark.parametrize("staleness", [0, 3])
def test_a_policy_scales_the_elastic_move(address: str, policy: str, staleness: int) -> None:
    moved, apart, dropped = overtaken(address, "easgd", policy, staleness)
    weight = WEIGHTS[policy][staleness]
    np.testing.assert_allclose(moved, ALPHA * weight * apart, atol=1e-6)
    assert dropped == (weight == 0)


def test_who_is_dropped_still_follows_the_center(address: str) -> None:
    method = replace(METHOD, staleness="drop:0")
    job = open_job(address, Recipe("seasgd", 2, method, ALPHA))
    first, second = job.workers
    for _ in range(2):
        second.step()
    before = job.center
    first.exchange.before_forward(0)
    close(first.weights, f64() - ALPHA * (f64() - before))
    np.testing.assert_array_equal(job.center, before)


def test_a_bounded_worker_waits_for_the_slowest_and_names_it(address: str) -> None:
    method = replace(METHOD, staleness="bounded:2", wait_limit=0.3)
    job = open_job(address, Recipe("seasgd", 2, method))
    first = job.workers[0]
    job.progress.put(0, Column.DONE, 2)
    first.step()  # two ahead: allowed
    job.progress.put(0, Column.DONE, 3)
    with pytest.raises(Exception, match=r"more steps than --staleness allows: nothing from worker 1"):
        first.step()
    job.bury(1)
    first.steps = 2
    first.step()  # the dead hold nobody


def test_the_policies_numbers() -> None:
    for text, weights in WEIGHTS.items():
        kind, _, number = text.partition(":")
        policy = Staleness(kind, float(number or 0))
        assert [policy.weight(s) for s in range(4)] == pytest.approx(weights)
