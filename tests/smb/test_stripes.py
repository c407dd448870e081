"""One box of several daemons: what lies where, who decides, and what is said when something is missing."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from smb import stripes
from smb.client import Box
from smb.crew import Crew
from smb.segment import CHUNK_BYTES
from smb.server import Daemon
from smb.striped import StripedAttachment
from smb.transport import base
from smb.transport.arrays import DeviceMemory
from smb.transport.base import Options
from tests.smb.processes import ServeProcess, chunk_held, wait_for

F32 = np.float32
PER_CHUNK = CHUNK_BYTES // 4
N = 7 * PER_CHUNK + 100  # of three stripes two have more chunks than the third, one a short one


def ramp(count: int = N) -> np.ndarray:
    return np.arange(count, dtype=F32)


def mappings(daemons: list[Daemon]) -> list[Any]:
    return [entry.mapping for daemon in daemons for entry in daemon.store._by_number.values()]


# What lies where -----------------------------------------------------------------------------------------


def test_chunks_are_dealt_round_robin_and_small_segments_lie_at_the_first(
    daemons: list[Daemon], open_box: Callable[..., Box]
) -> None:
    box = open_box()
    big, small = box.create("big", N, initial=ramp()), box.create("small", 10)
    assert [[len(e.attached) for e in d.store._by_number.values()] for d in daemons] == [[1, 1], [1], [1]]
    for i, daemon in enumerate(daemons):
        mapping = next(iter(daemon.store._by_number.values())).mapping
        assert mapping is not None
        here = np.empty(mapping.count, F32)
        mapping.read(here)
        dealt = [ramp()[k * PER_CHUNK : (k + 1) * PER_CHUNK] for k in range(i, 8, 3)]
        np.testing.assert_array_equal(here, np.concatenate(dealt))
    assert (big.count, big.version, small.count) == (N, 0, 10)
    assert box.stat("big").nbytes == 4 * N
    assert [row.count for row in box.stats()] == [N, 10]


RANGES = [
    (0, N),
    (0, 1),
    (PER_CHUNK - 1, 2),
    (PER_CHUNK, PER_CHUNK),
    (PER_CHUNK // 2, 3 * PER_CHUNK),
    (2 * PER_CHUNK + 7, 4 * PER_CHUNK),
    (N - 100, 100),
    (N - 101, 2),
    (N, 0),
]


def test_gpu_memory_goes_to_all_stripes_that_its_range_touches() -> None:
    """Without a GPU: whether each is asked."""
    asked: list[tuple[int, int]] = []

    class Part:
        def read(self, out: object, offset: int, threads: int, *, stripe: int, stripes: int) -> None:
            asked.append((stripe, stripes))

    parts: list[Any] = [Part(), Part(), Part()]
    segment = StripedAttachment(Crew("abc"), parts, 3, N, "float32")
    segment.read(DeviceMemory(3, 2 * PER_CHUNK), PER_CHUNK)
    assert sorted(asked) == [(1, 3), (2, 3)]


def test_a_range_is_the_same_as_of_a_plain_segment_element_by_element(
    daemons: list[Daemon], open_box: Callable[..., Box], scheme: str
) -> None:
    rng = np.random.default_rng(0)
    start = rng.standard_normal(N).astype(F32)
    striped = open_box(scheme).create("x", N, initial=start)
    plain = open_box(scheme, (1,)).create("plain", N, initial=start)
    version = 0
    for offset, count in RANGES:
        values = rng.standard_normal(count).astype(F32)
        for work in (
            lambda segment, x, at: segment.write(x, offset=at),
            lambda segment, x, at: segment.accumulate(x, scale=-0.5, offset=at),
            lambda segment, x, at: segment.exchange(x, 0.25, offset=at),
        ):
            mine, theirs = values.copy(), values.copy()
            version += 1 if count else 0
            assert work(striped, mine, offset) == work(plain, theirs, offset) == version
            np.testing.assert_array_equal(mine, theirs)
        out = np.full(count + 2, -7, F32)
        striped.read(out[1:-1], offset=offset)
        np.testing.assert_array_equal(out[1:-1], plain.read()[offset : offset + count])
        assert (out[0], out[-1]) == (-7, -7)
    np.testing.assert_array_equal(striped.read(), plain.read())
    assert striped.version == plain.version == version


def test_clients_of_two_transports_lose_nothing(open_box: Callable[..., Box]) -> None:
    """Fresh noise each round; the sum of all weights and the center is that of what was put in."""
    open_box().create("c", N)
    workers, rounds = 4, 15
    barrier = threading.Barrier(workers)

    def work(rank: int) -> np.ndarray:
        center = open_box("unix:" if rank % 2 else "tcp:").attach("c")
        rng = np.random.default_rng(rank)
        x, put_in = np.zeros(N, F32), np.zeros(N)
        barrier.wait(30)
        for _ in range(rounds):
            noise = rng.standard_normal(N).astype(F32)
            x += noise
            put_in += noise
            center.exchange(x, 0.3)
        return put_in - x

    with ThreadPoolExecutor(workers) as pool:
        owed = sum(pool.map(work, range(workers)))
    center = open_box().attach("c")
    assert center.version == workers * rounds
    assert np.abs(center.read()).max() > 1
    np.testing.assert_allclose(center.read() - owed, 0, atol=1e-3)


# The version ---------------------------------------------------------------------------------------------


def test_an_update_counts_when_every_daemon_has_done_it(
    daemons: list[Daemon], open_box: Callable[..., Box], scheme: str
) -> None:
    segment = open_box(scheme).create("x", N)
    watched = open_box(scheme).attach("x")
    last = mappings(daemons)[2]
    with chunk_held(last) as free, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(segment.write, np.ones(N, F32))
        first = watched.read(np.empty(1, F32))
        assert wait_for(lambda: watched.read(first)[0] == 1)  # the first daemon has done its part
        with pytest.raises(smb.WaitTimeout, match="version is 0"):
            watched.wait(1, timeout=0.3)
        free.set()
        assert writing.result(10) == 1
    assert watched.wait(1, timeout=5) == 1
    np.testing.assert_array_equal(watched.read(), 1)


def test_an_update_that_failed_somewhere_is_not_counted_and_names_the_first_bad_chunk(
    open_box: Callable[..., Box], scheme: str
) -> None:
    """Each daemon did its chunks before its own first bad one; exchange and center stay of one sum there."""
    center = open_box(scheme).create("c", N)
    x = np.ones(N, F32)
    x[5 * PER_CHUNK + 3] = np.nan  # the second chunk of stripe 2
    x[6 * PER_CHUNK] = np.inf  # the third of stripe 0
    with pytest.raises(smb.NonFinite, match=r"'c'.*chunk 5") as caught:
        center.exchange(x, 0.5)
    assert (caught.value.chunk, caught.value.element) == (5, 5 * PER_CHUNK + 3)  # type: ignore[attr-defined]
    assert center.version == 0
    got = center.read()
    assert np.isfinite(got).all()
    moved = np.repeat([1, 1, 1, 1, 1, 0, 0, 1], [PER_CHUNK] * 7 + [100]).astype(bool)
    np.testing.assert_array_equal(got[moved], 0.5)
    np.testing.assert_array_equal(x[moved], 0.5)
    np.testing.assert_array_equal(got[~moved], 0)
    assert center.exchange(np.ones(N, F32), 0.5) == 1  # the box goes on


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_wire_types_keep_their_shadows_at_every_daemon(open_box: Callable[..., Box], wire: str) -> None:
    """Only the first exchange travels as float32; the sum is kept as with one daemon."""
    center = open_box("tcp:").create("c", N)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(N).astype(F32)
    put_in = x.astype(float)
    center.exchange(x, 0.5, wire=wire)
    first = center.wire_stats
    for _ in range(5):
        noise = F32(0.01) * rng.standard_normal(N).astype(F32)
        x += noise
        put_in += noise
        center.exchange(x, 0.5, wire=wire)
    np.testing.assert_allclose(center.read() + x, put_in, atol=1e-4)
    assert first is not None
    assert first.bytes_sent >= 4 * N
    width = {"bfloat16": 2, "int8": 1}[wire]
    last = center.wire_stats
    assert last is not None
    assert last.bytes_sent - first.bytes_sent < 5 * N * width * 1.1
    assert center.version == 6


def test_wire_types_are_refused_where_they_do_not_travel(open_box: Callable[..., Box]) -> None:
    with pytest.raises(smb.NotSupported, match="float32 alone"):
        open_box("unix:").create("c", N).exchange(np.ones(N, F32), 0.5, wire="int8")


def test_a_thread_keeps_to_its_connections_and_they_end_with_it(
    daemons: list[Daemon], open_box: Callable[..., Box]
) -> None:
    box = open_box("tcp:")
    segment = box.create("c", N)

    def lines() -> int:
        return sum(len(transport._lines.all()) for transport in box._transport._transports)  # type: ignore[attr-defined]

    before = lines()
    for _ in range(50):
        segment.read()
    assert lines() == before
    thread = threading.Thread(target=segment.read)
    thread.start()
    thread.join(10)
    assert wait_for(lambda: lines() == before)


class Alarm(Exception):
    pass


def raise_alarm(*_: object) -> None:
    raise Alarm


def test_an_interrupted_operation_ends_before_its_array_is_given_back(
    daemons: list[Daemon], open_box: Callable[..., Box]
) -> None:
    segment = open_box().create("x", N)
    last = mappings(daemons)[2]
    x = np.ones(N, F32)
    before = signal.signal(signal.SIGALRM, raise_alarm)
    with chunk_held(last) as free, ThreadPoolExecutor(1) as pool:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            pool.submit(lambda: time.sleep(0.6) or free.set())
            with pytest.raises(Alarm):
                segment.exchange(x, 0.5)
            moved = x.copy()
        finally:
            signal.signal(signal.SIGALRM, before)
            free.set()
    time.sleep(0.2)
    np.testing.assert_array_equal(x, moved)
    np.testing.assert_array_equal(x + segment.read(), 1)


# Death ---------------------------------------------------------------------------------------------------


def test_a_daemon_that_is_not_there_is_named_and_the_others_are_left(
    daemons: list[Daemon], folder: Path
) -> None:
    where = [daemons[0].addresses[0], f"unix:{folder}/none.sock"]
    with pytest.raises(smb.TransportError, match=r"none.sock"):
        smb.connect(",".join(where))
    assert wait_for(lambda: daemons[0].store.sessions() == [])


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_one_daemons_death_is_named_and_ends_the_box_and_nothing_is_lost(folder: Path, dead: int) -> None:
    with contextlib.ExitStack() as stack:
        ones = [stack.enter_context(ServeProcess(folder / f"{i}.sock", "--lease", "2")) for i in range(3)]
        box = stack.enter_context(smb.connect(",".join(one.address for one in ones), timeout=10))
        segment, small = box.create("x", N, initial=ramp()), box.create("small", 10)
        ones[dead].kill()
        with pytest.raises(smb.TransportError, match=f"'x'.*{dead}.sock"):
            segment.write(np.ones(N, F32))
        for call in (
            lambda: small.write(np.ones(10, F32)),
            lambda: segment.version,
            lambda: box.counter("n").add(1),
            box.list,
            lambda: box.create("y", N),
        ):
            with pytest.raises(smb.TransportError, match=f"{dead}.sock"):
                call()
        saved = segment.rescue()
        chunks = np.arange(N) // PER_CHUNK % 3
        np.testing.assert_array_equal(saved[chunks == dead], ramp()[chunks == dead])
        assert np.isin(saved - ramp(), [0]).sum() + (saved == 1).sum() >= N  # each before or after
        start = time.monotonic()
        box.close()
        assert time.monotonic() - start < 8


def test_threads_may_share_a_box_and_a_stuck_one_holds_nobody_up(
    daemons: list[Daemon], open_box: Callable[..., Box]
) -> None:
    box = open_box()
    one, other = box.create("one", N), box.create("other", N)
    mapping = next(e.mapping for e in daemons[2].store._by_number.values() if e.key == "one")
    assert mapping
    with chunk_held(mapping) as free, ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(one.write, np.ones(N, F32))
        assert wait_for(lambda: one.read(np.empty(1, F32))[0] == 1)
        assert other.write(np.ones(N, F32)) == 1
        assert not stuck.done()
        free.set()
        assert stuck.result(10) == 1


def test_segments_of_two_boxes_are_not_combined(open_box: Callable[..., Box], scheme: str) -> None:
    one, other = open_box(scheme).create("x", N), open_box(scheme).create("y", N)
    for call in (lambda: one.accumulate(other), lambda: one.dot(other), lambda: one.copy_from(other)):
        with pytest.raises(smb.RequestError, match=r"'x'.*segment of the same box"):
            call()


def test_a_box_of_one_daemon_by_list_keeps_others_out_too(daemons: list[Daemon]) -> None:
    transport = stripes.connect([daemons[0].addresses[0]], Options("one"))
    with Box(transport, "one", Options("one")) as box:
        box.create("x", 10)
        plain: base.Transport = base.connect(daemons[0].addresses[0], Options("plain"))
        with (
            Box(plain, "plain", Options("plain")) as other,
            pytest.raises(smb.KeyExists, match="stripe 0 of 1"),
        ):
            other.attach("x")
