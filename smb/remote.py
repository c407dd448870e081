"""What a session that maps no segments has besides: what it may reach, its streams, its signs of life.

A stream is what one client thread says; it outlives its connections, of which the latest speaks for it. No
sockets here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from smb import _native
from smb.errors import Closed, NotPermitted, OutOfMemory, ProtocolError, RequestError, UnknownKey
from smb.figures import Figures

HANDOVER = 20.0  # seconds that an earlier connection may take to leave a stream


class Speaker(Protocol):
    """A connection, as seen from here."""

    def hang_up(self) -> None:
        """Any thread: end it; what waits on its behalf gives up."""


class Stream:
    """One client thread's requests. The native part numbers and remembers updates; control requests here."""

    def __init__(self, number: int, native: _native.Stream) -> None:
        self.number, self.native = number, native
        self.heard = time.monotonic()  # the last control frame
        self._turn = threading.Lock()  # held by the connection that speaks
        self._speaker: Speaker | None = None
        self._answered, self._frame = 0, b""

    def take(self, speaker: Speaker) -> None:
        """Let ``speaker`` speak from now on; the connection that did is ended first."""
        earlier = self._speaker
        if earlier:
            earlier.hang_up()
        if not self._turn.acquire(timeout=HANDOVER):
            raise RequestError(f"stream {self.number} is still busy with an earlier connection's request")
        self._speaker = speaker
        self.heard = time.monotonic()

    def hear(self) -> None:
        """A control frame came."""
        self.heard = time.monotonic()

    def leave(self) -> None:
        """The speaker's connection ended."""
        self._speaker = None
        self.heard = time.monotonic()
        self._turn.release()

    @property
    def spoken_for(self) -> bool:
        return self._speaker is not None

    @property
    def last_heard(self) -> float:
        """time.monotonic() of its last frame."""
        return max(self.heard, self.native.last_seen)

    def figures(self) -> Figures:
        return Figures(self.native.operations, self.native.bytes_in, self.native.bytes_out)

    def replay(self, number: int) -> bytes | None:
        """The frame that answered this control request, when it is sent again; None when it is new."""
        if number == self._answered:
            return self._frame or None
        if number < self._answered:
            raise ProtocolError(f"request {number} after {self._answered}: a stream's numbers rise")
        return None

    def remember(self, number: int, frame: bytes) -> None:
        """The reply of the latest control request; b"" where asking again does no harm."""
        self._answered, self._frame = number, frame

    def hang_up(self) -> None:
        speaker = self._speaker
        if speaker:
            speaker.hang_up()


class Remote:
    """One session's standing without shared memory.

    where  HOST:PORT that it comes from, for messages; "" for this host
    make   a stream's native part on the session's table
    most   streams that it may have at a time
    """

    def __init__(self, where: str, make: Callable[[_native.Table], _native.Stream], most: int) -> None:
        self.where, self._most = where, most
        self.table = _native.Table()
        self._make = make
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._updates = 0  # under way
        self._streams: dict[int, Stream] = {}
        self._numbers = 0
        self._writable = set[int]()
        self._ends: list[Callable[[], None]] = []
        self._born = time.monotonic()
        self._past = Figures()  # of streams that were forgotten
        self._over = False

    def stream(self, number: int) -> Stream:
        """The stream of this number, a new one for 0. Raises UnknownKey when it is not known (any more)."""
        with self._lock:
            if self._over:
                raise Closed("the session is over")
            if number:
                if number not in self._streams:
                    raise UnknownKey(f"this session has no stream {number}")
                return self._streams[number]
            if len(self._streams) >= self._most:
                raise OutOfMemory(f"this client has {self._most} connections, which is the limit")
            self._numbers += 1
            stream = self._streams[self._numbers] = Stream(self._numbers, self._make(self.table))
            return stream

    @property
    def streams(self) -> list[Stream]:
        with self._lock:
            return list(self._streams.values())

    @property
    def last_heard(self) -> float:
        """time.monotonic() of the last frame on any of its connections."""
        return max((stream.last_heard for stream in self.streams), default=self._born)

    def reach(self, number: int, mapping: _native.Mapping, writable: bool) -> None:
        """Let the session at a segment; one that it may write stays writable."""
        with self._lock:
            if writable:
                self._writable.add(number)
            self.table.add(number, mapping, number in self._writable)

    def lose(self, number: int) -> None:
        with self._lock:
            self._writable.discard(number)
            self.table.remove(number)

    def may_write(self, number: int | None = None) -> bool:
        """Whether the session may write to this segment, or to any."""
        with self._lock:
            return number in self._writable if number is not None else bool(self._writable)

    def at_end(self, call: Callable[[], None]) -> None:
        """``call`` when it is fenced. Raises Closed when it is over already."""
        with self._lock:
            if self._over:
                raise Closed("the session is over")
            self._ends.append(call)

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Around an update of a segment that the native streams do not make; revoke waits for its end."""
        with self._lock:
            if self._over:
                raise Closed("the session is over")
            if number not in self._writable:
                raise NotPermitted("the segment is attached read-only")
            self._updates += 1
        try:
            yield
        finally:
            with self._lock:
                self._updates -= 1
                self._idle.notify_all()

    def figures(self) -> Figures:
        """What its streams did to segments."""
        with self._lock:
            return Figures.sum([self._past, *(stream.figures() for stream in self._streams.values())])

    def drop_idle(self, before: float) -> None:
        """Forget streams whose connection is gone and that were last heard before ``before``."""
        with self._lock:
            idle = [n for n, s in self._streams.items() if not s.spoken_for and s.last_heard < before]
            for number in idle:
                self._past.add(self._streams.pop(number).figures())

    def hang_up(self) -> None:
        """End its connections."""
        for stream in self.streams:
            stream.hang_up()

    def revoke(self) -> None:
        """Fence it: when this returns, nothing of it lands any more. Not under the store's lock."""
        with self._lock:
            self._over, ends, self._ends = True, self._ends, []
        for end in ends:
            end()
        with self._lock:
            self._idle.wait_for(lambda: not self._updates)
        self.table.revoke()
