"""One client thread's queue pair to a daemon: one-sided moves, and requests behind their data.

A queue pair that fails is made again once for each operation; what has no reply is then sent again, which the
daemon applies once. Every wait is bounded, and its error names the daemon.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from smb import protocol
from smb.errors import Closed, ProtocolError, RequestError, Restarted, TransportError, UnknownKey
from smb.layout import unpack
from smb.segment import CHUNK_BYTES
from smb.transport import rdma

PIECE = 1 << 20  # bytes of one READ or WRITE
MOVES = 16  # of them under way
REQUEST, REPLY, REPLIES = 1024, 8192, 16  # bytes of messages, and how many may come at once
SLOTS = 8  # requests with elements under way
HEAD = 128  # bytes before the elements in a slot of the daemon's
SLOT = HEAD + CHUNK_BYTES
PREFIX = struct.Struct("<II")
SLICE = 0.5  # seconds of one wait
BUSY = 0.05  # seconds of it without sleep, as a piece takes less on a fast network than waking up
PROBE = 1.0  # seconds of silence after which the daemon's queue pair is probed
KIND = 32  # bits of a tag below its kind
MOVE, FETCH, DATA, SEND, PING = (kind << KIND for kind in range(1, 6))


class Carrier(Protocol):
    """The transport, as its queue pairs need it."""

    adapter: rdma.Adapter

    @property
    def timeout(self) -> float: ...
    @property
    def generation(self) -> int:
        """Counts the sessions that it has had."""

    def call(self, request: object, timeout: float) -> Any: ...
    def check(self) -> None:
        """Raises when the client is closed or has failed."""

    def fail(self, error: Exception) -> TransportError:
        """Nothing works any more; the error to raise, which names the daemon."""


class Move(NamedTuple):
    """One piece of a one-sided transfer."""

    here: rdma.Span
    there: rdma.Place


@dataclass
class Request:
    """One that was sent and not answered yet."""

    number: int
    code: int
    message: bytes
    slot: int
    elements: rdma.Span | None


class Answer(NamedTuple):
    header: protocol.Header
    body: bytes

    def record(self) -> Any:
        """Raises the error of a reply that is not good."""
        if self.header.status:
            protocol.raise_failure(self.header, self.body)
        return unpack(protocol.OPERATIONS[self.header.operation].reply, self.body)


class Channel:
    """Used by one thread at a time; ``end`` may come from any.

    scratch     SLOTS chunks of registered memory of our own
    sequence    of the last update sent
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._session = self._stream = self._numbers = self.sequence = self.acknowledged = 0
        self._lock = threading.Lock()  # held by the thread that works
        self._ended = self.closed = False
        self.generation = 0
        self._pair: rdma.Pair | None = None
        self._slots: rdma.Place | None = None
        self._inbox = rdma.Buffer(carrier.adapter, REPLIES * REPLY)
        self._outbox = rdma.Buffer(carrier.adapter, REPLIES * REQUEST)
        self._free = deque(range(REPLIES))  # of the outbox
        self.requests = deque[Request]()  # not answered yet, in order
        self._answers = deque[Answer]()  # that nobody has looked at
        self._busy = False  # within an operation, which a new session would drop
        self._posted = 0  # on the present pair, and not completed
        self.scratch = rdma.Buffer(carrier.adapter, SLOTS * CHUNK_BYTES)

    # The queue pair

    def pair(self) -> rdma.Pair:
        """Connected within the present session."""
        if self._ended:
            raise Closed("this box is closed")
        if self._pair and self.generation == self._carrier.generation:
            return self._pair
        if self._pair and self._busy:
            raise rdma.Broken("the session was lost")
        return self._connect()

    def ready(self) -> None:
        """Have the daemon answer on the queue pair: it works, and what was written by it has landed."""
        self.ask(lambda: protocol.Acknowledge(self.acknowledged), "an empty request by RDMA")

    def _connect(self) -> rdma.Pair:
        self._disconnect()
        fresh = rdma.Pair(self._carrier.adapter, remote_writable=False)
        try:
            answer = self._introduce(fresh)
            self._stream = answer.stream
            fresh.connect(rdma.Endpoint(answer.queue, answer.packet, answer.gid, answer.lid, answer.mtu))
            for index in range(REPLIES):
                self._expect(fresh, index)
        except BaseException:
            fresh.close()
            raise
        self._pair, self._slots, self._posted = fresh, None, 0
        self._free = deque(range(REPLIES))
        return fresh

    def _introduce(self, fresh: rdma.Pair) -> protocol.Paired:
        """Have the daemon make its end; outside an operation a lost stream is replaced."""
        own = fresh.endpoint
        try:
            answer: protocol.Paired = self._carrier.call(
                protocol.Pair(self._session, self._stream, *own), 0.0
            )
        except (UnknownKey, Restarted):
            if self._busy:
                raise
            self._forget()
            answer = self._carrier.call(protocol.Pair(0, 0, *own), 0.0)
        self.generation, self._session = self._carrier.generation, answer.session
        return answer

    def _disconnect(self) -> None:
        pair, self._pair = self._pair, None
        if pair:
            pair.close()

    def _expect(self, pair: rdma.Pair, index: int) -> None:
        pair.receive(index, self._inbox.region.span(index * REPLY, REPLY))

    def mending(self, what: str, attempt: Callable[[], None]) -> None:
        """Do ``attempt`` until it comes to its end; it goes on where a failing queue pair stopped it.

        The pair is made again once, then the failure is reported. Whatever else ends the attempt drops the
        pair: what is under way on it may still move.
        """
        with self._lock:
            self._mending(what, attempt)

    def _mending(self, what: str, attempt: Callable[[], None]) -> None:
        mended = False
        try:
            self.pair()
            generation, self._busy = self.generation, True
            while True:
                try:
                    return attempt()
                except rdma.Broken as error:
                    self._disconnect()
                    if mended:
                        raise self._carrier.fail(ConnectionError(f"{what}: {error}, twice")) from error
                    mended = True
                    self._mend(what, generation)
        except BaseException as error:
            if self.requests or not isinstance(error, RequestError):
                self._forget()
                self._disconnect()
            if isinstance(error, rdma.Broken):
                raise self._carrier.fail(ConnectionError(f"{what}: {error}")) from error
            raise
        finally:
            self._busy = False

    def _forget(self) -> None:
        """The stream cannot go on: what was under way may have been applied, or not."""
        self._stream = self.sequence = self.acknowledged = 0
        self.requests.clear()
        self._answers.clear()

    def _mend(self, what: str, generation: int) -> None:
        try:
            self._connect()
        except (UnknownKey, Restarted) as error:
            self._forget()
            raise Restarted(f"{what} was dropped: {error}") from error
        if self.generation != generation:
            self._forget()
            raise Restarted(f"{what} was dropped: the daemon no longer knows the session")
        for request in self.requests:
            self._post(request)

    def _await(self, what: str) -> Iterable[rdma.Completion]:
        """What has ended, waiting for it. Raises Broken, TransportError after the box's timeout."""
        pair, timeout = self.pair(), self._carrier.timeout
        began = time.monotonic()
        while True:
            soon = min(began + timeout, time.monotonic() + SLICE)
            ended = [one for one in pair.wait(soon, BUSY) if self._settle(one)]
            if ended:
                return ended
            self._carrier.check()
            silent = time.monotonic() - began
            if silent > timeout:
                raise self._carrier.fail(TimeoutError(f"no answer to {what} in {timeout:g} s"))
            if silent > PROBE and not self._posted:
                self._posted += 1
                pair.probe(PING)

    def _settle(self, one: rdma.Completion) -> bool:
        """Count a completion; whether it is one that somebody waits for."""
        if one.received:
            return True
        self._posted -= 1
        kind = one.tag >> KIND << KIND
        if kind == SEND:
            self._free.append(one.tag - SEND)
        return kind in (MOVE, FETCH)

    # One-sided moves

    def move(self, what: str, cut: Callable[[], list[Move]], *, write: bool) -> None:
        """READ or WRITE all pieces that ``cut`` gives, several at a time."""
        done = 0

        def attempt() -> None:
            nonlocal done
            pieces = cut()
            pair = self._writing() if write else self.pair()
            post = pair.write if write else pair.read
            posted = done  # a new pair begins with what had not come to its end
            while done < len(pieces):
                while posted < len(pieces) and posted - done < MOVES:
                    post(MOVE | posted, *pieces[posted])
                    self._posted += 1
                    posted += 1
                done += sum(not one.received for one in self._await(what))

        self.mending(what, attempt)

    def fetch(self, index: int, move: Move) -> None:
        """Begin a READ of part of a job; ``index`` comes back in its completion."""
        self.pair().read(FETCH | index, *move)
        self._posted += 1

    # Requests

    def _writing(self) -> rdma.Pair:
        """The pair, once the daemon lets it write."""
        pair = self.pair()
        if self._slots is None:
            region: protocol.Region = self._carrier.call(protocol.SlotsOf(self._stream), 0.0)
            self._slots = rdma.Place(region.address, region.key)
        return pair

    def submit(self, record: object, slot: int = 0, elements: rdma.Span | None = None) -> Request:
        """Send a request behind its elements, which must stay as they are until it is answered."""
        code = protocol.BY_REQUEST[type(record)].code
        self._numbers += 1
        frame = bytearray(protocol.pack(code, self._numbers, record))
        nbytes = elements.nbytes if elements else 0
        length = len(frame) - protocol.HEADER.size + nbytes
        protocol.HEADER.pack_into(frame, 0, protocol.MAGIC, code, 0, self._numbers, length)
        request = Request(self._numbers, code, PREFIX.pack(slot, nbytes) + frame, slot, elements)
        self.requests.append(request)
        self._post(request)
        return request

    def _post(self, request: Request) -> None:
        pair = self._writing() if request.elements else self.pair()
        if request.elements:
            assert self._slots is not None
            there = rdma.Place(self._slots.address + request.slot * SLOT + HEAD, self._slots.rkey)
            pair.write(DATA | request.slot, request.elements, there)
            self._posted += 1
        while not self._free:
            for one in pair.wait(time.monotonic() + SLICE):
                self._settle(one)  # the daemon has not answered this many requests: nothing but sends can end
        index = self._free.popleft()
        at = index * REQUEST
        self._outbox.bytes[at : at + len(request.message)] = np.frombuffer(request.message, np.uint8)
        pair.send(SEND | index, self._outbox.region.span(at, len(request.message)))
        self._posted += 1

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def collect(self, what: str) -> tuple[list[Answer], list[int]]:
        """Wait: the answers that have come, to the oldest requests, and the indices of fetches that ended."""
        fetched = list[int]()
        if not self._answers:
            for one in self._await(what):
                if one.received:
                    self._take_in(one)
                else:
                    fetched.append(one.tag - FETCH)
        answers = list(self._answers)
        self._answers.clear()
        return answers, fetched

    def _take_in(self, one: rdma.Completion) -> None:
        at = one.tag * REPLY
        frame = self._inbox.bytes[at : at + one.nbytes].tobytes()
        header = protocol.unpack_header(frame[: protocol.HEADER.size], REPLY)
        request = self.requests.popleft() if self.requests else None
        if request is None or header.number != request.number or header.operation != request.code:
            raise self._carrier.fail(
                ProtocolError(f"an answer to request {header.number}, which was not made")
            )
        self._answers.append(Answer(header, frame[protocol.HEADER.size :]))
        self._expect(self.pair(), one.tag)

    def ask(self, make: Callable[[], object], what: str = "a request") -> Any:
        """One request, made once the channel is ready for it; its reply's record."""
        got: list[Answer] = []

        def attempt() -> None:
            if not got and not self.requests:
                self.submit(make())
            while not got:
                got.extend(self.collect(what)[0])

        self.mending(what, attempt)
        return got[0].record()

    def update(self, make: Callable[[int, int], object]) -> int:
        """One update without elements, given its sequence and what is acknowledged; the version after it."""
        try:
            applied: protocol.Applied = self.ask(lambda: make(self.next_sequence(), self.acknowledged))
            return applied.version
        finally:
            self.acknowledged = self.sequence  # answered, well or not; or both are 0

    # The end

    def end(self) -> None:
        """Any thread: what waits here gives up."""
        self._ended = True
        pair = self._pair
        if pair:
            pair.wake()

    def orphan(self) -> None:
        """In a forked child, where nothing of it works."""
        self._ended = self.closed = True

    def close(self) -> None:
        """Any thread. One that works stops, and is closed when nobody refers to it any more."""
        self.end()
        if self._lock.acquire(timeout=SLICE):
            self.closed = True
            self._disconnect()
            for buffer in (self._inbox, self._outbox, self.scratch):
                buffer.close()
            self._lock.release()

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.close()
