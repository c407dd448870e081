"""Garbage at the daemon's socket (design: promise 4)."""

from __future__ import annotations

import gc
import os
import socket
import struct
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import layout, protocol
from smb.connection import Connection
from smb.protocol import HEADER, MAGIC, OPERATIONS
from tests.smb.frames import Attacker, Frames, hello
from tests.smb.processes import ServeProcess, state, wait_for

FRAMES = 500


def test_the_daemon_stays_up_under_wrong_frames_and_serves_the_others(process: ServeProcess) -> None:
    with smb.connect(process.address, name="innocent") as box:
        center = box.create("center", 1000, initial=np.ones(1000, np.float32))
        box.lock("mine").acquire()
        box.counter("mine").add(3)
        frames, attacker, kinds = Frames(seed=1), Attacker(str(process.path)), Counter[str]()
        for _ in range(FRAMES):
            frame = frames.next()
            frames.learn(attacker.attack(frame))
            kinds[frame.kind] += 1
            if sum(kinds.values()) % 50 == 0:
                assert "center" in box.list()
        attacker.close()
        assert kinds["good"] + kinds["field"] > FRAMES / 2
        assert state(process.pid) in set("SRD")
        with smb.connect(process.address) as late:
            assert late.attach("center").read().sum() == 1000
        assert center.exchange(np.ones(1000, np.float32), 0.5) == 1
        assert box.counter("mine").value == 3
        with pytest.raises(smb.WaitTimeout, match="innocent"):
            box.lock("mine").acquire(timeout=0.05)


def answer(path: Path, data: bytes) -> tuple[protocol.Header, str, bool]:
    """The daemon's answer to one frame after a Hello: header, message, whether the stream goes on."""
    attacker = Attacker(str(path))
    with attacker.socket as sock:
        sock.sendall(data)
        header = protocol.unpack_header(attacker.receive(sock, HEADER.size), protocol.MAX_REPLY)
        body = attacker.receive(sock, header.length)
        message = layout.unpack(protocol.Failure, body).message if header.status else ""
        try:
            sock.sendall(protocol.pack(10, 9, protocol.Sessions()))
            goes_on = attacker.reply(sock) is not None
        except OSError:
            goes_on = False
        return header, message, goes_on


