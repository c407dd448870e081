"""Unix sockets that a daemon listens at: where they lie, who may use them, what happens to a stale one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from smb.errors import RequestError, SmbError, TransportError

BACKLOG = 512
PATIENCE = 10.0  # seconds to wait for another daemon that is just starting in the same folder


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


def _clear(path: Path) -> None:
    """Remove a socket that no process listens at any more."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SmbError(f"{path} exists and is no socket; it was left alone")
    if _live(str(path)):
        raise SmbError(f"a daemon already listens at {path}")
    path.unlink()


class UnixListener:
    """A listening socket of mode 0600, in a folder that is made with mode 0700 when it is missing."""

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > 107:
            raise RequestError(f"socket path {str(path)!r} is longer than the kernel's 107 bytes")
        self.path = path.absolute()
        self.address = f"unix:{self.path}"
        self._pid = os.getpid()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if not self.path.parent.exists():
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path == default_path():
                check_folder(self.path.parent)
            os.fchmod(self.socket.fileno(), 0o600)  # before bind: the file is never open to others
            with _alone(self.path.parent):
                _clear(self.path)
                self.socket.bind(str(self.path))
                self.socket.listen(BACKLOG)
            self._inode = self.path.lstat().st_ino
        except OSError as error:
            self.socket.close()
            raise SmbError(f"cannot listen at {self.path}: {error.strerror or error}") from error
        except BaseException:
            self.socket.close()
            raise

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
