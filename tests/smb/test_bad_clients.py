"""Clients gone bad over TCP: they reach what is theirs, nobody is harmed, memory is bounded."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import smb
from smb import auth, connection, layout, protocol
from smb.protocol import HEADER, MAGIC
from tests.smb.frames import Attacker, Frames, hello
from tests.smb.processes import Program, client, state, wait_for
from tests.smb.strangers import F32, TOKEN, Innocent, N, Raw, ask, failure, is_closed

FRAMES = 2_000
HUGE = 2**32 - 1


def test_a_read_only_attachment_writes_nothing(attacker: Attacker, innocent: Innocent) -> None:
    raw = Raw(attacker)
    center = raw.attach("center", readonly=True)
    raw.ask(protocol.Create("mine", N, "float32", "owner", b"", False, True, 0.0))
    mine = raw.attach("mine", readonly=False)
    for record, elements in raw.updates(center, mine):
        assert "attached read-only" in failure(raw.ask(record, elements))
    for how in ("copy", "scale", "axpy", "fill"):
        combine = protocol.Combine(how, center, mine, 0.5, 0, N, True)
        assert "read-only" in failure(raw.ask(combine))
    raw.applied = 4
    for record, elements in raw.updates(mine, center):
        assert isinstance(raw.ask(record, elements), protocol.Applied)  # it is the right that was missing
    assert innocent.unharmed()


def test_what_is_not_attached_is_out_of_reach(attacker: Attacker, innocent: Innocent) -> None:
    raw = Raw(attacker)
    raw.ask(protocol.Create("mine", N, "float32", "owner", b"", False, True, 0.0))
    mine = raw.attach("mine", readonly=False)
    for segment in [n for n in range(8) if n != mine] + [2**63, 2**64 - 1]:
        raw.applied = 0
        assert "not attached" in failure(raw.ask(protocol.Read(segment, 0, N)))
        assert "attached" in failure(raw.ask(protocol.VersionOf(segment)))
        for request in (protocol.Publish(segment), protocol.Detach(segment), protocol.Mend(segment)):
            assert "attached to no segment" in failure(raw.ask(request))
        assert "attached" in failure(raw.ask(protocol.Reduce("sum", segment, 0)))
    assert innocent.unharmed()


def test_what_belongs_to_its_owner_is_freed_by_its_owner(attacker: Attacker, innocent: Innocent) -> None:
    delta = innocent.box.create("delta", N, lifetime="owner")
    assert "belongs to" in failure(Raw(attacker).ask(protocol.Free("delta")))
    assert innocent.box.list() == ["center", "delta"]
    innocent.box.free("delta")
    delta.detach()
    assert innocent.box.list() == ["center"]


def test_a_client_elsewhere_names_no_folder_of_the_daemons_host(
    attacker: Attacker, innocent: Innocent, tmp_path: Path
) -> None:
    raw = Raw(attacker)
    for request in (protocol.SnapshotNow(str(tmp_path / "there")), protocol.RestoreFrom("/etc")):
        assert "only a client on the daemon's host may name a folder" in failure(raw.ask(request))
    assert not (tmp_path / "there").exists()
    assert innocent.unharmed()


def test_another_clients_session_is_not_joined_without_its_secret(
    fort: smb.Daemon, attacker: Attacker, innocent: Innocent
) -> None:
    (other,) = (s for s in fort.store.sessions() if s.number != attacker.session)
    for greeting in (
        hello(other.number, other.secret ^ 1, "thief", mapped=False),
        hello(attacker.session, other.secret, "thief", mapped=False),
        hello(0, 0, "thief", mapped=True),
    ):
        with attacker.open(greet=False) as sock:
            auth.introduce(lambda record, sock=sock: ask(sock, record), attacker.token)  # type: ignore[misc, arg-type]
            assert failure(ask(sock, greeting))
    assert innocent.unharmed()


def test_lengths_that_are_lies_cost_nothing(fort: smb.Daemon, attacker: Attacker, innocent: Innocent) -> None:
    """Numbers of elements, of bytes, of rows, of updates; memory is watched."""
    raw = Raw(attacker)
    raw.ask(protocol.Create("mine", N, "float32", "owner", b"", False, True, 0.0))
    mine = raw.attach("mine", readonly=False)
    before = psutil.Process().memory_info().rss
    key = struct.pack("<I", 1) + b"k"
    lies: dict[int, list[bytes]] = {
        3: [key + struct.pack("<Q", 2**48), struct.pack("<I", HUGE) + b"k", key + struct.pack("<Q", 2**63)],
        5: [key + b"\0\0" + struct.pack("<I", HUGE), struct.pack("<I", HUGE)],
        9: [struct.pack("<I", HUGE)],
        18: [
            struct.pack("<3Q", mine, o, c)
            for o, c in ((0, 2**48), (2**64 - 1, 2), (N, 1), (1, 2**64 - 1), (0, 0))
        ],
        19: [struct.pack("<5QB", mine, 1, 0, o, c, 1) for o, c in ((0, 2**48), (2**64 - 1, 2), (0, N + 1))],
        20: [
            struct.pack("<5QBBd", mine, s, a, 0, 2**40, 1, 0, 1.0)
            for s, a in ((1, 0), (2**64 - 1, 0), (2, 2**63))
        ],
        21: [struct.pack("<5QBBd", mine, 1, 0, 0, c, 1, w, 0.5) for c in (2**40, 10) for w in (0, 3, 9, 255)],
        25: [struct.pack("<Q", 2**64 - 1)],
    }
    for code, bodies in lies.items():
        for body in bodies:
            raw.number += 1
            raw.socket.sendall(HEADER.pack(MAGIC, code, 0, raw.number, len(body)) + body)
            answer = Attacker.reply(raw.socket)
            assert answer
            assert failure(answer[1]), (code, body)
    assert psutil.Process().memory_info().rss - before < 8 << 20
    assert innocent.unharmed()
    for length in (HUGE, connection.LONGEST + 1, 1 << 31):
        with attacker.open() as sock:
            sock.sendall(HEADER.pack(MAGIC, 19, 0, 1, length))
            answer = Attacker.reply(sock)
            assert answer
            assert f"frame of {length} bytes" in failure(answer[1])
            assert is_closed(sock, 5)
    assert innocent.unharmed()


def test_who_stops_in_the_middle_of_a_frame_is_cut_off(
    attacker: Attacker, innocent: Innocent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connection keeps the session alive, so no lease ends them. Takes 15 seconds."""
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.5)
    raw = Raw(attacker)
    raw.ask(protocol.Create("mine", N, "float32", "owner", b"", False, True, 0.0))
    mine = raw.attach("mine", readonly=False)
    head = struct.pack("<5QB", mine, 1, 0, 0, N, 1)
    begun = (
        HEADER.pack(MAGIC, 3, 0, 20, 5000),  # a control request, read by Python
        HEADER.pack(MAGIC, 19, 0, 20, len(head) + 4 * N) + head[:7],
        HEADER.pack(MAGIC, 19, 0, 20, len(head) + 4 * N) + head,
    )
    slow: dict[int, socket.socket] = {}
    for which, start in enumerate(begun):
        attacker.stream = 0
        slow[which] = attacker.open()
        slow[which].sendall(start)
    cut: dict[int, float] = {}
    began = time.monotonic()
    while len(cut) < len(slow) and time.monotonic() - began < 20:
        for which in slow.keys() - cut.keys():
            try:
                slow[which].sendall(b"x")
            except ConnectionError:
                cut[which] = time.monotonic() - began
        assert raw.ask(protocol.Sessions())
        time.sleep(0.1)
    for sock in slow.values():
        sock.close()
    assert cut.keys() == slow.keys()
    assert cut[0] < 3
    assert min(cut[1], cut[2]) > 9
    assert max(cut[1], cut[2]) < 18
    assert isinstance(raw.ask(protocol.Read(mine, 0, N)), protocol.Done)
    assert innocent.unharmed()


