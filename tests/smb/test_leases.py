"""Sessions without shared memory: how long they last, and whose a stream is."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import layout, protocol
from smb.client import Box
from smb.protocol import HEADER
from tests.smb.conftest import TOKEN
from tests.smb.processes import ServeProcess, client, wait_for
from tests.smb.proxy import DOWN, Proxy

F32 = np.float32
COUNT = 400_000


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
    with (
        Proxy(served.addresses[1]) as proxy,
        client(proxy.address, REMOTE, more={"SMB_TOKEN_FILE": str(token)}) as worker,
    ):
        assert worker.line() == "in"
        assert wait_for(lambda: center.version > 5)
        proxy.faults[DOWN].lost = True  # so that it is stopped in the middle of an update
        assert wait_for(lambda: proxy.faults[DOWN].swallowed)
        time.sleep(0.2)
        worker.stop()
        near.lock("l").acquire(timeout=5)  # the lease is 2 s
        assert near.list() == ["center"]
        version, values = center.version, center.read()
        assert values.min() in {values.max(), values.max() - 1}
        proxy.faults[DOWN].lost = False
        worker.signal(signal.SIGCONT)
        assert worker.line().startswith("restarted segment 'center': accumulate was dropped: the daemon at")
        np.testing.assert_array_equal(center.read(), values)
        assert center.version == version


class Bare:
    """A client that speaks frames by itself."""

    def __init__(self, daemon: smb.Daemon | ServeProcess) -> None:
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


def begin(daemon: smb.Daemon | ServeProcess) -> tuple[Bare, protocol.Welcome]:
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


def test_a_thread_may_come_back_later_than_a_lease_while_its_session_lives(folder: Path) -> None:
    """As by RDMA, where a break is noticed late: what was under way goes on in its stream."""
    with smb.serve(unix=folder / "box.sock", lease=1.0) as daemon:
        bare, welcome = begin(daemon)
        other = Bare(daemon)
        other.ask(hello(welcome.session, welcome.secret))
        bare.socket.close()
        late = time.monotonic() + 1.5
        while time.monotonic() < late:
            assert refusal(other, protocol.Acknowledge(0)) is None
            time.sleep(0.1)
        assert refusal(Bare(daemon), hello(welcome.session, welcome.secret, welcome.stream)) is None


def test_a_daemon_that_stood_still_does_not_count_its_own_silence(folder: Path) -> None:
    with ServeProcess(folder / "box.sock", "--lease", "1") as process, smb.connect(process.address) as near:
        _, welcome = begin(process)
        process.stop()
        time.sleep(1.7)
        process.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert len(near.sessions()) == 2
        assert refusal(Bare(process), hello(welcome.session, welcome.secret, welcome.stream)) is None
        assert wait_for(lambda: len(near.sessions()) == 1, 5)


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
