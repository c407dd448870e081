"""Networks and daemons that fail under clients without shared memory: nothing lost, nothing doubled."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.client import Box
from smb.transport.base import Options
from smb.transport.tcp import connect as tcp_connect
from tests.smb.conftest import TOKEN
from tests.smb.processes import ServeProcess, wait_for
from tests.smb.proxy import DOWN, UP, Proxy

F32 = np.float32
COUNT = 400_000  # seven chunks, so that an exchange is several pieces
BYTES = 4 * COUNT


def whole(rng: np.random.Generator) -> np.ndarray:
    """Whole numbers: every sum here is exact in float32."""
    return rng.integers(-100, 100, COUNT).astype(F32)


# Connections that break ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [UP, DOWN])
def test_an_exchange_cut_in_mid_frame_is_done_once(proxy: Proxy, remote: Box, near: Box, way: str) -> None:
    """alpha = 1 swaps: a piece that was applied twice, or on one side only, shows in every element."""
    rng = np.random.default_rng(7)
    x, y = whole(rng), whole(rng)
    center = remote.create("c", COUNT, initial=y)
    expected_x, expected_c = x.copy(), y.copy()
    rounds = 12
    for _ in range(rounds):
        proxy.cut_after(way, int(rng.integers(1, BYTES)))
        center.exchange(x, 1.0)
        expected_x, expected_c = expected_c, expected_x
        np.testing.assert_array_equal(x, expected_x)
    np.testing.assert_array_equal(near.attach("c").read(), expected_c)
    assert center.version == rounds
    assert proxy.connections >= rounds  # it was cut, and made again
    assert len(near.sessions()) == 2


def test_an_accumulate_cut_again_and_again_is_added_once(proxy: Proxy, remote: Box, near: Box) -> None:
    center, ones = remote.create("c", COUNT), np.ones(COUNT, F32)
    rng, stop = np.random.default_rng(3), threading.Event()

    def saw() -> None:
        while not stop.wait(float(rng.uniform(0.0, 0.03))):
            proxy.cut()

    with ThreadPoolExecutor(1) as pool:
        sawing = pool.submit(saw)
        added = 0
        while added < 20 or proxy.connections < 8:
            center.accumulate(ones)
            added += 1
        stop.set()
        sawing.result(5)
    np.testing.assert_array_equal(near.attach("c").read(), added)
    assert center.version == added


def test_a_read_goes_on_over_the_next_connection(proxy: Proxy, remote: Box) -> None:
    values = np.arange(COUNT, dtype=F32)
    center = remote.create("c", COUNT, initial=values)
    for cut in (1, 30, 300_000, 1_000_000):
        proxy.cut_after(DOWN, cut)
        np.testing.assert_array_equal(center.read(), values)


def lose_the_reply(proxy: Proxy, box: Box, act: Callable[[], object]) -> object:
    """Do ``act`` while the daemon's answers are lost, then cut the connection; what ``act`` gives."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(box.list).result(5)  # so that this thread has its connection already
        proxy.faults[DOWN].lost, proxy.faults[DOWN].swallowed = True, 0
        acting = pool.submit(act)
        assert wait_for(lambda: proxy.faults[DOWN].swallowed)
        time.sleep(0.05)
        assert not acting.done()
        proxy.faults[DOWN].lost = False
        proxy.cut()
        return acting.result(10)


def test_a_move_whose_reply_was_lost_is_not_made_again(proxy: Proxy, remote: Box, near: Box) -> None:
    center = remote.create("c", 1000)
    x = np.full(1000, 8, F32)
    lose_the_reply(proxy, remote, lambda: center.accumulate(np.ones(1000, F32)))
    np.testing.assert_array_equal(near.attach("c").read(), 1)
    lose_the_reply(proxy, remote, lambda: center.exchange(x, 1.0))
    np.testing.assert_array_equal(near.attach("c").read(), 8)
    np.testing.assert_array_equal(x, 1)
    lose_the_reply(proxy, remote, lambda: center.write(np.zeros(1000, F32)))
    assert center.version == 3


def test_a_request_whose_reply_was_lost_is_not_served_again(proxy: Proxy, remote: Box, near: Box) -> None:
    counter, lock = remote.counter("n"), remote.lock("l")
    assert lose_the_reply(proxy, remote, lambda: counter.add(5)) == 0
    assert counter.value == 5
    lose_the_reply(proxy, remote, lambda: lock.acquire(5))
    with pytest.raises(smb.WaitTimeout, match="remote"):
        near.lock("l").acquire(timeout=0.05)
    lose_the_reply(proxy, remote, lock.release)
    near.lock("l").acquire(timeout=1)
    segment = lose_the_reply(proxy, remote, lambda: remote.create("c", 10, lifetime="stay"))
    assert isinstance(segment, smb.Segment)
    assert segment.created
    lose_the_reply(proxy, remote, lambda: remote.free("c"))
    assert near.list() == []


