"""What a daemon listens at: Unix sockets (where they lie, who may use them, stale ones), and TCP ports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smb import network
from smb.errors import RequestError, SmbError, TransportError

if TYPE_CHECKING:
    from smb.auth import OwnToken
    from smb.gate import Terms

BACKLOG = 512
ROOM = 60  # bytes of a folder whose sockets stay within the kernel's 107
TRIES = 8  # to find a port that is free at every address of a host
PATIENCE = 10.0  # seconds to wait for another daemon that is just starting in the same folder


def short_folder() -> str:
    """For temporary sockets: the folder of temporary files, or /tmp where its path is too long for them."""
    import tempfile  # which most clients need not load

    folder = tempfile.gettempdir()
    too_long = len(os.fsencode(folder)) > ROOM and os.access("/tmp", os.W_OK | os.X_OK)
    return "/tmp" if too_long else folder


def default_path() -> Path:
    """The user's own socket: under $XDG_RUNTIME_DIR, else in a folder of this user id under /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "smb" if runtime else Path("/tmp") / f"smb-{os.getuid()}"
    return folder / "daemon.sock"


def check_folder(folder: Path) -> None:
    """Refuse a folder in which somebody else could put a socket of theirs."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise TransportError(f"{folder} is not a folder that only this user can write to")


def _live(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full, or it is not ours to judge
        return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two daemons that start at once must not both replace the same stale socket."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SmbError(f"another process keeps {folder} locked") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(number)


def _clear(path: Path) -> bool:
    """Remove a socket that no process listens at any more; whether there was one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise SmbError(f"{path} exists and is no socket; it was left alone")
    if _live(str(path)):
        raise SmbError(f"a daemon already listens at {path}")
    path.unlink()
    return True


class Listener(Protocol):
    """Where clients come in."""

    address: str
    sockets: list[socket.socket]
    terms: Terms | None  # what is asked of those who come; None: nothing, the kernel has seen to it

    def where(self, place: Any) -> str:
        """Whom accept() named, for messages: HOST:PORT, or "" for this host."""

    def close(self) -> None: ...
    def orphan(self) -> None:
        """In a forked child: close the copies."""


class UnixListener:
    """A listening socket of mode 0600, in a folder that is made with mode 0700 when it is missing."""

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > 107:
            raise RequestError(f"socket path {str(path)!r} is longer than the kernel's 107 bytes")
        self.path = path.absolute()
        self.address = f"unix:{self.path}"
        self._pid = os.getpid()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets = [self.socket]
        self.terms: Terms | None = None
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path == default_path():
                check_folder(self.path.parent)
            os.fchmod(self.socket.fileno(), 0o600)  # before bind: the file is never open to others
            with _alone(self.path.parent):
                self.replaced = _clear(self.path)  # the daemon before this one died
                self.socket.bind(str(self.path))
                self.socket.listen(BACKLOG)
            self._inode = self.path.lstat().st_ino
        except OSError as error:
            self.socket.close()
            raise SmbError(f"cannot listen at {self.path}: {error.strerror or error}") from error
        except BaseException:
            self.socket.close()
            raise

    def where(self, place: Any) -> str:
        return ""

    def orphan(self) -> None:
        self.socket.close()

    def close(self) -> None:
        """Stop listening and remove the file, unless it is another daemon's by now."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self.socket.close()
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


class TcpListener:
    """A TCP port at every address of a host; "" or "*" is every address of this one. Port 0 is chosen."""

    def __init__(self, where: str, terms: Terms) -> None:
        self.terms: Terms | None = terms
        self.own_token: OwnToken | None = None  # made for this listener, removed with it
        host, port = network.parse(where)
        everywhere = host in network.EVERYWHERE
        self.sockets: list[socket.socket] = []
        places = network.resolve("" if everywhere else host, port, passive=True)
        for left in reversed(range(1 if port else TRIES)):  # one address's free port may be taken at another
            try:
                self._listen_at(places, port)
                break
            except SmbError:
                self.close()
                if not left:
                    raise
        if not self.sockets:
            raise SmbError(f"cannot listen at {where}: this host has no such address")
        self.address = f"tcp://{network.show('*' if everywhere else host, self._port())}"
        self._hosts = [str(sock.getsockname()[0]) for sock in self.sockets]

    def _listen_at(self, places: list[tuple[socket.AddressFamily, tuple[Any, ...]]], port: int) -> None:
        self.sockets = []
        try:
            for family, place in places:
                chosen = (place[0], port or self._port(), *place[2:])
                with contextlib.suppress(_NoSuchAddress):
                    self.sockets.append(self._listen(family, chosen))
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> list[str]:
        """The numeric addresses that it listens at."""
        return self._hosts

    def _port(self) -> int:
        return int(self.sockets[0].getsockname()[1]) if self.sockets else 0

    def _listen(self, family: socket.AddressFamily, place: tuple[Any, ...]) -> socket.socket:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _NoSuchAddress from error  # no IPv6 here
        try:
            network.tune(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last daemon's connections linger
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
            sock.bind(place)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6:
                raise _NoSuchAddress from error
            where = network.show(str(place[0]), place[1])
            raise SmbError(f"cannot listen at {where}: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise
        return sock

    def where(self, place: Any) -> str:
        return network.show(str(place[0]), place[1])

    def orphan(self) -> None:
        for sock in self.sockets:
            sock.close()

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            sock.close()
        if self.own_token:
            self.own_token.close()


class _NoSuchAddress(Exception):
    """This host has no address of this family."""
