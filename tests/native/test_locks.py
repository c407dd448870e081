"""Several processes and one segment: nothing is lost, and the dead and the stopped hold nobody up."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from smb import _native
from smb.errors import RequestError, TransportError, WaitTimeout
from smb.segment import CHUNK_BYTES, Mapping
from tests.native.processes import Child, children, wait_for

F32 = npt.NDArray[np.float32]
CHUNK = CHUNK_BYTES // 4
COUNT = 4 * CHUNK


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    made = Mapping.create(COUNT, "float32")
    yield made
    made.close()


def read_all(mapping: Mapping) -> Any:
    out = np.empty(mapping.count, mapping.dtype)
    mapping.read(out)
    return out


def holder_of(mapping: Mapping, chunk: int) -> Callable[[], None]:
    """A process that takes a chunk's lock, leaves the chunk half-written and sleeps there."""

    def hold() -> None:
        mapping.hold_chunk(chunk)
        while True:
            time.sleep(1)

    return hold


@pytest.mark.parametrize("held", ["weights", "sums"])
def test_adagrad_waits_for_each_chunk_that_it_changes(held: str) -> None:
    weights, sums, gradient = (Mapping.create(COUNT, "float32") for _ in range(3))
    gradient.initialise(np.ones(COUNT, np.float32))
    one = {"weights": weights, "sums": sums}[held]
    held_now, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        one.hold_chunk(1, False)
        held_now.set()
        go_on.wait(60)
        one.release_chunk(1)

    holder = threading.Thread(target=hold)
    holder.start()
    held_now.wait(30)
    worker = threading.Thread(target=weights.adagrad, args=(sums, gradient, 0.5, 1.0, 1e-8, 0, COUNT))
    worker.start()
    wait_for(lambda: bool((read_all(weights)[2 * CHUNK :] == -0.5).all()))  # the others are done meanwhile
    time.sleep(0.1)
    assert (read_all(one)[CHUNK : 2 * CHUNK] == 0.0).all()
    assert worker.is_alive()
    go_on.set()
    holder.join(30)
    worker.join(30)
    assert (read_all(sums) == 1.0).all()
    np.testing.assert_allclose(read_all(weights), -0.5, rtol=1e-6)
    for mapping in (weights, sums, gradient):
        mapping.close()


# Promises 1 and 2 ----------------------------------------------------------------------------------------

PROCESSES, ROUNDS, WEIGHTS = 8, 200, 1_000_000


def exchange_with_noise(center: Mapping, result: Mapping, rank: int) -> None:
    """Fresh known noise into every element each round: base times 1, 2, 3, 1, 2, 3, ..."""
    noise = base_noise(rank)
    x = np.zeros(WEIGHTS, np.float32)
    for step in range(ROUNDS):
        _native.axpy(1.0 + step % 3, noise, x)
        center.exchange(x, 0.9 / PROCESSES, threads=1 + rank % 2)
    result.write(x)


def base_noise(rank: int) -> F32:
    return np.random.default_rng(rank).random(WEIGHTS, np.float32)


@pytest.mark.timeout(120)
def test_exchanges_of_many_processes_conserve_every_element() -> None:
    center = Mapping.create(WEIGHTS, "float32")
    results = [Mapping.create(WEIGHTS, "float32") for _ in range(PROCESSES)]
    works = [partial(exchange_with_noise, center, results[r], r) for r in range(PROCESSES)]
    with children(works) as workers:
        assert [worker.wait(100) for worker in workers] == [0] * PROCESSES
    total = read_all(center).astype(np.float64)
    for result in results:
        total += read_all(result)
    put_in = sum(1.0 + step % 3 for step in range(ROUNDS)) * sum(
        base_noise(rank).astype(np.float64) for rank in range(PROCESSES)
    )
    # One update of one element that is lost shifts the sum by about 0.1; rounding by 1e-3 at most.
    np.testing.assert_allclose(total, put_in, rtol=0, atol=0.02)
    assert center.version == PROCESSES * ROUNDS
    for each in (center, *results):
        each.close()


def test_concurrent_accumulates_lose_no_update() -> None:
    count, rounds = 1_000_000, 50
    center = Mapping.create(count, "float32")
    ones = np.ones(count, np.float32)

    def push() -> None:
        for _ in range(rounds):
            center.accumulate(ones)

    with children([push] * 4) as workers:
        assert [worker.wait() for worker in workers] == [0] * 4
    np.testing.assert_array_equal(read_all(center), 4 * rounds)  # whole numbers: exact in any order
    center.close()


def test_threads_of_one_process_lose_no_update(mapping: Mapping) -> None:
    ones = np.ones(COUNT, np.float32)

    def push() -> None:
        for _ in range(50):
            mapping.accumulate(ones, threads=2)

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(read_all(mapping), 200)
    assert mapping.version == 200


