"""One connection of a client, served by one thread of the daemon.

A client that maps its segments sends control requests only. Any other speaks for a stream: its data requests
are answered by the stream's native loop without the GIL (over TLS: one by one), and every other frame here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
from typing import Protocol

from smb import protocol
from smb.errors import Closed, NotPermitted, NotSupported, ProtocolError, RequestError, SmbError
from smb.limits import Bucket
from smb.peer import Peer
from smb.remote import Remote, Stream
from smb.rendezvous import Session, Ticket
from smb.service import Answer, Service
from smb.store import Store
from smb.transport.frames import close_all, receive, receive_by, receive_descriptors, send
from smb.watcher import Watcher

log = logging.getLogger(__name__)
IDLE = 1e9  # seconds that a connection may be silent: the session's lease judges that, not the connection
LONGEST = protocol.MAX_HEAD + protocol.MAX_PIECE  # bytes of a frame's body
LONGEST_HELLO = 1 << 12  # bytes of a frame's body before Hello
BODY_SECONDS, BODY_RATE = 10.0, 1 << 16  # a begun body has so long, and a second more for so many bytes


class Visit(Protocol):
    """What a listener's gate knows of one connection (see smb/gate.py)."""

    def admit(self) -> socket.socket:
        """Everything before Hello: TLS and token. OSError or SmbError: refused, and its socket closed."""

    def receive(self, sock: socket.socket, count: int) -> bytes:
        """As frames.receive, within what is left of the time in which it must have greeted."""

    def leave(self) -> None:
        """It has greeted, or ended: before its socket is closed. Twice is fine."""


class House(Protocol):
    """The daemon, as its connections need it."""

    store: Store
    service: Service
    watcher: Watcher

    @property
    def closed(self) -> bool: ...
    @property
    def number(self) -> int:
        """Tells this daemon from every other one."""

    @property
    def unix(self) -> str:
        """The path of a Unix socket of this daemon, or ""."""

    @property
    def rdma(self) -> str:
        """HOST:PORT where clients set up RDMA, or ""."""

    def begin(self, pid: int, name: str, pidfd: int) -> Session: ...
    def begin_remote(self, where: str, pid: int, name: str) -> Session: ...
    def forget(self, connection: Connection) -> None: ...


