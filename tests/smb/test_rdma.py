"""What RDMA alone promises, over real verbs: on a device, or in the guest of tests/rdma_guest.

The guest is slow: keep segments at 1 MiB and rounds few.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from smb import pairs
from smb.client import Box
from smb.server import Daemon
from smb.transport import rdma
from smb.transport.arrays import DeviceMemory
from smb.transport.channel import Channel, Move
from smb.transport.onesided import RdmaAttachment, RdmaTransport
from smb.transport.ports import ports
from tests.smb.conftest import TOKEN
from tests.smb.processes import Program, wait_for

pytestmark = pytest.mark.rdma
N = 1 << 18  # 1 MiB of float32: four chunks


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    with smb.serve(
        unix=folder / "box.sock", tcp="127.0.0.1:0", rdma=f"{ports()[0].address}:0", token=TOKEN, lease=2.0
    ) as one:
        yield one


def address(daemon: Daemon, scheme: str = "rdma:") -> str:
    return next(one for one in daemon.addresses if one.startswith(scheme))


@pytest.fixture
def connect(daemon: Daemon) -> Iterator[Callable[..., Box]]:
    boxes: list[Box] = []

    def make(scheme: str = "rdma:", timeout: float = 20.0) -> Box:
        boxes.append(smb.connect(address(daemon, scheme), token=TOKEN, timeout=timeout))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()


def transport(box: Box) -> RdmaTransport:
    inner = box._transport
    assert isinstance(inner, RdmaTransport)
    return inner


def channel(box: Box) -> Channel:
    return transport(box).channel()


def attachment(segment: smb.Segment) -> RdmaAttachment:
    inner = segment._attachment
    assert isinstance(inner, RdmaAttachment)
    return inner


@pytest.fixture
def afar(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[Daemon, str, pytest.LogCaptureFixture]]:
    """A daemon without a Unix socket, as one on another host, and HOST:PORT of its TCP port."""
    caplog.set_level("INFO", "smb")
    with smb.serve(tcp="127.0.0.1:0", rdma=f"{ports()[0].address}:0", token=TOKEN) as one:
        yield one, address(one, "tcp:").removeprefix("tcp://"), caplog


def test_an_address_without_a_scheme_takes_rdma_where_both_have_a_device(
    afar: tuple[Daemon, str, pytest.LogCaptureFixture],
) -> None:
    daemon, where, log = afar
    with smb.connect(where, token=TOKEN) as box:
        center = box.create("c", N, initial=np.ones(N, np.float32))
        assert box.transport == center.transport == "rdma"
        np.testing.assert_array_equal(center.read(), 1)
        assert len(box.sessions()) == 1  # the first one, by TCP, is over
    there = address(daemon).removeprefix("rdma://")
    assert f"{where}: by RDMA, since {ports()[0]} has reached the daemon's at {there}; shared" in log.text
    with smb.connect(f"tcp://{where}", token=TOKEN) as box:
        assert box.transport == "tcp"  # a named transport is not replaced


def test_a_device_that_does_not_reach_the_daemons_is_not_taken(
    afar: tuple[Daemon, str, pytest.LogCaptureFixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a firewall lets through the set-up, and not the packets of the queue pairs."""
    _, where, log = afar
    monkeypatch.setattr(pairs.Responder, "_run", pairs.Responder.close)
    with pytest.raises(smb.TransportError, match="an empty request by RDMA: the peer does not answer"):
        smb.connect(f"rdma://{where}", token=TOKEN, timeout=10)
    with smb.connect(where, token=TOKEN, timeout=10) as box:
        assert box.transport == box.create("c", 10).transport == "tcp"
        assert wait_for(lambda: len(box.sessions()) == 1)
    assert "by tcp, since shared memory does not work: " in log.text
    assert "an empty request by RDMA: the peer does not answer" in log.text


def test_rdma_of_another_daemon_is_not_taken(
    daemon: Daemon, afar: tuple[Daemon, str, pytest.LogCaptureFixture]
) -> None:
    meant, where, log = afar
    meant.rdma = daemon.rdma
    with smb.connect(where, token=TOKEN) as box:
        assert box.transport == "tcp"
        assert box.list() == []
    assert f"RDMA does not work: another daemon listens at {daemon.rdma}" in log.text


