"""The reader process: fetches batches ahead and writes them to the ring, until its parent goes.

It imports no torch and starts in some 50 ms. A file that kills a C library kills this process only. It
sleeps while the ring is full, and ends when the socket closes or the parent dies (seen by a pidfd, since a
fork of the parent may keep the socket open).

A net and its reader speak in datagrams: the net sends what is to be read (beside it the descriptors of the
note and of the mean image); the reader answers with the shapes; the net hands over memory for the ring and
for the counts by which both know which slots are free (counts.py). From then on the reader says only where
the batches of a slot lie and what went wrong, the net which batches to read where they are claimed
(claims.py), and who sleeps is woken. reader_server.py speaks the same with several nets at once.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Protocol

from prototxt.data.claims import CLAIM, unpack_claims
from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.counts import Counts
from prototxt.data.note import Note
from prototxt.data.ring import ALLOT, FAILED, HELLO, MORE, Ring, allot, batch_bytes
from prototxt.data.store import Stores
from prototxt.errors import DataError

MAX_MESSAGE = 1 << 16
MAX_TEXT = 4000
RING_BYTES = 1 << 30  # fewer slots than asked for when batches are huge
SMALL_RING_BYTES, SMALL_RING_SLOTS = 16 << 20, 33  # more when they are small: the reader wakes up less often
MANY_SLOTS = 8
LONGEST_SLEEP = 3600.0  # seconds; the net wakes the reader earlier when it goes on


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


class Inbox:
    """What the net says. ``parent_fd`` is a pidfd of the net's process."""

    def __init__(self, sock: socket.socket, parent_fd: int) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(parent_fd, select.POLLIN)
        self._claims: deque[int] = deque()

    @contextmanager
    def receive_with(self, descriptors: int) -> Iterator[tuple[bytes, list[int]]]:
        """The net's next message, and up to so many descriptors beside it, closed afterwards. Raises Gone."""
        message, fds = self._receive(descriptors)
        try:
            yield message, fds
        finally:
            for fd in fds:
                os.close(fd)

    def _receive(self, descriptors: int) -> tuple[bytes, list[int]]:
        ready = {fd for fd, _ in self._poll.poll()}
        if self._sock.fileno() not in ready:
            raise Gone
        message, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, descriptors)
        if not message:
            raise Gone
        return message, fds

    def wait_claim(self) -> int:
        """Sleep until it is known which batch is the net's next. Raises Gone."""
        while not self._claims:
            self.sleep(None)
        return self._claims.popleft()

    def knows_claim(self) -> bool:
        """Whether wait_claim() would not sleep. Raises Gone."""
        while not self._claims and self._poll.poll(0):
            self.sleep(None)
        return bool(self._claims)

    def sleep(self, seconds: float | None) -> None:
        """Until the net sends a message, or so long. Raises Gone."""
        if seconds is not None and not self._poll.poll(seconds * 1000):
            return
        message, _ = self._receive(0)
        if message[:1] == CLAIM:
            self._claims.extend(unpack_claims(message))