def test_an_operation_after_fork_locks_in_the_childs_own_name(mapping: Mapping) -> None:
    ones = np.ones(COUNT, np.float32)
    mapping.accumulate(ones, threads=2)  # the parent has its thread id and its helpers already

    def child() -> None:
        mapping.accumulate(ones, threads=2)
        mapping.hold_chunk(1)
        assert mapping.holders() == [(1, os.getpid())]
        mapping.release_chunk(1)

    with Child(child) as forked:
        assert forked.wait() == 0
    np.testing.assert_array_equal(read_all(mapping), 2)


def test_a_thread_holds_one_lock_at_a_time(mapping: Mapping) -> None:
    mapping.hold_chunk(0)
    for call in (
        lambda: mapping.read(np.empty(4, np.float32), CHUNK),
        lambda: mapping.write(np.empty(4, "f")),
    ):
        with pytest.raises(RequestError, match="holds a chunk's lock"):
            call()
    mapping.release_chunk(0)
    assert mapping.holders() == []


# Promise 3 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readonly", [False, True])
def test_a_read_never_mixes_two_updates_inside_a_chunk(mapping: Mapping, readonly: bool) -> None:
    def write_whole_numbers() -> None:
        values = np.zeros(COUNT, np.float32)
        for number in range(1, 1_000_000):
            values[:] = number
            mapping.write(values)

    reader = Mapping.attach(mapping.control_fd, mapping.payload_fd, COUNT, "float32", readonly=readonly)
    seen = set()
    with Child(write_whole_numbers):
        mapping.wait(1, 30)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            for chunk in read_all(reader).reshape(-1, CHUNK):
                assert chunk.min() == chunk.max()
                seen.add(float(chunk[0]))
    assert len(seen) > 3
    reader.close()


# The dead ------------------------------------------------------------------------------------------------


def seconds_to_pass_on(mapping: Mapping) -> float:
    """From the kill of a holder to the end of an exchange that waited for its chunk."""
    ended = float("inf")

    def exchange() -> None:
        nonlocal ended
        with contextlib.suppress(WaitTimeout):
            mapping.exchange(np.ones(CHUNK, np.float32), 0.5, offset=2 * CHUNK)
            ended = time.monotonic()

    with Child(holder_of(mapping, 2)) as holder:
        wait_for(mapping.holders)
        waiter = threading.Thread(target=exchange)
        waiter.start()
        time.sleep(0.05)
        assert waiter.is_alive()
        killed = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        waiter.join(20)
    assert ended < float("inf"), "the lock of a killed holder never came free"
    return ended - killed


def test_the_lock_of_a_killed_holder_passes_on_within_10_ms(mapping: Mapping) -> None:
    mapping.patience = 10
    waits = [seconds_to_pass_on(mapping) for _ in range(9)]
    assert statistics.median(waits) < 0.010, waits
    assert max(waits) < 1.0, waits
    assert mapping.holders() == []


def test_kill_9_in_live_traffic_leaves_the_segment_whole(mapping: Mapping) -> None:
    """Workers are killed at random moments until several were caught with a lock in hand."""
    local = np.ones(COUNT, np.float32)

    def work() -> None:
        x = np.random.default_rng().random(COUNT, np.float32)
        while True:
            mapping.exchange(x, 0.3, threads=1)

    caught = kills = 0
    dice = random.Random(3)
    while caught < 5 and kills < 400:
        with Child(work) as victim:
            before = mapping.version
            mapping.wait(before + 2, 30)
            time.sleep(dice.random() * 0.002)
            victim.stop()
            caught += any(tid == victim.pid for _, tid in mapping.holders())
            victim.kill()
        kills += 1
        mapping.exchange(local, 0.1)
        values = read_all(mapping)
        assert np.isfinite(values).all()
        assert mapping.holders() == []
    assert caught >= 5, f"only {caught} of {kills} kills found a lock held"


@pytest.mark.parametrize("readonly", [False, True])
def test_a_chunk_that_a_killed_writer_left_odd_becomes_readable_again(
    mapping: Mapping, readonly: bool
) -> None:
    """A writer's reader mends it; a read-only one has it mended."""
    reader = Mapping.attach(mapping.control_fd, mapping.payload_fd, COUNT, "float32", readonly=readonly)
    reader.patience = 5.0
    asked: list[int] = []

    def ask(chunk: int) -> None:
        asked.append(chunk)
        assert mapping.repair() == 1

    reader.on_torn = ask
    with Child(holder_of(mapping, 1)) as writer:
        wait_for(mapping.holders)
        writer.kill()
    began = time.monotonic()
    read_all(reader)
    assert time.monotonic() - began < 2.0
    assert asked == ([1] if readonly else [])
    reader.close()


def test_repair_mends_what_the_dead_left_and_leaves_the_living_alone(mapping: Mapping) -> None:
    with Child(holder_of(mapping, 0)) as living, Child(holder_of(mapping, 3)) as dying:
        wait_for(lambda: len(mapping.holders()) == 2)
        dying.kill()
        assert mapping.repair() == 1
        assert mapping.holders() == [(0, living.pid)]
        assert mapping.repair() == 0
        assert mapping.repair(lambda tid: tid != living.pid) == 1  # told that it is dead
        assert mapping.holders() == []
    read_all(mapping)


