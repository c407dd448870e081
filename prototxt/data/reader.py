"""The reader process: fetches batches ahead and writes them to the ring, until its parent goes.

It imports no torch and starts in some 50 ms. A file that kills a C library kills this process only. It
sleeps while the ring is full, and ends when the socket closes or the parent dies (seen by a pidfd, since a
fork of the parent may keep the socket open).

A net and its reader speak in datagrams: the net sends what is to be read (beside it the descriptors of the
note and of the mean image); the reader answers with the shapes; the net hands over memory for the ring; then
slots go to and fro, and with claims.py the numbers of the batches to read. reader_server.py speaks the
same with several nets at once.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Protocol

from prototxt.data.claims import CLAIM, unpack_claims
from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.note import Note
from prototxt.data.ring import ALLOT, FAILED, HELLO, Ring, allot, batch_bytes
from prototxt.data.store import Stores
from prototxt.errors import DataError

MAX_MESSAGE = 1 << 16
MAX_TEXT = 4000
RING_BYTES = 1 << 30  # fewer slots than asked for when batches are huge
SMALL_RING_BYTES, SMALL_RING_SLOTS = 16 << 20, 33  # more when they are small: fewer steps wake the reader


class Gone(Exception):
    """The net is not there any more."""


class Source(Protocol):
    """Batches without end. advance() first, then write() into float views of the shapes it gave.

    write() may leave the work to threads; then it returns what waits for them, and advance() may come before
    that is called. close() ends the threads.

    seek(record) before advance(): let the batch begin with this record of the endless sequence, which lies
    behind all that were written.
    """

    notes: list[str]

    def seek(self, record: int) -> None: ...
    def advance(self) -> list[Shape]: ...
    def write(self, tops: list[memoryview[float]]) -> Callable[[], None] | None: ...
    def close(self) -> None: ...


def open_source(config: ReaderConfig, mean_image: bytes | None, stores: Stores, note: Note) -> Source:
    """Raises DataError when the source cannot be read."""
    if config.kind in ("lmdb", "leveldb"):
        from prototxt.data.datum_source import DatumSource

        return DatumSource(config, stores.open(config.kind, config.source), mean_image)
    if config.kind == "images":
        from prototxt.data.image_source import ImageSource

        return ImageSource(config, mean_image, note)
    if config.kind == "windows":
        from prototxt.data.window_source import WindowSource

        return WindowSource(config, mean_image, note)
    from prototxt.data.hdf5_source import Hdf5Source

    return Hdf5Source(config, note)


class Outbox:
    """The socket to the net, and the slots that are free. ``parent_fd`` is a pidfd of the net's process."""

    def __init__(self, sock: socket.socket, parent_fd: int) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(parent_fd, select.POLLIN)
        self.free: deque[int] = deque()
        self._claims: deque[int] = deque()

    def send(self, message: bytes) -> None:
        self._sock.send(message)

    def receive(self, descriptors: int = 0) -> tuple[bytes, list[int]]:
        """The net's next message, and the descriptors beside it. Raises Gone."""
        ready = {fd for fd, _ in self._poll.poll()}
        if self._sock.fileno() not in ready:
            raise Gone
        message, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, descriptors)
        if not message:
            raise Gone
        return message, fds

    def wait_free(self) -> None:
        """Sleep until a slot is free. Raises Gone."""
        while not self.free:
            self._sort()

    def wait_claim(self) -> int:
        """Sleep until it is known which batch is the net's next. Raises Gone."""
        while not self._claims:
            self._sort()
        return self._claims.popleft()

    def knows_claim(self) -> bool:
        """Whether wait_claim() would not sleep. Raises Gone."""
        while not self._claims and self._poll.poll(0):
            self._sort()
        return bool(self._claims)

    def _sort(self) -> None:
        message, _ = self.receive()
        if message[:1] == CLAIM:
            self._claims.extend(unpack_claims(message))
        else:
            self.free.extend(message)


def slots_for(batch: int, wanted: int) -> int:
    """How many slots for batches of so many bytes."""
    small = min(SMALL_RING_SLOTS, SMALL_RING_BYTES // batch)
    return max(2, small, min(wanted, RING_BYTES // batch))


def fetch(config: ReaderConfig, source: Source, outbox: Outbox) -> list[Shape]:
    """The next batch of this worker, whichever that is; its shapes. Raises Gone."""
    if config.claimed:
        source.seek(outbox.wait_claim() * config.batch_size)
    return source.advance()


def pass_on(
    config: ReaderConfig, source: Source, outbox: Outbox, announcement: bytes, tops: list[memoryview[float]]
) -> list[Shape]:
    """Write a batch, tell the net, and fetch the next: its shapes. Raises Gone.

    While threads write, the next is fetched if it is known, so that they have its images to decode when they
    come to the end of this one's. An error in it comes after this batch all the same.
    """
    finish = source.write(tops)

    def send() -> None:
        if finish is not None:
            finish()
        outbox.send(announcement)

    if finish is None or (config.claimed and not outbox.knows_claim()):
        send()
        return fetch(config, source, outbox)
    try:
        shapes = fetch(config, source, outbox)
    except Gone:
        raise
    except Exception:
        send()
        raise
    send()
    return shapes


def serve(config: ReaderConfig, source: Source, outbox: Outbox) -> None:
    """Batches into free slots until the net is gone, which raises Gone."""
    shapes = source.advance()
    slots = slots_for(batch_bytes(shapes), config.slots)
    hello = {
        "shapes": shapes,
        "slots": slots,
        "bytes": slots * allot(batch_bytes(shapes)),
        "notes": source.notes,
        "pid": os.getpid(),
    }
    outbox.send(HELLO + json.dumps(hello).encode())
    message, fds = outbox.receive(1)
    if message != ALLOT or len(fds) != 1:
        raise DataError("the net handed over no memory")
    ring = Ring(fds[0], slots)
    outbox.free.extend(range(slots))
    try:
        if config.claimed:  # what was fetched for its shapes is nobody's
            shapes = fetch(config, source, outbox)
        while True:
            outbox.wait_free()
            slot = outbox.free.popleft()
            announcement, tops = ring.slot(slot, shapes)
            shapes = pass_on(config, source, outbox, announcement, tops)
    finally:
        os.close(fds[0])


def answer(sock: socket.socket, parent_fd: int, stores: Stores) -> None:
    """Do what the net at the other end of ``sock`` asks for; returns when it is gone or has got an error."""
    try:
        outbox = Outbox(sock, parent_fd)
        wanted, fds = outbox.receive(2)
        config = ReaderConfig.from_json(wanted)
        mean = os.pread(fds[1], os.fstat(fds[1]).st_size, 0) if len(fds) > 1 else None
        with closing(open_source(config, mean, stores, Note(fds[0]))) as source:
            serve(config, source, outbox)
    except (BrokenPipeError, ConnectionResetError, Gone):
        pass  # perhaps while a message was on its way
    except Exception as error:  # whatever it is, the net must hear of it
        text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            sock.send(FAILED + text.encode(errors="replace")[:MAX_TEXT])


def give_way() -> None:
    """Let a wake-up of this process interrupt nobody: the net that gives a slot back goes on with its step.

    The reader gets its share of a core all the same, a moment later; batches lie ready meanwhile.
    """
    with suppress(OSError):  # some containers refuse it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(sock_fd: int, parent_fd: int) -> None:
    """Serve the parent at the other end of ``sock_fd``; never returns."""
    give_way()
    answer(socket.socket(fileno=sock_fd), parent_fd, Stores())
    os._exit(0)  # nothing to tidy up: the net holds the memory
