"""The client's side of data operations over a socket: what one thread reads and updates, resumable.

A Stream belongs to one client thread and outlives its connections; a Transfer is one operation of the user
on it. Plain sockets are driven by one native call without the GIL, both directions at once; TLS sockets by a
loop here over the same native state.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from smb import _native
from smb.errors import NotSupported, RequestError, TypeMismatch

WIRES = ("float32", "bfloat16", "float16", "int8")  # by their codes in a frame
WINDOW = 8  # pieces under way at most; the daemon keeps that many replies
MOVED = -1  # in place of events to wait for: bytes moved
RECORD = 1 << 14  # bytes that TLS gives at a time


class WireStats(NamedTuple):
    """What one segment's transfers moved, and what quantising cost, at this end.

    Bytes are those of elements, without heads. squared_error is the sum of (v - Q(v))^2 over all increments v
    that were quantised here, squared_sum the sum of v^2.
    """

    bytes_sent: int
    bytes_received: int
    squared_error: float
    squared_sum: float


class Transfer:
    """One operation of the user. After an OSError of run() it may be run again on a new connection.

    What has a reply is not sent again, and the daemon applies what it already had only once: a transfer that
    is run until it ends was done once. One that is dropped in the middle may be half done.
    """

    __slots__ = ("_native", "_peer")

    def __init__(self, native: _native.Transfer, peer: str) -> None:
        self._native, self._peer = native, peer

    def run(self, sock: socket.socket, timeout: float, ticking: bool = False) -> int:
        """Finish the operation over ``sock``; the segment's version after it (of a read: 0).

        timeout   seconds that may pass without a byte moving
        ticking   whether calls on a plain ``sock`` block, and come back by themselves (network.tick)

        Raises OSError when the connection broke (TimeoutError and ConnectionError too): run it again on a new
        one. RequestError when the daemon or a check here refused it: earlier chunks stand, the connection is
        usable.
        TransportError when the daemon's answers make no sense.
        What a signal's handler raises ends it too. A plain socket's replies under way are still waited for
        then, for 5 s at most; nothing more can be done over a TLS socket, which may or may not have moved the
        bytes of the call that was interrupted. Unless it is finished, its stream must not be used again.
        """
        if isinstance(sock, ssl.SSLSocket):
            return self._run_secured(sock, timeout)
        return self._native.drive(sock.fileno(), timeout, self._peer, ticking)

    def _run_secured(self, sock: ssl.SSLSocket, timeout: float) -> int:
        native = self._native
        native.restart()
        with _unblocked(sock):
            self._move(sock, timeout)
        return native.outcome()

    def give_up(self) -> None:
        """Begin nothing more: the next run() only brings to its end what was begun."""
        self._native.give_up()

    @property
    def finished(self) -> bool:
        return self._native.finished

    def _move(self, sock: ssl.SSLSocket, timeout: float) -> None:
        native, poller = self._native, select.poll()
        poller.register(sock, 0)
        deadline = time.monotonic() + timeout
        while True:
            waits = _send(native, sock), _receive(native, sock)
            if native.finished:
                return
            if MOVED in waits:
                deadline = 0.0  # counted from the next time that nothing moves
                continue
            now = time.monotonic()
            deadline = deadline or now + timeout
            poller.modify(sock, waits[0] | waits[1] | select.POLLIN)
            if not poller.poll(max(0.0, deadline - now) * 1000) and time.monotonic() >= deadline:
                raise TimeoutError(f"{self._peer}: nothing moved for {timeout:g} s")


@contextlib.contextmanager
def _unblocked(sock: socket.socket) -> Iterator[None]:
    before = sock.gettimeout()
    sock.settimeout(0.0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sock.settimeout(before)


def _send(native: _native.Transfer, sock: ssl.SSLSocket) -> int:
    """Send one part; MOVED, or the events to wait for."""
    data = native.outgoing()
    if not len(data):
        return 0
    try:
        native.sent(sock.send(data))
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    return MOVED


def _receive(native: _native.Transfer, sock: ssl.SSLSocket) -> int:
    if not native.expecting:
        return 0
    try:
        if native.in_place:
            data = sock.recv(RECORD)
            got = len(data)
            native.absorb(data)
        else:
            got = sock.recv_into(native.incoming())
            native.received(got)
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    if not got:
        raise ConnectionError("the daemon ended the stream")
    return MOVED


class Stream:
    """What one client thread asks for, over all its connections.

    Arrays are C-contiguous buffers (numpy) or CPU torch tensors of the segment's dtype; offset counts
    elements; ``count`` and ``dtype`` are the segment's. Making a transfer raises what the mapping's
    operations raise for a wrong array, range or rate. With stripes > 1, array and offset are those of a
    larger segment whose chunks stripe, stripe + stripes, .. lie in this one, and only they are touched; its
    version is then not counted, as with counts=False.
    """

    def __init__(self, peer: str, window: int = WINDOW) -> None:
        """peer: how messages name the daemon."""
        self.peer = peer
        self.number = 0
        """The daemon's number for this stream; 0 until it gave one."""
        self._native = _native.ClientStream(window)

    def _transfer(self, *args: Any) -> Transfer:  # by position: by name costs twice the call
        return Transfer(_native.Transfer(self._native, *args), self.peer)

    def read(
        self,
        segment: int,
        out: Any,
        offset: int = 0,
        *,
        count: int,
        dtype: str,
        stripe: int = 0,
        stripes: int = 1,
    ) -> Transfer:
        return self._transfer("read", segment, out, offset, 1.0, count, dtype, 0, True, stripe, stripes)

    def write(
        self,
        segment: int,
        array: Any,
        offset: int = 0,
        *,
        count: int,
        dtype: str,
        counts: bool = True,
        stripe: int = 0,
        stripes: int = 1,
    ) -> Transfer:
        array = given(array)
        return self._transfer("write", segment, array, offset, 1.0, count, dtype, 0, counts, stripe, stripes)

    def accumulate(
        self,
        segment: int,
        source: Any,
        scale: float = 1.0,
        offset: int = 0,
        *,
        count: int,
        dtype: str,
        wire: str = "float32",
        counts: bool = True,
        stripe: int = 0,
        stripes: int = 1,
    ) -> Transfer:
        """segment += scale * source. What a narrow wire loses is owed, and goes with the next accumulate."""
        source, code = given(source), wire_code(wire)
        return self._transfer(
            "accumulate", segment, source, offset, scale, count, dtype, code, counts, stripe, stripes
        )

    def exchange(
        self,
        segment: int,
        local: Any,
        alpha: float,
        offset: int = 0,
        *,
        count: int,
        dtype: str,
        wire: str = "float32",
        counts: bool = True,
        stripe: int = 0,
        stripes: int = 1,
    ) -> Transfer:
        """d = alpha (local - segment); local -= d; segment += d.

        A narrow wire carries the increments of both directions, against a shadow of ``local`` that both ends
        hold: local + segment stays the same as with float32. A chunk's first exchange sends float32.
        """
        local, code = given(local), wire_code(wire)
        return self._transfer(
            "exchange", segment, local, offset, alpha, count, dtype, code, counts, stripe, stripes
        )

    def accumulate_from(self, segment: int, source: int, scale: float = 1.0, offset: int = 0) -> Transfer:
        """segment += scale * source, both at the daemon."""
        return self._transfer(
            "accumulate_from", segment, None, offset, scale, 0, "float32", 0, True, 0, 1, source
        )

    def count_update(self, segment: int) -> Transfer:
        """Count one update of the segment's version, nothing else."""
        return self._transfer("count", segment)

    def version(self, segment: int) -> Transfer:
        return self._transfer("version", segment)

    def acknowledge(self) -> Transfer:
        """Let the daemon forget the replies that have come; for when nothing else is sent."""
        return self._transfer("acknowledge", 0)

    def next_number(self) -> int:
        """A request number for a frame of one's own: they rise over all connections."""
        return self._native.next_number()

    @property
    def acknowledged(self) -> int:
        """The sequence up to which all updates have their replies."""
        return self._native.acknowledged

    def reset(self) -> None:
        """The daemon knows this stream no more: sequences start again, and so do the shadows."""
        self.number = 0
        self._native.reset()

    def forget(self, segment: int) -> None:
        """The segment was detached: drop its shadow, what is owed to it and its figures."""
        self._native.forget(segment)

    def stats(self, segment: int) -> WireStats:
        return WireStats(*self._native.stats(segment))


def wire_code(wire: str) -> int:
    """Its code in a frame. Raises RequestError for an unknown name."""
    if wire not in WIRES:
        raise RequestError(f"unknown wire type {wire!r} (known: {', '.join(WIRES)})")
    return WIRES.index(wire)


def given(array: Any) -> Any:
    """The array. Raises TypeMismatch for None, with which the native part moves nothing."""
    if array is None:
        raise TypeMismatch("must be a numpy array or a CPU torch tensor, got NoneType")
    return array


def refuse_wire(wire: str, transport: str) -> None:
    """For transports that move float32 alone: raise NotSupported for anything else."""
    if wire_code(wire):
        raise NotSupported(f"{transport} moves float32 alone, not {wire}: wire types are for tcp and rdma")
