"""The net's side of a reader: starts the process, takes its batches, turns its death into an error."""

from __future__ import annotations

import json
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

import prototxt
from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.ring import BATCH, FAILED, HELLO, unpack_batch
from prototxt.errors import DataError

log = logging.getLogger(__name__)

# -I -S: neither the user's folder nor site-packages' start-up files get a say; the paths come as arguments.
_BOOT = (
    "import sys; sys.path += sys.argv[5:]; "
    "from prototxt.data.reader import main; main(*map(int, sys.argv[1:5]))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_MAX_MESSAGE = 1 << 16
_MAX_VIEWS = 256
_STOP_SECONDS = 2.0
_DEATHS = {
    signal.SIGBUS: "is it truncated, or its disk failing?",
    signal.SIGSEGV: "is it corrupt?",
    signal.SIGKILL: "out of memory, or killed by hand",
}


def _memory(name: str, content: bytes = b"") -> int:
    fd = os.memfd_create(name)
    if content:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(content)
    return fd


def _spawn(sock: socket.socket, ring: int, mean_image: bytes | None) -> subprocess.Popen[bytes]:
    """A reader at the other end of ``sock``; in a session of its own, so Ctrl-C reaches the trainer alone."""
    me = os.pidfd_open(os.getpid())
    mean = -1 if mean_image is None else _memory("prototxt-mean", mean_image)
    fds = [sock.fileno(), ring, me, mean]
    paths = [str(Path(prototxt.__file__).parent.parent), *filter(None, sys.path)]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, *map(str, fds), *paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[fd for fd in fds if fd >= 0],
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
    finally:
        for fd in fds[2:]:
            if fd >= 0:
                os.close(fd)


def _stop(owner: int, sock: socket.socket, process: subprocess.Popen[bytes], fds: tuple[int, ...]) -> None:
    """End the reader and reap it. In a fork of the owner only the descriptors go."""
    if os.getpid() == owner:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # reaches the reader whatever forks hold the socket too
    sock.close()
    for fd in fds:
        os.close(fd)
    if os.getpid() != owner:
        return
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel; init reaps it then
            process.wait(_STOP_SECONDS)


class Reader:
    """Batches of a data source, read ahead by a process of its own.

    take() gives the next batch as tensors that lie in the memory the reader wrote: they are the caller's
    until the next take(), then the reader's again. For one thread, of the process that made it. Every failure
    is a DataError that begins with ``place``; after one, each take() raises it again.

    timeout  seconds that a batch may take (a stalled file system must not hang a training for ever)
    shapes   of the first batch's tops;  batches: taken so far
    """

    def __init__(
        self, config: ReaderConfig, *, place: str, mean_image: bytes | None = None, timeout: float = 300.0
    ) -> None:
        self._place = place
        self._source = os.path.abspath(config.source)
        self._timeout = timeout
        self._owner = os.getpid()
        self._failure = ""
        self._views: dict[bytes, tuple[int, tuple[Tensor, ...]]] = {}
        self._held = -1  # the slot in the caller's hands
        self._done = bytearray()  # slots to give back, half a ring at once: that wakes the reader less often
        self.batches = config.start
        self._ring = _memory("prototxt-ring")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _spawn(theirs, self._ring, mean_image)
        self._pidfd = os.pidfd_open(self._process.pid)
        fds = (self._ring, self._pidfd)
        self._stop = weakref.finalize(self, _stop, self._owner, self._sock, self._process, fds)
        self._sock.setblocking(False)
        self._sock.send(config.to_json())
        hello = json.loads(self._wait(HELLO)[1:])
        self.shapes: list[Shape] = [tuple(shape) for shape in hello["shapes"]]
        self._give_back = max(1, hello["slots"] // 2)
        for note in hello["notes"]:
            log.warning("%s: %s", place, note)

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self) -> tuple[Tensor, ...]:
        """The next batch, one float32 tensor a top; the one before is given back."""
        if self._failure or os.getpid() != self._owner:
            raise self._unusable()
        if self._held >= 0:
            self._done.append(self._held)
            self._held = -1
            if len(self._done) >= self._give_back:
                self._send_back()
        try:
            message = self._sock.recv(_MAX_MESSAGE)
        except BlockingIOError:
            message = b""
        if message[:1] != BATCH:
            message = self._wait(BATCH, message)
        self._held, tensors = self._views.get(message) or self._map(message)
        self.batches += 1
        return tensors

    def close(self) -> None:
        """End the reader; tensors already taken stay valid. Twice is fine."""
        self._failure = self._failure or f"{self._place}: this reader is closed"
        self._stop()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send_back(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead reader is noticed at the next recv
            self._sock.send(self._done)
        self._done.clear()

    def _map(self, message: bytes) -> tuple[int, tuple[Tensor, ...]]:
        """Tensors over the ring for a message that was not seen before."""
        slot, places = unpack_batch(message)
        memory = mmap.mmap(self._ring, os.fstat(self._ring).st_size)
        tensors = tuple(
            torch.frombuffer(memory, dtype=torch.float32, count=prod(shape), offset=offset).view(shape)
            for offset, shape in places
        )
        if len(self._views) >= _MAX_VIEWS:  # shapes that never come back must not pile up
            self._views.clear()
        self._views[message] = slot, tensors
        return slot, tensors

    def _wait(self, kind: bytes, message: bytes = b"") -> bytes:
        """The next message, which must be of this kind; else close and raise what happened."""
        if self._done:
            self._send_back()
        if not message:
            message = self._receive()
        if message[:1] == kind:
            return message
        if message[:1] == FAILED:
            self._fail(message[1:].decode(errors="replace"))
        self._fail(self._death())

    def _receive(self) -> bytes:
        """The next message; b"" when the reader is dead (seen by its pidfd: a fork may hold its socket)."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(self._timeout * 1000):
            self._fail(
                f"no batch for {self._timeout:g} s; reader process {self._process.pid} is alive, "
                f"so the file system of {self._source} may be stalled"
            )
        with suppress(BlockingIOError, ConnectionResetError):
            return self._sock.recv(_MAX_MESSAGE)
        return b""

    def _death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        code = self._process.returncode
        if code is None or code >= 0:
            return f"the reader of {self._source} ended unexpectedly (exit code {code})"
        why = _DEATHS.get(signal.Signals(-code))
        return f"reading {self._source} ended in {signal.Signals(-code).name}{f' ({why})' if why else ''}"

    def _fail(self, text: str) -> NoReturn:
        self._failure = f"{self._place}: {text}"
        self._stop()
        raise DataError(self._failure)

    def _unusable(self) -> DataError:
        if self._failure:
            return DataError(self._failure)
        return DataError(
            f"{self._place}: this reader belongs to process {self._owner}, not to its fork {os.getpid()}"
        )
