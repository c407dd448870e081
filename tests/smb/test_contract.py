"""What every transport promises, by the same tests."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import smb
from smb.client import Box
from tests.smb.conftest import EVERYWHERE, ON_HOST, Connect
from tests.smb.processes import wait_for

N = 200_000  # four chunks, the last one partly filled


def ramp(count: int = N) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


@pytest.mark.parametrize("connect", EVERYWHERE, indirect=True)
def test_a_new_segment_holds_zeros_or_its_initial_values(box: Box) -> None:
    np.testing.assert_array_equal(box.create("a", N).read(), 0)
    segment = box.create("b", N, initial=ramp(), meta=b"ramp")
    np.testing.assert_array_equal(segment.read(), ramp())
    assert (segment.created, segment.count, segment.dtype, segment.meta) == (True, N, "float32", b"ramp")
    assert (segment.lifetime, segment.version, segment.staleness) == ("attached", 0, 0)


@pytest.mark.parametrize("connect", EVERYWHERE, indirect=True)
def test_every_client_sees_the_same_memory(connect: Connect) -> None:
    one, other = connect(), connect()
    mine = one.create("a", N)
    yours = other.attach("a")
    assert yours.write(ramp(10), offset=5) == 1
    out = np.empty(10, np.float32)
    mine.read(out=out, offset=5)
    np.testing.assert_array_equal(out, ramp(10))
    assert mine.version == 1
    assert mine.transport == one.transport == yours.transport


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_the_descriptor_is_the_memory_itself_or_refused(box: Box) -> None:
    segment = box.create("a", N, initial=ramp())
    if segment.transport not in ("local", "shm") or "," in repr(box):
        with pytest.raises(smb.NotSupported, match="segment 'a': its memory is not on this host"):
            segment.descriptor()
        return
    descriptor = segment.descriptor()
    try:
        with mmap.mmap(descriptor, 4 * N) as memory:
            memory[:4] = np.float32(7).tobytes()
    finally:
        os.close(descriptor)
    np.testing.assert_array_equal(segment.read()[:2], [7, 1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int32", "uint8"])
def test_segments_hold_every_type(box: Box, dtype: str) -> None:
    values = np.arange(100).astype(dtype)
    segment = box.create("a", 100, dtype, initial=values)
    np.testing.assert_array_equal(segment.read(), values)
    assert segment.read().dtype == dtype
    segment.write(values[::-1].copy())
    np.testing.assert_array_equal(segment.read(), values[::-1])


@pytest.mark.parametrize("connect", EVERYWHERE, indirect=True)
def test_accumulate_adds_where_the_segment_is(box: Box) -> None:
    center, delta = box.create("c", N, initial=ramp()), box.create("d", N, initial=ramp())
    assert center.accumulate(delta, scale=2.0) == 1
    np.testing.assert_array_equal(center.read(), 3 * ramp())
    assert center.accumulate(np.ones(7, np.float32), scale=-1.0, offset=3) == 2
    np.testing.assert_array_equal(center.read()[3:10], 3 * ramp()[3:10] - 1)


@pytest.mark.parametrize("connect", EVERYWHERE, indirect=True)
def test_exchange_is_the_elastic_move(box: Box) -> None:
    rng = np.random.default_rng(0)
    local, start = rng.standard_normal((2, N)).astype(np.float32)
    x = local.copy()
    center = box.create("c", N, initial=start)
    assert center.exchange(x, 0.25) == 1
    d = np.float32(0.25) * (local - start)
    np.testing.assert_array_equal(x, local - d)
    np.testing.assert_array_equal(center.read(), start + d)


def test_what_is_no_array_and_no_segment_is_refused(box: Box) -> None:
    segment = box.create("c", 10)
    wrong: list[Any] = [None, np.ones(10, np.float32)]
    for move in (segment.write, segment.accumulate, partial(segment.exchange, alpha=0.5)):
        with pytest.raises(smb.TypeMismatch, match=r"'c'.*array"):
            move(wrong[0])
    for combine in (segment.copy_from, partial(segment.axpy, 1.0), segment.dot):
        for other in wrong:
            with pytest.raises(smb.TypeMismatch, match=r"'c'.*must be a segment, got"):
                combine(other)
    assert segment.version == 0


@pytest.mark.parametrize("threads", [0, -1])
def test_an_operation_by_no_threads_is_refused(box: Box, threads: int) -> None:
    local = np.ones(4, np.float32)
    with box.create("a", 4) as segment:
        calls: list[Callable[[], object]] = [
            lambda: segment.read(local, threads=threads),
            lambda: segment.write(local, threads=threads),
            lambda: segment.accumulate(local, threads=threads),
            lambda: segment.exchange(local, 0.5, threads=threads),
            lambda: segment.adagrad(segment, segment, 0.5, threads=threads),
        ]
        for call in calls:
            with pytest.raises(smb.RangeError, match=f"segment 'a': threads is {threads}: .* at least 1"):
                call()
        np.testing.assert_array_equal(segment.read(), np.zeros(4))
        assert segment.version == 0


def test_an_exchange_may_cover_a_range(box: Box) -> None:
    center = box.create("c", N)
    x = np.ones(100, np.float32)
    center.exchange(x, 0.5, offset=N - 100)
    np.testing.assert_array_equal(center.read()[-100:], 0.5)
    np.testing.assert_array_equal(center.read()[:-100], 0)


def test_staleness_counts_the_updates_of_others_only(connect: Connect) -> None:
    a = connect().create("c", 100)
    b = connect().attach("c")
    x = np.zeros(100, np.float32)
    a.exchange(x, 0.5)
    assert a.staleness == 0
    for _ in range(3):
        b.exchange(x, 0.5)
    assert b.staleness == 0
    a.write(x)
    a.exchange(x, 0.5)
    assert a.staleness == 3
    b.exchange(x, 0.5)
    assert b.staleness == 2


def test_wait_returns_when_the_version_is_reached(connect: Connect) -> None:
    a, b = connect().create("c", 100), connect().attach("c")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.wait, 2, 10.0)
        b.write(np.ones(100, np.float32))
        time.sleep(0.05)
        assert not waiting.done()
        b.write(np.ones(100, np.float32))
        assert waiting.result(5) == 2
    with pytest.raises(smb.WaitTimeout, match="'c': version is 2, not yet 3"):
        a.wait(3, timeout=0.05)


def test_one_of_many_creators_is_first_and_all_see_its_values(connect: Connect) -> None:
    boxes = [connect() for _ in range(8)]

    def create(rank: int) -> tuple[bool, np.ndarray]:
        values = np.full(N, rank + 1, np.float32)
        segment = boxes[rank].create("c", N, initial=values, or_attach=True)
        return segment.created, segment.read()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, range(8)))
    assert sum(created for created, _ in results) == 1
    first = next(rank for rank, (created, _) in enumerate(results) if created)
    for _, values in results:
        np.testing.assert_array_equal(values, first + 1)


def test_lifetime_owner_ends_with_the_creators_session(connect: Connect) -> None:
    owner, other = connect(), connect()
    owner.create("mine", 10, lifetime="owner")
    mapped = other.attach("mine")
    owner.close()
    assert other.list() == []
    np.testing.assert_array_equal(mapped.read(), 0)  # memory stays for those who have it


def test_lifetime_attached_ends_with_the_last_attachment(connect: Connect) -> None:
    creator, other, third = connect(), connect(), connect()
    creator.create("c", 10, lifetime="attached")
    segment = other.attach("c")
    creator.close()
    assert other.list() == ["c"]
    segment.detach()
    assert third.list() == []


def test_lifetime_stay_ends_when_freed(connect: Connect) -> None:
    one, other = connect(), connect()
    one.create("c", 10, lifetime="stay", initial=ramp(10))
    one.close()
    np.testing.assert_array_equal(other.attach("c", readonly=True).read(), ramp(10))
    other.free("c")
    assert other.list() == []


def test_a_freed_key_can_be_used_again_while_others_keep_the_old_memory(connect: Connect) -> None:
    one, other = connect(), connect()
    old = one.create("c", 10, initial=ramp(10))
    other.free("c")
    new = other.create("c", 20)
    assert (old.count, new.count) == (10, 20)
    np.testing.assert_array_equal(old.read(), ramp(10))
    old.detach()
    assert other.list() == ["c"]
    np.testing.assert_array_equal(new.read(), 0)


def test_meta_keeps_another_jobs_worker_out(connect: Connect) -> None:
    connect().create("c", 10, meta=b"lenet")
    other = connect()
    assert other.attach("c", meta=b"lenet").meta == b"lenet"
    assert other.attach("c").meta == b"lenet"
    with pytest.raises(smb.KeyExists, match="'c' exists with other meta: b'lenet'"):
        other.attach("c", meta=b"cifar")


def test_list_stat_and_sessions_say_what_there_is(connect: Connect) -> None:
    one, other = connect(name="one"), connect(name="other")
    one.create("job/b", 10, "int32", meta=b"m")
    one.create("job/a", 10)
    other.attach("job/b")
    other.create("x", 10)
    assert one.list() == ["job/a", "job/b", "x"]
    assert one.list("job/") == ["job/a", "job/b"]
    stat = one.stat("job/b")
    assert (stat.count, stat.dtype, stat.nbytes, stat.sessions, stat.meta) == (10, "int32", 40, 2, b"m")
    seen = {row["name"]: row["segments"] for row in one.sessions()}
    assert seen == {"one": ["job/a", "job/b"], "other": ["job/b", "x"]}


def test_counter_claims_are_never_given_twice(connect: Connect) -> None:
    boxes = [connect() for _ in range(4)]

    def claim(box: Box) -> list[int]:
        counter = box.counter("job/iterations")
        return [counter.add(1) for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        claims = [n for part in pool.map(claim, boxes) for n in part]
    assert sorted(claims) == list(range(400))
    assert boxes[0].counter("job/iterations").value == 400


def test_a_counter_can_be_waited_for(connect: Connect) -> None:
    a, b = connect().counter("n"), connect().counter("n")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.wait, 5, 10.0)
        b.add(3)
        b.add(2)
        assert waiting.result(5) == 5
    with pytest.raises(smb.WaitTimeout, match="counter 'n' is 5, not yet 6"):
        a.wait(6, timeout=0.05)


def test_a_counter_goes_with_its_last_user(connect: Connect) -> None:
    one, other = connect(), connect()
    one.counter("n").add(7)
    assert other.counter("n").value == 7
    one.close()
    assert other.counter("n").value == 7
    other.close()
    assert connect().counter("n").value == 0


def test_a_barrier_opens_for_all_at_once_and_again(connect: Connect) -> None:
    boxes = [connect() for _ in range(4)]
    passed: list[int] = []

    def walk(rank: int) -> None:
        for turn in range(3):
            boxes[rank].barrier("b", 4, timeout=10)
            passed.append(turn)
            boxes[rank].barrier("c", 4, timeout=10)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(walk, range(4)))
    assert passed == sorted(passed)


def test_a_barrier_that_is_not_full_says_who_came_and_frees_the_place(connect: Connect) -> None:
    one, other = connect(name="early"), connect()
    with pytest.raises(smb.WaitTimeout, match=r"barrier 'b': 1 of 2 came in 0.05 s: pid \d+ \(early\)"):
        one.barrier("b", 2, timeout=0.05)
    with pytest.raises(smb.WaitTimeout, match="1 of 2"):
        other.barrier("b", 2, timeout=0.05)


def test_a_lock_keeps_others_out(connect: Connect) -> None:
    boxes = [connect() for _ in range(4)]
    inside, most = 0, 0

    def work(box: Box) -> None:
        nonlocal inside, most
        for _ in range(10):
            with box.lock("l"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, boxes))
    assert most == 1


def test_a_lock_is_given_in_the_order_of_asking_and_names_its_holder(connect: Connect) -> None:
    first, second, third = connect(name="first"), connect(), connect()
    lock = first.lock("l")
    lock.acquire()
    with pytest.raises(smb.WaitTimeout, match=r"'l' was not free in 0.05 s: held by pid \d+ \(first\)"):
        second.lock("l").acquire(timeout=0.05)
    order: list[str] = []

    def take(box: Box, name: str) -> None:
        with box.lock("l"):
            order.append(name)

    threads = [threading.Thread(target=take, args=(b, n)) for b, n in ((second, "second"), (third, "third"))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    lock.release()
    for thread in threads:
        thread.join(10)
    assert order == ["second", "third"]


def test_closing_releases_what_a_client_holds(connect: Connect) -> None:
    holder, other = connect(), connect()
    holder.lock("l").acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.lock("l").acquire, 10)
        time.sleep(0.05)
        assert not waiting.done()
        holder.close()
        waiting.result(5)


def test_threads_may_share_a_box_and_one_that_waits_holds_nobody_up(box: Box) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(box.barrier, "b", 2, 10)
        time.sleep(0.05)
        segment = box.create("c", 10)
        assert box.list() == ["c"]
        box.barrier("b", 2, timeout=5)
        waiting.result(5)
    assert len(box.sessions()) == 1
    segment.detach()


class Alarm(Exception):
    pass


def raise_alarm(*_: object) -> None:
    raise Alarm


def test_an_interrupted_wait_leaves_nothing_and_the_box_usable(connect: Connect, served: smb.Daemon) -> None:
    box, other = connect(), connect()
    other.lock("l").acquire()
    waits = [
        lambda: box.barrier("b", 2, 30),
        lambda: box.lock("l").acquire(30),
        lambda: box.counter("n").wait(9, 30),
        lambda: box.create("c", 10).wait(9, 30),
    ]
    before = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        for wait in waits:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Alarm):
                wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert box.list() == ["c"]
    assert wait_for(lambda: not served.store.rendezvous._barriers)
    (lock,) = served.store.rendezvous._locks.values()
    assert not lock.queue
    assert len(box.sessions()) == 2


def test_detach_close_and_release_are_fine_twice(connect: Connect) -> None:
    box = connect()
    segment = box.create("c", 10)
    segment.detach()
    segment.detach()
    box.close()
    box.close()
    assert connect().list() == []


def test_a_dropped_box_ends_its_session(connect: Connect, served: smb.Daemon) -> None:
    del connect
    box = smb.connect(served.addresses[0])
    box.create("c", 10)
    del box
    other = smb.connect(served.addresses[0])
    assert wait_for(lambda: other.list() == [])
    other.close()


# Not by rdma: in the emulated guest `import torch` takes a minute; tests/smb/test_arrays.py has the tensors.
@pytest.mark.parametrize("connect", ["local", "shm", "tcp", "tcp+tls", "tcp-over-3"], indirect=True)
def test_torch_tensors_are_arrays_too(box: Box) -> None:
    torch = pytest.importorskip("torch")
    center, x = box.create("c", 100), torch.ones(100)
    center.exchange(x, 0.5)
    np.testing.assert_array_equal(center.read(), 0.5)
    assert float(x.sum()) == 50.0
    center.write(torch.arange(100.0))
    out = torch.empty(100)
    center.read(out)
    assert torch.equal(out, torch.arange(100.0))
