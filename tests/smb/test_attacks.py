"""Strangers and clients gone bad at a daemon's TCP port: refused, logged, nobody harmed, memory bounded."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import smb
from smb import auth, connection, layout, network, protocol
from smb.limits import Limits
from smb.options import ServeOptions
from smb.protocol import HEADER, MAGIC
from smb.tls import Tls
from tests.smb.certificates import Authority
from tests.smb.frames import Attacker, Frames, hello
from tests.smb.processes import ROOT, Program, client, state, wait_for

TOKEN = b"the token of these tests"
WRONG = b"another token than that"
FRAMES = 2_000
N = 1000
F32 = np.float32
ELSEWHERE = "127.0.0.2"  # where attackers come from


class Innocent:
    """A client that works on the box, and says whether it still can."""

    def __init__(self, address: str, token: bytes | None = TOKEN) -> None:
        self.box = smb.connect(address, token=token, name="innocent", timeout=10)
        self.center = self.box.create("center", N, initial=np.full(N, 2, F32))
        self.updates = 0

    def unharmed(self) -> bool:
        start = time.monotonic()
        local = np.full(N, 2, F32)
        self.updates += 1
        same = self.center.exchange(local, 0.5) == self.updates and bool((self.center.read() == 2).all())
        return same and time.monotonic() - start < 2


@pytest.fixture
def fort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[smb.Daemon]:
    """A daemon at a TCP port, under a token."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(auth.VARIABLE, raising=False)
    options = ServeOptions(memory_limit=64 << 20, lease=2.0)
    with smb.serve(tcp="127.0.0.1:0", token=TOKEN, options=options) as daemon:
        yield daemon


@pytest.fixture
def innocent(fort: smb.Daemon) -> Iterator[Innocent]:
    one = Innocent(fort.addresses[0])
    yield one
    one.box.close()


def knock(daemon: smb.Daemon, source: str = ELSEWHERE) -> socket.socket:
    place = network.parse(daemon.addresses[0].removeprefix("tcp://"))
    return socket.create_connection(place, 10, source_address=(source, 0))


def ask(sock: socket.socket, record: object) -> Any:
    """A request over a bare socket, and its reply."""
    sock.sendall(protocol.pack(protocol.BY_REQUEST[type(record)].code, 1, record))
    answer = Attacker.reply(sock)
    if answer is None:
        raise ConnectionError("closed")
    return answer[1]


def failure(answer: object) -> str:
    assert isinstance(answer, protocol.Failure), answer
    return answer.message


def is_closed(sock: socket.socket, seconds: float) -> bool:
    """Whether the daemon ends the connection in time; what it says before that is thrown away."""
    sock.settimeout(seconds)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


# Strangers -----------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_logged(
    fort: smb.Daemon, innocent: Innocent, caplog: pytest.LogCaptureFixture
) -> None:
    for token, message in ((WRONG, "wrong token, number 1 lately"), (None, "this daemon asks for a token")):
        with pytest.raises(smb.NotPermitted, match=message):
            smb.connect(fort.addresses[0], token=token)
        assert wait_for(lambda message=message: message in caplog.text)  # type: ignore[misc]
    assert innocent.unharmed()
    assert len(fort.store.sessions()) == 1


def test_a_recorded_proof_opens_nothing(fort: smb.Daemon, innocent: Innocent) -> None:
    token = auth.Token(TOKEN, "t")
    with knock(fort) as first, knock(fort) as second:
        theirs = ask(first, protocol.Challenge(bytes(32))).nonce
        recorded = protocol.Prove(token.proof(b"client", bytes(32), theirs, b""))
        assert isinstance(ask(first, recorded), protocol.Proved)
        assert ask(second, protocol.Challenge(bytes(32))).nonce != theirs
        assert "wrong token" in failure(ask(second, recorded))
        assert is_closed(second, 5)
        assert "any more" in failure(ask(first, recorded))  # nor may it be said twice
    assert innocent.unharmed()


def test_guessing_is_slowed_and_the_others_come_and_go(fort: smb.Daemon, innocent: Innocent) -> None:
    fort.gate.patience = 1.0
    answers, stop = Counter[str](), threading.Event()

    def guess(number: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), knock(fort) as sock:
                ask(sock, protocol.Challenge(bytes(32)))
                answers[failure(ask(sock, protocol.Prove(os.urandom(32))))[:11]] += 1

    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(guess, number)
        end, visitors = time.monotonic() + 2.5, 0
        while time.monotonic() < end:
            start = time.monotonic()
            with smb.connect(fort.addresses[0], token=TOKEN) as box:
                assert box.list() == ["center"]
            assert time.monotonic() - start < 1
            visitors += 1
            time.sleep(0.05)
        stop.set()
    assert answers["wrong token"] <= auth.Guard.FREE + 3, answers  # after 0, 0.5, 1.5 and 3.5 s
    assert answers["too many wr"] > 0
    assert visitors > 5
    assert innocent.unharmed()


