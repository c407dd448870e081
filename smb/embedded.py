"""How a program comes to a box: by an address, by the user's own daemon, or by one inside the process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from pathlib import Path

from smb import stripes
from smb.client import Box
from smb.errors import RequestError, TransportError
from smb.gate import guarded, terms
from smb.listen import Listener, TcpListener, UnixListener, check_folder, default_path
from smb.options import ServeOptions
from smb.server import Daemon
from smb.tls import Tls, from_environment
from smb.transport import base
from smb.transport.base import Options
from smb.transport.local import LocalTransport
from smb.transport.rdma import available

log = logging.getLogger(__name__)


class _Embedded:
    """The one daemon without a socket that serves this process, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._daemon: Daemon | None = None
        self._pid = 0

    def daemon(self, why: str) -> Daemon:
        with self._lock:
            if self._daemon is None or self._daemon.closed or self._pid != os.getpid():
                self._daemon, self._pid = Daemon([]), os.getpid()
                log.warning(
                    "%s: using a memory box inside this process, pid %d; other processes do not see it",
                    why,
                    self._pid,
                )
            return self._daemon

    def renew_lock(self) -> None:
        """In a forked child, which may have got a locked copy."""
        self._lock = threading.Lock()


_embedded = _Embedded()
os.register_at_fork(after_in_child=_embedded.renew_lock)


def own_name() -> str:
    """What this process is called in messages and `smb ls -v`."""
    return (Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python")[:80]


def connect(
    address: str | None = None,
    token: str | os.PathLike[str] | bytes | None = None,
    timeout: float = 30.0,
    *,
    name: str | None = None,
    tls: Tls | None = None,
    reconnect: float = 0.0,
) -> Box:
    """A client's standing with a box. Raises TransportError when no daemon answers at ``address``.

    address  "unix:PATH", "tcp://HOST:PORT" or "rdma://HOST:PORT"; "HOST:PORT" takes shared memory where the
             daemon is on this host, else RDMA where both ends have a device that reaches the other and no TLS
             is asked for, else TCP, and the log says why. Several with commas make one box, in that order.
             None: $SMB_ADDRESS; else the user's own running daemon at the default socket; else a box inside
             this process, one a process
    token    for tcp and rdma: a file that nobody else can read, or the bytes. None: the file $SMB_TOKEN_FILE,
             else, for a daemon on this host, the one that the user's own daemon left
    timeout  seconds that one answer of the daemon may take, waits not counted
    name     what messages and `smb ls -v` call this client; the program's name by default
    tls      for tcp: who signed the daemon's certificate, and one's own. None: what $SMB_TLS_CA,
             $SMB_TLS_CERT and $SMB_TLS_KEY name, else no TLS
    reconnect  seconds for which operations wait for another daemon when this one dies (or raise Away, see
             Box.patient); on this host its memory is handed back, so that nothing is lost. 0: they fail then
    """
    options = Options((name or own_name())[:80], timeout, token, tls or from_environment(), reconnect)
    address = address or os.environ.get("SMB_ADDRESS") or None
    if address:
        several = stripes.daemons(address)
        to = stripes.connect(several, options) if len(several) > 1 else base.connect(address, options)
        box = Box(to, address, options)
    else:
        box = _own_daemon(options) or _inside(options)
    log.info("memory box at %s by %s", box.address, box.transport)
    return box


def running(options: Options) -> Box:
    """The user's own daemon at the default socket. Raises TransportError when there is none."""
    path = default_path()
    if path.parent.exists():
        check_folder(path.parent)
    address = f"unix:{path}"
    return Box(base.connect(address, options), address, options)


def _own_daemon(options: Options) -> Box | None:
    try:
        return running(options) if default_path().exists() else None
    except TransportError as error:
        log.debug("%s", error)
        return None


def _inside(options: Options) -> Box:
    daemon = _embedded.daemon(f"no $SMB_ADDRESS and no daemon at {default_path()}")
    return Box(LocalTransport(daemon.service, options), "local", options)


def offering_rdma(chosen: ServeOptions) -> ServeOptions:
    """The same choices, and RDMA. Raises NotSupported, which says why, where there is none."""
    wanted = chosen.rdma if chosen.rdma is not None else os.environ.get("SMB_RDMA", "")
    available(wanted)
    return dataclasses.replace(chosen, rdma=wanted)


def serve(
    unix: str | os.PathLike[str] | None = None,
    *,
    tcp: str | None = None,
    rdma: str | None = None,
    token: str | os.PathLike[str] | bytes | None = None,
    tls: Tls | None = None,
    insecure: bool = False,
    memory_limit: int | None = None,
    lease: float = 30.0,
    snapshot_dir: str | os.PathLike[str] | None = None,
    snapshot_every: float | None = None,
    options: ServeOptions | None = None,
) -> Daemon:
    """Start a daemon in this process; it ends with close(), with the ``with`` block, or with the process.

    unix          the socket's path; the user's default socket when no address is given at all
    tcp           "HOST:PORT" to listen at as well; "*" is every address of this host, port 0 is chosen
    rdma          "HOST:PORT" for clients that come by RDMA, which is set up over TCP; $SMB_RDMA says by which
                  device, DEVICE[/PORT[/GID_INDEX]], else the one that has the address which they came to
    token         what clients over TCP prove to have: a file that nobody else can read, or the bytes. None at
                  an address of this host: the user's own, which smb.connect finds
    tls           the daemon's certificate; with ``ca`` set, clients must show one too
    insecure      listen without token or client certificates
    memory_limit  bytes that all segments together may take; None: what the machine has
    lease         seconds after which a client that holds a chunk lock while others wait is killed, and after
                  which one that came over TCP and is not heard from is gone
    snapshot_dir  a folder in which snapshots of the box are kept: the box goes on from the newest whole one,
                  and writes one at its end
    snapshot_every  seconds between two
    options       all choices; the ones above take their place when they are given

    Daemon.addresses says where it listens. Raises SmbError when another daemon listens there, NotPermitted
    for an address that strangers reach without anything that keeps them out.
    """
    if tcp is None and rdma is None and (insecure or token is not None or tls is not None):
        what = "insecure" if insecure else "token" if token is not None else "tls"
        raise RequestError(f"{what} is for a daemon that listens on a network: give tcp or rdma too")
    folder = Path(snapshot_dir) if snapshot_dir is not None else None
    chosen = options or ServeOptions(memory_limit, lease, snapshot_dir=folder, snapshot_every=snapshot_every)
    with contextlib.ExitStack() as stack:
        listeners: list[Listener] = []
        if unix is not None or (tcp is None and rdma is None):
            listeners.append(UnixListener(Path(unix) if unix is not None else default_path()))
            stack.callback(listeners[-1].close)
        for where in filter(None, (tcp, rdma)):
            port = TcpListener(where, terms(token, tls))
            stack.callback(port.close)
            port.terms, port.own_token = guarded(port.hosts, terms(token, tls), insecure)
            listeners.append(port)
        if rdma is not None:
            chosen = offering_rdma(chosen)
            listeners[-1].address = f"rdma://{listeners[-1].address.removeprefix('tcp://')}"
        daemon = Daemon(listeners, chosen)
        stack.pop_all()
    return daemon
