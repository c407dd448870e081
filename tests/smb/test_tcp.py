"""Networks and daemons that fail under clients without shared memory: nothing lost, nothing doubled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import layout, protocol
from smb.client import Box
from smb.protocol import HEADER
from smb.transport.base import Options
from smb.transport.tcp import connect as tcp_connect
from tests.smb.conftest import TOKEN
from tests.smb.processes import ROOT, ServeProcess, client, wait_for
from tests.smb.proxy import DOWN, UP, Proxy

F32 = np.float32
COUNT = 400_000  # seven chunks, so that an exchange is several pieces
BYTES = 4 * COUNT


@pytest.fixture
def proxy(served: smb.Daemon) -> Iterator[Proxy]:
    with Proxy(served.addresses[1]) as proxy:
        yield proxy


@pytest.fixture
def remote(proxy: Proxy) -> Iterator[Box]:
    """A box behind the proxy."""
    with smb.connect(proxy.address, token=TOKEN, timeout=10.0, name="remote") as box:
        yield box


@pytest.fixture
def near(served: smb.Daemon) -> Iterator[Box]:
    """A box by shared memory that looks at what the remote one does."""
    with smb.connect(served.addresses[0], name="near") as box:
        yield box


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


# Leases --------------------------------------------------------------------------------------------------


def test_an_idle_client_keeps_its_lease(served: smb.Daemon) -> None:
    with smb.connect(served.addresses[1], token=TOKEN, name="idle") as box:
        box.create("mine", 10, lifetime="owner")
        time.sleep(3.0)  # the lease is 2 s
        assert [row["name"] for row in box.sessions()] == ["idle"]
        assert box.list() == ["mine"]


REMOTE = """
mine = box.create("mine", 1000, lifetime="owner")
center = box.attach("center")
box.lock("l").acquire()
print("in")
while True:
    try:
        center.accumulate(np.ones(center.count, np.float32))
    except smb.Restarted as error:
        print("restarted", error)
        time.sleep(60)
"""


def test_a_client_stopped_for_longer_than_its_lease_is_gone_and_harms_nobody(
    served: smb.Daemon, near: Box, folder: Path
) -> None:
    center = near.create("center", COUNT)
    token = folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with client(served.addresses[1], REMOTE, more={"SMB_TOKEN_FILE": str(token)}) as worker:
        assert worker.line() == "in"
        assert wait_for(lambda: center.version > 5)
        worker.stop()
        near.lock("l").acquire(timeout=5)  # the lease is 2 s
        assert near.list() == ["center"]
        version, values = center.version, center.read()
        assert values.min() in {values.max(), values.max() - 1}
        worker.signal(signal.SIGCONT)
        assert worker.line().startswith("restarted segment 'center': accumulate was dropped: the daemon at")
        np.testing.assert_array_equal(center.read(), values)
        assert center.version == version


class Bare:
    """A client that speaks frames by itself."""

    def __init__(self, daemon: smb.Daemon) -> None:
        address = daemon.addresses[0].removeprefix("unix:")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(address)
        self.number = 0

    def ask(self, record: object, payload: bytes = b"") -> tuple[protocol.Header, bytes]:
        self.send(record, payload)
        return self.reply()

    def send(self, record: object, payload: bytes = b"") -> None:
        self.number += 1
        code = protocol.BY_REQUEST[type(record)].code
        frame = bytearray(protocol.pack(code, self.number, record))
        HEADER.pack_into(frame, 0, b"SMB1", code, 0, self.number, len(frame) - HEADER.size + len(payload))
        self.socket.sendall(bytes(frame) + payload)

    def reply(self) -> tuple[protocol.Header, bytes]:
        header = protocol.unpack_header(self.receive(HEADER.size), protocol.MAX_REPLY)
        return header, self.receive(header.length)

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError("ended")
            data += part
        return data


def hello(session: int = 0, secret: int = 0, stream: int = 0) -> protocol.Hello:
    return protocol.Hello(protocol.VERSION, session, secret, stream, False, 1, "bare")


def begin(daemon: smb.Daemon) -> tuple[Bare, protocol.Welcome]:
    bare = Bare(daemon)
    _, body = bare.ask(hello())
    return bare, layout.unpack(protocol.Welcome, body)


def test_a_late_write_after_the_lease_is_refused(served: smb.Daemon, near: Box) -> None:
    center = near.create("c", 1000)
    bare, welcome = begin(served)
    _, body = bare.ask(protocol.Attach("c", False, False, b""))
    opened = layout.unpack(protocol.Opened, body)
    write = protocol.Write(opened.segment, 1, 0, 0, 1000, 1)
    half = bytearray(protocol.pack(19, 3, write))
    HEADER.pack_into(half, 0, b"SMB1", 19, 0, 3, len(half) - HEADER.size + 4000)
    bare.socket.sendall(bytes(half) + bytes([1]) * 2000)  # the rest comes too late
    assert wait_for(lambda: len(served.store.sessions()) == 1, 6)
    with contextlib.suppress(OSError):
        bare.socket.sendall(bytes([1]) * 2000)
        assert bare.receive(1) is None  # never: it was ended
    again = Bare(served)
    header, _ = again.ask(hello(welcome.session, welcome.secret, welcome.stream))
    assert protocol.ERRORS[header.status] is smb.Closed
    header, _ = again.ask(protocol.Write(opened.segment, 1, 0, 0, 0, 1))
    assert protocol.ERRORS[header.status] is smb.NotPermitted  # nothing before Hello
    np.testing.assert_array_equal(center.read(), 0)
    assert center.version == 0


def test_what_is_under_way_when_the_session_ends_does_not_land(served: smb.Daemon, near: Box) -> None:
    """The fence itself, without the connection's end that comes with it."""
    center = near.create("c", 1000)
    bare, welcome = begin(served)
    opened = layout.unpack(protocol.Opened, bare.ask(protocol.Attach("c", False, False, b""))[1])
    session = served.store._sessions[welcome.session]
    assert session.remote is not None
    (stream,) = session.remote.streams
    served.store.end_session(session)
    late = bytearray(protocol.pack(19, 9, protocol.Write(opened.segment, 1, 0, 0, 1000, 1)))
    HEADER.pack_into(late, 0, b"SMB1", 19, 0, 9, len(late) - HEADER.size + 4000)
    with pytest.raises(smb.Closed):
        stream.native.handle(bytes(late[: HEADER.size]), bytes(late[HEADER.size :]) + bytes([1]) * 4000)
    np.testing.assert_array_equal(center.read(), 0)
    assert center.version == 0