class Connection:
    """One client thread's line to the daemon."""

    def __init__(
        self, house: House, sock: socket.socket, where: str = "", visit: Visit | None = None
    ) -> None:
        self._house, self._socket, self._where, self._visit = house, sock, where, visit
        self._session: Session | None = None
        self._ticket: Ticket | None = None
        self._stream: Stream | None = None
        self._bucket = Bucket(house.store.limits.rate)
        self._brought: list[int] = []  # descriptors that came with the latest request
        self._abandoned = False  # whether the latest request's client went away while it waited
        self.thread = threading.Thread(target=self._run, name="smb-connection", daemon=True)

    def _run(self) -> None:
        watched = None
        try:
            if self._visit:
                self._socket = self._visit.admit()
            watched = self._socket.fileno()
            self._house.watcher.stream(watched, self._ended)
            while self._serve_one():
                pass
        except (OSError, SmbError) as error:
            log.debug("connection of %s: %s", self._session or self._where, error)
        except Exception:
            if not self._house.closed:  # else the watcher may be closed already
                log.exception("connection of %s", self._session or self._where)
        finally:
            if watched is not None:
                self._house.watcher.forget(watched)
            if self._stream:
                self._stream.leave()
            if self._visit:
                self._visit.leave()
            self._socket.close()
            self._house.forget(self)

    def _ended(self) -> None:
        """The client's end of the stream is closed: nobody waits for an answer."""
        number = self._socket.fileno()
        if number < 0:  # its own thread has closed it since
            return
        probe = select.poll()
        probe.register(number, select.POLLRDHUP)
        if probe.poll(0):  # the number may have been another's when this was reported
            self._give_up()

    def _give_up(self) -> None:
        with self._house.store.lock:
            if self._ticket:
                self._ticket.give_up("the connection ended")

    # Frames

    def _next(self) -> bytes | None:
        """The header of the next frame that is to be answered here; nothing at the end of the stream."""
        if self._visit and self._session is None:
            return self._visit.receive(self._socket, protocol.HEADER.size)
        if self._stream is None or isinstance(self._socket, ssl.SSLSocket):
            return receive(self._socket, protocol.HEADER.size)
        return self._stream.native.serve(self._socket.fileno(), IDLE)

    def _body(self, length: int) -> bytes:
        """What follows a header. Who stops in the middle of it must not hold its memory for ever."""
        if self._visit and self._session is None:
            return self._visit.receive(self._socket, length)
        try:
            return receive_by(self._socket, length, time.monotonic() + BODY_SECONDS + length / BODY_RATE)
        finally:
            self._socket.settimeout(None)

    def _descriptors(self, header: protocol.Header) -> list[int]:
        """What an operation's client sends beside one more byte; the caller closes them."""
        row = protocol.OPERATIONS.get(header.operation)
        if row is None or not row.brings or self._session is None:
            return []
        if self._where or self._stream:
            self._body(1)  # none travel here; the request will be refused
            return []
        self._socket.settimeout(BODY_SECONDS)
        try:
            return receive_descriptors(self._socket)
        finally:
            self._socket.settimeout(None)

    def _longest(self) -> int:
        if self._session is None:
            return LONGEST_HELLO
        return LONGEST if self._stream else protocol.MAX_REQUEST

    def _serve_one(self) -> bool:
        """One request; False when the stream ended or its framing is lost."""
        head = self._next()
        if not head:
            return False
        try:
            header = protocol.unpack_header(head, self._longest())
        except ProtocolError as error:
            send(self._socket, protocol.pack_error(0, 0, error))
            return False
        body = self._body(header.length)
        if len(body) < header.length:
            return False
        if delay := self._bucket.delay():
            time.sleep(delay)
        self._brought = self._descriptors(header)
        try:
            if self._stream is None:
                return self._converse(header, body)
            return self._speak(self._stream, head, header, body)
        finally:
            close_all(self._brought)
            self._brought = []

    def _converse(self, header: protocol.Header, body: bytes) -> bool:
        """Answer a mapped client, or one that has not said Hello: what cannot be delivered is taken back."""
        answer, frame = self._attempt(header, body)
        if answer is None:
            send(self._socket, frame)
        else:
            self._deliver(frame, answer)
        return True

    def _speak(self, stream: Stream, head: bytes, header: protocol.Header, body: bytes) -> bool:
        """Answer a stream: the reply is kept, since it may be asked for again on the next connection."""
        if header.operation in protocol.DATA and isinstance(self._socket, ssl.SSLSocket):
            send(self._socket, stream.native.handle(head, body))
            return True
        stream.hear()
        try:
            frame = stream.replay(header.number)
        except ProtocolError as error:
            frame = protocol.pack_error(header.operation, header.number, error)
        if frame is None:
            answer, frame = self._attempt(header, body)
            if answer or not self._abandoned:
                row = protocol.OPERATIONS.get(header.operation)
                stream.remember(header.number, frame if row and row.once else b"")
        send(self._socket, frame)
        if self._session and self._session.ended:
            self._hang_up_all(self._session)
            return False
        return True

    def _hang_up_all(self, session: Session) -> None:
        if session.remote:
            session.remote.hang_up()

    def _attempt(self, header: protocol.Header, body: bytes) -> tuple[Answer | None, bytes]:
        """The answer to one request and its frame; no answer with the frame of an error."""
        self._abandoned = False
        try:
            protocol.check_version(header, body)
            answer = self._answer(protocol.unpack_request(header, body))
            return answer, protocol.pack(header.operation, header.number, answer.record)
        except SmbError as error:
            return None, protocol.pack_error(header.operation, header.number, error)
        except Exception as error:
            log.exception("request %s of %s", header, self._session)
            failure = SmbError(f"the daemon failed at this request: {type(error).__name__}: {error}")
            return None, protocol.pack_error(header.operation, header.number, failure)

    def _deliver(self, frame: bytes, answer: Answer) -> None:
        """Send a good reply, with its descriptors to a mapped client."""
        descriptors: list[int] = []
        seats: list[int] = []
        try:
            mapped = self._session is not None and self._session.remote is None
            if mapped and answer.entry and answer.entry.mapping:
                mapping = answer.entry.mapping
                descriptors = [mapping.control_fd, mapping.payload_fd]
            elif mapped and isinstance(answer.record, protocol.Welcome):
                descriptors = [self._house.store.life.fd]
            if answer.readonly and answer.entry and answer.entry.mapping:
                descriptors = seats = list(answer.entry.mapping.readonly_fds())
            send(self._socket, frame, descriptors)
        except OSError:
            if answer.undo:
                with contextlib.suppress(RequestError):
                    answer.undo()
            raise
        finally:
            close_all(seats)

    # Requests

    def _answer(self, request: object) -> Answer:
        if isinstance(request, protocol.Hello):
            return Answer(self._hello(request))
        if isinstance(request, protocol.Challenge | protocol.Prove):
            raise NotSupported("this daemon asks for no token (any more)")
        session = self._session
        if session is None:
            raise NotPermitted(f"{type(request).__name__} before Hello")
        if session.ended:
            raise Closed("the session is over")
        ticket = self._ticket = Ticket(session)
        ticket.descriptors = self._brought
        try:
            answer = self._house.service.answer(ticket, request)
            if session.remote:
                self._follow(session.remote, request, answer)
            return answer
        finally:
            self._ticket, self._abandoned = None, bool(ticket.gone)

    def _follow(self, remote: Remote, request: object, answer: Answer) -> None:
        """What the session may reach by data requests follows what it is attached to."""
        entry = answer.entry
        if entry and entry.mapping:
            remote.reach(entry.number, entry.mapping, not answer.readonly)
        elif isinstance(request, protocol.Detach):
            assert self._session is not None
            if not self._house.store.is_attached(self._session, request.segment):
                remote.lose(request.segment)

    def _hello(self, request: protocol.Hello) -> protocol.Welcome:
        if self._session:
            raise RequestError("this connection has a session already")
        session = self._mapped(request) if request.mapped else self._unmapped(request)
        if self._visit:
            self._visit.leave()
            self._socket.settimeout(None)
        self._session, house = session, self._house
        stream = self._stream.number if self._stream else 0
        return protocol.Welcome(
            session.number,
            session.secret,
            stream,
            os.getpid(),
            house.store.lease,
            house.number,
            house.unix,
            house.rdma,
        )

    def _mapped(self, request: protocol.Hello) -> Session:
        """The session of a client that maps its segments, which ends with its process."""
        if self._where:
            raise NotSupported("descriptors do not travel over TCP")
        peer = Peer(self._socket)
        refusal = peer.refusal()
        if refusal:
            raise refusal
        if request.session:
            return self._house.store.join_session(request.session, request.secret, peer.pid)
        return self._house.begin(peer.pid, request.name, peer.pidfd(self._socket))

    def _unmapped(self, request: protocol.Hello) -> Session:
        """The session of a client that sends and receives what it moves, which ends with its lease."""
        if request.session:
            session = self._house.store.join_session(request.session, request.secret, None)
        else:
            pid = request.pid if self._where else Peer(self._socket).pid or request.pid
            session = self._house.begin_remote(self._where, pid, request.name)
        assert session.remote is not None
        stream = session.remote.stream(request.stream)
        stream.take(self)
        self._stream = stream
        return session

    # From other threads

    def hang_up(self) -> None:
        """End the connection; a request that waits on its behalf gives up."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not SSLSocket's, which is for one thread
        self._give_up()

    def orphan(self) -> None:
        """In a forked child: close the child's copy, so that the client sees the daemon's end."""
        self._socket.close()
