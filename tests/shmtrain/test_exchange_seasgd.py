"""SEASGD through a box against the equations in float64, and what it must never change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import smb
from shmtrain.exchange.seasgd import PaperSeasgd, Seasgd, elastic_pull
from shmtrain.exchange.update_thread import UpdateThread
from smb.errors import SmbError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
N, STEPS, RATE, ALPHA = 70_000, 10, 0.05, 0.3  # N: two chunks and a part of one


def start(seed: int = 0, n: int = N) -> F32:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def gradient(weights: npt.NDArray[Any], rank: int, step: int) -> Any:
    """That of a quadratic bowl of the worker's own, and noise: known, the same in both precisions."""
    noise = start(1000 + 100 * rank + step, len(weights)).astype(weights.dtype)
    return weights * (0.5 + rank) + noise


@dataclass
class Reference:
    """The equations, line by line, in float64."""

    center: F64
    workers: list[F64]
    alpha: float
    deltas: list[F64] = field(default_factory=list)

    def pull(self, rank: int) -> F64:
        delta = self.alpha * (self.workers[rank] - self.center)
        self.workers[rank] = self.workers[rank] - delta
        return delta

    def update(self, rank: int, step: int) -> None:
        self.workers[rank] = self.workers[rank] - RATE * gradient(self.workers[rank], rank, step)


def close(got: F32, want: F64) -> None:
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def pair(box: smb.Box, address: str, rank: int) -> tuple[smb.Segment, smb.Segment]:
    other = smb.connect(address)
    center = other.attach("job/center")
    return other.create(f"job/delta/{rank}", count=center.count, lifetime="owner"), center


Open = Callable[[int, F32, int], Seasgd | PaperSeasgd]


@pytest.fixture(params=["fused", "paper"])
def open_worker(request: pytest.FixtureRequest, box: smb.Box, address: str) -> Open:
    """Opens worker ``rank`` on ``local`` with a tau, the way of the parameter."""
    box.create("job/center", count=N, initial=start(), lifetime="attached")

    def make(rank: int, local: F32, tau: int) -> Seasgd | PaperSeasgd:
        center = box.attach("job/center")
        if request.param == "fused":
            return Seasgd(center, local, ALPHA, tau)
        update = UpdateThread(lambda: pair(box, address, rank))
        return PaperSeasgd(center, local, ALPHA, tau, update=update)

    return make


def read(box: smb.Box) -> F32:
    out = np.empty(N, np.float32)
    box.attach("job/center").read(out)
    return out


@pytest.mark.parametrize("tau", [1, 3])
def test_two_workers_in_lock_step_follow_the_equations(open_worker: Open, box: smb.Box, tau: int) -> None:
    locals_ = [start(), start()]
    workers = [open_worker(rank, local, tau) for rank, local in enumerate(locals_)]
    want = Reference(start().astype(np.float64), [start().astype(np.float64) for _ in workers], ALPHA)
    for step in range(STEPS):
        for rank, worker in enumerate(workers):
            worker.before_forward(step)
            settle(worker)
            if step % tau == 0:
                want.center += want.pull(rank)
            locals_[rank] -= np.float32(RATE) * gradient(locals_[rank], rank, step)
            worker.after_update(step)
            want.update(rank, step)
        for rank, local in enumerate(locals_):
            close(local, want.workers[rank])
        close(read(box), want.center)
    for rank, worker in enumerate(workers):
        worker.finish()  # one more exchange each: nothing that was learned stays behind
        want.center += want.pull(rank)
    close(read(box), want.center)


def settle(worker: Seasgd | PaperSeasgd) -> None:
    """Wait until the center has what the worker owes it: makes the order of two workers known."""
    if isinstance(worker, PaperSeasgd):
        worker._wait()


class Gated:
    """A segment whose writes wait: holds an increment back until another worker has read the center."""

    def __init__(self, segment: smb.Segment, gate: threading.Event) -> None:
        self.segment, self.gate = segment, gate

    def write(self, array: F32) -> None:
        assert self.gate.wait(30)
        self.segment.write(array)


