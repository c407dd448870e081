"""The reader process: fetches batches ahead and writes them to the ring, until its parent goes.

It imports no torch and starts in some 50 ms. A file that kills a C library kills this process only. It
sleeps while the ring is full, and ends when the socket closes or the parent dies (seen by a pidfd, since a
fork of the parent may keep the socket open).
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections import deque
from contextlib import suppress
from typing import Protocol

from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.ring import FAILED, HELLO, Ring, batch_bytes
from prototxt.data.store import Stores
from prototxt.errors import DataError

MAX_MESSAGE = 1 << 16
MAX_TEXT = 4000
RING_BYTES = 1 << 30  # fewer slots than asked for when batches are huge
SMALL_RING_BYTES, SMALL_RING_SLOTS = 4 << 20, 9  # more when they are small: the reader is woken less often


class Source(Protocol):
    """Batches without end. advance() first, then write() into float views of the shapes it gave."""

    notes: list[str]

    def advance(self) -> list[Shape]: ...
    def write(self, tops: list[memoryview[float]]) -> None: ...


def open_source(config: ReaderConfig, mean_image: bytes | None, stores: Stores) -> Source:
    """Raises DataError when the source cannot be read."""
    if config.kind in ("lmdb", "leveldb"):
        from prototxt.data.datum_source import DatumSource

        return DatumSource(config, stores.open(config.kind, config.source), mean_image)
    if config.kind == "images":
        from prototxt.data.image_source import ImageSource

        return ImageSource(config, mean_image)
    if config.kind == "windows":
        from prototxt.data.window_source import WindowSource

        return WindowSource(config, mean_image)
    from prototxt.data.hdf5_source import Hdf5Source

    return Hdf5Source(config)


class Outbox:
    """The socket to the net, and the slots that are free."""

    def __init__(self, sock: socket.socket, parent_fd: int) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(parent_fd, select.POLLIN)
        self.free: deque[int] = deque()

    def send(self, message: bytes) -> None:
        self._sock.send(message)

    def wait_free(self) -> bool:
        """Sleep until a slot is free; False when the net is gone."""
        while not self.free:
            ready = {fd for fd, _ in self._poll.poll()}
            if self._sock.fileno() not in ready:
                return False
            slots = self._sock.recv(MAX_MESSAGE)
            if not slots:
                return False
            self.free.extend(slots)
        return True


def slots_for(batch: int, wanted: int) -> int:
    """How many slots for batches of so many bytes."""
    small = min(SMALL_RING_SLOTS, SMALL_RING_BYTES // batch)
    return max(2, small, min(wanted, RING_BYTES // batch))


def serve(config: ReaderConfig, source: Source, ring_fd: int, outbox: Outbox) -> None:
    """Batches into free slots until the net is gone."""
    shapes = source.advance()
    slots = slots_for(batch_bytes(shapes), config.slots)
    ring = Ring(ring_fd, slots)
    outbox.free.extend(range(slots))
    hello = {"shapes": shapes, "slots": slots, "notes": source.notes}
    outbox.send(HELLO + json.dumps(hello).encode())
    while outbox.wait_free():
        slot = outbox.free.popleft()
        message, tops = ring.slot(slot, shapes)
        source.write(tops)
        outbox.send(message)
        shapes = source.advance()


def read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def main(sock_fd: int, ring_fd: int, parent_fd: int, mean_fd: int) -> None:
    """Serve the parent at the other end of ``sock_fd``; never returns. mean_fd is -1 without a mean image."""
    sock = socket.socket(fileno=sock_fd)
    try:
        config = ReaderConfig.from_json(sock.recv(MAX_MESSAGE))
        mean = read_all(mean_fd) if mean_fd >= 0 else None
        outbox = Outbox(sock, parent_fd)
        serve(config, open_source(config, mean, Stores()), ring_fd, outbox)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the net went while a message was on its way
    except Exception as error:  # whatever it is, the net must hear of it
        text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            sock.send(FAILED + text.encode()[:MAX_TEXT])
    os._exit(0)  # nothing to tidy up: the net holds the memory


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