def test_a_cut_connection_is_no_death(proxy: Proxy, remote: Box, near: Box) -> None:
    remote.create("mine", 10, lifetime="owner")
    lock = remote.lock("l")
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(remote.barrier, "b", 2, 10)
        assert wait_for(lambda: near.stats("mine"))
        for _ in range(5):
            time.sleep(0.1)
            proxy.cut()
        time.sleep(0.2)
        near.barrier("b", 2, timeout=5)
        waiting.result(5)
    assert near.list() == ["mine"]
    with pytest.raises(smb.WaitTimeout, match="remote"):
        near.lock("l").acquire(timeout=0.05)
    lock.release()
    assert len(remote.sessions()) == 2


def test_a_slow_network_changes_nothing(proxy: Proxy, remote: Box) -> None:
    rng = np.random.default_rng(1)
    x, y = whole(rng), whole(rng)
    center = remote.create("c", COUNT, initial=y)
    for faults in proxy.faults.values():
        faults.delay = 0.003
    before = x.copy()
    center.exchange(x, 1.0)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(center.read(), before)


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_network_that_goes_one_way_only_is_named_in_time(proxy: Proxy, way: str) -> None:
    with smb.connect(proxy.address, token=TOKEN, timeout=0.6) as box:
        center = box.create("c", COUNT)
        proxy.faults[way].stalled = True
        before = time.monotonic()
        with pytest.raises(
            smb.TransportError, match=rf"daemon at 127.0.0.1:{proxy.address.rpartition(':')[2]}"
        ):
            center.exchange(np.zeros(COUNT, F32), 0.5)
        assert time.monotonic() - before < 3


def test_a_network_that_breaks_every_connection_is_given_up(proxy: Proxy, near: Box) -> None:
    """It lets everybody connect, and nobody get through."""
    center = near.create("c", COUNT)
    with smb.connect(proxy.address, token=TOKEN, timeout=10) as box:
        mine = box.attach("c")
        proxy.faults[UP].most = 20_000
        before = time.monotonic()
        with pytest.raises(smb.TransportError, match=r"daemon at 127.0.0.1:\d+: "):
            mine.write(np.ones(COUNT, F32))
        assert 1.5 < time.monotonic() - before < 8  # the lease is 2 s
    np.testing.assert_array_equal(center.read(), 0)  # no piece came through
    assert proxy.connections < 30


def test_many_threads_survive_cuts_together(proxy: Proxy, remote: Box, near: Box) -> None:
    center = remote.create("c", COUNT)
    rounds, workers = 15, 4

    def work(rank: int) -> None:
        for i in range(rounds):
            if rank == 0 and i % 3 == 0:
                proxy.cut()
            center.accumulate(np.ones(COUNT, F32))
            remote.counter("n").add(1)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    np.testing.assert_array_equal(near.attach("c").read(), rounds * workers)
    assert remote.counter("n").value == rounds * workers


# Daemons that end ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(folder: Path, port: int) -> ServeProcess:
    token = folder / "token"
    if not token.exists():
        token.write_bytes(TOKEN)
        token.chmod(0o600)
    options = ["--lease", "2", "--tcp", f"127.0.0.1:{port}", "--token", str(token)]
    (folder / "box.sock").unlink(missing_ok=True)  # else the daemon waits for what local clients hand back
    return ServeProcess(folder / "box.sock", *options)


def accumulate_for_ever(center: smb.Segment) -> None:
    while True:
        center.accumulate(np.ones(center.count, F32))


def test_after_a_restart_the_box_goes_on_and_names_what_was_dropped(folder: Path) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with start(folder, port) as first, Proxy(address) as proxy, ThreadPoolExecutor(1) as pool:
        box = smb.connect(proxy.address, token=TOKEN, timeout=10, reconnect=30.0)
        center, lost = box.create("c", COUNT, lifetime="stay"), box.create("lost", 1000)
        adding = pool.submit(accumulate_for_ever, center)
        assert wait_for(lambda: center.version > 3)
        proxy.refuse = True  # until the next daemon has what this one had
        first.kill()
        with start(folder, port), smb.connect(address, token=TOKEN) as other:
            fresh = other.create("c", COUNT, lifetime="stay", initial=np.full(COUNT, 5, F32))
            proxy.refuse = False
            with pytest.raises(smb.Restarted, match="'c': accumulate was dropped: the daemon at"):
                adding.result(20)
            np.testing.assert_array_equal(center.read(), 5)
            assert center.accumulate(np.ones(COUNT, F32)) == fresh.version == 1
            x = np.zeros(COUNT, F32)
            center.exchange(x, 0.5)
            assert center.staleness == 0  # though the version is lower than it was
            with pytest.raises(smb.UnknownKey, match="segment 'lost': lost with the daemon's restart"):
                lost.read()
            assert box.create("new", 10).created
            center.detach()
            box.close()


