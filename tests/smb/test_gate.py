"""The gate by itself, over socket pairs: who gets through, who is sent away, how long, how many."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import smb
from smb import auth, layout, protocol, tls
from smb.auth import Credential, Token
from smb.gate import Gate, Terms, Visit, check_exposure
from smb.protocol import HEADER, MAGIC
from smb.tls import Tls
from smb.transport.frames import receive
from tests.smb.certificates import Authority
from tests.smb.processes import wait_for

TOKEN = Token(b"0123456789abcdef", "t")
TERMS = Terms(TOKEN)
HERE = "10.0.0.1"


class Stranger:
    """The other end of a connection that a gate looks at in a thread of its own."""

    def __init__(self, gate: Gate, terms: Terms, address: str = HERE) -> None:
        self.socket, there = socket.socketpair()
        self.socket.settimeout(10)
        self.visit = gate.enter(there, address, terms)
        self.admitted: Future[socket.socket] = Future()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.admitted.set_result(self.visit.admit())
        except Exception as error:
            self.admitted.set_exception(error)

    def send(self, record: object) -> None:
        self.socket.sendall(protocol.pack(protocol.BY_REQUEST[type(record)].code, 7, record))

    def reply(self) -> Any:
        head = receive(self.socket, HEADER.size, self._late)
        if not head:
            raise ConnectionError("closed")
        header = protocol.unpack_header(head, protocol.MAX_REPLY)
        body = receive(self.socket, header.length, self._late)
        if header.status:
            protocol.raise_failure(header, body)
        return layout.unpack(protocol.OPERATIONS[header.operation].reply, body)

    def _late(self) -> None:
        raise ConnectionError("no answer in 10 s")

    def request(self, record: object) -> Any:
        self.send(record)
        return self.reply()

    def sent_away(self, seconds: float = 5) -> bool:
        """Whether the gate ended the connection, and its thread is over."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(100):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        self.thread.join(seconds)
        return self.admitted.done() and self.admitted.exception() is not None

    def close(self) -> None:
        self.socket.close()
        self.thread.join(10)
        if self.admitted.done() and not self.admitted.exception():
            self.visit.leave()
            self.admitted.result().close()


Come = Callable[..., Stranger]


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate(patience=0.6, strangers=8)
    yield one
    one.close()


@pytest.fixture
def come(gate: Gate) -> Iterator[Come]:
    strangers: list[Stranger] = []

    def one(terms: Terms = TERMS, address: str = HERE) -> Stranger:
        strangers.append(Stranger(gate, terms, address))
        return strangers[-1]

    yield one
    for stranger in strangers:
        stranger.close()


def test_who_has_the_token_comes_in(gate: Gate, come: Come) -> None:
    stranger = come()
    auth.introduce(stranger.request, Credential(TOKEN, True))
    sock = stranger.admitted.result(5)
    stranger.socket.sendall(b"hello")
    assert stranger.visit.receive(sock, 5) == b"hello"
    assert gate.strangers == 1
    stranger.visit.leave()
    assert gate.strangers == 0


def test_a_wrong_token_is_refused_told_and_logged(come: Come, caplog: pytest.LogCaptureFixture) -> None:
    stranger = come()
    with pytest.raises(smb.NotPermitted, match="wrong token"):
        auth.introduce(stranger.request, Credential(Token(b"x" * 16, "mine"), True))
    assert stranger.sent_away()
    assert "10.0.0.1: wrong token, number 1 lately from here: closed" in caplog.messages


def test_a_proof_of_one_connection_is_worth_nothing_on_another(come: Come) -> None:
    sent: list[protocol.Prove] = []
    first = come()

    def record(request: object) -> object:
        if isinstance(request, protocol.Prove):
            sent.append(request)
        return first.request(request)

    nonce = os.urandom(32)
    theirs = record(protocol.Challenge(nonce)).nonce  # type: ignore[attr-defined]
    record(protocol.Prove(TOKEN.proof(b"client", nonce, theirs, b"")))
    assert first.admitted.result(5)
    second = come()
    assert second.request(protocol.Challenge(nonce)).nonce != theirs
    with pytest.raises(smb.NotPermitted, match="wrong token"):
        second.request(sent[0])
    assert second.sent_away()


def test_a_connection_has_one_guess(come: Come) -> None:
    stranger = come()
    stranger.request(protocol.Challenge(bytes(32)))
    with pytest.raises(smb.NotPermitted, match="wrong token"):
        stranger.request(protocol.Prove(bytes(32)))
    with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        stranger.request(protocol.Challenge(bytes(32)))


