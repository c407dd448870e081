"""The token: who may read its file, what a proof is worth, how slowly one may guess. And TLS from files."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import smb
from smb import auth, protocol, tls
from smb.auth import Credential, Guard, OwnToken, Token
from smb.limits import Alarm, Bucket, Limits
from smb.tls import Tls
from tests.smb.certificates import Authority

SECRET = b"0123456789abcdef"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# The file ------------------------------------------------------------------------------------------------


def test_a_made_token_is_new_each_time_and_nobody_elses(tmp_path: Path) -> None:
    auth.make(tmp_path / "a")
    auth.make(tmp_path / "b")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert len((tmp_path / "a").read_text().strip()) == 64
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()
    assert auth.load(tmp_path / "a").source == f"token file {tmp_path / 'a'}"


def test_making_a_token_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(smb.SmbError, match="mine exists already"):
        auth.make(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610])
def test_a_token_file_that_lets_others_in_is_refused(tmp_path: Path, mode: int) -> None:
    auth.make(tmp_path / "t")
    (tmp_path / "t").chmod(mode)
    with pytest.raises(smb.SmbError, match=rf"token file .*/t: mode {mode:04o} .* `smb token FILE`"):
        auth.load(tmp_path / "t")


def test_a_token_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth.make(tmp_path / "t")
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    if own == 0:
        os.chown(tmp_path / "t", 12345, -1)
    with pytest.raises(smb.SmbError, match="it belongs to user id"):
        auth.load(tmp_path / "t")


def test_what_is_no_token_is_refused_with_the_cure(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.touch(0o600)
    short.write_text("abc\n")
    for given, message in (
        (tmp_path / "none", r"No such file or directory \(`smb token .*/none` makes one\)"),
        (short, "3 bytes, a token has 16 to 4096"),
        (b"abc", "3 bytes, a token has 16 to 4096"),
        (b"x" * 4097, "4097 bytes, a token has 16 to 4096"),
        (tmp_path, "token file .*: (Is a directory|no regular file)"),
    ):
        with pytest.raises(smb.SmbError, match=message):
            auth.load(given)


def test_a_token_shows_itself_to_nobody() -> None:
    token = Token(SECRET, "somewhere")
    assert SECRET.decode() not in f"{token!r} {token} {vars(Credential(token, True))!r}"


# The proofs ----------------------------------------------------------------------------------------------


def daemon(token: Token, binding: bytes = b"", sent: list[bytes] | None = None) -> Callable[[object], object]:
    """A daemon's half in a few lines: what it answers to each record."""
    nonces: list[bytes] = []

    def request(record: object) -> object:
        if isinstance(record, protocol.Challenge):
            nonces[:] = [record.nonce, os.urandom(protocol.NONCE)]
            return protocol.Challenged(nonces[1])
        assert isinstance(record, protocol.Prove)
        if sent is not None:
            sent.append(record.proof)
        if record.proof != token.proof(b"client", *nonces, binding):
            raise smb.NotPermitted("wrong token")
        return protocol.Proved(token.proof(b"daemon", *nonces, binding))

    return request


def test_both_ends_prove_and_a_proof_is_good_for_one_connection() -> None:
    token, sent = Token(SECRET, "t"), list[bytes]()
    for _ in range(3):
        auth.introduce(daemon(token, sent=sent), Credential(token, True))
    assert len(set(sent)) == 3
    assert not any(SECRET in proof for proof in sent)


def test_a_client_with_another_token_is_told_which_file_it_used() -> None:
    with pytest.raises(smb.NotPermitted, match=r"wrong token \(token file /x\)"):
        auth.introduce(daemon(Token(SECRET, "t")), Credential(Token(b"another" * 3, "token file /x"), True))


def test_a_daemon_that_does_not_prove_the_token_is_not_believed() -> None:
    def impostor(record: object) -> object:
        if isinstance(record, protocol.Challenge):
            return protocol.Challenged(record.nonce)  # reflected
        assert isinstance(record, protocol.Prove)
        return protocol.Proved(record.proof)

    with pytest.raises(smb.NotPermitted, match="the daemon did not prove"):
        auth.introduce(impostor, Credential(Token(SECRET, "t"), True))