def test_connections_that_say_nothing_are_few_and_short_lived(
    fort: smb.Daemon, innocent: Innocent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smb.gate.GRACE", 0.05)
    fort.gate.patience = 1.5
    before = threading.active_count()
    silent = [knock(fort) for _ in range(300)]
    assert wait_for(lambda: fort.gate.strangers > 0)
    for sock in silent[::3]:
        with contextlib.suppress(OSError):
            sock.send(MAGIC)  # half a header
    assert threading.active_count() <= before + 128 + 2
    assert innocent.unharmed()
    with smb.connect(fort.addresses[0], token=TOKEN) as late:
        assert late.list() == ["center"]
    assert all(is_closed(sock, 5) for sock in silent)
    assert wait_for(lambda: fort.gate.strangers == 0)
    assert "too many connections that did not authenticate: closed" in caplog.text
    assert "not authenticated in 1.5 s: closed" in caplog.text
    for sock in silent:
        sock.close()


def test_who_has_proved_the_token_and_says_no_hello_is_sent_away(
    fort: smb.Daemon, innocent: Innocent
) -> None:
    fort.gate.patience = 0.5
    with knock(fort) as sock:
        auth.introduce(lambda record: ask(sock, record), auth.Credential(auth.Token(TOKEN, "t"), True))
        sock.send(HEADER.pack(MAGIC, 1, 0, 1, 60))
        assert is_closed(sock, 3)
    assert innocent.unharmed()


def test_before_hello_a_frame_is_short(fort: smb.Daemon) -> None:
    with knock(fort) as sock:
        auth.introduce(lambda record: ask(sock, record), auth.Credential(auth.Token(TOKEN, "t"), True))
        sock.sendall(HEADER.pack(MAGIC, 1, 0, 1, connection.LONGEST_HELLO + 1))
        answer = Attacker.reply(sock)
        assert answer
        assert "frame of 4097 bytes, at most 4096 are allowed" in failure(answer[1])
        assert is_closed(sock, 3)


def test_without_the_clients_certificate_nobody_comes_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.make(tmp_path)
    with smb.serve(tcp="127.0.0.1:0", tls=authority.sign("daemon")) as daemon:
        address = daemon.addresses[0]
        with smb.connect(address, tls=authority.sign("worker")) as box:
            assert box.create("c", 10).created
        for files in (Tls(ca=authority.ca), Authority.make(tmp_path, "other").sign("worker"), None):
            with pytest.raises(smb.TransportError):
                smb.connect(address, tls=files and replace(files, ca=authority.ca), timeout=5)
        assert caplog.text.count("127.0.0.1: TLS: ") >= 2


def test_a_daemon_that_others_reach_does_not_start_without_a_token(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(smb.NotPermitted, match=r"listening at 0\.0\.0\.0 would let anybody in"):
        smb.serve(tcp="0.0.0.0:0")
    command = [sys.executable, "-m", "smb.cli", "serve", "--tcp", "0.0.0.0:0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "or say --insecure" in ended.stderr


def test_on_loopback_the_users_own_token_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with smb.serve(tcp="127.0.0.1:0") as daemon:
        with smb.connect(daemon.addresses[0]) as box:
            assert box.list() == []
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "another user's"))
        with pytest.raises(smb.NotPermitted, match="this daemon asks for a token"):
            smb.connect(daemon.addresses[0])
    assert os.listdir(tmp_path / "smb") == []
    with smb.serve(tcp="127.0.0.1:0", insecure=True) as daemon, smb.connect(daemon.addresses[0]) as box:
        assert box.list() == []


# Clients gone bad ------------------------------------------------------------------------------------------


@pytest.fixture
def attacker(fort: smb.Daemon) -> Iterator[Attacker]:
    one = Attacker(fort.addresses[0], TOKEN)
    yield one
    one.close()


class Raw:
    """A session over one bare socket, whose every field one may choose."""

    def __init__(self, attacker: Attacker) -> None:
        self.socket = attacker.socket
        self.socket.settimeout(10)
        self.number = 10
        self.applied = 0

    def send(self, record: object, elements: bytes = b"") -> None:
        body = bytearray()
        layout.put(record, body)
        self.number += 1
        code = protocol.BY_REQUEST[type(record)].code
        self.socket.sendall(
            HEADER.pack(MAGIC, code, 0, self.number, len(body) + len(elements)) + body + elements
        )

    def ask(self, record: object, elements: bytes = b"") -> Any:
        self.send(record, elements)
        answer = Attacker.reply(self.socket)
        assert answer
        assert answer[0].number == self.number
        return answer[1]

    def attach(self, key: str, readonly: bool) -> int:
        return int(self.ask(protocol.Attach(key, readonly, False, b"")).segment)

    def updates(self, segment: int, source: int) -> list[tuple[object, bytes]]:
        """One valid update of each kind, with its elements."""
        ones = np.ones(N, F32).tobytes()
        n = self.applied
        return [
            (protocol.Write(segment, n + 1, n, 0, N, 1), ones),
            (protocol.Accumulate(segment, n + 2, n, 0, N, 1, "float32", 1.0), ones),
            (protocol.Exchange(segment, n + 3, n, 0, N, 1, "float32", 0.5), ones),
            (protocol.AccumulateFrom(segment, n + 4, n, source, 0, 1.0), b""),
        ]


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


HUGE = 2**32 - 1


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


# Limits --------------------------------------------------------------------------------------------------


def limited(limits: Limits, memory: int | None = None) -> smb.Daemon:
    return smb.serve(tcp="127.0.0.1:0", token=TOKEN, options=ServeOptions(memory, 30.0, limits))


def test_clients_segments_and_memory_are_limited() -> None:
    with limited(Limits(clients=3, segments=4), 1 << 20) as daemon:
        boxes = [smb.connect(daemon.addresses[0], token=TOKEN) for _ in range(3)]
        with pytest.raises(smb.OutOfMemory, match=r"3 clients are there, the limit \(--max-clients\)"):
            smb.connect(daemon.addresses[0], token=TOKEN)
        kept = [boxes[0].create(f"k{i}", 10) for i in range(4)]
        with pytest.raises(smb.OutOfMemory, match=r"4 segments exist, which is the limit \(--max-segments\)"):
            boxes[1].create("another", 10)
        kept.pop().detach()
        with pytest.raises(smb.OutOfMemory, match=r"memory limit 1\.0 MiB"):
            boxes[1].create("large", 1 << 20)
        boxes.pop().close()
        boxes.append(smb.connect(daemon.addresses[0], token=TOKEN))
        for box in boxes:
            box.close()


def test_one_client_has_a_bounded_number_of_connections() -> None:
    with limited(Limits(connections=3)) as daemon:
        attacker = Attacker(daemon.addresses[0], TOKEN)
        sockets = []
        for _ in range(2):
            attacker.stream = 0
            sockets.append(attacker.open())
        attacker.stream = 0
        with pytest.raises(AssertionError, match="this client has 3 connections, which is the limit"):
            attacker.open()
        for sock in sockets:
            sock.close()
        attacker.close()


def test_what_one_client_has_under_way_is_bounded() -> None:
    """It never says that it has its replies, on any of its many streams; the daemon keeps them for it."""
    count = 1 << 16  # a chunk
    with limited(Limits(streams=4 << 20)) as daemon:
        attacker = Attacker(daemon.addresses[0], TOKEN)
        Raw(attacker).ask(protocol.Create("c", count, "float32", "owner", b"", False, True, 0.0))
        answers, sockets, before = Counter[str](), list[socket.socket](), psutil.Process().memory_info().rss
        for _ in range(10):
            attacker.stream = 0
            attacker.socket = attacker.open()
            sockets.append(attacker.socket)
            raw = Raw(attacker)
            segment = raw.attach("c", readonly=False)
            for sequence in range(1, 9):
                exchange = protocol.Exchange(segment, sequence, 0, 0, count, 1, "float32", 0.5)
                answers[type(raw.ask(exchange, bytes(4 * count))).__name__] += 1
        assert answers["Applied"] >= 8
        assert answers["Failure"] >= 50
        assert psutil.Process().memory_info().rss - before < 24 << 20
        with smb.connect(daemon.addresses[0], token=TOKEN) as box:
            assert box.attach("c").read().shape == (count,)
        for sock in sockets:
            sock.close()
        attacker.close()


@pytest.mark.parametrize("operation", ["read", "control"])
def test_who_asks_too_often_is_slowed_at_nobody_elses_cost(operation: str) -> None:
    with limited(Limits(rate=100.0)) as daemon, smb.connect(daemon.addresses[0], token=TOKEN) as box:
        segment = box.create("c", 10)
        acts: dict[str, Callable[[], object]] = {
            "read": segment.read,
            "control": lambda: box.counter("n").value,
        }
        start, count = time.monotonic(), 0
        while time.monotonic() - start < 1.5:
            acts[operation]()
            count += 1
        assert 100 <= count <= 270
        start = time.monotonic()
        with smb.connect(daemon.addresses[0], token=TOKEN) as other:
            assert other.list() == ["c"]
        assert time.monotonic() - start < 1


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


def test_nothing_that_comes_in_is_unpickled_or_evaluated() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in (ROOT / "smb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.partition(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in forbidden, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
