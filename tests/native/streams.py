"""Both ends of streams for tests: over socket pairs, and over a network of bytes that can be cut anywhere."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from smb import _native, protocol
from smb.errors import SmbError
from smb.segment import CHUNK_BYTES, Mapping
from smb.transport.stream import Stream

F32 = npt.NDArray[np.float32]
CHUNK = CHUNK_BYTES // 4  # float32 elements of a chunk
TIMEOUT = 10.0
NUMBER = 7  # of the segment in its table
FOREVER = 1 << 62
CODES = {kind: code for code, kind in protocol.ERRORS.items()}


class Daemon:
    """A table with one segment, and what its streams came to."""

    def __init__(self, mapping: Mapping, writable: bool = True, **options: Any) -> None:
        self.table = _native.Table()
        self.table.add(NUMBER, mapping, writable)
        self.stream = _native.Stream(self.table, **options)
        self.ended: list[object] = []

    @contextlib.contextmanager
    def served(self, stream: _native.Stream | None = None) -> Iterator[socket.socket]:
        """The client's end of a connection that a thread serves until the block ends."""
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(theirs, stream or self.stream))
        thread.start()
        try:
            yield ours
        finally:
            ours.close()
            thread.join()
            theirs.close()

    def _serve(self, sock: socket.socket, stream: _native.Stream) -> None:
        try:
            self.ended.append(stream.serve(sock.fileno(), TIMEOUT))
        except (OSError, SmbError) as error:
            self.ended.append(error)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Cut(ConnectionError):
    """The network lost the rest."""


class Network:
    """Moves a transfer's bytes to a stream's handle() and back, until so many went out or came in."""

    def __init__(self, stream: _native.Stream, out_limit: int = FOREVER, in_limit: int = FOREVER) -> None:
        self.stream = stream
        self.out_left, self.in_left = out_limit, in_limit
        self._to_daemon, self._to_client = bytearray(), bytearray()

    def run(self, transfer: Any) -> int:
        """Raises Cut. Everything that the client may send is sent before a reply is delivered."""
        native: _native.Transfer = transfer._native
        native.restart()
        while not native.finished:
            data = bytes(native.outgoing())
            if data:
                self._send(native, data)
            elif self._to_client:
                self._deliver(native)
            elif not native.finished:
                raise AssertionError("neither end has anything to say")
        return native.outcome()

    def _send(self, native: _native.Transfer, data: bytes) -> None:
        data = data[: self.out_left]
        if not data:
            raise Cut("outbound")
        self.out_left -= len(data)
        self._to_daemon += data
        native.sent(len(data))
        while len(self._to_daemon) >= 20:
            header = bytes(self._to_daemon[:20])
            length = struct.unpack("<I", header[16:])[0]
            if len(self._to_daemon) < 20 + length:
                return
            body = bytes(self._to_daemon[20 : 20 + length])
            del self._to_daemon[: 20 + length]
            self._to_client += self.stream.handle(header, body)

    def _deliver(self, native: _native.Transfer) -> None:
        room = native.incoming()
        count = min(len(room), len(self._to_client), self.in_left)
        if not count:
            raise Cut("inbound")
        room[:count] = self._to_client[:count]
        room.release()
        del self._to_client[:count]
        self.in_left -= count
        native.received(count)


HEADS = {18: "<QQQ", 19: "<QQQQQB", 20: "<QQQQQBBd", 21: "<QQQQQBBd", 22: "<QQQQQd", 23: "<Q", 25: "<Q"}


def frame(
    operation: int, *fields: float, elements: bytes = b"", number: int = 1, length: int | None = None
) -> bytes:
    """A request frame; the header's length is as given or the right one."""
    body = struct.pack(HEADS[operation], *fields) + elements
    size = len(body) if length is None else length
    return protocol.HEADER.pack(protocol.MAGIC, operation, 0, number, size) + body


def ask(stream: _native.Stream, request: bytes) -> tuple[int, bytes]:
    """Status and body of handle()'s reply to a frame."""
    reply = stream.handle(request[:20], request[20:])
    header = protocol.unpack_header(reply[:20], protocol.MAX_REPLY)
    assert header.length == len(reply) - 20
    return header.status, reply[20:]


def receive(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next reply."""
    header = protocol.unpack_header(_exactly(sock, 20), protocol.MAX_REPLY)
    return header.status, _exactly(sock, header.length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, "the daemon ended the stream"
        data += more
    return data


def piece(sequence: int, acknowledged: int = 0, last: int = 1, value: float = 1.0, offset: int = 0) -> bytes:
    """The frame of an accumulate of one element."""
    elements = np.float32(value).tobytes()
    return frame(20, NUMBER, sequence, acknowledged, offset, 1, last, 0, 1.0, elements=elements)


def noise(count: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def read_all(mapping: Mapping) -> Any:
    out = np.empty(mapping.count, mapping.dtype)
    mapping.read(out)
    return out


def client() -> Stream:
    return Stream("the daemon under test")
