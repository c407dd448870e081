"""The daemon: listens, opens and ends sessions, buries dead clients.

A thread a connection reads and answers (connection.py); one more watches the processes (pidfd) and the ends
of the connections, so that a client that dies while it waits frees its place at once; another one ends the
sessions of clients without shared memory that are not heard from.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from typing import Any

from smb import _native
from smb.connection import Connection
from smb.errors import SmbError
from smb.gate import Gate
from smb.listen import Listener, UnixListener
from smb.memory import available, need_huge_pages
from smb.options import ServeOptions
from smb.pairs import Fabric
from smb.remote import Remote
from smb.rendezvous import Session
from smb.service import Service
from smb.snapshot import newest
from smb.store import Store
from smb.watcher import Watcher

log = logging.getLogger(__name__)

JOIN = 5.0  # seconds that a thread may take to end
RETURN = 10.0  # seconds beyond the lease in which a client's thread may notice a break, and be back
PATIENCE = 15.0  # seconds beyond the lease after which an operation that a stuck holder blocks gives up
ALL = 1 << 62  # bytes, where nobody knows what is available
EACH = 4  # connections that a client has on average, when there are as many clients as may be
ACCEPT_ERRORS = (errno.EINVAL, errno.EBADF)  # the listener was closed


class Daemon:
    """One box with its listeners. A context manager; close() twice is fine.

    listeners  where clients of other processes come in; none: the box of this process alone
    """

    def __init__(self, listeners: list[Listener], options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        if self.options.huge_pages:
            need_huge_pages()
        self.store = Store(
            self.options.memory_limit,
            self.options.lease,
            limits=self.options.limits,
            huge_pages=self.options.huge_pages,
        )
        self.service = Service(self.store)
        self.fabric = Fabric(self.service, self.options.rdma) if self.options.rdma is not None else None
        self._remember(any(isinstance(one, UnixListener) and one.replaced for one in listeners))
        self.watcher = Watcher()
        self.gate = Gate()
        self.number = secrets.randbits(63) + 1
        self._listeners = listeners
        if any(listener.terms for listener in listeners):
            half = (available() or 0) // 2
            _native.limit_stream_memory(self.options.limits.streams or half or ALL)  # of this process
        self.addresses = [listener.address for listener in listeners]
        self.unix = next((str(one.path) for one in listeners if isinstance(one, UnixListener)), "")
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.rdma = _rdma_port(self.addresses) if self.fabric else ""
        self._closed = False
        self._stop = threading.Event()
        self._connections: set[Connection] = set()
        self._threads = [
            threading.Thread(target=self._accept, args=(one, sock), name="smb-accept", daemon=True)
            for one in listeners
            for sock in one.sockets
        ]
        self._leases: threading.Thread | None = None  # from the first session that has one
        _daemons.add(self)
        self._finalize = weakref.finalize(self, _remove, listeners)
        for thread in self._threads:
            thread.start()
        self.service.keeper.start()

    def _remember(self, crashed: bool) -> None:
        """Begin with the newest whole snapshot, where snapshots are kept."""
        folder, past = self.options.snapshot_dir, None
        try:
            if folder is not None:
                self.service.keeper.keep_in(folder, self.options.snapshot_every)
                past = newest(folder, log.warning)
            self.service.restoring.begin(past, crashed)
        except BaseException:
            self.service.keeper.orphan()
            self.store.close()
            raise
        if past:
            log.warning("the box goes on from %s", past.path)

    @property
    def closed(self) -> bool:
        return self.store.closed

    # Connections

    def _accept(self, listener: Listener, door: socket.socket) -> None:
        while True:
            try:
                sock, place = door.accept()
            except OSError as error:
                if self.closed or error.errno in ACCEPT_ERRORS:
                    return
                log.error("cannot accept a connection: %s", error)
                time.sleep(0.2)  # no descriptors left: others may end
                continue
            self._start(listener, sock, place)

    def _start(self, listener: Listener, sock: socket.socket, place: Any) -> None:
        try:
            visit = self.gate.enter(sock, str(place[0]), listener.terms) if listener.terms else None
        except SmbError:  # closing
            sock.close()
            return
        connection = Connection(self, sock, listener.where(place), visit)
        with self._lock:
            full = len(self._connections) >= EACH * self.options.limits.clients
            self._connections.add(connection)
        try:
            if full:
                raise RuntimeError(f"{len(self._connections) - 1} are there, the limit (--max-clients)")
            connection.thread.start()
        except RuntimeError as error:
            self.gate.alarm("full", f"cannot serve a connection: {error}")
            self.forget(connection)
            if visit:
                visit.leave()
            sock.close()

    def forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    # Sessions

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

    def begin_remote(self, where: str, pid: int, name: str) -> Session:
        """Open a session that ends when it is not heard from for a lease."""
        session, limits = self.store.open_session(pid, name), self.options.limits

        # weak: the native stream, whose references the collector does not see, would keep its own session
        behind = weakref.ref(session)

        def on_stuck(segment: int, chunk: int, thread: int, seconds: float) -> None:
            asking = behind()
            if asking:
                self.service.lease.judge(self.store.attached(asking, segment), chunk, thread)

        def make(table: _native.Table) -> _native.Stream:
            rate = limits.rate
            return _native.Stream(table, rate=rate, patience=self.store.lease + PATIENCE, on_stuck=on_stuck)

        session.remote = Remote(where, make, limits.connections)
        with self._lock:
            if self._leases is None:
                self._leases = threading.Thread(target=self._end_leases, name="smb-leases", daemon=True)
                self._leases.start()
        return session

    def _end_leases(self) -> None:
        lease = self.store.lease
        pause, looked, awake = min(1.0, lease / 10), time.monotonic(), 0.0
        while not self._stop.wait(pause):
            now = time.monotonic()
            if now - looked > pause + lease / 2:
                awake = now  # this process stood still: what clients said meanwhile it has not heard
            looked, limit = now, now - lease
            for session in self.store.sessions() if awake < limit else ():
                if session.remote is None:
                    continue
                try:
                    session.remote.drop_idle(limit - RETURN)
                    if session.remote.last_heard < limit:
                        self._fence(session)
                except Exception:
                    log.exception("lease of %s", session)

    def _fence(self, session: Session) -> None:
        """The client is gone, or counts as gone: from now on nothing of it lands."""
        if session.remote:
            session.remote.hang_up()
        self.store.end_session(session)
        log.warning("%s was not heard from for %g s: its session is over", session, self.store.lease)

    # The end

    def close(self) -> None:
        """Stop listening, end the sessions, free all memory, remove the sockets. No-op in a forked child."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self.gate.close()
        self._finalize()
        if self.fabric:
            self.fabric.close()
        if self.service.keeper.folder:  # what is acknowledged must be in the last snapshot
            self._hang_up()
        self.service.keeper.close()
        self.store.close()
        self.service.restoring.close()
        for thread in self._threads + ([self._leases] if self._leases else []):
            thread.join(JOIN)
        self._hang_up()
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self.watcher.close()

    def _hang_up(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.hang_up()
        for connection in connections:
            connection.thread.join(JOIN)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def orphan(self) -> None:
        """In a forked child: let go of the sockets without ending them."""
        for listener in self._listeners:
            listener.orphan()
        for connection in list(self._connections):
            connection.orphan()
        self.service.keeper.orphan()


_daemons: weakref.WeakSet[Daemon] = weakref.WeakSet()


def _rdma_port(addresses: list[str]) -> str:
    """HOST:PORT where clients set up RDMA: the port that was named for it, else any that serves TCP."""
    ports = [one.partition("://") for one in addresses if "://" in one]
    return next((where for _, _, where in sorted(ports) if len(where) <= 255), "")  # "rdma" before "tcp"


def _remove(listeners: list[Listener]) -> None:
    for listener in listeners:
        listener.close()


def _orphan_all() -> None:
    for daemon in list(_daemons):
        daemon.orphan()


os.register_at_fork(after_in_child=_orphan_all)
