"""The daemon: listens, hands requests to the service, buries dead clients.

A thread a connection reads and answers; one more thread watches the processes (pidfd) and the ends of the
connections, so that a client that dies while it waits frees its place at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from smb import protocol
from smb.errors import (
    Closed,
    NotPermitted,
    NotSupported,
    OutOfMemory,
    ProtocolError,
    RequestError,
    SmbError,
)
from smb.listen import UnixListener
from smb.rendezvous import Session, Ticket
from smb.service import Answer, Service
from smb.store import Store
from smb.transport.frames import close_all, receive, send

log = logging.getLogger(__name__)

JOIN = 5.0  # seconds that a thread may take to end
SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module yet
_CREDENTIALS = struct.Struct("iII")


class Watcher:
    """Calls back once, from one thread of its own, when a descriptor reports its end."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._epoll.register(self._stop_read, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="smb-watcher", daemon=True)
        self._thread.start()

    def process(self, pidfd: int, call: Callable[[], None]) -> None:
        self._add(pidfd, select.EPOLLIN, call)

    def stream(self, number: int, call: Callable[[], None]) -> None:
        self._add(number, select.EPOLLRDHUP, call)

    def _add(self, number: int, events: int, call: Callable[[], None]) -> None:
        self._calls[number] = call
        self._epoll.register(number, events | select.EPOLLONESHOT)

    def forget(self, number: int) -> None:
        """Before the descriptor is closed."""
        self._calls.pop(number, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(number)

    def _run(self) -> None:
        while True:
            for number, _ in self._epoll.poll():
                if number == self._stop_read:
                    return
                call = self._calls.get(number)
                try:
                    if call:
                        call()
                except Exception:
                    log.exception("watching descriptor %d", number)

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        self._epoll.close()
        os.close(self._stop_read)
        os.close(self._stop_write)


class Peer:
    """The process at the other end of a Unix socket, by the kernel's word."""

    def __init__(self, sock: socket.socket) -> None:
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(data)

    def refusal(self) -> RequestError | None:
        """Why this process may not map our memory."""
        if self.uid not in (os.getuid(), 0):
            return NotPermitted(f"user id {self.uid} is not the daemon's, {os.getuid()}")
        try:
            status = Path(f"/proc/{self.pid}/status").read_text() if self.pid else ""
        except OSError:
            return NotPermitted(f"pid {self.pid} is gone")
        nested = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [""])
        if not self.pid or len(nested) != 1:
            return NotSupported("shared memory needs client and daemon in one PID namespace")
        return None

    def pidfd(self, sock: socket.socket) -> int:
        """A descriptor of the process itself; its number may already belong to another."""
        try:
            return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise self._gone(error) from error
        try:
            return os.pidfd_open(self.pid)
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> RequestError:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return OutOfMemory("the daemon has no descriptors left (is its `ulimit -n` too low?)")
        return NotPermitted(f"pid {self.pid} is gone")


class Connection:
    """One client thread's stream, served by one thread here."""

    def __init__(self, daemon: Daemon, sock: socket.socket) -> None:
        self._daemon, self._socket = daemon, sock
        self._session: Session | None = None
        self._ticket: Ticket | None = None
        self.thread = threading.Thread(target=self._run, name="smb-connection", daemon=True)

    def _run(self) -> None:
        watcher, number = self._daemon.watcher, self._socket.fileno()
        try:
            watcher.stream(number, self._ended)
            while self._serve_one():
                pass
        except OSError as error:
            log.debug("connection of %s: %s", self._session, error)
        except Exception:
            if not self._daemon.closed:  # else the watcher may be closed already
                log.exception("connection of %s", self._session)
        finally:
            watcher.forget(number)
            self._socket.close()
            self._daemon.forget(self)

    def _ended(self) -> None:
        """The client's end of the stream is closed: nobody waits for an answer."""
        probe = select.poll()
        probe.register(self._socket, select.POLLRDHUP)
        with self._daemon.store.lock:
            if self._ticket and probe.poll(0):  # the number may have been another's when this was reported
                self._ticket.give_up("the connection ended")

    def _serve_one(self) -> bool:
        """One request; False when the stream ended or its framing is lost."""
        head = receive(self._socket, protocol.HEADER.size)
        if not head:
            return False
        try:
            header = protocol.unpack_header(head, protocol.MAX_REQUEST)
        except ProtocolError as error:
            send(self._socket, protocol.pack_error(0, 0, error))
            return False
        body = receive(self._socket, header.length)
        if len(body) < header.length:
            return False
        try:
            answer = self._answer(protocol.unpack_request(header, body))
            frame = protocol.pack(header.operation, header.number, answer.record)
        except SmbError as error:
            send(self._socket, protocol.pack_error(header.operation, header.number, error))
        except Exception as error:
            log.exception("request %s of %s", header, self._session)
            failure = SmbError(f"the daemon failed at this request: {type(error).__name__}: {error}")
            send(self._socket, protocol.pack_error(header.operation, header.number, failure))
        else:
            self._reply(frame, answer)
        return True

    def _reply(self, frame: bytes, answer: Answer) -> None:
        descriptors: list[int] = []
        seats: list[int] = []
        try:
            if answer.entry and answer.entry.mapping:
                mapping = answer.entry.mapping
                descriptors = [mapping.control_fd, mapping.payload_fd]
            elif isinstance(answer.record, protocol.Welcome):
                descriptors = [self._daemon.store.life.fd]
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

    def _answer(self, request: object) -> Answer:
        if isinstance(request, protocol.Hello):
            return Answer(self._hello(request))
        if self._session is None:
            raise NotPermitted(f"{type(request).__name__} before Hello")
        if self._session.ended:
            raise Closed("the session is over")
        self._ticket = Ticket(self._session)
        try:
            return self._daemon.service.answer(self._ticket, request)
        finally:
            self._ticket = None

    def _hello(self, request: protocol.Hello) -> protocol.Welcome:
        if request.version != protocol.VERSION:
            raise NotSupported(
                f"the daemon speaks protocol version {protocol.VERSION}, not {request.version}"
            )
        if self._session:
            raise RequestError("this connection has a session already")
        peer, store = Peer(self._socket), self._daemon.store
        refusal = peer.refusal()
        if refusal:
            raise refusal
        if request.session:
            self._session = store.join_session(request.session, request.secret, peer.pid)
        else:
            self._session = self._daemon.begin(peer.pid, request.name, peer.pidfd(self._socket))
        session = self._session
        return protocol.Welcome(session.number, session.secret, 0, os.getpid(), store.lease)

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def orphan(self) -> None:
        """In a forked child: close the child's copy, so that the client sees the daemon's end."""
        self._socket.close()


