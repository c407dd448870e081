"""The transport to a daemon on another host: frames over TCP, in the clear or by TLS.

The same frames travel over a Unix socket where the daemon cannot pass its memory: from another PID namespace
or another user. Each thread has a connection of its own. One that breaks is made again, within the lease, and
what has no reply is sent again, which the daemon applies once. Where the daemon no longer knows the session
(it was restarted, or the lease ended), a new one is begun, every segment is attached again by its key, and
what was under way raises Restarted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from smb import auth, network, protocol, tls
from smb.errors import (
    Away,
    Closed,
    NotPermitted,
    NotSupported,
    RequestError,
    Restarted,
    SmbError,
    TransportError,
    UnknownKey,
)
from smb.transport.base import Array, Opening, Options
from smb.transport.line import SLICE, Breaks, Line, broken
from smb.transport.remote import RemoteAttachment
from smb.transport.stream import Transfer
from smb.transport.threads import PerThread

log = logging.getLogger(__name__)
T = TypeVar("T")

FAREWELL = 5.0  # seconds for each of the daemon's answers, at the box's end and an interrupted operation's
PAUSES = (0.02, 1.0)  # seconds between two attempts to connect, at first and at most
RESTORING = 12.0  # seconds for which a daemon that was restarted may wait for what others hand back
BRIEF = 2.0  # seconds that an impatient operation tries to save what it has sent already
RETRY = 0.25  # seconds between two attempts while nobody waits for one
CLOSED = "this box is closed"
BUSY = "this thread is in the middle of another operation of the box: a signal's handler must not use it then"
NUMBERS = ("segment", "source", "other")  # fields that name a segment


class TcpTransport:
    """One client of a daemon that it shares no memory with.

    peer     the daemon's address, for messages
    dial     makes a connected socket within so many seconds
    patient  whether an operation waits for a daemon that cannot be reached; else it raises Away at once
    """

    name = "tcp"
    attachment = RemoteAttachment  # what a segment becomes here

    def __init__(self, peer: str, dial: Callable[[float], socket.socket], options: Options) -> None:
        self.peer, self._dial, self._options = peer, dial, options
        self.patient = True
        self.welcome = protocol.Welcome(0, 0, 0, 0, 0.0, 0, "", "")
        self._generation = 0  # how many sessions there have been
        self._failed = ""  # why nothing works any more
        self._closed = threading.Event()
        self._lock = threading.RLock()  # held to greet, so that one thread begins a new session for all
        self._again = threading.Lock()  # held to attach again, so that one thread does it for all
        self._attachments = weakref.WeakSet[RemoteAttachment]()
        self._tried = 0.0  # when an impatient operation last tried in vain
        self._away = 0.0  # since when the daemon cannot be reached; 0: it can
        self._lines = PerThread(lambda: Line(peer))
        self._numbers: dict[int, int] = {}  # of segments: the daemon's first -> its present one
        self._pulse = threading.Thread(target=self._beat, name="smb-pulse", daemon=True)
        try:
            self._connect(self._lines.get(), options.timeout)
        except OSError as error:
            raise broken(peer, error) from error
        self._pulse.start()

    # Connecting

    def _connect(self, line: Line, timeout: float) -> None:
        """Give the line a connection that has greeted. OSError or SmbError: it has none.

        timeout  seconds to connect in, and for each of the daemon's answers meanwhile
        """
        line.patience = timeout
        sock = self._dial(timeout)
        try:
            sock.settimeout(SLICE)
            with self._lock:
                self._greet(line, sock)
        except BaseException:
            sock.close()
            raise
        line.carry(sock)
        self._away = 0.0
        if threading.current_thread() is not self._pulse:  # it keeps the lease, whatever the others wait for
            self._attach_all(line, sock)

    def _ask(self, line: Line, sock: socket.socket, record: object, wait: float = 0.0) -> Any:
        """A request on a connection that is being set up: nothing is sent again."""
        number = line.stream.next_number()
        reply = line.ask(sock, number, record, line.patience + wait)
        return reply.record(protocol.BY_REQUEST[type(record)])

    def _introduce(self, line: Line, sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX:
            return
        host = str(sock.getpeername()[0])
        have = auth.credential(self._options.token, host)
        if have:
            auth.introduce(lambda record: self._ask(line, sock, record), have, tls.binding(sock))

    def _hello(self, line: Line, sock: socket.socket, session: int, secret: int, stream: int) -> None:
        version, name = protocol.VERSION, self._options.name
        hello = protocol.Hello(version, session, secret, stream, False, os.getpid(), name)
        self.welcome = self._ask(line, sock, hello)

    def _greet(self, line: Line, sock: socket.socket) -> None:
        self._introduce(line, sock)
        old = self.welcome
        known = line.generation == self._generation
        if not old.session:
            self._renew(line, sock, old)
            return
        try:
            self._hello(line, sock, old.session, old.secret, line.stream.number if known else 0)
            if not known:
                line.begin(self.welcome.stream, self._generation)
        except UnknownKey:  # forgotten, since it was idle for a lease without a connection
            self._hello(line, sock, old.session, old.secret, 0)
            line.begin(self.welcome.stream, self._generation)
        except Closed:
            self._renew(line, sock, old)

    def _renew(self, line: Line, sock: socket.socket, old: protocol.Welcome) -> None:
        """Begin a session, the first one or one after the daemon forgot ours."""
        if self._closed.is_set():  # whoever closes has said goodbye for all
            raise Closed(CLOSED)
        self._hello(line, sock, 0, 0, 0)
        self._generation += 1
        line.begin(self.welcome.stream, self._generation)
        if old.session:
            why = "the lease ended" if old.daemon == self.welcome.daemon else "the daemon was restarted"
            log.warning("daemon at %s: %s: a new session is begun", self.peer, why)
            if old.daemon != self.welcome.daemon:
                with contextlib.suppress(RequestError):
                    self._ask(line, sock, protocol.Inherit(old.session, old.secret, True))

    def _attach_all(self, line: Line, sock: socket.socket) -> None:
        """Attach again to what is not attached in the line's session. OSError: it has no connection left."""
        try:
            with self._again:
                missing = [a for a in list(self._attachments) if a.generation != line.generation]
                if len(missing) > 1:  # a key that is not there is waited for: the others' time would end
                    there = {row.key for row in self._ask(line, sock, protocol.ListOf("")).segments}
                    missing.sort(key=lambda attachment: attachment.key not in there)
                for attachment in missing:
                    self._attach_again(line, sock, attachment)
        except BaseException:
            line.cut()
            raise

    def _attach_again(self, line: Line, sock: socket.socket, attachment: RemoteAttachment) -> None:
        if line.generation != self._generation:
            raise ConnectionError("the session was lost again")
        try:
            opened: protocol.Opened = self._ask(line, sock, attachment.again(), RESTORING)
            attachment.renew(opened, line.generation)
            self._numbers[attachment.first] = opened.segment
        except RequestError as error:
            log.warning("daemon at %s: segment %r is lost: %s", self.peer, attachment.key, error)
            attachment.lose(str(error), line.generation)

    def _check(self) -> None:
        if self._closed.is_set():
            raise Closed(CLOSED)
        if self._failed:
            raise TransportError(self._failed)

    def _fail(self, error: Exception) -> TransportError:
        """Nothing works any more: everybody's connections end."""
        self._failed = self._failed or str(broken(self.peer, error))
        self._lines.end()
        return TransportError(self._failed)

    def endurance(self) -> float:
        """Seconds for which the daemon may be out of reach before it counts as dead."""
        return max(self.welcome.lease, self._options.reconnect)

    def _reconnect(self, line: Line, sent: bool) -> None:
        """Connect again, with growing pauses, until the daemon has been away for too long.

        sent  whether something is under way that would be lost. Raises TransportError, Away.
        """
        pause, most = PAUSES
        self._away = began = self._away or time.monotonic()
        limit = self.endurance()
        brief = time.monotonic() + (BRIEF if sent else 0.0)
        while True:
            self._check()
            if not self.patient and not sent and time.monotonic() < self._tried + RETRY:
                raise Away(f"daemon at {self.peer}: not reached just now")
            try:
                return self._connect(line, self._options.timeout)
            except (NotPermitted, NotSupported) as error:
                raise self._fail(error) from error
            except (OSError, SmbError) as error:
                now = self._tried = time.monotonic()
                if now >= began + limit:
                    raise self._fail(ConnectionError(f"{error} (for {now - began:.0f} s)")) from error
                gone = isinstance(error.__cause__, ConnectionRefusedError)  # and with it what was sent
                if not self.patient and (gone or now > brief):
                    raise Away(f"daemon at {self.peer}: {error}") from error
            left = began + limit - time.monotonic()
            self._closed.wait(max(0.0, min(left, pause * random.uniform(0.5, 1.0))))
            pause = min(most, 2 * pause)

    def ready(self) -> Line:
        """This thread's line, connected within the present session."""
        line = self._lines.get()
        if line.socket is None or line.generation != self._generation or self._failed:
            with line.lock:
                self._check()
                line.cut()
                self._reconnect(line, sent=False)
        return line

    # Operations

    def carry(self, what: str, make: Callable[[Line], Transfer]) -> int:
        """Run a data operation to its end, over as many connections as it takes; the version after it."""
        return self._alone(self._carry, what, make)

    def _alone(self, act: Callable[..., T], *given: Any) -> T:
        """``act`` with this thread's line, unless a signal's handler asks in the midst of another such call.

        Here a signal cannot come between the mark and what takes it away again.
        """
        line = self._lines.get()
        if line.busy:
            raise RequestError(BUSY)
        line.busy = True
        try:
            return act(self.ready(), *given)
        finally:
            line.busy = False

    def _carry(self, line: Line, what: str, make: Callable[[Line], Transfer]) -> int:
        with line.lock:
            epoch, timeout = line.epoch, self._options.timeout
            transfer, breaks = make(line), None
            while True:
                try:
                    if breaks is not None:
                        breaks.wait(self._closed)
                    if line.socket is None:
                        self._resume(line, epoch, what)
                    return line.run(transfer, timeout)
                except OSError as error:
                    line.cut()
                    breaks = breaks or Breaks(self.endurance())
                    if isinstance(error, TimeoutError) or breaks.hopeless():
                        raise self._fail(error) from error
                    log.info("daemon at %s: %s: connecting again", self.peer, error)
                except RequestError:
                    raise
                except SmbError as error:
                    line.cut()
                    raise self._fail(error) from error
                except BaseException:  # a signal's
                    if not transfer.finished:
                        self._abandon(line, epoch, transfer)
                    raise

    def _abandon(self, line: Line, epoch: int, transfer: Transfer) -> None:
        """Take no further part in an operation that was interrupted.

        Over a plain socket its replies did not come in time. By TLS they may: what was under way is asked for
        again over another connection, since nobody knows how far the old one's streams got.
        """
        secured = isinstance(line.socket, ssl.SSLSocket)
        line.cut()
        try:
            if secured:
                transfer.give_up()
                self._connect(line, FAREWELL)
                if line.epoch == epoch:
                    line.run(transfer, FAREWELL)
        except (OSError, SmbError) as error:
            log.debug("daemon at %s: %s", self.peer, error)
        finally:
            if not transfer.finished:
                line.cut()
                line.generation = 0  # what was sent may have been applied: the stream cannot go on

    def _resume(self, line: Line, epoch: int, what: str) -> None:
        """Connect again while ``what`` is under way."""
        try:
            self._reconnect(line, sent=True)
        except Away:
            line.generation = 0  # what was sent may have been applied: the stream cannot go on
            raise
        if line.epoch != epoch:
            raise Restarted(f"{what} was dropped: the daemon at {self.peer} no longer knows the session")

    @property
    def daemon(self) -> int:
        """A number that no other daemon has."""
        return self.welcome.daemon

    def lines(self) -> list[Line]:
        return self._lines.all()

    def call(self, request: object, timeout: float) -> Any:
        return self._request(request, timeout)

    def _request(self, request: object, timeout: float) -> Any:
        return self._alone(self._ask_by, request, timeout)

    def _ask_by(self, line: Line, request: object, timeout: float) -> Any:
        with line.lock:
            row, limit = protocol.BY_REQUEST[type(request)], timeout + self._options.timeout
            epoch, number = line.epoch, line.stream.next_number()
            doubted = False  # whether the daemon has said that something is over, which may be the session
            breaks = Breaks(self.endurance())
            while True:
                try:
                    breaks.wait(self._closed)
                    if line.socket is None:
                        self._resume(line, epoch, type(request).__name__)
                    assert line.socket is not None
                    reply = line.ask(line.socket, number, self._renumbered(request), limit)
                    if protocol.ERRORS.get(reply.header.status) is not Closed or doubted:
                        return reply.record(row)
                    doubted = True
                    line.cut()  # the lease may have just ended
                except OSError as error:
                    line.cut()
                    if isinstance(error, TimeoutError) or breaks.hopeless():
                        raise self._fail(error) from error
                    log.info("daemon at %s: %s: connecting again", self.peer, error)
                except Restarted:
                    if row.once:
                        raise
                    epoch, number = line.epoch, line.stream.next_number()
                except TransportError as error:
                    line.cut()
                    raise self._fail(error) from error
                except SmbError:
                    raise
                except BaseException:  # the answer is still under way: the next request takes the stream over
                    line.cut()
                    raise

    def _renumbered(self, request: Any) -> Any:
        """The request with the numbers that its segments have in the present session."""
        if not self._numbers:
            return request
        have = {name: getattr(request, name) for name in NUMBERS if hasattr(request, name)}
        return dataclasses.replace(request, **{n: self._numbers.get(v, v) for n, v in have.items()})

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None = None) -> Opening:
        wait = request.timeout if isinstance(request, protocol.Create) else 0.0
        generation = self._generation
        reply: protocol.Opened = self._request(request, wait)
        attachment = self.attachment(self, request, reply, generation)
        try:
            if reply.created and initial is not None:
                attachment.initialise(initial)
                self._request(protocol.Publish(reply.segment), 0.0)
            with self._lock:
                if generation != self._generation:
                    raise Restarted(f"the session was lost while segment {request.key!r} was opened")
                self._attachments.add(attachment)
        except BaseException:
            with contextlib.suppress(SmbError):
                self._request(protocol.Detach(reply.segment), 0.0)
            raise
        return Opening(attachment, reply)

    # Signs of life

    def _beat(self) -> None:
        """Keep the lease, and notice a daemon that is gone while everybody waits for it."""
        while not self._closed.wait(max(0.02, self.welcome.lease / 3)):
            try:
                told = [self._acknowledge(line) for line in self._lines.all()]
                if not any(told):
                    self.carry("a sign of life", lambda line: line.stream.acknowledge())
            except SmbError as error:
                log.debug("daemon at %s: %s", self.peer, error)
                if self._failed:
                    return

    def _acknowledge(self, line: Line) -> bool:
        """Have the daemon forget an idle line's replies; False when it is not idle or not connected."""
        if not line.lock.acquire(blocking=False):
            return False
        try:
            if line.socket is None:
                return False
            line.run(line.stream.acknowledge(), self._options.timeout)
            return True
        except OSError as error:
            line.cut()
            if isinstance(error, TimeoutError):
                raise self._fail(error) from error
            return False
        finally:
            line.lock.release()

    # The end

    def orphan(self) -> None:
        self._closed = threading.Event()  # the old one may have been copied locked
        self._closed.set()
        self._lines.each(Line.orphan)

    def close(self) -> None:
        if self._closed.is_set():
            return
        held = self._lock.acquire(timeout=FAREWELL)  # not while another thread begins a session
        self._closed.set()
        if held:
            self._lock.release()
        line = self._lines.get()
        if line.busy:  # a signal's handler closes
            line = Line(self.peer)
        with contextlib.suppress(OSError, SmbError), line.lock:
            if not self._failed and not self._away:
                if line.socket is None or line.generation != self._generation:
                    line.cut()
                    self._connect(line, FAREWELL)
                assert line.socket is not None
                line.ask(line.socket, line.stream.next_number(), protocol.Bye(), FAREWELL)
        self._lines.close()
        if threading.current_thread() is not self._pulse:
            self._pulse.join(FAREWELL)

    def local_host(self) -> str:
        """The numeric address of this host by which it reaches the daemon; "" over a Unix socket."""
        line = self.ready()
        sock = line.socket
        return str(sock.getsockname()[0]) if sock is not None and sock.family != socket.AF_UNIX else ""


def connect(where: str, options: Options) -> TcpTransport:
    """Connect to ``HOST:PORT`` by TCP."""
    host, port = network.parse(where)

    def dial(timeout: float) -> socket.socket:
        sock = network.dial(host, port, timeout)
        secured = options.tls
        return tls.wrap_client(sock, host, secured, timeout) if secured else sock

    return TcpTransport(where, dial, options)


def over_unix(path: str, options: Options) -> TcpTransport:
    """The same frames over the Unix socket ``path``, where the daemon cannot pass its memory."""

    def dial(timeout: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise TransportError(f"no daemon answers at {path}: {error.strerror or error}") from error
        return sock

    return TcpTransport(path, dial, options)