def test_a_client_told_to_use_a_token_does_not_speak_to_a_daemon_that_asks_for_none() -> None:
    def trusting(record: object) -> object:
        raise smb.NotSupported("this daemon asks for no token")

    with pytest.raises(smb.NotPermitted, match="asks for no token, so it cannot prove"):
        auth.introduce(trusting, Credential(Token(SECRET, "t"), True))
    auth.introduce(trusting, Credential(Token(SECRET, "t"), False))


def test_a_proof_passed_on_over_another_certificate_is_wrong() -> None:
    token = Token(SECRET, "t")
    auth.introduce(daemon(token, b"its certificate"), Credential(token, True), b"its certificate")
    with pytest.raises(smb.NotPermitted, match="wrong token"):
        auth.introduce(daemon(token, b"its certificate"), Credential(token, True), b"the relay's certificate")


def test_the_proof_is_what_the_protocol_page_says() -> None:
    nonces = bytes(32), bytes(range(32))
    text = b"smb 1 client\0" + nonces[0] + nonces[1] + hashlib.sha256(b"").digest()
    assert Token(SECRET, "t").proof(b"client", *nonces, b"") == hmac.new(SECRET, text, "sha256").digest()


# The user's own token -------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(auth.VARIABLE, raising=False)
    return tmp_path / "smb"


def test_daemons_of_one_user_share_the_own_token_and_the_last_removes_it(runtime: Path) -> None:
    first, second = OwnToken(), OwnToken()
    assert os.listdir(runtime) == ["token"]
    assert (runtime / "token").stat().st_mode & 0o777 == 0o600
    have = auth.credential(None, "127.0.0.1")
    assert have is not None
    assert not have.demanded
    for own in (first, second):
        auth.introduce(daemon(own.token), have)
    first.close()
    first.close()
    assert (runtime / "token").exists()
    second.close()
    assert os.listdir(runtime) == []


def test_a_daemon_that_was_killed_leaves_a_token_that_the_next_one_takes(runtime: Path) -> None:
    killed = OwnToken()
    os.close(killed._file)
    again = OwnToken()
    assert auth.introduce(daemon(killed.token), Credential(again.token, True)) is None
    again.close()
    assert os.listdir(runtime) == []


def test_the_own_token_is_for_this_host_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnToken()
    assert auth.credential(None, "::1")
    assert auth.credential(None, "127.8.8.8")
    assert auth.credential(None, "10.0.0.1") is None
    runtime.chmod(0o777)
    assert auth.credential(None, "127.0.0.1") is None  # anybody could have put it there
    with pytest.raises(smb.TransportError, match="only this user can write"):
        OwnToken()
    runtime.chmod(0o700)
    own.close()
    auth.make(runtime / "given")
    monkeypatch.setenv(auth.VARIABLE, str(runtime / "given"))
    have = auth.credential(None, "10.0.0.1")
    assert have is not None
    assert have.demanded


# Guessing ------------------------------------------------------------------------------------------------


def guess(guard: Guard, clock: Clock, address: str, seconds: float, right: bool = False) -> int:
    """How many proofs of an address that tries without a pause are looked at in so many seconds."""
    looked, end = 0, clock.now + seconds
    while clock.now < end:
        attempt = guard.attempt(address, lambda: right)
        looked += not attempt.wait
        clock.now += min(attempt.wait, end - clock.now) if attempt.wait else 0.001
    return looked


def test_guessing_from_one_address_is_slowed_to_one_in_eight_seconds() -> None:
    clock = Clock()
    guard = Guard(clock)
    assert guess(guard, clock, "10.0.0.1", 60) <= Guard.FREE + 12
    assert guess(guard, clock, "10.0.0.1", 80) <= 11
    assert guard.attempt("10.0.0.2", lambda: True).right  # nobody else waits for that


