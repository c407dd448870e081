"""One client thread's line to a daemon: the stream that it speaks, and the connection that carries it now."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from typing import Any, NamedTuple

from smb import protocol
from smb.errors import ProtocolError, TransportError
from smb.layout import unpack
from smb.network import tick
from smb.transport.frames import receive, send
from smb.transport.stream import Stream, Transfer

SLICE = 0.5  # seconds between two looks at whether an answer is still waited for
LARGE = 1 << 16  # bytes of a frame that may have to wait for room in the socket


def _comes(sock: socket.socket, seconds: float) -> bool:
    """Whether something can be received within so long."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))


class Reply(NamedTuple):
    header: protocol.Header
    body: bytes

    def record(self, row: protocol.Operation) -> Any:
        """The record of a good reply. Raises the error of another one."""
        if self.header.status:
            protocol.raise_failure(self.header, self.body)
        try:
            return unpack(row.reply, self.body)
        except ProtocolError as error:
            raise TransportError(f"the daemon's reply makes no sense: {error}") from error


class Line:
    """Used by one thread at a time, which holds ``lock``; ``end`` may come from any.

    generation  which of the client's sessions the stream belongs to; 0: none yet
    epoch       how many streams the line has had: when it changes, what was under way is lost
    busy        its thread is in the middle of a request or an operation
    patience    seconds that an answer may take while a connection is set up
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.stream = Stream(peer)
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()
        self.generation = self.epoch = 0
        self.busy = False
        self.patience = 0.0

    def carry(self, sock: socket.socket) -> None:
        """Go on over this connection."""
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(SLICE)
        else:
            tick(sock, SLICE)
        self.socket = sock

    def run(self, transfer: Transfer, timeout: float) -> int:
        """Finish a data operation over the present connection, as Transfer.run does."""
        assert self.socket is not None
        return transfer.run(self.socket, timeout, timeout > SLICE)  # a shorter one ends between two ticks

    def begin(self, number: int, generation: int) -> None:
        """Start a new stream, the daemon's ``number``."""
        self.stream.reset()
        self.stream.number, self.generation = number, generation
        self.epoch += 1

    def ask(self, sock: socket.socket, number: int, record: object, timeout: float) -> Reply:
        """Send a control request, give its reply, whatever it says.

        Raises OSError when the connection breaks, TimeoutError when no reply comes for ``timeout`` seconds,
        TransportError when it makes no sense.
        """
        row = protocol.BY_REQUEST[type(record)]
        frame = protocol.pack(row.code, number, record)
        deadline = time.monotonic() + timeout

        def hurry() -> None:
            left = deadline - time.monotonic()
            if left < SLICE and not _comes(sock, left):  # the call itself would come back too late
                raise TimeoutError(f"no answer to {type(record).__name__} in {timeout:g} s")

        self._send(sock, frame, timeout)
        head = receive(sock, protocol.HEADER.size, ready=hurry)
        if not head:
            raise ConnectionError("the stream ended")
        try:
            header = protocol.unpack_header(head, protocol.MAX_REPLY)
        except ProtocolError as error:
            raise TransportError(str(error)) from error
        body = receive(sock, header.length, ready=hurry)
        if len(body) < header.length:
            raise ConnectionError("the stream ended")
        answers = (number,) if not header.status else (number, 0)  # 0: the daemon lost our framing
        if header.number not in answers or (not header.status and header.operation != row.code):
            raise TransportError(f"answer to request {header.number} instead of {number}")
        return Reply(header, body)

    @staticmethod
    def _send(sock: socket.socket, frame: bytes, timeout: float) -> None:
        large, before = len(frame) > LARGE, sock.gettimeout()
        if large:
            sock.settimeout(timeout)
        try:
            send(sock, frame)
        except BlockingIOError:
            raise TimeoutError(f"no room for a request in {SLICE} s") from None
        if large:
            sock.settimeout(before)

    def cut(self) -> None:
        """Its own thread: let go of the connection; the stream goes on over the next one."""
        sock, self.socket = self.socket, None
        if sock is not None:
            sock.close()

    def end(self) -> None:
        """Any thread: end the connection, so that the thread that waits at it notices."""
        sock = self.socket
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which is for one thread

    def orphan(self) -> None:
        """In a forked child: close the child's copy only."""
        self.lock, self.busy = threading.Lock(), False  # may have been copied locked
        sock, self.socket = self.socket, None
        if isinstance(sock, socket.socket):
            socket.socket.close(sock)

    close = cut

    def __del__(self) -> None:
        sock = getattr(self, "socket", None)
        if sock is not None:
            sock.close()


class Breaks:
    """How often the connection broke under one operation: a daemon that answers each one so is no daemon.

    endurance  seconds in which it may break again and again
    """

    LASTED = 5.0  # seconds after which a connection that broke had been a good one
    AT_ONCE = 4  # times that it is used again without a pause
    PAUSE = 0.05  # seconds, doubled each further time

    def __init__(self, endurance: float) -> None:
        self._endurance = endurance
        self._number = 0
        self._since = self._began = 0.0

    def wait(self, closed: threading.Event) -> None:
        """Before the operation goes on over a connection."""
        if self._number > self.AT_ONCE:
            closed.wait(min(1.0, self.PAUSE * 2.0 ** (self._number - self.AT_ONCE)))
        self._began = time.monotonic()

    def hopeless(self) -> bool:
        """It broke once more: whether to give up."""
        now = time.monotonic()
        if not self._number or now - self._began > self.LASTED:
            self._number, self._since = 0, now
        self._number += 1
        return now - self._since > self._endurance


def broken(peer: str, error: Exception) -> TransportError:
    """The error of a connection that cannot be mended."""
    return TransportError(f"daemon at {peer}: {error}")
