"""Strangers at a daemon's TCP port: refused, logged, nobody harmed."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import smb
from smb import auth, connection, protocol
from smb.protocol import HEADER, MAGIC
from smb.tls import Tls
from tests.smb.certificates import Authority
from tests.smb.frames import Attacker
from tests.smb.processes import ROOT, wait_for
from tests.smb.strangers import TOKEN, Innocent, ask, failure, is_closed, knock

WRONG = b"another token than that"


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