def test_a_right_proof_in_between_does_not_make_guessing_faster() -> None:
    clock = Clock()
    guard = Guard(clock)
    guess(guard, clock, "10.0.0.1", 60)
    clock.now += 9
    assert guard.attempt("10.0.0.1", lambda: True).right
    assert guess(guard, clock, "10.0.0.1", 80) <= 11


def test_guessing_is_forgotten_after_a_while() -> None:
    clock = Clock()
    guard = Guard(clock)
    guess(guard, clock, "10.0.0.1", 60)
    clock.now += Guard.QUIET + 1
    assert guess(guard, clock, "10.0.0.1", 0.004) >= 3


def test_many_addresses_guess_slowly_together_and_known_ones_are_not_held_up() -> None:
    clock = Clock()
    guard = Guard(clock)
    assert guard.attempt("10.0.0.1", lambda: True).right
    looked = 0
    for number in range(6000):  # each from another network, one a millisecond
        looked += not guard.attempt(f"2001:db8:{number:x}::1", lambda: False).wait
        clock.now += 0.001
    assert looked <= Guard.OVERALL + 6 / Guard.SHARED + 1
    assert guard.attempt("10.0.0.1", lambda: True).right
    assert len(guard._records) <= Guard.REMEMBERED


def test_the_guard_remembers_a_bounded_number_of_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "REMEMBERED", 50)
    monkeypatch.setattr(Guard, "OVERALL", 10**9)
    guard = Guard(Clock())
    for number in range(500):
        guard.attempt(f"10.0.{number // 250}.{number % 250}", lambda: False)
        guard.attempt(f"10.9.{number // 250}.{number % 250}", lambda: True)
    assert len(guard._records) == len(guard._proved) == 50


def test_an_ipv6_host_cannot_change_its_address_to_guess_on() -> None:
    assert auth.network("2001:db8::1") == auth.network("2001:db8::ffff:1") != auth.network("2001:db8:0:1::1")
    assert auth.network("::ffff:10.0.0.1") == auth.network("10.0.0.1") == "10.0.0.1"
    assert auth.network("fe80::1%eth0") == "fe80::/64"
    assert auth.loopback("::ffff:127.0.0.1")
    assert not auth.loopback("0.0.0.0")
    assert not auth.loopback("::")


# Limits --------------------------------------------------------------------------------------------------


def test_a_bucket_lets_its_rate_through_however_it_is_pushed() -> None:
    clock = Clock()
    bucket, passed = Bucket(100.0, clock), 0
    end = clock.now + 10
    while clock.now < end:
        clock.now += bucket.delay()
        passed += 1
    assert 1000 <= passed <= 1102
    assert Bucket(0.0, clock).delay() == 0


@pytest.mark.parametrize("name", ["clients", "connections", "segments", "rate"])
def test_a_limit_that_makes_no_sense_is_refused(name: str) -> None:
    for value in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"limit of {name}"):
            replace(Limits(), **{name: value})


def test_a_stranger_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    alarm = Alarm(logging.getLogger("test"), clock)
    for number in range(1000):
        alarm("knock", f"stranger {number}")
    assert len(caplog.records) == Alarm.BURST
    clock.now += Alarm.WHILE + 1
    alarm("knock", "stranger again")
    assert caplog.messages[-1] == f"stranger again (and {1000 - Alarm.BURST} more like it before)"


# TLS -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("other"), "other")


def shake(
    context: ssl.SSLContext, client: Callable[[socket.socket], socket.socket]
) -> tuple[str, str, bytes]:
    """A handshake over a socket pair: the daemon's complaint, whom the client names, what the client saw."""
    here, there = socket.socketpair()
    told: list[str] = []

    def serve() -> None:
        here.settimeout(10)
        try:
            with context.wrap_socket(here, server_side=True) as sock:
                sock.recv(1)
                told.extend(["", tls.subject(sock)])
        except OSError as error:
            told.extend([tls.why(error), ""])
            here.close()

    thread = threading.Thread(target=serve)
    thread.start()
    seen = b""
    try:
        with client(there) as sock:
            seen = tls.binding(sock)
            with contextlib.suppress(OSError):  # refused after the handshake, as TLS 1.3 does
                sock.send(b"x")
    finally:
        there.close()
        thread.join()
    return told[0], told[1], seen