ADD = bytearray()
layout.put(protocol.Add("k", 1), ADD)
WRONG = {
    "huge frame": (
        HEADER.pack(MAGIC, 11, 0, 1, 1 << 30),
        "frame of 1073741824 bytes, at most 1048576",
        False,
    ),
    "another magic": (HEADER.pack(b"HTTP", 11, 0, 1, 0), "frame starts with b'HTTP', not b'SMB1'", False),
    "unknown operation": (HEADER.pack(MAGIC, 99, 0, 1, 0), "unknown operation 99", True),
    "status in a request": (
        HEADER.pack(MAGIC, 11, 5, 1, len(ADD)) + ADD,
        "a request's status is 0, not 5",
        True,
    ),
    "cut body": (HEADER.pack(MAGIC, 11, 0, 1, 4) + ADD[:4], "Add.key: 1 bytes expected", True),
    "long body": (HEADER.pack(MAGIC, 11, 0, 1, len(ADD) + 3) + ADD + b"abc", "Add: 3 bytes too many", True),
    "second Hello": (
        protocol.pack(1, 1, hello()),
        "this connection has a session already",
        True,
    ),
    "another version": (
        protocol.pack(1, 1, replace(hello(), version=9)),
        "the client speaks protocol version 9, the daemon version 3: install the same version of shmtrain",
        True,
    ),
    "another version's Hello": (
        HEADER.pack(MAGIC, 1, 0, 1, 5) + b"\x09\x00new",
        "the client speaks protocol version 9, the daemon version 3",
        True,
    ),
    "a segment of others": (protocol.pack(6, 1, protocol.Detach(1)), "attached to no segment 1", True),
    "publish twice": (protocol.pack(4, 1, protocol.Publish(77)), "attached to no segment 77", True),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_frame_gets_an_error_and_loses_the_stream_only_with_its_framing(
    served: smb.Daemon, folder: Path, name: str
) -> None:
    data, expected, goes_on = WRONG[name]
    header, message, went_on = answer(folder / "box.sock", data)
    assert header.status in protocol.ERRORS
    assert expected in message
    assert went_on == goes_on


@pytest.mark.parametrize("reconnect", [0.0, 5.0])
def test_a_client_of_another_version_is_refused_once(
    process: ServeProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reconnect: float,
) -> None:
    """It is not told that shared memory does not work, nor of the ways in which it has been tried."""
    monkeypatch.setattr(protocol, "VERSION", 9)
    with pytest.raises(smb.NotSupported, match=r"client speaks protocol version 9, .* version 3") as refused:
        smb.connect(process.address, reconnect=reconnect)
    assert refused.value.__context__ is None
    assert not caplog.text


def test_nothing_is_served_before_hello(served: smb.Daemon, folder: Path) -> None:
    attacker = Attacker(str(folder / "box.sock"))
    with attacker.open(greet=False) as sock:
        for code, operation in OPERATIONS.items():
            if operation.request in (protocol.Hello, protocol.Challenge, protocol.Prove):
                continue
            sock.sendall(protocol.pack(code, 3, Frames(0).good(code)))
            header = protocol.unpack_header(attacker.receive(sock, HEADER.size), protocol.MAX_REPLY)
            message = layout.unpack(protocol.Failure, attacker.receive(sock, header.length)).message
            assert message == f"{operation.request.__name__} before Hello"
    attacker.close()


def test_a_session_is_joined_by_its_own_process_with_its_secret_only(
    served: smb.Daemon, folder: Path
) -> None:
    box = smb.connect(served.addresses[0])
    (session,) = served.store.sessions()
    attacker = Attacker(str(folder / "box.sock"))
    for number, secret, refusal in (
        (session.number, session.secret ^ 1, smb.NotPermitted),
        (session.number + 99, session.secret, smb.Closed),
    ):
        with attacker.open(greet=False) as sock:
            sock.sendall(protocol.pack(1, 1, hello(number, secret, "thief")))
            header, _ = attacker.reply(sock) or pytest.fail("no answer")
            assert protocol.ERRORS[header.status] is refusal
    attacker.close()
    box.close()


def test_half_a_frame_holds_nobody_up(served: smb.Daemon, folder: Path) -> None:
    slow = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for sock in slow:
        sock.connect(str(folder / "box.sock"))
        sock.sendall(HEADER.pack(MAGIC, 11, 0, 1, 100)[:13])
    before = time.monotonic()
    with smb.connect(served.addresses[0]) as box:
        assert box.counter("n").add(1) == 0
    assert time.monotonic() - before < 2
    for sock in slow:
        sock.close()
    assert wait_for(lambda: not served._connections)


def test_who_stops_waiting_frees_its_place_though_its_process_lives(served: smb.Daemon, folder: Path) -> None:
    attacker = Attacker(str(folder / "box.sock"))
    attacker.socket.sendall(protocol.pack(13, 1, protocol.Barrier("b", 2, 1e6)))
    assert wait_for(lambda: served.store.rendezvous._barriers)
    attacker.socket.close()
    assert wait_for(lambda: not served.store.rendezvous._barriers)
    with smb.connect(served.addresses[0]) as box, pytest.raises(smb.WaitTimeout, match="1 of 2 came"):
        box.barrier("b", 2, timeout=0.1)


def test_what_was_granted_to_nobody_is_taken_back(served: smb.Daemon, folder: Path) -> None:
    """The answers cannot be delivered; the client's process lives on."""
    attacker = Attacker(str(folder / "box.sock"))
    create = protocol.Create("c", 100, "float32", "stay", b"", False, True, 0.0)
    for code, request in ((14, protocol.Lock("l", 1, 0.0)), (3, create)):
        with attacker.open() as sock:
            sock.shutdown(socket.SHUT_RD)
            sock.sendall(protocol.pack(code, 1, request))
    attacker.close()
    with smb.connect(served.addresses[0]) as box:

        def ours() -> bool:  # the daemon may not have come to the request yet when the list is empty
            try:
                return box.create("c", 100).created
            except smb.KeyExists:
                return False

        box.lock("l").acquire(timeout=5)
        assert wait_for(lambda: box.list() == [])
        assert wait_for(ours)


def test_an_end_that_is_reported_after_the_connection_has_closed_is_no_error() -> None:
    """The watcher's thread is told of the end just before the connection's own thread closes the socket."""
    ended = Connection.__new__(Connection)
    ended._socket = socket.socket(socket.AF_UNIX)
    ended._socket.close()
    ended._ended()


def test_descriptors_that_a_client_sends_are_not_kept(served: smb.Daemon, folder: Path) -> None:
    attacker = Attacker(str(folder / "box.sock"))
    gc.collect()  # what other tests left would go in the midst of this one
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read, write = os.pipe()
        frame = protocol.pack(10, 3, protocol.Sessions())
        socket.send_fds(attacker.socket, [frame], [read, write])
        os.close(read)
        os.close(write)
        assert attacker.reply(attacker.socket)
    assert len(os.listdir("/proc/self/fd")) == before
    attacker.close()


@pytest.mark.parametrize("code", OPERATIONS)
def test_every_record_comes_back_as_it_was_sent(code: int) -> None:
    frames = Frames(seed=code)
    for _ in range(50):
        request = frames.good(code)
        frame = protocol.pack(code, 5, request)
        header = protocol.unpack_header(frame[: HEADER.size], protocol.MAX_REQUEST)
        assert (header.operation, header.status, header.number) == (code, 0, 5)
        assert protocol.unpack_request(header, frame[HEADER.size :]) == request


@pytest.mark.parametrize("kind", protocol.ERRORS.values())
def test_every_error_comes_back_as_the_class_that_was_raised(kind: type[smb.SmbError]) -> None:
    frame = protocol.pack_error(3, 4, kind("what went wrong"))
    header = protocol.unpack_header(frame[: HEADER.size], protocol.MAX_REPLY)
    with pytest.raises(kind, match="what went wrong") as caught:
        protocol.raise_failure(header, frame[HEADER.size :])
    assert type(caught.value) is kind


def test_a_row_count_that_the_body_cannot_hold_is_refused_at_once() -> None:
    with pytest.raises(smb.ProtocolError, match=r"Listing.segments: Stat.key: 4 bytes expected"):
        layout.unpack(protocol.Listing, struct.pack("<I", 2**32 - 1))