@pytest.mark.parametrize("code", [code for code in protocol.OPERATIONS if code != 30])
def test_before_the_token_is_proved_no_operation_is_looked_at(come: Come, code: int) -> None:
    stranger = come()
    stranger.socket.sendall(HEADER.pack(MAGIC, code, 0, 7, 100) + bytes(100))
    with pytest.raises(smb.NotPermitted, match="this daemon asks for a token"):
        stranger.reply()
    assert stranger.sent_away()


PROOF = struct.pack("<I", 32) + bytes(32)
WRONG = {
    "huge": (HEADER.pack(MAGIC, 30, 0, 1, 2**32 - 1), "frame of 4294967295 bytes, at most 256"),
    "too long": (HEADER.pack(MAGIC, 30, 0, 1, 257), "frame of 257 bytes, at most 256"),
    "another magic": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "frame starts with b'GET ', not b'SMB1'"),
    "status": (HEADER.pack(MAGIC, 30, 3, 1, 36) + PROOF, "a request's status is 0, not 3"),
    "cut": (HEADER.pack(MAGIC, 30, 0, 1, 20) + PROOF[:20], "Challenge.nonce: 32 bytes expected"),
    "trailing": (HEADER.pack(MAGIC, 30, 0, 1, 40) + PROOF + b"more", "4 bytes too many"),
    "long nonce": (
        HEADER.pack(MAGIC, 30, 0, 1, 44) + struct.pack("<I", 40) + bytes(40),
        "40 bytes, at most 32",
    ),
    "short nonce": (
        HEADER.pack(MAGIC, 30, 0, 1, 5) + struct.pack("<I", 1) + b"x",
        "a nonce of 1 bytes, not 32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_strangers_wrong_frame_is_answered_and_ends_the_connection(come: Come, name: str) -> None:
    data, message = WRONG[name]
    stranger = come()
    stranger.socket.sendall(data)
    with pytest.raises(smb.SmbError, match=message):
        stranger.reply()
    assert stranger.sent_away()


def test_who_says_nothing_or_drips_is_sent_away_in_time(
    gate: Gate, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    silent, dripping = come(), come()
    frame = protocol.pack(30, 1, protocol.Challenge(bytes(32)))
    with contextlib.suppress(OSError):
        for byte in frame:
            dripping.socket.send(bytes([byte]))
            time.sleep(0.05)  # the whole frame takes 2.8 s
    assert silent.sent_away()
    assert dripping.sent_away()
    assert time.monotonic() - dripping.visit.since < 2
    assert caplog.messages.count("10.0.0.1: not authenticated in 0.6 s: closed") == 2
    assert gate.strangers == 0


def test_the_time_runs_on_until_hello(come: Come) -> None:
    stranger = come()
    auth.introduce(stranger.request, Credential(TOKEN, True))
    sock = stranger.admitted.result(5)
    stranger.socket.send(b"x")
    with pytest.raises(TimeoutError, match=r"came in time|timed out"):
        stranger.visit.receive(sock, 2)
    assert time.monotonic() - stranger.visit.since < 2


def test_strangers_are_bounded_and_the_newcomer_gets_the_place(
    gate: Gate, come: Come, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smb.gate.GRACE", 0.1)
    gate.patience = 60.0
    innocent = come(address="10.0.0.2")
    crowd = [come() for _ in range(20)]
    assert gate.strangers == 8
    assert all(stranger.sent_away() for stranger in crowd[:13])
    assert "10.0.0.1: too many connections that did not authenticate: closed" in caplog.messages
    auth.introduce(innocent.request, Credential(TOKEN, True))  # older than all of them
    auth.introduce(crowd[-1].request, Credential(TOKEN, True))


def test_a_burst_of_clients_waits_instead_of_pushing_each_other_out(gate: Gate) -> None:
    def client(_: int) -> bool:
        stranger = Stranger(gate, Terms(TOKEN))
        auth.introduce(stranger.request, Credential(TOKEN, True))
        stranger.close()
        return stranger.admitted.exception() is None

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(client, range(96)))


def test_guesses_of_one_address_wait_and_those_who_know_the_token_elsewhere_do_not(gate: Gate) -> None:
    def guess(address: str) -> str:
        stranger = Stranger(gate, Terms(TOKEN), address)
        try:
            auth.introduce(stranger.request, Credential(Token(b"guess" * 4, "g"), True))
        except smb.NotPermitted as error:
            return str(error)
        finally:
            stranger.close()
        return ""

    start = time.monotonic()
    answers = [guess(HERE) for _ in range(auth.Guard.FREE + 2)]
    assert time.monotonic() - start > auth.Guard.FIRST
    assert "too many wrong tokens from 10.0.0.1: try again in 1 s" in answers[-1]
    start = time.monotonic()
    stranger = Stranger(gate, Terms(TOKEN), "10.0.0.2")
    auth.introduce(stranger.request, Credential(TOKEN, True))
    stranger.close()
    assert time.monotonic() - start < auth.Guard.FIRST


def test_the_gate_ends_its_strangers_when_it_closes(gate: Gate, come: Come) -> None:
    gate.patience = 60.0
    strangers = [come() for _ in range(3)]
    gate.close()
    assert all(stranger.sent_away() for stranger in strangers)
    with pytest.raises(smb.Closed):
        come()


# TLS -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls"))


def secured(own: Tls, token: Token | None = None) -> Terms:
    return Terms(token, own.server(), own.fingerprint())


def test_over_tls_the_token_holds_for_the_daemons_certificate(come: Come, authority: Authority) -> None:
    own = authority.sign("daemon")
    stranger = come(secured(own, TOKEN))
    stranger.socket = authority_client(stranger, authority)
    auth.introduce(stranger.request, Credential(TOKEN, True), own.fingerprint())
    assert stranger.admitted.result(5)
    relayed = come(secured(own, TOKEN))
    relayed.socket = authority_client(relayed, authority)
    with pytest.raises(smb.NotPermitted, match="wrong token"):
        auth.introduce(relayed.request, Credential(TOKEN, True), b"the relay's")


def authority_client(stranger: Stranger, authority: Authority) -> socket.socket:
    return tls.wrap_client(stranger.socket, "localhost", authority.sign("worker"), 5)


def test_a_client_certificate_opens_the_gate_without_a_token(come: Come, authority: Authority) -> None:
    stranger = come(secured(authority.sign("daemon")))
    stranger.socket = authority_client(stranger, authority)
    assert stranger.admitted.result(5)


@pytest.mark.parametrize("first", [b"", b"\x16", b"GET / HTTP/1.0\r\n\r\n"], ids=["silent", "half", "plain"])
def test_who_does_not_finish_the_handshake_is_sent_away(
    come: Come, authority: Authority, first: bytes
) -> None:
    stranger = come(secured(authority.sign("daemon")))
    stranger.socket.sendall(first)
    assert stranger.sent_away()
    assert time.monotonic() - stranger.visit.since < 2


def test_strangers_in_a_handshake_can_be_sent_away(gate: Gate, come: Come, authority: Authority) -> None:
    gate.patience = 60.0
    stranger = come(secured(authority.sign("daemon")))
    assert wait_for(lambda: stranger.visit._sock is not None and stranger.visit._sock.fileno() >= 0)
    stranger.visit.evict()
    assert stranger.sent_away()


# Listening -----------------------------------------------------------------------------------------------


def test_an_address_that_others_reach_needs_a_token_or_client_certificates(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    own = authority.sign("daemon")
    encrypted_only = Terms(None, Tls(own.certificate, own.key).server(), own.fingerprint())
    for terms in (Terms(), encrypted_only):
        for address in ("0.0.0.0", "::", "10.1.2.3", "fe80::1%eth0"):
            with pytest.raises(smb.NotPermitted, match=r"listening at .* would let anybody in.*--insecure"):
                check_exposure(address, terms, insecure=False)
    for terms in (Terms(TOKEN), secured(own)):
        check_exposure("0.0.0.0", terms, insecure=False)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        check_exposure("0.0.0.0", Terms(), insecure=True)
    assert "whoever reaches it is let in" in caplog.text


def test_a_visit_shows_no_secret() -> None:
    assert "0123456789abcdef" not in repr(Terms(TOKEN))
    assert Visit.__repr__ is object.__repr__


def test_a_proof_is_compared_in_constant_time(come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends by hmac.compare_digest, whose time does not tell how much of a guess is right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    auth.introduce(come().request, Credential(TOKEN, True))
    assert len(compared) == 2
    assert all(len(a) == len(b) == protocol.NONCE for a, b in compared)