def test_a_read_only_reader_whom_nobody_helps_gives_up_and_says_so(mapping: Mapping) -> None:
    reader = Mapping.attach(mapping.control_fd, mapping.payload_fd, COUNT, "float32", readonly=True)
    reader.patience = 0.3
    with Child(holder_of(mapping, 1)) as writer:
        wait_for(mapping.holders)
        writer.kill()
    with pytest.raises(WaitTimeout, match=r"chunk 1 was left half-written"):
        reader.read(np.empty(10, np.float32), CHUNK)
    out = np.empty(COUNT, np.float32)
    assert reader.rescue(out) == 1  # takes it as it is
    reader.close()


# The stopped ---------------------------------------------------------------------------------------------


def test_a_stopped_holder_keeps_only_its_own_chunk(mapping: Mapping) -> None:
    calls: list[tuple[int, int, float]] = []
    mapping.on_stuck = lambda *call: calls.append(call)
    mapping.patience = 1.5
    ones = np.ones(COUNT, np.float32)
    began = time.monotonic()
    with Child(holder_of(mapping, 1)) as holder:
        wait_for(mapping.holders)
        holder.stop()
        for threads in (1, 2):
            with pytest.raises(TransportError, match=rf"thread {holder.pid} .*chunk 1 .*3 of 4 chunks"):
                mapping.accumulate(ones, threads=threads)
        with pytest.raises(WaitTimeout, match="0 of 1 chunks"):
            mapping.write(np.ones(5, np.float32), CHUNK)
    values = read_all(mapping).reshape(4, CHUNK)
    np.testing.assert_array_equal(values[[0, 2, 3]], 2)
    np.testing.assert_array_equal(values[1], 0)
    assert time.monotonic() - began < 3 * mapping.patience + 10
    assert [(chunk, tid) for chunk, tid, _ in calls] == [(1, holder.pid)] * 3
    assert all(1.0 <= seconds < 1.5 for _, _, seconds in calls)


def test_an_operation_ends_when_a_stopped_holder_goes_on(mapping: Mapping) -> None:
    def hold_for_a_while() -> None:
        mapping.hold_chunk(1)
        os.kill(os.getpid(), signal.SIGSTOP)
        mapping.release_chunk(1)

    resumed: list[float] = []

    def resume(chunk: int, tid: int, seconds: float) -> None:
        resumed.append(seconds)
        holder.resume()

    mapping.on_stuck = resume
    with Child(hold_for_a_while) as holder:
        wait_for(mapping.holders)
        assert mapping.accumulate(np.ones(COUNT, np.float32)) == 1
    assert len(resumed) == 1
    np.testing.assert_array_equal(read_all(mapping), 1)


def test_what_on_stuck_raises_ends_the_operation(mapping: Mapping) -> None:
    class Enough(Exception):
        pass

    def give_up(chunk: int, tid: int, seconds: float) -> None:
        raise Enough

    mapping.on_stuck = give_up
    with Child(holder_of(mapping, 1)):
        wait_for(mapping.holders)
        with pytest.raises(Enough):
            mapping.accumulate(np.ones(COUNT, np.float32))
        with pytest.raises(Enough):
            mapping.read(np.ones(COUNT, np.float32))


def test_ctrl_c_ends_a_waiting_operation(mapping: Mapping) -> None:
    with Child(holder_of(mapping, 1)):
        wait_for(mapping.holders)
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            mapping.write(np.ones(COUNT, np.float32))
        assert time.monotonic() - began < 5


def test_a_small_operation_that_waits_lets_other_threads_run(mapping: Mapping) -> None:
    """Below 16 KiB the GIL is kept, but not while waiting."""
    with Child(holder_of(mapping, 0)) as holder:
        wait_for(mapping.holders)
        threading.Timer(0.2, os.kill, [holder.pid, signal.SIGKILL]).start()  # the test's end reaps it
        assert mapping.write(np.ones(4, np.float32)) == 1


def test_nonsense_in_the_control_words_harms_nobody_outside(mapping: Mapping) -> None:
    """Whoever may map the control file may write anything there: numbers go wrong, waiting ends."""
    noise = np.random.default_rng(7)
    size = os.fstat(mapping.control_fd).st_size
    mapping.patience = 0.2
    local = np.ones(COUNT, np.float32)
    for _ in range(5):
        os.pwrite(mapping.control_fd, noise.integers(0, 256, size, dtype=np.uint8).tobytes(), 0)
        for call in (
            lambda: mapping.read(local),
            lambda: mapping.exchange(local, 0.5, threads=2),
            lambda: mapping.wait(1 << 63, 0.01),
            mapping.holders,
            mapping.repair,
        ):
            with contextlib.suppress(WaitTimeout, TransportError):
                call()
