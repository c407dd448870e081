"""The net's side of a reader: starts the process, takes its batches, turns its death into an error."""

from __future__ import annotations

import json
import logging
import mmap
import os
import select
import socket
import weakref
from contextlib import suppress
from math import prod
from time import perf_counter
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

from prototxt.data.claims import Claiming, Claims, pack_claims
from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.counts import COUNTS_BYTES, Counts
from prototxt.data.note import read_note
from prototxt.data.process import ReaderProcess, join_shared, memory, start_own, stop
from prototxt.data.ring import ALLOT, BATCH, FAILED, HELLO, MORE, WAKE, unpack_batch
from prototxt.data.share import Share
from prototxt.errors import DataError

log = logging.getLogger(__name__)

_MAX_MESSAGE = 1 << 16
_MAX_VIEWS = 256


class Reader:
    """Batches of a data source, read ahead by a process of its own.

    take() gives the next batch as tensors that lie in the memory the reader wrote: they are the caller's
    until the next take(), then the reader's again. For one thread, of the process that made it. Every failure
    is a DataError that begins with ``place``; after one, each take() raises it again.

    timeout  seconds that a batch may take (a stalled file system must not hang a training for ever)
    share    read through the process that the machine's workers share; the batches are the same
    claims   says which batches are this worker's, for a config that is ``claimed``
    pid      of the reader process;  waited: seconds in take() so far
    shapes   of the first batch's tops;  batches: taken so far
    """

    def __init__(
        self,
        config: ReaderConfig,
        *,
        place: str,
        mean_image: bytes | None = None,
        timeout: float = 300.0,
        share: Share | None = None,
        claims: Claims | None = None,
    ) -> None:
        self._place = place
        self._source = os.path.abspath(config.source)
        self._timeout = timeout
        self._owner = os.getpid()
        self._failure = ""
        self._views: dict[bytes, tuple[int, tuple[Tensor, ...]]] = {}
        self._taken = self._ready = 0  # batches from the ring; how many are known to have been written
        self._layouts = 0  # messages that said where a batch lies
        self._claiming = Claiming(claims) if claims else None
        self.batches = config.start
        self.waited = 0.0
        self._note = memory("prototxt-note")
        self._reader = self._start(config, share)
        self._sock = self._reader.sock
        self._fds = [self._note]
        self._stop = weakref.finalize(self, stop, self._owner, self._reader, self._fds)
        self._pidfd, self.pid = -1, 0  # of a reader that this process has started
        if self._reader.process is not None:
            self.pid = self._reader.process.pid
            self._pidfd = os.pidfd_open(self._reader.process.pid)
            self._fds.append(self._pidfd)
        self._sock.setblocking(False)
        self._ask(config, mean_image)
        hello = json.loads(self._wait(HELLO)[1:])
        self.pid = hello["pid"]
        self.shapes: list[Shape] = [tuple(shape) for shape in hello["shapes"]]
        self._slots: list[tuple[Tensor, ...]] = [()] * hello["slots"]
        self._at_once = max(1, hello["slots"] // 8)
        self._due = 1  # the count at which batches are given back: several at once, for that takes some 8 us
        for note in hello["notes"]:
            log.warning("%s: %s", place, note)
        self._ring, self._counts = self._allot(config, hello["bytes"], share)

    def _start(self, config: ReaderConfig, share: Share | None) -> ReaderProcess:
        if share is None:
            return start_own()
        try:
            return join_shared(share.address(config.kind, config.source), self._timeout)
        except DataError as error:
            os.close(self._note)
            raise DataError(f"{self._place}: {error}") from error

    def _ask(self, config: ReaderConfig, mean_image: bytes | None) -> None:
        """Say what is to be read; the note and the mean image go beside it."""
        mean = [] if mean_image is None else [memory("prototxt-mean", mean_image)]
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # a dead reader is noticed at the next recv
                socket.send_fds(self._sock, [config.to_json()], [self._note, *mean])
        finally:
            for fd in mean:
                os.close(fd)

    def _allot(self, config: ReaderConfig, size: int, share: Share | None) -> tuple[int, Counts]:
        """The ring's memory: the program's where the reader is shared, else our own, which grows; counts."""
        if share is None:
            ring = memory("prototxt-ring")
        else:
            ring = os.dup(share.memory(f"{config.kind}/{self._source}/{config.rank}", size))
        self._fds.append(ring)
        counts = memory("prototxt-counts", bytes(COUNTS_BYTES))
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._sock, [ALLOT], [ring, counts])
            return ring, Counts(counts, "net")
        finally:
            os.close(counts)

    def take(self) -> tuple[Tensor, ...]:
        """The next batch, one float32 tensor a top; the one before is given back."""
        start = perf_counter()
        if self._failure or os.getpid() != self._owner:
            raise self._unusable()
        if self._taken >= self._due:
            self._give_back()
        if self._claiming is not None and (numbers := self._claiming.take()):
            self._send(pack_claims(numbers))
        if self._taken >= self._ready:
            self._look()
        tensors = self._slots[self._taken % len(self._slots)]
        self._taken += 1
        self.batches += 1
        self.waited += perf_counter() - start
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

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead reader is noticed at the next recv
            self._sock.send(message)

    def _give_back(self) -> None:
        """All that were taken, and wake the reader if it waits for them."""
        if self._counts.move(self._taken):
            self._send(WAKE)
        self._due = self._taken + self._at_once

    def _look(self) -> None:
        """See what the reader has written; wait until there is a batch, and know where all of them lie."""
        self._ready = self._counts.theirs()
        if self._taken >= self._ready:
            self._give_back()  # the reader may sleep
            self._ready = self._counts.wish(self._taken + 1)
        while self._taken >= self._ready:
            self._wait(MORE)
            self._ready = self._counts.theirs()
        if self._ready > self._taken + len(self._slots):  # else old batches would pass for new ones
            self._fail(
                f"reader process {self.pid} says that {self._ready - self._taken} batches lie ready,"
                f" there is room for {len(self._slots)} (its memory is corrupt)"
            )
        while self._layouts < self._counts.layouts:
            self._hear()

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

    def _wait(self, kind: bytes) -> bytes:
        """The next message of this kind; close and raise what happened, when none comes."""
        while (message := self._hear())[:1] != kind:
            pass
        return message

    def _hear(self) -> bytes:
        """The next message, where it is one that says where a batch lies it is noted; else as _wait()."""
        message = self._receive()
        if message[:1] == BATCH:
            slot, tensors = self._views.get(message) or self._map(message)
            self._slots[slot] = tensors
            self._layouts += 1
        elif message[:1] == FAILED:
            self._fail(message[1:].decode(errors="replace"))
        elif not message:
            self._fail(self._death())
        return message

    def _receive(self) -> bytes:
        """The next message; b"" when the reader is dead (seen by its pidfd: a fork may hold its socket).

        One that ended before it had read all of ours shows as an error once; what it said lies behind that.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(self._timeout * 1000):
            self._fail(
                f"no batch for {self._timeout:g} s; reader process {self.pid} is alive, "
                f"so the file system of {self._source} may be stalled"
            )
        for _ in range(2):
            with suppress(BlockingIOError, ConnectionResetError):
                return self._sock.recv(_MAX_MESSAGE)
        return b""

    def _death(self) -> str:
        files = read_note(self._note)
        return self._reader.death(self._source) + (f", at {files}" if files else "")

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
