"""The daemon's side of RDMA: segments as registered regions, and a thread for each queue pair of a client.

One-sided READs and WRITEs never come here. Requests come as messages behind their data on the same queue pair
(records.Pair); they are answered by the stream that the queue pair speaks for, so that updates are applied
once, whatever breaks.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import socket
import struct
import threading
import time
import weakref
from collections import deque
from typing import Any

import numpy as np

from smb import network, protocol
from smb.errors import Closed, NotPermitted, NotSupported, ProtocolError, RequestError, SmbError, UnknownKey
from smb.remote import Remote, Stream
from smb.rendezvous import Session, Ticket
from smb.segment import CHUNK_BYTES, Mapping
from smb.service import Answer, Service
from smb.transport import ports, rdma

log = logging.getLogger(__name__)

MESSAGES = 16  # requests of one queue pair that may wait
REQUEST, REPLY = 1024, 8192  # bytes of a message
SLOTS = 8  # for the elements of requests
HEAD = 128  # bytes before a slot's elements, where the frame's head is put
SLOT = HEAD + CHUNK_BYTES
PREFIX = struct.Struct("<II")  # slot, bytes of its elements
IDLE = 3600.0  # seconds of one wait for messages
JOIN = 5.0  # seconds that a responder may take to end
DATA = frozenset(
    protocol.BY_REQUEST[record].code
    for record in (
        protocol.Write,
        protocol.Accumulate,
        protocol.AccumulateFrom,
        protocol.VersionOf,
        protocol.Acknowledge,
    )
)


class Segment:
    """A segment's payload, mapped once more for the adapter and registered."""

    def __init__(self, adapter: rdma.Adapter, mapping: Mapping, writable: bool) -> None:
        self._memory = mmap.mmap(mapping.payload_fd, mapping.nbytes)
        self._view = np.frombuffer(self._memory, np.uint8)
        address = self._view.ctypes.data
        self.region = adapter.register(address, mapping.nbytes, local=True, readable=True, writable=writable)

    def close(self) -> None:
        """Before the segment's memory goes."""
        self.region.close()
        del self._view