def refusal(bare: Bare, record: object, payload: bytes = b"") -> type[smb.SmbError] | None:
    header, _ = bare.ask(record, payload)
    return protocol.ERRORS[header.status] if header.status else None


def test_data_requests_reach_what_the_session_is_attached_to_and_as_it_is(
    served: smb.Daemon, near: Box
) -> None:
    center = near.create("c", 1000)
    bare, _ = begin(served)
    number = center._number
    assert refusal(bare, protocol.Read(number, 0, 10)) is smb.Closed
    opened = layout.unpack(protocol.Opened, bare.ask(protocol.Attach("c", True, False, b""))[1])
    assert opened.segment == number
    write = protocol.Write(number, 1, 0, 0, 10, 1)
    assert refusal(bare, protocol.Read(number, 0, 10)) is None
    assert refusal(bare, write, bytes([1]) * 40) is smb.NotPermitted
    bare.ask(protocol.Detach(number))
    assert refusal(bare, protocol.Read(number, 0, 10)) is smb.Closed
    np.testing.assert_array_equal(center.read(), 0)


def test_a_stream_has_one_speaker_and_the_latest_connection_is_it(served: smb.Daemon, near: Box) -> None:
    near.create("c", 1000)
    first, welcome = begin(served)
    first.send(protocol.Barrier("b", 2, 60.0))
    assert wait_for(lambda: served.store.rendezvous._barriers)
    second = Bare(served)
    header, _ = second.ask(hello(welcome.session, welcome.secret, welcome.stream))
    assert not header.status
    with pytest.raises(ConnectionError):
        first.receive(1)
    assert wait_for(lambda: not served.store.rendezvous._barriers)


def test_a_streams_request_numbers_rise(served: smb.Daemon) -> None:
    bare, _ = begin(served)
    bare.number = 10
    assert layout.unpack(protocol.Value, bare.ask(protocol.Add("n", 1))[1]).value == 0
    bare.number = 10  # the same request again: the same answer
    assert layout.unpack(protocol.Value, bare.ask(protocol.Add("n", 1))[1]).value == 0
    bare.number = 8
    header, body = bare.ask(protocol.Add("n", 1))
    assert protocol.ERRORS[header.status] is smb.ProtocolError
    assert "request 9 after 11" in layout.unpack(protocol.Failure, body).message
    bare.number = 20
    assert layout.unpack(protocol.Value, bare.ask(protocol.Add("n", 0))[1]).value == 1


def test_a_session_is_entered_with_its_secret_only(served: smb.Daemon) -> None:
    _, welcome = begin(served)
    thief = Bare(served)
    header, _ = thief.ask(hello(welcome.session, welcome.secret ^ 1, welcome.stream))
    assert protocol.ERRORS[header.status] is smb.NotPermitted
    mapped = protocol.Hello(protocol.VERSION, welcome.session, welcome.secret, 0, True, 1, "thief")
    header, _ = thief.ask(mapped)
    assert protocol.ERRORS[header.status] is smb.NotPermitted


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


# Which transport -----------------------------------------------------------------------------------------


def test_an_address_without_a_scheme_takes_shared_memory_where_it_works(
    served: smb.Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "smb")
    where = served.addresses[1].removeprefix("tcp://")
    with smb.connect(where, token=TOKEN) as box:
        assert box.transport == box.create("c", 10).transport == "shm"
        assert len(box.sessions()) == 1  # the first one, by TCP, is over
    assert f"{where}: by shared memory, since the daemon's socket" in caplog.text
    with smb.connect(served.addresses[1], token=TOKEN) as box:
        assert box.transport == box.create("c", 10).transport == "tcp"  # a named transport is not replaced


