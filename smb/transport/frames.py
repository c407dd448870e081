"""Frames over a stream socket, descriptors beside them."""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Callable, Sequence

from smb.protocol import HEADER, Header, unpack_header

MAX_DESCRIPTORS = 4
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


def nothing() -> None:
    """The idle of a socket without a timeout."""


def receive(
    sock: socket.socket, count: int, idle: Callable[[], None] = nothing, ready: Callable[[], None] = nothing
) -> bytes:
    """Exactly ``count`` bytes, or b"" when the peer ended the stream before the first of them.

    ``ready`` is called before each look at the socket, ``idle`` whenever its timeout or tick (network.tick)
    passes; both raise to give up. Raises ConnectionError when the stream ends in the middle.
    """
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        ready()
        try:
            more = sock.recv_into(view[got:])
        except (TimeoutError, BlockingIOError):
            idle()
            continue
        if not more:
            if got:
                raise ConnectionError(f"the stream ended after {got} of {count} bytes")
            return b""
        got += more
    return bytes(data)


def receive_by(sock: socket.socket, count: int, deadline: float) -> bytes:
    """As receive, but all of it until time.monotonic() is ``deadline``, however the bytes drip in.

    Changes the socket's timeout. Raises TimeoutError.
    """

    def hurry() -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not all of {count} bytes came in time")
        sock.settimeout(left)

    return receive(sock, count, ready=hurry)


def receive_first(
    sock: socket.socket, descriptors: list[int], idle: Callable[[], None] = nothing, limit: int = HEADER.size
) -> bytes:
    """The first bytes of a frame, at most ``limit``; descriptors are appended and are the caller's."""
    while True:
        try:
            data, ancillary, flags, _ = sock.recvmsg(limit, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            break
        except TimeoutError:
            idle()
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            descriptors.extend(numbers)
    if flags & socket.MSG_CTRUNC:
        raise OSError("descriptors were lost on the way (is `ulimit -n` too low?)")
    return data


def receive_reply(
    sock: socket.socket, limit: int, descriptors: list[int], idle: Callable[[], None]
) -> tuple[Header, bytes]:
    """One frame with its descriptors. Raises ConnectionError when the stream ends."""
    first = receive_first(sock, descriptors, idle)
    rest = receive(sock, HEADER.size - len(first), idle) if first else b""
    if len(first) + len(rest) < HEADER.size:
        raise ConnectionError("the stream ended")
    header = unpack_header(first + rest, limit)
    body = receive(sock, header.length, idle)
    if len(body) < header.length:
        raise ConnectionError("the stream ended")
    return header, body


def send(sock: socket.socket, frame: bytes, descriptors: Sequence[int] = ()) -> None:
    """All of ``frame``; the descriptors travel with its first byte."""
    sent = socket.send_fds(sock, [frame], list(descriptors)) if descriptors else 0
    if sent < len(frame):  # sending nothing fails too where the peer has its answer and is gone
        sock.sendall(memoryview(frame)[sent:])


def receive_descriptors(sock: socket.socket) -> list[int]:
    """The descriptors beside the one byte that follows a body; the caller's to close."""
    descriptors: list[int] = []

    def late() -> None:
        raise ConnectionError("the descriptors of a request did not come")

    try:
        if not receive_first(sock, descriptors, late, 1):
            raise ConnectionError("the stream ended")
    except BaseException:
        close_all(descriptors)
        raise
    return descriptors


def close_all(descriptors: Sequence[int]) -> None:
    for number in descriptors:
        os.close(number)