class Responder:
    """One queue pair and the thread that answers its requests."""

    def __init__(self, fabric: Fabric, session: Session, adapter: rdma.Adapter) -> None:
        self._fabric, self.session, self._adapter = fabric, session, adapter
        self._stream: Stream | None = None
        self._slots: rdma.Buffer | None = None
        self._over = self._closed = False
        self.pair = rdma.Pair(adapter, remote_writable=False)
        self._inbox = rdma.Buffer(adapter, MESSAGES * REQUEST)
        self._outbox = rdma.Buffer(adapter, MESSAGES * REPLY)
        self._free = list(range(MESSAGES))  # of the outbox
        self._unsent = deque[bytes]()
        self.thread = threading.Thread(target=self._run, name="smb-pair", daemon=True)

    def begin(self, peer: rdma.Endpoint) -> None:
        """Connect; requests may come from now on, and are answered once the thread runs."""
        self.pair.connect(peer)
        for index in range(MESSAGES):
            self._expect(index)

    def speak(self, stream: Stream) -> None:
        """Answer for ``stream``, whose earlier queue pair is ended."""
        stream.take(self)
        self._stream = stream
        self.thread.start()

    def speaks_for(self, session: Session, stream: int) -> bool:
        return session is self.session and self._stream is not None and self._stream.number == stream

    def slots(self) -> rdma.Region:
        """Memory for the elements of requests, made when it is first asked for."""
        if self._slots is None:
            self._slots = rdma.Buffer(self._adapter, SLOTS * SLOT, writable=True)
            self.pair.allow_writes()
        return self._slots.region

    def _expect(self, index: int) -> None:
        self.pair.receive(index, self._inbox.region.span(index * REQUEST, REQUEST))

    def _run(self) -> None:
        try:
            while not self._over:
                for done in self.pair.wait(time.monotonic() + IDLE):
                    if done.received:
                        self._answer(done.tag, done.nbytes)
                    else:
                        self._free.append(done.tag)
                self._send()
        except (rdma.Broken, OSError, SmbError) as error:
            log.debug("queue pair of %s: %s", self.session, error)
        except Exception:
            log.exception("queue pair of %s", self.session)
        finally:
            self.close()

    def _answer(self, index: int, nbytes: int) -> None:
        message = self._inbox.bytes[index * REQUEST : index * REQUEST + nbytes].tobytes()
        self._expect(index)
        if len(message) < PREFIX.size + protocol.HEADER.size:
            raise ProtocolError(f"a message of {nbytes} bytes")
        slot, elements = PREFIX.unpack_from(message)
        if slot >= SLOTS or elements > CHUNK_BYTES:
            raise ProtocolError(f"{elements} bytes in slot {slot}")
        frame = message[PREFIX.size :]
        head, body = frame[: protocol.HEADER.size], frame[protocol.HEADER.size :]
        if len(self._unsent) >= MESSAGES:
            raise ProtocolError("the client takes no replies")
        self._unsent.append(self._reply(head, body, slot, elements))

    def _send(self) -> None:
        while self._unsent and self._free:
            frame, index = self._unsent.popleft(), self._free.pop()
            at = index * REPLY
            self._outbox.bytes[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
            self.pair.send(index, self._outbox.region.span(at, len(frame)))

    def _reply(self, head: bytes, body: bytes, slot: int, elements: int) -> bytes:
        """The frame that answers a request."""
        stream = self._stream
        assert stream is not None
        header = protocol.unpack_header(head, protocol.MAX_HEAD + CHUNK_BYTES)
        if header.length != len(body) + elements:
            raise ProtocolError(f"{len(body) + elements} bytes, the header says {header.length}")
        if header.operation in DATA:
            return stream.native.handle(head, self._body(body, slot, elements))
        return self._control(stream, header, body)

    def _body(self, head: bytes, slot: int, elements: int) -> Any:
        """Head and elements in one piece; the head is put before the elements of its slot."""
        if not elements:
            return head
        if self._slots is None or len(head) > HEAD:
            raise ProtocolError("elements of a client that has no slots")
        at = slot * SLOT + HEAD
        self._slots.bytes[at - len(head) : at] = np.frombuffer(head, np.uint8)
        return self._slots.bytes[at - len(head) : at + elements]

    def _control(self, stream: Stream, header: protocol.Header, body: bytes) -> bytes:
        """A counter's request, answered once as on a connection."""
        stream.hear()
        try:
            frame = stream.replay(header.number)
            if frame is None:
                request = protocol.unpack_request(header, body)
                if not isinstance(request, protocol.Add):
                    raise NotSupported(f"{type(request).__name__} does not go by queue pair")
                answer = self._fabric.service.answer(Ticket(self.session), request)
                frame = protocol.pack(header.operation, header.number, answer.record)
                stream.remember(header.number, frame)
            return frame
        except SmbError as error:
            return protocol.pack_error(header.operation, header.number, error)

    def hang_up(self) -> None:
        """Any thread: when this returns nothing of the client lands any more."""
        self._over = True
        with contextlib.suppress(SmbError):
            self.pair.fail()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(JOIN)

    def close(self) -> None:
        """Its own thread, or when that does not run. Twice is fine."""
        self._over = True
        if self._closed:
            return
        self._closed = True
        self.pair.close()
        for buffer in (self._inbox, self._outbox, self._slots):
            if buffer:
                buffer.close()
        if self._stream:
            self._stream.leave()
        self._fabric.forget(self)


class Fabric:
    """All that one daemon does by RDMA. Adapters are opened when the first client asks for one.

    wanted  which port to use (ports.choose); "": the one whose address the client's connection goes to
    """

    def __init__(self, service: Service, wanted: str = "") -> None:
        self.service, self._wanted = service, wanted
        self._lock = threading.Lock()
        self._closed = False
        self._adapters: dict[ports.Port, rdma.Adapter] = {}
        self.registered: dict[tuple[Mapping, ports.Port, bool], Segment] = {}
        self.responders = set[Responder]()
        self._sessions = weakref.WeakSet[Session]()  # that have had a queue pair
        service.also(
            {
                protocol.Pair: self._pair,
                protocol.Unpair: self._unpair,
                protocol.RegionOf: self._region,
                protocol.SlotsOf: self._slots,
            }
        )

    @staticmethod
    def _remote(session: Session) -> Remote:
        if session.remote is None:
            raise NotSupported("a client that maps its segments needs no RDMA")
        return session.remote

    def _adapter(self, session: Session) -> rdma.Adapter:
        port = ports.choose(local_address(self._remote(session).where), self._wanted)
        with self._lock:
            if self._closed:
                raise Closed("the daemon is closing")
            if port not in self._adapters:
                self._adapters[port] = rdma.Adapter(port)
                log.info("RDMA by %s", port)
            return self._adapters[port]

    def _pair(self, ticket: Ticket, request: protocol.Pair) -> Answer:
        session, remote = ticket.session, self._remote(ticket.session)
        if request.stream and request.session != session.number:
            raise UnknownKey(f"stream {request.stream} is not of this session")
        if session not in self._sessions:
            self._sessions.add(session)
            session.paired = True
            remote.at_end(lambda: self._end(session))
        responder = Responder(self, session, self._adapter(session))
        with self._lock:
            self.responders.add(responder)
        try:
            peer = rdma.Endpoint(request.queue, request.packet, request.gid, request.lid, request.mtu)
            responder.begin(peer)
            stream = remote.stream(request.stream)
            responder.speak(stream)
            remote.stream(stream.number)  # Closed: the session has just ended, and did not know of this pair
        except BaseException:
            responder.hang_up()
            responder.close()
            raise
        own = responder.pair.endpoint
        return Answer(protocol.Paired(session.number, stream.number, *own), undo=responder.hang_up)

    def _end(self, session: Session) -> None:
        """The session is fenced: its queue pairs go first."""
        for responder in list(self.responders):
            if responder.session is session:
                responder.hang_up()

    def _responder(self, session: Session, stream: int) -> Responder:
        with self._lock:
            found = [r for r in self.responders if r.speaks_for(session, stream)]
        if not found:
            raise UnknownKey(f"stream {stream} of this session has no queue pair")
        return found[0]

    def _unpair(self, ticket: Ticket, request: protocol.Unpair) -> Answer:
        self._responder(ticket.session, request.stream).hang_up()
        return Answer(protocol.Done())

    def _region(self, ticket: Ticket, request: protocol.RegionOf) -> Answer:
        session = ticket.session
        mapping = self.service.store.attached(session, request.segment).mapping
        assert mapping is not None  # attached: its memory is there
        writable = self._remote(session).may_write(request.segment)
        adapter = self._adapter(session)
        key = (mapping, adapter.port, writable)
        with self._lock:
            if self._closed or mapping.payload_fd < 0:
                raise Closed(f"segment {request.segment} is freed")
            if key not in self.registered:
                mapping.before_close(lambda: self._release(mapping))
                self.registered[key] = Segment(adapter, mapping, writable)
            region = self.registered[key].region
        return Answer(protocol.Region(region.address, region.rkey, region.nbytes))

    def _slots(self, ticket: Ticket, request: protocol.SlotsOf) -> Answer:
        if not self._remote(ticket.session).may_write():
            raise NotPermitted("all segments of this client are attached read-only")
        region = self._responder(ticket.session, request.stream).slots()
        return Answer(protocol.Region(region.address, region.rkey, region.nbytes))

    def _release(self, mapping: Mapping) -> None:
        """The segment is freed: nobody reaches its memory any more."""
        with self._lock:
            for key in [key for key in self.registered if key[0] is mapping]:
                self.registered.pop(key).close()

    def forget(self, responder: Responder) -> None:
        with self._lock:
            self.responders.discard(responder)

    def close(self) -> None:
        """End every queue pair, then let go of the memory and the adapters. Twice is fine."""
        with self._lock:
            self._closed = True
            responders = list(self.responders)
        for responder in responders:
            responder.hang_up()
        with self._lock:
            for segment in self.registered.values():
                segment.close()
            self.registered.clear()
            for adapter in self._adapters.values():
                adapter.close()
            self._adapters.clear()


def local_address(where: str) -> str:
    """The address of this machine from which it reaches HOST:PORT; "" when it does not."""
    try:
        host, port = network.parse(where)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, RequestError):
        return ""