def test_the_papers_add_is_blind(box: smb.Box, address: str) -> None:
    """Both read the same center; each adds a difference to what the other has moved meanwhile."""
    box.create("job/center", count=N, initial=start(), lifetime="attached")
    gate = threading.Event()

    class Accumulating:
        """The center of an update thread: takes the segment out of the gate."""

        def __init__(self, center: smb.Segment) -> None:
            self.center = center

        def accumulate(self, gated: Gated) -> int:
            return self.center.accumulate(gated.segment)

    def open_pair(rank: int) -> Any:
        own, center = pair(box, address, rank)
        return Gated(own, gate), Accumulating(center)

    locals_ = [start(1), start(2)]
    want = Reference(start().astype(np.float64), [v.astype(np.float64) for v in locals_], ALPHA)
    center = box.attach("job/center")
    workers = [
        PaperSeasgd(center, local, ALPHA, update=UpdateThread(lambda rank=rank: open_pair(rank)))  # type: ignore[misc]
        for rank, local in enumerate(locals_)
    ]
    for worker in workers:
        worker.before_forward(0)
    gate.set()
    for worker in workers:
        worker.finish()
    deltas = [want.pull(rank) for rank in range(2)]
    want.center += deltas[0] + deltas[1]
    close(read(box), want.center)
    assert [w.stats.count for w in workers] == [1, 1]
    assert sorted(w.stats.staleness for w in workers) == [0, 1]  # the second add meets the first


def test_exchanges_at_once_keep_the_sum(open_worker: Open, box: smb.Box) -> None:
    """sum of all W_x + W_g: whatever the interleaving, float32 rounding aside."""
    locals_ = [start(seed) for seed in range(4)]
    before = sum(v.astype(np.float64) for v in locals_) + start()
    workers = [open_worker(rank, local, 1) for rank, local in enumerate(locals_)]

    def run(worker: Seasgd | PaperSeasgd) -> None:
        for step in range(30):
            worker.before_forward(step)
        worker.finish()

    in_threads([lambda w=w: run(w) for w in workers])  # type: ignore[misc]
    after = sum(v.astype(np.float64) for v in locals_) + read(box)
    assert np.abs(after - before).max() < 1e-4


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_the_papers_main_thread_waits_for_its_update_thread(box: smb.Box, address: str) -> None:
    """The next exchange must not read a center that lacks this worker's own last increment."""
    box.create("job/center", count=N, initial=np.zeros(N, np.float32), lifetime="attached")
    gate = threading.Event()

    def open_pair() -> Any:
        own, center = pair(box, address, 0)

        class Slow:
            version = center.version

            def accumulate(self, gated: Gated) -> int:
                return center.accumulate(gated.segment)

        return Gated(own, gate), Slow()

    local = np.ones(N, np.float32)
    worker = PaperSeasgd(box.attach("job/center"), local, 0.5, update=UpdateThread(open_pair))
    worker.before_forward(0)  # local 0.5, the center is owed 0.5
    threading.Timer(0.3, gate.set).start()
    worker.before_forward(1)  # meets its own half: nothing to move
    np.testing.assert_array_equal(local, np.full(N, 0.5, np.float32))
    worker.finish()


def test_a_diverged_worker_is_refused_and_the_center_stays_whole(open_worker: Open, box: smb.Box) -> None:
    local = start()
    local[N // 2] = np.nan
    worker = open_worker(0, local, 1)

    def exchange_twice() -> None:
        worker.before_forward(0)
        worker.before_forward(1)  # the paper's way learns of it from its update thread

    with pytest.raises(smb.NonFinite):
        exchange_twice()
    assert np.isfinite(read(box)).all()


def test_a_broken_update_thread_is_heard_in_the_training_loop(box: smb.Box) -> None:
    box.create("job/center", count=N, initial=start(), lifetime="attached")

    def open_pair() -> Any:
        raise SmbError("no second connection")

    worker = PaperSeasgd(box.attach("job/center"), start(), ALPHA, update=UpdateThread(open_pair))
    with pytest.raises(SmbError, match="no second connection"):
        worker.finish()


def test_the_center_that_is_saved_is_the_shared_one(open_worker: Open) -> None:
    worker = open_worker(0, np.zeros(N, np.float32), 1)
    out = np.empty(N, np.float32)
    worker.center(out)
    np.testing.assert_array_equal(out, start())


def test_the_pull_returns_what_the_center_is_owed() -> None:
    local, center, out = start(1), start(2), np.empty(N, np.float32)
    before = local.astype(np.float64) + center
    elastic_pull(local, center, 0.25, out)
    np.testing.assert_allclose(local + (center + out), before, atol=1e-5)
    np.testing.assert_allclose(out, 0.25 * (start(1) - start(2)), rtol=1e-5)
