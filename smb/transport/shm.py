"""The transport to a daemon on this host: requests over a Unix socket, segments mapped into this process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smb import protocol
from smb.errors import (
    Closed,
    NotPermitted,
    NotSupported,
    ProtocolError,
    RequestError,
    SmbError,
    TransportError,
)
from smb.layout import unpack
from smb.segment import Life, Mapping
from smb.transport.base import Array, Opening, Options, Transport
from smb.transport.frames import close_all, receive_reply, send
from smb.transport.mapped import attach, watched
from smb.transport.threads import PerThread

if TYPE_CHECKING:
    from smb.transport.lasting import LastingTransport  # it knows this module

log = logging.getLogger(__name__)
LARGE = 1 << 16  # bytes of a frame that may have to wait for room in the socket
FAREWELL = 5.0  # seconds that close() waits for the daemon's answer at most
SLICE = 0.5  # seconds between two looks at whether the daemon lives; a forked child may keep its socket open


class Silent(TransportError):
    """A daemon that lives does not answer, or answers nonsense."""


class Unsent(TransportError):
    """No connection could be made: the request was surely not applied."""


class _NoAnswer(ConnectionError):
    pass


class Connection:
    """One thread's socket. After TransportError it is closed."""

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._number = 0
        self.life: Life | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
            self._socket.settimeout(SLICE)
        except OSError as error:
            self._socket.close()
            raise Unsent(f"no daemon answers at {path}: {error.strerror or error}") from error

    def request(
        self,
        record: object,
        timeout: float,
        descriptors: list[int] | None = None,
        brings: Sequence[int] = (),
    ) -> Any:
        """Send ``record``, give the reply; descriptors that come with it are the caller's.

        brings  descriptors that go with the request; they stay the caller's
        """
        operation = protocol.BY_REQUEST[type(record)]
        self._number += 1
        frame = protocol.pack(operation.code, self._number, record)
        deadline = time.monotonic() + timeout

        def idle() -> None:
            if self.life and not self.life.alive:
                raise ConnectionError("the daemon died")
            if time.monotonic() > deadline:
                raise _NoAnswer(f"no answer to {type(record).__name__} in {timeout:g} s")

        got: list[int] = []
        try:
            self._send(frame, timeout)
            if brings:
                socket.send_fds(self._socket, [b"+"], list(brings))
            header, body = receive_reply(self._socket, protocol.MAX_REPLY, got, idle)
            _check_answer(header, self._number, operation.code)
            if header.status:
                close_all(got)
                got.clear()
        except BaseException as error:
            close_all(got)
            self.close()
            if isinstance(error, (OSError, ProtocolError)):
                kind = Silent if isinstance(error, (_NoAnswer, ProtocolError)) else TransportError
                raise kind(f"daemon at {self._path}: {self._why(error)}") from error
            raise
        return self._reply(operation, header, body, got, descriptors)

    def _send(self, frame: bytes, timeout: float) -> None:
        large = len(frame) > LARGE
        if large:
            self._socket.settimeout(timeout)
        send(self._socket, frame)
        if large:
            self._socket.settimeout(SLICE)

    def _why(self, error: Exception) -> str:
        gone = self.life and not self.life.alive
        return f"the daemon died ({error})" if gone and "the daemon died" not in str(error) else str(error)

    def _reply(
        self,
        operation: protocol.Operation,
        header: protocol.Header,
        body: bytes,
        got: list[int],
        descriptors: list[int] | None,
    ) -> Any:
        if header.status:
            protocol.raise_failure(header, body)
        if len(got) != operation.descriptors or (got and descriptors is None):
            close_all(got)
            raise TransportError(f"{len(got)} descriptors came with {operation.reply.__name__}")
        if descriptors is not None:
            descriptors.extend(got)
        return unpack(operation.reply, body)

    def end(self) -> None:
        """Any thread: end the stream, which reaches the daemon even when a forked child keeps the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._socket.close()

    def orphan(self) -> None:
        """In a forked child: close the child's copy only."""
        self._socket.close()

    def __del__(self) -> None:
        sock = getattr(self, "_socket", None)
        if sock is not None:
            sock.close()


def _check_answer(header: protocol.Header, number: int, operation: int) -> None:
    answers = (number,) if not header.status else (number, 0)  # 0: our framing made no sense to the daemon
    if header.number not in answers or (not header.status and header.operation != operation):
        raise ProtocolError(f"answer to request {header.number} instead of {number}")