def test_who_reads_no_reply_holds_nobody_up(fort: smb.Daemon, attacker: Attacker, innocent: Innocent) -> None:
    """Its own lease ends it: while its replies are stuck, nothing is heard from it."""
    raw = Raw(attacker)
    raw.ask(protocol.Create("mine", 1 << 20, "float32", "owner", b"", False, True, 0.0))
    mine = raw.attach("mine", readonly=False)
    raw.socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        for _ in range(200):
            raw.send(protocol.Read(mine, 0, 1 << 18))
    assert innocent.unharmed()
    assert wait_for(lambda: len(fort.store.sessions()) == 1, 10)
    assert innocent.box.list() == ["center"]


# Fencing -------------------------------------------------------------------------------------------------


def test_a_late_write_of_a_fenced_client_does_not_land(
    fort: smb.Daemon, attacker: Attacker, innocent: Innocent, caplog: pytest.LogCaptureFixture
) -> None:
    raw = Raw(attacker)
    center = raw.attach("center", readonly=False)
    ones = np.ones(N, F32).tobytes()
    body = bytearray()
    layout.put(protocol.Accumulate(center, 1, 0, 0, N, 1, "float32", 1.0), body)
    frame = HEADER.pack(MAGIC, 20, 0, 99, len(body) + len(ones)) + body + ones
    raw.socket.sendall(frame[:-100])
    assert wait_for(lambda: len(fort.store.sessions()) == 1, 10)  # the lease ends it
    with contextlib.suppress(OSError):
        raw.socket.sendall(frame[-100:])
        raw.socket.sendall(frame)
    assert is_closed(raw.socket, 5)
    assert innocent.unharmed()
    assert "was not heard from for 2 s: its session is over" in caplog.text
    with attacker.open(greet=False) as sock:
        auth.introduce(lambda record: ask(sock, record), attacker.token)  # type: ignore[arg-type]
        back = hello(attacker.session, attacker.secret, "late", mapped=False)
        assert "lease ended" in failure(ask(sock, replace(back, stream=attacker.stream)))


