"""Starting and ending reader processes: a net's own, or one that the workers of a machine share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import prototxt
from prototxt.data.reader_server import peer
from prototxt.errors import DataError

# -I -S: neither the user's folder nor site-packages' start-up files get a say; the paths come as arguments.
_BOOT = (
    "import sys; module, count = sys.argv[1], int(sys.argv[2]); numbers = sys.argv[3 : 3 + count]; "
    "sys.path += sys.argv[3 + count :]; "
    "from importlib import import_module; import_module(module).main(*map(int, numbers))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_RETRY_SECONDS = 0.02
_BACKLOG = 1024
STOP_SECONDS = 2.0
LEAVE_SECONDS = 0.1  # for a shared reader to end; others may still need it
_DEATHS = {
    signal.SIGBUS: "is it truncated, or its disk failing?",
    signal.SIGSEGV: "is it corrupt?",
    signal.SIGKILL: "out of memory, or killed by hand",
}


def memory(name: str, content: bytes = b"") -> int:
    """The descriptor of anonymous memory with this content."""
    fd = os.memfd_create(name)
    if content:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(content)
    return fd


def _spawn(module: str, *fds: int) -> subprocess.Popen[bytes]:
    """``module.main(*fds)`` in a session of its own, so Ctrl-C reaches the trainer alone."""
    paths = [str(Path(prototxt.__file__).parent.parent), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, module, str(len(fds)), *map(str, fds), *paths],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=fds,
        env={**os.environ, **_ONE_THREAD},
        start_new_session=True,
    )


@dataclass
class ReaderProcess:
    """The net's end of a reader.

    process  None where another worker has started it
    """

    sock: socket.socket
    process: subprocess.Popen[bytes] | None
    shared: bool = False

    def death(self, source: str) -> str:
        """What became of the reader of ``source``, once it is gone."""
        whose = "the shared reader" if self.shared else "the reader"
        if self.process is None:
            return f"{whose} of {source} is gone; the worker that started it says why"
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        code = self.process.returncode
        if code is None or code >= 0:
            return f"{whose} of {source} ended unexpectedly (exit code {code})"
        why = _DEATHS.get(signal.Signals(-code))
        return f"reading {source} ended in {signal.Signals(-code).name}{f' ({why})' if why else ''}"


def start_own() -> ReaderProcess:
    """A reader for this net alone."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    me = os.pidfd_open(os.getpid())
    try:
        with theirs:
            return ReaderProcess(mine, _spawn("prototxt.data.reader", theirs.fileno(), me))
    finally:
        os.close(me)


def join_shared(address: str, timeout: float) -> ReaderProcess:
    """The machine's reader at ``address``, started by whoever comes first.

    Raises DataError when it is another user's, or cannot be reached in time.
    """
    end = time.monotonic() + timeout
    process: subprocess.Popen[bytes] | None = None
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(address)
        except ConnectionRefusedError:
            sock.close()
            process = process or _start_shared(address)
        else:
            if peer(sock)[1] == os.getuid():
                return ReaderProcess(sock, process, shared=True)
            sock.close()
            raise DataError(f"the shared reader's socket {address[1:]} is another user's")
        if time.monotonic() > end:
            raise DataError(f"no shared reader answers at {address[1:]} for {timeout:g} s")
        if process is None:  # another worker has the address and does not listen yet
            time.sleep(_RETRY_SECONDS)


def _start_shared(address: str) -> subprocess.Popen[bytes] | None:
    """The process that serves ``address``; None when somebody else has taken it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(address)
        except OSError:
            return None
        listening.listen(_BACKLOG)
        return _spawn("prototxt.data.reader_server", listening.fileno())


def stop(owner: int, reader: ReaderProcess, fds: list[int]) -> None:
    """Take leave of the reader, end it when it is the net's own, and reap it.

    In a fork of the owner only the descriptors go.
    """
    if os.getpid() == owner:
        with suppress(OSError):
            reader.sock.shutdown(socket.SHUT_RDWR)  # reaches the reader whatever forks hold the socket too
    reader.sock.close()
    for fd in fds:
        os.close(fd)
    process = reader.process
    if os.getpid() != owner or process is None:
        return
    try:
        process.wait(LEAVE_SECONDS if reader.shared else STOP_SECONDS)
    except subprocess.TimeoutExpired:
        if not reader.shared:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel; init reaps it then
                process.wait(STOP_SECONDS)