class Outbox:
    """Where batches go: the slots of the ring in turn. When none is free it sleeps until about half are.

    Waking this process costs the net some 30 us of its step. So where there are many slots it wakes up by
    itself when half should be free, at the pace that the net has had the last few times; it sleeps on when
    less than a quarter is free, and the net wakes it at three quarters. Where there are few, batches are
    large and steps long: the net wakes it at half.
    """

    def __init__(self, sock: socket.socket, inbox: Inbox, counts: Counts, slots: int) -> None:
        self._sock, self._inbox, self._counts, self._slots = sock, inbox, counts, slots
        self._written = 0
        self._layouts = [b""] * slots  # as the net knows them
        self._half = half = max(1, slots // 2)
        self._many = slots >= MANY_SLOTS
        self._least, self._most = (half // 2, half * 3 // 2) if self._many else (half, half)
        # When it fell asleep, and the net's count then: a few times, as several are given back at once.
        self._slept = deque([(monotonic(), 0)], 4)

    def wait_free(self) -> int:
        """The slot for the next batch. Raises Gone."""
        if self._counts.theirs() <= self._written - self._slots:
            self._sleep()
        return self._written % self._slots

    def _sleep(self) -> None:
        full = self._written - self._slots
        asleep = monotonic(), self._counts.wish(full + self._most)
        while self._counts.theirs() < full + self._least:
            self._inbox.sleep(self._seconds(full + self._half))
        if self._counts.wish(0) >= full + self._most:
            self._slept.clear()  # another pace than it had
        self._slept.append(asleep)

    def _seconds(self, until: int) -> float | None:
        """Until the net has given back so many batches, at its pace; None: it will send a message."""
        since, before = self._slept[0]
        given = self._counts.theirs()
        if not self._many or given <= before:
            return None
        seconds = (monotonic() - since) / (given - before) * (until - given)
        # To poll() less than none is for ever, as when the net is farther than it was a moment ago; and what
        # a net that stands still for weeks comes to is an error.
        return min(max(seconds, 0.0), LONGEST_SLEEP)

    def publish(self, layout: bytes) -> None:
        """The batch in the slot that wait_free() gave is written, and lies as this message says."""
        slot = self._written % self._slots
        if self._layouts[slot] != layout:
            self._sock.send(layout)
            self._layouts[slot] = layout
            self._counts.layouts += 1
        self._written += 1
        if self._counts.move(self._written):
            self._sock.send(MORE)


def slots_for(batch: int, wanted: int) -> int:
    """How many slots for batches of so many bytes."""
    small = min(SMALL_RING_SLOTS, SMALL_RING_BYTES // batch)
    return max(2, small, min(wanted, RING_BYTES // batch))


def fetch(config: ReaderConfig, source: Source, inbox: Inbox) -> list[Shape]:
    """The next batch of this worker, whichever that is; its shapes. Raises Gone."""
    if config.claimed:
        source.seek(inbox.wait_claim() * config.batch_size)
    return source.advance()


def pass_on(
    config: ReaderConfig,
    source: Source,
    inbox: Inbox,
    tops: list[memoryview[float]],
    publish: Callable[[], None],
) -> list[Shape]:
    """Write a batch, publish it, and fetch the next: its shapes. Raises Gone.

    While threads write, the next is fetched if it is known, so that they have its images to decode when they
    come to the end of this one's. An error in it comes after this batch all the same.
    """
    finish = source.write(tops)

    def send() -> None:
        if finish is not None:
            finish()
        publish()

    if finish is None or (config.claimed and not inbox.knows_claim()):
        send()
        return fetch(config, source, inbox)
    try:
        shapes = fetch(config, source, inbox)
    except Gone:
        raise
    except Exception:
        send()
        raise
    send()
    return shapes


def serve(config: ReaderConfig, source: Source, sock: socket.socket, inbox: Inbox) -> None:
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
    sock.send(HELLO + json.dumps(hello).encode())
    with inbox.receive_with(2) as (message, fds):
        if message != ALLOT or len(fds) != 2:
            raise DataError("the net handed over no memory")
        ring = Ring(fds[0], slots)
        outbox = Outbox(sock, inbox, Counts(fds[1], "reader"), slots)
        if config.claimed:  # what was fetched for its shapes is nobody's
            shapes = fetch(config, source, inbox)
        while True:
            layout, tops = ring.slot(outbox.wait_free(), shapes)
            shapes = pass_on(config, source, inbox, tops, partial(outbox.publish, layout))


def answer(sock: socket.socket, parent_fd: int, stores: Stores) -> None:
    """Do what the net at the other end of ``sock`` asks for; returns when it is gone or has got an error."""
    try:
        inbox = Inbox(sock, parent_fd)
        with inbox.receive_with(2) as (wanted, fds):
            if not fds:
                raise DataError("the net handed over no memory for notes")
            config = ReaderConfig.from_json(wanted)
            mean = os.pread(fds[1], os.fstat(fds[1]).st_size, 0) if len(fds) > 1 else None
            with closing(open_source(config, mean, stores, Note(fds[0]))) as source:
                serve(config, source, sock, inbox)
    except (BrokenPipeError, ConnectionResetError, Gone):
        pass  # perhaps while a message was on its way
    except Exception as error:  # whatever it is, the net must hear of it
        text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            sock.send(FAILED + text.encode(errors="replace")[:MAX_TEXT])


def give_way() -> None:
    """Let a wake-up of this process interrupt nobody: the net goes on with its step.

    The reader gets its share of a core all the same, a moment later; batches lie ready meanwhile.
    """
    with suppress(OSError):  # some containers refuse it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(sock_fd: int, parent_fd: int) -> None:
    """Serve the parent at the other end of ``sock_fd``; never returns."""
    give_way()
    answer(socket.socket(fileno=sock_fd), parent_fd, Stores())
    os._exit(0)  # nothing to tidy up: the net holds the memory