def test_client_and_daemon_know_each_other_by_certificate(authority: Authority) -> None:
    own, mine = authority.sign("daemon"), authority.sign("worker-7")
    complaint, subject, seen = shake(own.server(), lambda sock: tls.wrap_client(sock, "127.0.0.1", mine, 10))
    assert (complaint, subject) == ("", "worker-7")
    assert seen == own.fingerprint()


def test_a_daemon_of_another_authority_or_name_is_not_believed(
    authority: Authority, other: Authority
) -> None:
    own, mine = authority.sign("daemon"), authority.sign("worker")
    for context, host, message in (
        (
            other.sign("daemon").server(),
            "localhost",
            "TLS with localhost: .*is the ca file the one that signed",
        ),
        (own.server(), "elsewhere", "TLS with elsewhere: Hostname mismatch"),
    ):
        with pytest.raises(smb.TransportError, match=message):
            shake(context, lambda sock, host=host: tls.wrap_client(sock, host, mine, 10))


def test_a_client_without_the_right_certificate_is_refused(authority: Authority, other: Authority) -> None:
    own = authority.sign("daemon")
    stranger = replace(other.sign("worker"), ca=authority.ca)
    for mine, message in ((Tls(ca=authority.ca), "no certificate"), (stranger, "certificate")):
        complaint, subject, _ = shake(
            own.server(),
            lambda sock, mine=mine: tls.wrap_client(sock, "localhost", mine, 10),
        )
        assert message in complaint
        assert not subject


def test_tls_older_than_1_2_is_refused(authority: Authority) -> None:
    own = authority.sign("daemon")
    old = Tls(ca=authority.ca).client()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    assert own.server().minimum_version == Tls().client().minimum_version == ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake(own.server(), lambda sock: old.wrap_socket(sock, server_hostname="localhost"))


def test_a_wrong_tls_file_is_named(authority: Authority, tmp_path: Path) -> None:
    own, another = authority.sign("daemon"), authority.sign("another")
    junk, empty, locked = tmp_path / "junk", tmp_path / "empty", tmp_path / "locked"
    junk.write_text("junk")
    empty.touch()
    locked.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAc\n-----END "
        "ENCRYPTED PRIVATE KEY-----\n"
    )
    for files, message in (
        (Tls(), "a daemon needs a certificate"),
        (replace(own, certificate=tmp_path / "none"), "TLS certificate .*/none: No such file"),
        (replace(own, key=tmp_path / "none"), "TLS key .*/none: No such file"),
        (replace(own, ca=tmp_path / "none"), "TLS ca .*/none: No such file"),
        (
            replace(own, key=another.key),
            "TLS key .*/another.key does not belong to certificate .*/daemon.pem",
        ),
        (replace(own, certificate=junk), "TLS certificate .*/junk with key .*: no PEM of both"),
        (replace(own, ca=junk), "TLS ca .*/junk: no PEM certificate in it"),
        (replace(own, ca=empty), "TLS ca .*/empty: no .*certificate in it"),
    ):
        with pytest.raises(smb.SmbError, match=message):
            files.server()
    with pytest.raises(smb.SmbError, match="junk: no PEM certificate in it"):
        Tls(junk).fingerprint()


def test_a_key_with_a_passphrase_is_refused_without_a_question(authority: Authority, tmp_path: Path) -> None:
    own = authority.sign("daemon")
    assert own.key
    locked = tmp_path / "locked"
    subprocess.run(
        ["openssl", "pkey", "-in", own.key, "-aes256", "-passout", "pass:secret", "-out", locked], check=True
    )
    with pytest.raises(smb.SmbError, match=r"TLS key .*/locked has a passphrase"):
        replace(own, key=locked).server()


def test_tls_files_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in tls.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert tls.from_environment() is None
    monkeypatch.setenv("SMB_TLS_CA", "/ca.pem")
    assert tls.from_environment() == Tls(ca="/ca.pem")