def noise(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(N).astype(np.float32)


def test_an_update_never_overtakes_its_data(connect: Callable[..., Box]) -> None:
    center = connect().create("c", N)
    total = np.zeros(N, np.float32)
    for step in range(4):
        source = np.round(100 * noise(0, step))  # whole numbers: exact in any order
        total += source
        center.accumulate(source)
    np.testing.assert_array_equal(center.read(), total)


WORKER = """
import sys, numpy as np, smb
box = smb.connect(sys.argv[1], token=sys.argv[2].encode(), timeout=10)
center, ones = box.attach("c"), np.ones(1 << 18, np.float32)
print("ready", flush=True)
while True:
    print(center.accumulate(ones) and 1, flush=True)
"""


def test_killed_clients_leave_the_center_whole(daemon: Daemon, connect: Callable[..., Box]) -> None:
    center = connect().create("c", N)
    acknowledged = 0
    for kill in range(3):
        with Program("-c", WORKER, address(daemon), TOKEN.decode()) as worker:
            assert worker.line() == "ready"
            for _ in range(kill + 1):
                assert worker.line() == "1"
            time.sleep(0.07 * kill)
            worker.kill()
            acknowledged += kill + 1
            while worker.line():
                acknowledged += 1
        assert wait_for(lambda: len(daemon.store.sessions()) == 1, 10)
        values = center.read()
        for begin in range(0, N, N // 4):
            chunk = values[begin : begin + N // 4]
            assert np.all(chunk == chunk[0])  # all of an update or nothing of it
            assert acknowledged <= chunk[0] <= acknowledged + kill + 1
        assert center.accumulate(np.zeros(N, np.float32)) > 0
    assert not daemon.fabric or len(daemon.fabric.responders) == 1


SERVER = """
import sys, time, smb
daemon = smb.serve(unix=sys.argv[1], rdma=sys.argv[2] + ":0", token=sys.argv[3].encode(), lease=30)
print(daemon.addresses[1], flush=True)
time.sleep(600)
"""


class Server(Program):
    """A daemon in a process of its own."""

    def __init__(self, socket: Path) -> None:
        super().__init__("-c", SERVER, str(socket), ports()[0].address, TOKEN.decode())
        self.address = ""

    def __enter__(self) -> Server:
        self.address = self.line()
        assert self.address
        return self


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder / "box.sock") as program:
        yield program


def test_a_dead_daemon_is_an_error_within_seconds(server: Server) -> None:
    box = smb.connect(server.address, token=TOKEN, timeout=20)
    center, x = box.create("c", N), np.zeros(N, np.float32)
    center.exchange(x, 0.5)
    server.kill()
    for operation in (lambda: center.read(x), lambda: center.exchange(x, 0.5)):
        began = time.monotonic()
        with pytest.raises(smb.TransportError, match=f"daemon at {ports()[0].address}:"):
            operation()
        assert time.monotonic() - began < 15
    box.close()


def test_a_stopped_daemon_is_waited_for_no_longer_than_asked(server: Server) -> None:
    box = smb.connect(server.address, token=TOKEN, timeout=3)
    center, x = box.create("c", N, initial=np.ones(N, np.float32)), np.zeros(N, np.float32)
    server.stop()
    center.read(x)  # one-sided: nobody is asked
    np.testing.assert_array_equal(x, 1)
    with pytest.raises(smb.TransportError, match=f"daemon at {ports()[0].address}:.* no answer .*in 3 s"):
        center.exchange(x, 0.5)
    box.close()


def test_the_daemon_does_nothing_while_it_is_read(server: Server) -> None:
    box = smb.connect(server.address, token=TOKEN, timeout=20)
    center, x = box.create("c", 1 << 20), np.empty(1 << 20, np.float32)

    def ticks() -> int:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(") ")[2].split()
        return int(fields[11]) + int(fields[12])

    center.read(x)
    before = ticks()
    for _ in range(4):
        center.read(x)
    assert ticks() - before <= 1  # hundredths of a second; the session's sign of life may fall in
    box.close()


def test_a_read_only_client_cannot_write(connect: Callable[..., Box]) -> None:
    owner = connect().create("c", N)
    box = connect()
    center = box.attach("c", readonly=True)
    with pytest.raises(smb.NotPermitted):
        center.write(np.ones(N, np.float32))
    line, place = channel(box), attachment(center)._place(0)
    with pytest.raises((smb.TransportError, smb.NotPermitted)):  # the daemon gives no slots
        line.move("write", lambda: [Move(line.scratch.region.span(0, 4096), place)], write=True)
    pair = line.pair()
    pair.write(1, line.scratch.region.span(0, 4096), place)  # past our own checks: the queue pair forbids it
    with pytest.raises(rdma.Broken, match="does not understand the request"):
        pair.wait(time.monotonic() + 10)
    np.testing.assert_array_equal(owner.read(), 0)


def test_a_read_only_key_forbids_writes_on_a_pair_that_may_write(connect: Callable[..., Box]) -> None:
    owner = connect().create("c", N)
    box = connect()
    center, own = box.attach("c", readonly=True), box.create("own", N)
    own.write(np.ones(N, np.float32))  # from now on the queue pair may write
    line, place = channel(box), attachment(center)._place(0)
    pair = line.pair()
    pair.write(1, line.scratch.region.span(0, 4096), place)
    with pytest.raises(rdma.Broken, match="does not allow it"):
        pair.wait(time.monotonic() + 10)
    np.testing.assert_array_equal(owner.read(), 0)


def test_a_broken_queue_pair_is_made_again(connect: Callable[..., Box]) -> None:
    box = connect()
    center, x = box.create("c", N), np.ones(N, np.float32)
    for operation in (center.accumulate, center.write, center.read):
        pair = channel(box).pair()
        pair.fail()
        operation(x)
        assert channel(box).pair() is not pair
    np.testing.assert_array_equal(center.read(), 1)
    assert box.counter("n").add(1) == 0


def test_a_lost_reply_does_not_double_an_update(
    connect: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = connect()
    center = box.create("c", N)
    center.accumulate(np.ones(N, np.float32))
    send, left = pairs.Responder._send, [2]  # the third reply of the operation is lost, with the queue pair

    def lossy(self: pairs.Responder) -> None:
        if self._unsent:
            left[0] -= 1
            if left[0] == 0:
                raise rdma.Broken("lost")
        send(self)

    monkeypatch.setattr(pairs.Responder, "_send", lossy)
    local = np.full(N, 3.0, np.float32)
    center.exchange(local, 0.5)
    assert left[0] < 0
    np.testing.assert_array_equal(local, 2)
    np.testing.assert_array_equal(center.read(), 2)
    left[0] = 1
    assert box.counter("n").add(5) == 0
    assert box.counter("n").value == 5


def test_a_queue_pair_that_breaks_again_is_reported(
    connect: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = connect()
    center = box.create("c", N)

    def lost(_: pairs.Responder) -> None:
        raise rdma.Broken("lost")

    monkeypatch.setattr(pairs.Responder, "_send", lost)
    with pytest.raises(smb.TransportError, match=r"daemon at .*: accumulate: .*, twice"):
        center.accumulate(np.ones(N, np.float32))


def test_a_fenced_client_writes_no_more(daemon: Daemon, connect: Callable[..., Box]) -> None:
    owner = connect().create("c", N)
    box = connect()
    center = box.attach("c")
    center.write(np.ones(N, np.float32))
    line, place = channel(box), attachment(center)._place(0)
    (session,) = [s for s in daemon.store.sessions() if s.number == transport(box).welcome.session]
    pair = line.pair()
    daemon._fence(session)
    line.scratch.bytes[:4096] = 7
    pair.write(1, line.scratch.region.span(0, 4096), place)
    with pytest.raises(rdma.Broken, match="does not answer"):
        pair.wait(time.monotonic() + 10)
    np.testing.assert_array_equal(owner.read(), 1)


def test_a_forked_child_harms_no_queue_pair(connect: Callable[..., Box]) -> None:
    box = connect()
    center = box.create("c", N)
    center.write(np.ones(N, np.float32))
    child = os.fork()
    if not child:
        try:
            channel(box).close()
            transport(box).adapter.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    line = channel(box)
    pair = line.pair()
    np.testing.assert_array_equal(center.read(), 1)
    assert line.pair() is pair


def test_what_is_freed_is_registered_no_more(daemon: Daemon, connect: Callable[..., Box]) -> None:
    box = connect()
    center = box.create("c", N)
    x = np.zeros(N, np.float32)
    center.read(x)
    assert daemon.fabric
    assert len(daemon.fabric.registered) == 1
    assert len(transport(box).arrays) == 1
    center.detach()
    assert len(transport(box).arrays) == 0
    assert wait_for(lambda: daemon.fabric and not daemon.fabric.registered)


def device_memory(nbytes: int) -> tuple[int, Callable[[], np.ndarray[Any, Any]]]:
    """GPU memory as a dma-buf descriptor, and what copies it out; skips where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("needs a GPU whose memory an RDMA device can reach")
    context, pointer, descriptor = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(-1)
    made = (
        cuda.cuInit(0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        or cuda.cuCtxSetCurrent(context)
        or cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        or cuda.cuMemGetHandleForAddressRange(
            ctypes.byref(descriptor), pointer, ctypes.c_size_t(nbytes), 1, ctypes.c_ulonglong(0)
        )
    )
    if made:
        pytest.skip(f"needs a GPU whose memory an RDMA device can reach (CUDA error {made})")

    def values() -> np.ndarray[Any, Any]:
        out = np.empty(nbytes // 4, np.float32)
        assert cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(out.ctypes.data), pointer, ctypes.c_size_t(nbytes)) == 0
        return out

    return descriptor.value, values


def test_gpu_memory_is_read_into_and_written_from_in_place(connect: Callable[..., Box]) -> None:
    descriptor, values = device_memory(4 * N)
    try:
        center = connect().create("c", N, initial=noise(0, 0))
        try:
            center.read(DeviceMemory(descriptor, N))
        except smb.NotSupported as error:
            pytest.skip(f"needs a GPU whose memory an RDMA device can reach ({error})")
        np.testing.assert_array_equal(values(), noise(0, 0))
        other = connect().create("d", N)
        other.write(DeviceMemory(descriptor, N))
        np.testing.assert_array_equal(other.read(), noise(0, 0))
    finally:
        os.close(descriptor)