def test_a_stopped_client_that_goes_on_after_its_lease_is_told_and_adds_nothing(
    fort: smb.Daemon, innocent: Innocent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_bytes(TOKEN)
    monkeypatch.setenv(auth.VARIABLE, str(tmp_path / "token"))
    code = """
center = box.attach("center")
ones, applied, dropped = np.ones(1000, np.float32), 0, 0
while applied % 20 or not box.counter("stop").value:
    try:
        center.accumulate(ones, 0.0)
        applied += 1
        if applied == 50:
            print("going", flush=True)
    except smb.Restarted:
        dropped += 1
print(applied, dropped, flush=True)
"""
    with client(fort.addresses[0], code) as worker:
        assert worker.line() == "going"
        worker.stop()
        assert wait_for(lambda: len(fort.store.sessions()) == 1, 10)
        before = innocent.center.version
        time.sleep(0.3)
        assert innocent.center.version == before
        worker.signal(signal.SIGCONT)
        assert wait_for(lambda: innocent.center.version > before + 50, 10)  # it comes back as a new client
        innocent.box.counter("stop").add(1)
        applied, dropped = map(int, worker.line().split())
    assert dropped <= 1
    assert applied <= innocent.center.version <= applied + dropped  # the one under way may have landed before
    assert (innocent.center.read() == 2).all()


# Frames --------------------------------------------------------------------------------------------------


def test_the_daemon_stays_up_under_wrong_frames_over_tcp(folder: Path) -> None:
    (folder / "token").touch(0o600)
    (folder / "token").write_bytes(TOKEN)
    words = ["-m", "smb.cli", "serve", "--tcp", "127.0.0.1:0", "--token", str(folder / "token")]
    with Program(*words, "--memory-limit", "64M") as daemon:
        address = daemon.line().split()[-1]
        innocent, rss = Innocent(address), psutil.Process(daemon.pid).memory_info().rss
        frames, attacker, kinds = (
            Frames(seed=3, remote=True),
            Attacker(address, TOKEN, patience=0.1),
            Counter[str](),
        )
        for number in range(FRAMES):
            frame = frames.next()
            record = attacker.attack(frame)
            frames.learn(record)
            kinds[frame.kind] += 1
            kinds[type(record).__name__] += 1
            if number % 200 == 0:
                assert innocent.unharmed()
        attacker.close()
        assert innocent.unharmed()
        assert state(daemon.pid) in set("SRD")
        assert kinds["good"] + kinds["field"] > FRAMES / 2
        assert kinds["Applied"] > 10, kinds  # the native loop was reached, and went on
        assert psutil.Process(daemon.pid).memory_info().rss - rss < 48 << 20
        innocent.box.close()
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 0