def test_an_address_without_a_scheme_takes_tcp_elsewhere_and_says_why(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "smb")
    with smb.serve(tcp="localhost:0", token=TOKEN) as daemon:
        (address,) = daemon.addresses
        with smb.connect(address.removeprefix("tcp://"), token=TOKEN) as box:
            assert box.transport == "tcp"
    assert "by tcp, since shared memory does not work: the daemon has no Unix socket" in caplog.text


def test_another_daemons_socket_on_this_host_is_not_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the daemon is on another host whose socket has the same path as one of this host's."""
    caplog.set_level("INFO", "smb")
    path = folder / "a.sock"
    with smb.serve(unix=path, tcp="127.0.0.1:0", token=TOKEN) as meant:
        path.unlink()
        with smb.serve(unix=path) as other, smb.connect(other.addresses[0]) as wrong:
            wrong.create("wrong", 10)
            with smb.connect(meant.addresses[1].removeprefix("tcp://"), token=TOKEN) as box:
                assert box.transport == "tcp"
                assert box.list() == []
    assert f"another daemon listens at {path} on this host" in caplog.text


def test_both_versions_of_ip_are_served(folder: Path) -> None:
    with smb.serve(tcp="*:0", token=TOKEN) as daemon:
        port = daemon.addresses[0].rpartition(":")[2]
        hosts = ["127.0.0.1", "localhost", "*"]
        if Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
            hosts.append("[::1]")
        for host in hosts:
            with smb.connect(f"tcp://{host}:{port}", token=TOKEN) as box:
                assert box.list() == []


NESTED = """
import sys
sys.path.insert(0, {root!r})
import numpy as np, smb
box = smb.connect({address!r}, name="nested")
center = box.attach("c")
x = np.full(1000, 4, np.float32)
center.exchange(x, 0.5)
print(box.transport, center.transport, x.sum(), box.counter("n").add(1))
"""


def test_another_pid_namespace_is_served_by_frames_over_the_unix_socket(
    served: smb.Daemon, near: Box
) -> None:
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("a PID namespace needs root and unshare")
    center = near.create("c", 1000)
    code = NESTED.format(root=str(ROOT), address=served.addresses[0])
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no PID namespace here: {done.stderr.strip()}")
    assert done.stdout.split() == ["tcp", "tcp", "2000.0", "0"], done.stderr
    assert "no shared memory, its data travel over the socket" in done.stderr
    np.testing.assert_array_equal(center.read(), 2)


def test_a_forked_child_connects_for_itself_and_does_not_disturb_its_parent(served: smb.Daemon) -> None:
    with smb.connect(served.addresses[1], token=TOKEN, name="parent") as box:
        center = box.create("c", 1000)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                center.read()
            except smb.Closed as error:
                status = 0 if "connect again after a fork" in str(error) else 2
            box.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert center.write(np.ones(1000, F32)) == 1
        assert [row["name"] for row in box.sessions()] == ["parent"]


def test_a_closed_box_leaves_no_thread_and_no_descriptor(served: smb.Daemon) -> None:
    def figures() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with smb.connect(served.addresses[1], token=TOKEN) as box:
        box.list()
    assert wait_for(lambda: not served.store.sessions())
    before = figures()
    for _ in range(5):
        box = smb.connect(served.addresses[1], token=TOKEN)
        box.create("c", 10)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: box.list(), range(3)))  # noqa: B023
        box.close()
    assert wait_for(lambda: figures() <= before), (figures(), before)
    assert not served.store.sessions()


# Wire types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_a_segment_exchanges_in_a_wire_type_and_keeps_the_sum(served: smb.Daemon, wire: str) -> None:
    rng = np.random.default_rng(5)
    with smb.connect(served.addresses[1], token=TOKEN) as box:
        center = box.create("c", COUNT)
        x = rng.standard_normal(COUNT).astype(F32)
        put_in = x.astype(np.float64)
        for _ in range(5):
            noise = (0.01 * rng.standard_normal(COUNT)).astype(F32)
            x += noise
            put_in += noise
            center.exchange(x, 0.25, wire=wire)
        np.testing.assert_allclose(x + center.read().astype(np.float64), put_in, atol=1e-5)
        stats = center.wire_stats
        assert stats is not None
        assert BYTES <= stats.bytes_sent < (1 + 4 * 0.55) * BYTES  # the first one is float32
        assert 0 < stats.squared_error < 1e-3 * stats.squared_sum


def test_a_wire_type_is_refused_where_nothing_travels(near: Box) -> None:
    center = near.create("c", 1000)
    with pytest.raises(smb.NotSupported, match="shm moves float32 alone, not int8: wire types are for tcp"):
        center.exchange(np.ones(1000, F32), 0.5, wire="int8")
    with pytest.raises(smb.RequestError, match="unknown wire type 'int4' "):
        center.accumulate(np.ones(1000, F32), wire="int4")
    assert center.wire_stats is None