class Daemon:
    """One box with its listeners. A context manager; close() twice is fine.

    listeners     where clients of other processes come in; none: the box of this process alone
    memory_limit  bytes that all segments together may take; None: what the machine has
    lease         seconds after which a stuck holder of a chunk lock is killed
    """

    def __init__(
        self, listeners: list[UnixListener], memory_limit: int | None = None, lease: float = 30.0
    ) -> None:
        self.store = Store(memory_limit, lease)
        self.service = Service(self.store)
        self.watcher = Watcher()
        self._listeners = listeners
        self.addresses = [listener.address for listener in listeners]
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._connections: set[Connection] = set()
        self._threads = [
            threading.Thread(target=self._accept, args=(one,), name="smb-accept", daemon=True)
            for one in listeners
        ]
        _daemons.add(self)
        self._finalize = weakref.finalize(self, _remove, listeners)
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        return self.store.closed

    def _accept(self, listener: UnixListener) -> None:
        while True:
            try:
                sock, _ = listener.socket.accept()
            except OSError as error:
                if self.closed or error.errno in (errno.EINVAL, errno.EBADF):
                    return
                log.error("cannot accept a connection: %s", error)
                time.sleep(0.2)  # no descriptors left: others may end
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        connection = Connection(self, sock)
        with self._lock:
            self._connections.add(connection)
        try:
            connection.thread.start()
        except RuntimeError as error:
            log.error("cannot serve a connection: %s", error)
            self.forget(connection)
            sock.close()

    def forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def begin(self, pid: int, name: str, pidfd: int) -> Session:
        """Open a session that ends with the process behind ``pidfd``."""
        try:
            session = self.store.open_session(pid, name, pidfd)
        except BaseException:
            os.close(pidfd)
            raise
        try:
            self.watcher.process(pidfd, lambda: self._bury(session))
        except BaseException:
            self.store.end_session(session)
            raise
        return session

    def _bury(self, session: Session) -> None:
        probe = select.poll()
        with self.store.lock:
            if session.pidfd is None:
                return
            probe.register(session.pidfd, select.POLLIN)
            if not probe.poll(0):  # a late report about a descriptor whose number is another's by now
                return
            repaired = self.store.end_session(session)
        log.info("%s died; %d chunks repaired", session, repaired)

    def close(self) -> None:
        """Stop listening, end the sessions, free all memory, remove the sockets. No-op in a forked child."""
        if os.getpid() != self._pid:
            return
        self.store.close()
        self._finalize()
        for thread in self._threads:
            thread.join(JOIN)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.shutdown()
        for connection in connections:
            connection.thread.join(JOIN)
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self.watcher.close()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def orphan(self) -> None:
        """In a forked child: let go of the sockets without ending them."""
        for listener in self._listeners:
            listener.socket.close()
        for connection in list(self._connections):
            connection.orphan()


_daemons: weakref.WeakSet[Daemon] = weakref.WeakSet()


def _remove(listeners: list[UnixListener]) -> None:
    for listener in listeners:
        listener.close()


def _orphan_all() -> None:
    for daemon in list(_daemons):
        daemon.orphan()


os.register_at_fork(after_in_child=_orphan_all)