def test_a_segment_that_only_has_the_same_name_is_not_taken_for_it(folder: Path) -> None:
    port = free_port()
    with start(folder, port) as first:
        box = smb.connect(f"tcp://127.0.0.1:{port}", token=TOKEN, timeout=10)
        center = box.create("c", 1000, meta=b"lenet")
        plain = box.create("d", 1000)
        first.kill()
        with start(folder, port), smb.connect(f"tcp://127.0.0.1:{port}", token=TOKEN) as other:
            other.create("c", 1000, meta=b"cifar", lifetime="stay")
            other.create("d", 500, lifetime="stay")
            assert wait_for(lambda: len(other.sessions()) == 2)  # the idle client came back by itself
            for segment in (center, plain):
                with pytest.raises(smb.UnknownKey, match="lost with the daemon's restart"):
                    segment.write(np.ones(1000, F32))
            box.close()


def exchange_for_ever(center: smb.Segment) -> None:
    while True:
        center.exchange(np.zeros(center.count, F32), 0.5)


@pytest.mark.parametrize("wait", ["exchange", "barrier"])
def test_a_daemon_that_stays_away_is_an_error_within_the_lease(folder: Path, wait: str) -> None:
    with start(folder, free_port()) as daemon:
        box = smb.connect(daemon.addresses[1], token=TOKEN, timeout=5)
        center = box.create("c", COUNT)
        endless = {"exchange": lambda: exchange_for_ever(center), "barrier": lambda: box.barrier("b", 2)}
        threading.Timer(0.3, daemon.process.kill).start()
        before = time.monotonic()
        with pytest.raises(
            smb.TransportError, match=r"no daemon answers at 127.0.0.1:\d+: Connection refused"
        ):
            endless[wait]()
        assert 1 < time.monotonic() - before < 6
        with pytest.raises(smb.TransportError, match="no daemon answers"):
            box.list()
        with pytest.raises(smb.NotSupported, match="'c': the segment lay in the daemon's memory alone"):
            center.rescue()
        box.close()


@pytest.mark.parametrize("wait", ["exchange", "barrier", "list"])
def test_a_frozen_daemon_is_named_in_time(folder: Path, wait: str) -> None:
    with start(folder, free_port()) as daemon:
        box = smb.connect(daemon.addresses[1], token=TOKEN, timeout=1.0)
        center = box.create("c", COUNT)
        daemon.stop()
        before = time.monotonic()
        with pytest.raises(smb.TransportError, match=r"daemon at 127.0.0.1:\d+"):
            {
                "exchange": lambda: center.exchange(np.zeros(COUNT, F32), 0.5),
                "barrier": lambda: box.barrier("b", 2, timeout=15),  # the pulse notices before
                "list": box.list,
            }[wait]()
        assert time.monotonic() - before < 4
        before = time.monotonic()
        box.close()
        assert time.monotonic() - before < 1


def test_who_is_impatient_is_told_at_once_that_the_daemon_is_away(folder: Path) -> None:
    port = free_port()
    with start(folder, port) as first:
        transport = tcp_connect(f"127.0.0.1:{port}", Options("test", 5.0, TOKEN, reconnect=20.0))
        box = Box(transport, "tcp", Options("test", 5.0))
        center = box.create("c", 1000)
        transport.patient = False
        first.kill()
        for limit in (3.0, 0.1, 0.1):  # the first may have been under way
            before = time.monotonic()
            with pytest.raises(smb.Away):
                center.accumulate(np.ones(1000, F32))
            assert time.monotonic() - before < limit
        with start(folder, port), smb.connect(f"tcp://127.0.0.1:{port}", token=TOKEN) as other:
            fresh = other.create("c", 1000, lifetime="stay")
            assert wait_for(lambda: added(center), 10)
            np.testing.assert_array_equal(fresh.read(), 1)
            box.close()


def added(center: smb.Segment) -> bool:
    try:
        center.accumulate(np.ones(1000, F32))
    except (smb.Away, smb.Restarted):
        return False
    return True
