"""What stands before a listener on a network: bounds on strangers, TLS, the token, 10 s to get through.

A connection is a stranger until it has greeted (Hello). The thread that accepts calls ``Gate.enter``, the
connection's own thread ``Visit.admit``, which returns the socket of somebody who has proved to belong here.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from smb import auth, protocol, tls
from smb.errors import Closed, NotPermitted, ProtocolError, SmbError
from smb.limits import Alarm
from smb.transport.frames import receive_by, send

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds until a connection must have greeted
STRANGERS = 128  # connections that have not greeted yet; when there are more, the oldest of them goes
GRACE = 1.0  # seconds that a stranger is left in peace at least, though others wait for its place
LONGEST = 256  # bytes of a body before the token is proved
FAREWELL = 1.0  # seconds in which a refusal must be delivered
ASKED = "this daemon asks for a token (token=, --token or $SMB_TOKEN_FILE)"

R = TypeVar("R")


@dataclass(frozen=True)
class Terms:
    """What a listener asks of those who come.

    token    to be proved; None: none is asked for
    context  TLS; None: in the clear. With verify_mode CERT_REQUIRED it asks for a client certificate
    binding  the daemon's certificate (DER), which the proofs then hold for alone
    """

    token: auth.Token | None = None
    context: ssl.SSLContext | None = None
    binding: bytes = b""

    @property
    def open(self) -> bool:
        """Whether anybody may come in."""
        return self.token is None and (self.context is None or self.context.verify_mode == ssl.CERT_NONE)


def terms(given: str | os.PathLike[str] | bytes | None, files: tls.Tls | None) -> Terms:
    """The terms that a token and TLS files make. Raises SmbError naming the file that is wrong."""
    token = auth.load(given) if given is not None else None
    if files is None:
        return Terms(token)
    return Terms(token, files.server(), files.fingerprint())


def check_exposure(address: str, own: Terms, insecure: bool) -> None:
    """Refuse to listen at a numeric address that strangers reach, without anything that keeps them out."""
    if own.open and not auth.loopback(address):
        if not insecure:
            raise NotPermitted(
                f"listening at {address} would let anybody in: give a token (--token FILE, `smb token FILE` "
                "makes one) or ask for client certificates (--tls-ca), or say --insecure"
            )
        log.warning(
            "listening at %s without token or client certificates: whoever reaches it is let in", address
        )


def guarded(addresses: list[str], own: Terms, insecure: bool) -> tuple[Terms, auth.OwnToken | None]:
    """The terms to listen under at these numeric addresses.

    Where nothing is asked for and only this host can come, the user's own token is, unless ``insecure``:
    other users are on this host too. It is the caller's to close. Raises NotPermitted.
    """
    for address in addresses:
        check_exposure(address, own, insecure)
    if not own.open or insecure:
        return own, None
    made = auth.OwnToken()
    return replace(own, token=made.token), made


class Gate:
    """The strangers at all network listeners of one daemon. Any thread may call."""

    def __init__(self, patience: float = PATIENCE, strangers: int = STRANGERS) -> None:
        self.patience, self._most = patience, strangers
        self.guard = auth.Guard()
        self.alarm = Alarm(log)
        self._changed = threading.Condition()
        self._visits: dict[Visit, None] = {}  # in the order of their coming
        self._closed = False

    @property
    def strangers(self) -> int:
        return len(self._visits)

    def enter(self, sock: socket.socket, address: str, own: Terms) -> Visit:
        """One more stranger; when there are too many, waits for a moment, then the oldest of the network that
        has the most loses its place. Raises Closed when the daemon ends meanwhile.
        """
        visit = Visit(self, sock, address, own)
        with self._changed:
            end = time.monotonic() + GRACE
            while len(self._visits) >= self._most and not self._closed:
                oldest = self._oldest()
                now = time.monotonic()
                free = min(end, oldest.since + GRACE)
                if now >= free:
                    oldest.evict()
                    self._visits.pop(oldest, None)
                else:
                    self._changed.wait(free - now)
            if self._closed:
                raise Closed("the daemon is closing")
            self._visits[visit] = None
        return visit

    def _oldest(self) -> Visit:
        crowd = Counter(visit.network for visit in self._visits)
        most = max(crowd.values())
        return next(visit for visit in self._visits if crowd[visit.network] == most)

    def left(self, visit: Visit) -> None:
        with self._changed:
            self._visits.pop(visit, None)
            self._changed.notify()

    def close(self) -> None:
        """Send all strangers away. Twice is fine."""
        with self._changed:
            self._closed = True
            for visit in self._visits:
                visit.evict()
            self._changed.notify_all()


class Visit:
    """One connection until it has greeted. Its thread calls admit, then greeted; leave in any case."""

    def __init__(self, gate: Gate, sock: socket.socket, address: str, own: Terms) -> None:
        self.address, self.network = address, auth.network(address)
        self.since = time.monotonic()
        self.deadline = self.since + gate.patience
        self._gate, self._terms = gate, own
        self._sock: socket.socket | None = sock
        self._lock = threading.Lock()  # a socket is not closed, or wrapped, while it is evicted
        self._evicted = threading.Event()

    def left(self) -> float:
        """Seconds until it must have greeted, above 0. Raises TimeoutError."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not authenticated after {self._gate.patience:g} s")
        return left

    def evict(self) -> None:
        """From another thread: end the connection; its thread notices and leaves."""
        self._evicted.set()
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    # An SSLSocket's own shutdown throws away the state that its thread is using.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def admit(self) -> socket.socket:
        """TLS and token; the socket to go on with, whose timeout is the caller's to set.

        Who is refused is told, and logged. OSError or SmbError: the visit is over and its socket closed.
        """
        assert self._sock is not None
        try:
            sock = self._secure(self._sock)
            if self._terms.token is not None:
                self._prove(sock, self._terms.token)
            return sock
        except (OSError, SmbError) as error:
            self._log(error)
            self.close()
            raise

    def receive(self, sock: socket.socket, count: int) -> bytes:
        """As frames.receive, within what is left of the time until it must have greeted; late is logged."""
        try:
            return receive_by(sock, count, self.deadline)
        except OSError as error:
            self._log(error)
            raise

    def leave(self) -> None:
        """It has greeted, or ended: before its socket is closed. Twice is fine."""
        with self._lock:
            self._sock = None
        self._gate.left(self)

    def close(self) -> None:
        sock = self._sock
        self.leave()
        if sock is not None:
            sock.close()

    def _log(self, error: Exception) -> None:
        if self._evicted.is_set():
            self._gate.alarm(
                "place", f"{self.address}: too many connections that did not authenticate: closed"
            )
        elif isinstance(error, TimeoutError):
            self._gate.alarm(
                "late", f"{self.address}: not authenticated in {self._gate.patience:g} s: closed"
            )
        elif isinstance(error, ssl.SSLError):
            self._gate.alarm("tls", f"{self.address}: TLS: {tls.why(error)}: closed")
        elif isinstance(error, SmbError):
            self._gate.alarm("refused", f"{self.address}: {error}: closed")
        else:
            log.debug("%s: %s", self.address, error)

    def _secure(self, sock: socket.socket) -> socket.socket:
        if self._terms.context is None:
            return sock
        sock.settimeout(self.left())
        with self._lock:
            wrapped = self._terms.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._sock = wrapped
        if self._evicted.is_set():
            raise ConnectionError("sent away")
        wrapped.do_handshake()  # the socket's timeout bounds all of it
        return wrapped

    def _prove(self, sock: socket.socket, token: auth.Token) -> None:
        """Challenge, then Prove, each once; anything else, or wrong, ends the connection."""
        header, challenge = self._request(sock, protocol.Challenge)
        client, daemon = challenge.nonce, os.urandom(protocol.NONCE)
        if len(client) != protocol.NONCE:
            raise self._refusal(
                sock, header, ProtocolError(f"a nonce of {len(client)} bytes, not {protocol.NONCE}")
            )
        self._send(sock, protocol.pack(header.operation, header.number, protocol.Challenged(daemon)))
        header, prove = self._request(sock, protocol.Prove)
        expected = token.proof(b"client", client, daemon, self._terms.binding)
        self._judge(sock, header, lambda: hmac.compare_digest(expected, prove.proof))
        proof = token.proof(b"daemon", client, daemon, self._terms.binding)
        self._send(sock, protocol.pack(header.operation, header.number, protocol.Proved(proof)))

    def _judge(self, sock: socket.socket, header: protocol.Header, proves: Callable[[], bool]) -> None:
        """Wait for this network's turn, then look at the proof. Raises NotPermitted."""
        while True:
            right, wait, wrong = self._gate.guard.attempt(self.address, proves)
            if right:
                return
            if not wait:
                raise self._refusal(
                    sock, header, NotPermitted(f"wrong token, number {wrong} lately from here")
                )
            if wait >= self.deadline - time.monotonic():
                why = f"too many wrong tokens from {self.network}: try again in {wait:.0f} s"
                raise self._refusal(sock, header, NotPermitted(why))
            if self._evicted.wait(wait):
                raise ConnectionError("sent away")

    def _request(self, sock: socket.socket, kind: type[R]) -> tuple[protocol.Header, R]:
        head = receive_by(sock, protocol.HEADER.size, self.deadline)
        if not head:
            raise ConnectionError("the stream ended")
        try:
            header = protocol.unpack_header(head, LONGEST)
        except ProtocolError as error:
            raise self._refusal(sock, protocol.Header(0, 0, 0, 0), error) from None
        body = receive_by(sock, header.length, self.deadline)
        if len(body) < header.length:
            raise ConnectionError("the stream ended")
        if protocol.OPERATIONS.get(header.operation, protocol.OPERATIONS[1]).request is not kind:
            raise self._refusal(sock, header, NotPermitted(ASKED))
        try:
            return header, cast(R, protocol.unpack_request(header, body))
        except ProtocolError as error:
            raise self._refusal(sock, header, error) from None

    def _refusal(self, sock: socket.socket, header: protocol.Header, error: SmbError) -> SmbError:
        """Tell the peer; the same error, to be raised."""
        with contextlib.suppress(OSError):
            sock.settimeout(FAREWELL)
            send(sock, protocol.pack_error(header.operation, header.number, error))
        return error

    def _send(self, sock: socket.socket, frame: bytes) -> None:
        sock.settimeout(self.left())
        send(sock, frame)