class Standing:
    """What a client has with one daemon: a session, the word that says it lives, a connection a thread.

    Raises TransportError when no daemon answers at ``path``.
    """

    def __init__(self, path: str, options: Options) -> None:
        self.path, self._options = path, options
        self.session = self.secret = 0
        self.daemon = 0  # the number that the daemon gave itself
        self.pid = 0
        self.lease = 0.0
        self._life: Life | None = None
        self.connections = PerThread(self._connect)
        self.connections.get()

    @property
    def life(self) -> Life:
        assert self._life is not None  # there was a Hello
        return self._life

    def _connect(self) -> Connection:
        connection = Connection(self.path, self._options.timeout)
        hello = protocol.Hello(
            protocol.VERSION, self.session, self.secret, 0, True, os.getpid(), self._options.name
        )
        descriptors: list[int] = []
        try:
            welcome: protocol.Welcome = connection.request(hello, self._options.timeout, descriptors)
            if self._life is None:
                self._life = Life.attach(descriptors[0])
                self.session, self.secret, self.pid = welcome.session, welcome.secret, welcome.pid
                self.lease, self.daemon = welcome.lease, welcome.daemon
        except BaseException:
            connection.close()
            raise
        finally:
            close_all(descriptors)
        connection.life = self._life
        return connection

    def ask(
        self,
        request: object,
        timeout: float = 0.0,
        descriptors: list[int] | None = None,
        brings: Sequence[int] = (),
    ) -> Any:
        """The reply to a request, for which the daemon may wait ``timeout`` seconds."""
        connection = self.connections.get()
        try:
            return connection.request(request, timeout + self._options.timeout, descriptors, brings)
        except RequestError:
            raise
        except BaseException:  # it failed, or the answer is still under way: its state is unknown
            self.connections.drop()
            raise

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None) -> tuple[Mapping, Any]:
        """Create or attach: the mapping and the reply."""
        descriptors: list[int] = []
        wait = request.timeout if isinstance(request, protocol.Create) else 0.0
        reply: protocol.Opened = self.ask(request, wait, descriptors)
        try:
            mapping = attach(descriptors, reply, request, self.life)
            if reply.created and initial is not None:
                mapping.initialise(initial)
                self.ask(protocol.Publish(reply.segment))
        except BaseException:
            with contextlib.suppress(SmbError):
                self.ask(protocol.Detach(reply.segment))
            raise
        finally:
            close_all(descriptors)
        mapping.tally(self.session)
        return mapping, reply

    def farewell(self) -> None:
        """End the session, where the daemon still listens."""
        if self.life.alive:
            with contextlib.suppress(SmbError):
                self.ask(protocol.Bye(), min(0.0, FAREWELL - self._options.timeout))

    def close(self) -> None:
        self.connections.close()
        self.life.close()

    def orphan(self) -> None:
        self.connections.each(Connection.orphan)
        self.life.close()


class ShmTransport:
    """One client of one daemon on this host; when that dies, only close() is left."""

    name = "shm"
    patient = True

    def __init__(self, path: str, options: Options) -> None:
        self._standing = Standing(path, options)
        self._failed = ""  # the TransportError after which nothing works any more
        self._closed = False

    @property
    def daemon(self) -> int:
        """The number that the daemon gave itself."""
        return self._standing.daemon

    def _check(self) -> None:
        if self._closed:
            raise Closed("this box is closed")
        if not self._failed and not self._standing.life.alive:
            self._failed = f"daemon at {self._standing.path}: the daemon died"
        if self._failed:
            raise TransportError(self._failed)

    def call(self, request: object, timeout: float) -> Any:
        self._check()
        try:
            return self._standing.ask(request, timeout)
        except TransportError as error:
            self._failed = str(error)
            raise

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None = None) -> Opening:
        self._check()
        try:
            mapping, reply = self._standing.open(request, initial)
        except TransportError as error:
            self._failed = str(error)
            raise
        return watched(mapping, reply, self, self._standing.lease)

    def orphan(self) -> None:
        self._closed = True
        self._standing.orphan()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._failed:
            self._standing.farewell()
        self._standing.close()


def mapped(path: str, options: Options) -> ShmTransport | LastingTransport:
    """A client by shared memory alone: of this daemon, or of the next ones too (``options.reconnect``)."""
    if not options.reconnect:
        return ShmTransport(path, options)
    from smb.transport.lasting import LastingTransport

    return LastingTransport(path, options)


def connect(where: str, options: Options) -> Transport:
    """Connect to the daemon whose socket is the file ``where``; by frames where it cannot pass its memory."""
    if len(os.fsencode(where)) > 107:
        raise RequestError(f"socket path {where!r} is longer than the kernel's 107 bytes")
    try:
        return mapped(where, options)
    except (NotSupported, NotPermitted) as error:
        why = str(error)
    from smb.transport import tcp  # rarely needed, and it loads ssl

    by_frames = tcp.over_unix(where, options)  # raises by itself what any client is refused for
    log.warning("daemon at %s: no shared memory, its data travel over the socket: %s", where, why)
    return by_frames
