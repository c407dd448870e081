"""DiLoCo with few bytes, in parts, overlapped, and with workers of different speed, against its equations."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shmtrain.exchange.narrow import Feedback, Narrow
from shmtrain.method import Method, check_interval, method
from shmtrain.options import ConfigError, MethodOptions
from smb.errors import NonFinite
from tests.shmtrain.crowds import F64, RATE, Job, Recipe, close, gradient, open_job, start, together

METHOD = Method(beta=None, wait_limit=30.0)
NU, MU = 0.7, 0.9


def f64(n: int = 600) -> F64:
    return start(n=n).astype(np.float64)


def end(job: Job) -> None:
    for future in [w.pool.submit(w.exchange.finish) for w in job.workers if w.pool]:
        future.result(30)


@pytest.mark.parametrize(("wire", "nbytes", "error"), [
    ("float32", 2400, 0.0), ("bfloat16", 1200, 2**-8), ("float16", 1200, 2**-11), ("int8", 612, 0.02),
])  # fmt: skip
def test_a_narrow_type_has_its_size_and_its_error(wire: str, nbytes: int, error: float) -> None:
    values, narrow, out = start(3), Narrow(wire, 600, 5), np.empty(605, np.float32)
    values = np.concatenate([values, np.arange(5, dtype=np.float32)])
    data = narrow.encode(values)
    assert data.nbytes == narrow.nbytes == nbytes + 20
    narrow.decode(data, out)
    assert np.abs(out[:600] - values[:600]).max() <= error * np.abs(values).max()
    np.testing.assert_array_equal(out[600:], values[600:])  # what no rule touches travels as it is


def test_what_a_narrow_type_loses_travels_with_the_next_change() -> None:
    feedback, narrow, sent = Feedback(600), Narrow("int8", 600), np.zeros(600)
    changes = [start(seed) for seed in range(20)]
    for change in changes:
        said = change.copy()
        feedback.encode(narrow, said, slice(0, 600))
        sent += said
    np.testing.assert_allclose(sent + feedback.owed, sum(c.astype(np.float64) for c in changes), atol=1e-4)
    assert np.abs(feedback.owed).max() < 0.03


@pytest.mark.parametrize("wire", ["int8", "bfloat16"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_small_changes_lead_where_whole_ones_do(address: str, wire: str, asynchronous: bool) -> None:
    """And move as few bytes as they say."""
    recipe = Recipe(
        "diloco", 2, replace(METHOD, wire=wire, asynchronous=asynchronous, outer_momentum=0.5), tau=2
    )
    job = open_job(address, recipe)
    together(job.workers, 20)
    end(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.shmtrain.crowds.JOB", "whole")
        whole = open_job(address, replace(recipe, method=replace(recipe.method, wire="float32")))
        together(whole.workers, 20)
        end(whole)
        centers = job.box.attach("job/center").read(), whole.center
    away = np.abs(centers[1] - start()).max()
    assert np.abs(centers[0] - centers[1]).max() < (0.5 if asynchronous else 0.02) * away
    stats = job.workers[1].exchange.stats
    small = Narrow(wire, 600).nbytes
    assert stats.sent == 10 * small
    assert stats.received == 10 * (2400 if asynchronous else small)
    assert "quantising error" in stats.wired


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_parts_are_exchanged_in_turns_and_mixed_in_after_the_overlap(address: str, overlap: int) -> None:
    tau = 6
    parts = [slice(0, 125), slice(125, 250), slice(250, 375), slice(375, 600)]
    if overlap == 2:
        parts = [slice(0, 166), slice(166, 333), slice(333, 600)]
    way = replace(METHOD, fragments=len(parts), overlap=overlap, outer_lr=NU, outer_momentum=MU)
    recipe = Recipe("diloco", 2, way, tau=tau, trained=500)
    job = open_job(address, recipe)
    theta, m, x = f64(), np.zeros(600), [f64(), f64()]
    due = [(k + 1) * tau // len(parts) - k * tau // len(parts) for k in range(len(parts))]
    turn, since, under_way = 0, 0, None
    for step in range(14):
        together(job.workers, 1)
        for rank in range(2):
            x[rank][:500] -= RATE * gradient(x[rank], rank, step)[:500]
        since += 1
        if under_way is not None and since >= min(overlap, due[turn]):
            turn, under_way = turn + 1, land(parts[turn], under_way, (theta, m), x, overlap)
            turn %= len(parts)
        if since >= due[turn]:
            under_way, since = np.mean([theta[parts[turn]] - w[parts[turn]] for w in x], axis=0), 0
            if not overlap:
                turn, under_way = turn + 1, land(parts[turn], under_way, (theta, m), x, overlap)
                turn %= len(parts)
        for worker, w in zip(job.workers, x, strict=True):
            close(worker.weights, w)
        close(job.center, theta)
    end(job)
    close(job.workers[0].exchange._base, job.center.astype(np.float64))  # type: ignore[attr-defined]


def land(part: slice, change: F64, outer: tuple[F64, F64], x: list[F64], overlap: int) -> None:
    theta, m = outer
    inner = slice(part.start, min(part.stop, 500))
    trained = change[: inner.stop - inner.start]
    m[inner] = MU * m[inner] + trained
    theta[inner] -= NU * (trained + MU * m[inner])
    theta[inner.stop : part.stop] -= change[trained.size :]
    mine = 0.5 if overlap else 0.0
    for w in x:
        w[part] = mine * w[part] + (1 - mine) * theta[part]


def test_a_slower_worker_makes_fewer_steps_and_nobody_waits(address: str) -> None:
    """One needs five times as long for a step; what a round counts is what was done."""

    def slow(weights: Any, rank: int, step: int) -> Any:
        time.sleep(0.015 if rank else 0.003)
        return gradient(weights, rank, step)

    recipe = Recipe("diloco", 2, replace(METHOD, dynamic=True), tau=12, gradient=slow, iterations=200)
    job = open_job(address, recipe)

    def until_done(worker: Any) -> None:
        while worker.exchange.upcoming is not None:
            worker.step()
        worker.exchange.finish()

    for future in [w.pool.submit(until_done, w) for w in job.workers if w.pool]:
        future.result(30)
    fast, slow_one = (worker.steps for worker in job.workers)
    assert fast > 1.3 * slow_one
    completed = job.workers[0].exchange.completed  # type: ignore[attr-defined]
    assert completed == fast + slow_one
    assert abs(completed - 200) <= 16  # a round
    np.testing.assert_array_equal(job.workers[0].weights, job.workers[1].weights)


def test_a_worker_that_comes_later_takes_theta_and_momentum_and_is_waited_for(address: str) -> None:
    """It joins at the border of a round; from the next one on all three make one mean."""
    recipe = Recipe("diloco", 3, replace(METHOD, wire="int8"), tau=3)
    job = open_job(address, recipe, absent={2})
    together(job.workers, 6)
    coming: list[Any] = []
    opened = threading.Thread(target=lambda: coming.append(job.open_late(address, recipe, 2)))
    opened.start()
    job.wait_until_training(2)
    together(job.workers, 3)
    opened.join(30)
    (late,) = coming
    outer = job.workers[0].exchange._outer  # type: ignore[attr-defined]
    np.testing.assert_array_equal(late.weights, late.exchange._base)
    assert late.exchange._outer.step == 3 == outer.step
    np.testing.assert_array_equal(late.weights, job.workers[0].weights)
    np.testing.assert_array_equal(late.exchange._outer.momentum, outer.momentum)
    together([*job.workers, late], 3)
    assert late.exchange.completed == 6 * 2 + 3 * 2 + 3 * 3
    for worker in job.workers:
        np.testing.assert_array_equal(worker.weights, late.weights)


def test_a_change_that_is_no_number_reaches_nobody(address: str) -> None:
    job = open_job(address, Recipe("diloco", 2, METHOD, tau=1))
    job.workers[1].weights[7] = np.nan
    with pytest.raises(NonFinite, match="worker 1 is NaN or Inf at element 7"):
        job.workers[1].step()
    job.bury(1)
    job.workers[0].step()
    assert np.isfinite(job.center).all()


def test_parts_need_room_in_a_round() -> None:
    with pytest.raises(ConfigError, match="tau 4 steps must have room"):
        check_interval(Method(fragments=3, overlap=2), 4)
    with pytest.raises(ConfigError, match="not for --asynchronous"):
        method("diloco", 2, False, MethodOptions(asynchronous=True, overlap=2))
