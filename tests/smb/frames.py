"""Random frames for the daemon's socket, made from the protocol's own table: most are wrong in one field."""

from __future__ import annotations

import random
import socket
import struct
from dataclasses import dataclass
from typing import Any

from smb import layout, protocol
from smb.layout import Blob, Choice, Number, Rows, Text, Truth
from smb.protocol import HEADER, MAGIC, OPERATIONS, Header

KEYS = [f"fuzz/{letter}" for letter in "abcdefgh"]
PATIENCE = 1.0  # seconds to wait for an answer; a valid request may ask the daemon to wait for ever


def hello(session: int = 0, secret: int = 0, name: str = "x", mapped: bool = True) -> protocol.Hello:
    return protocol.Hello(protocol.VERSION, session, secret, 0, mapped, 1, name)


@dataclass
class Frame:
    data: bytes
    kind: str  # "good", "field", "header", "body" or "noise"
    operation: int


class Frames:
    """A seeded stream of frames. Three quarters are valid up to one field at least."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.segments = [1, 2, 3]

    def value(self, name: str, kind: Any) -> Any:
        """A value that the daemon accepts."""
        pick = self.random
        if name == "segment":
            return pick.choice(self.segments)
        if isinstance(kind, Number):
            if kind.layout == "f64":
                return pick.choice([0.0, 0.001, 0.01])
            return min(kind.high, max(kind.low, pick.choice([1, 2, 3, pick.randrange(1, 1000)])))
        if isinstance(kind, Choice):
            return pick.choice(kind.names)
        if isinstance(kind, Truth):
            return pick.random() < (0.9 if name == "publish" else 0.5)
        if isinstance(kind, Text):
            return pick.choice(KEYS)
        assert isinstance(kind, Blob)
        return pick.randbytes(pick.choice([0, 1, 20]))

    def learn(self, record: object) -> None:
        """From a good reply: the segments that the attacker is attached to."""
        if isinstance(record, protocol.Opened):
            self.segments = [*self.segments, record.segment][-4:]

    def good(self, operation: int) -> object:
        request = OPERATIONS[operation].request
        return request(*(self.value(name, kind) for name, kind in layout.layout(request)))

    def wrong(self, kind: Any) -> bytes:
        """Bytes in place of one field that break its layout, or go to the edge of what it may hold."""
        pick = self.random
        if isinstance(kind, Number):
            size = kind.packed.size
            if kind.layout == "f64":
                return struct.pack("<d", pick.choice([-1.0, float("nan"), float("inf"), 1e300, -0.0]))
            return pick.choice([bytes(size), b"\xff" * size, pick.randbytes(size)])
        if isinstance(kind, Choice | Truth):
            return bytes([pick.choice([2, 3, 11, 200, 255])])
        if isinstance(kind, Text):
            text = pick.choice(
                [b"", b"a b", b"\xff\xfe", b"x" * 300, "ä".encode(), b"\x00", b"../../etc/passwd"]
            )
            return struct.pack("<I", pick.choice([len(text), len(text), 2**32 - 1, len(text) + 1])) + text
        assert isinstance(kind, Blob | Rows)
        return struct.pack("<I", pick.choice([2**32 - 1, 1 << 16, (1 << 16) + 1])) + pick.randbytes(40)

    def one_field_wrong(self, operation: int) -> bytes:
        request = self.good(operation)
        rows = layout.layout(type(request))
        bad = self.random.randrange(len(rows)) if rows else -1
        body = bytearray()
        for index, (name, kind) in enumerate(rows):
            if index == bad:
                body += self.wrong(kind)
            else:
                kind.put(getattr(request, name), body)
        return bytes(body)

    def body_wrong(self, operation: int) -> bytes:
        """Cut short, too long, or with a flipped bit."""
        body = bytearray()
        layout.put(self.good(operation), body)
        choice = self.random.randrange(3)
        if choice == 0:
            return bytes(body[: self.random.randrange(len(body) + 1)])
        if choice == 1 or not body:
            return bytes(body) + self.random.randbytes(self.random.randrange(1, 9))
        body[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
        return bytes(body)

    def header_wrong(self, body: bytes) -> bytes:
        pick = self.random
        magic, operation, status, number, length = MAGIC, pick.choice([*OPERATIONS]), 0, 7, len(body)
        which = pick.randrange(4)
        if which == 0:
            magic = pick.choice([b"SMB2", b"\x00\x00\x00\x00", b"GET ", pick.randbytes(4)])
        elif which == 1:
            operation = pick.choice([0, 18, 255, 65535])
        elif which == 2:
            status = pick.randrange(1, 65536)
        else:
            length = pick.choice([protocol.MAX_REQUEST + 1, 2**32 - 1])
        return HEADER.pack(magic, operation, status, number, length) + body

    def next(self) -> Frame:
        pick = self.random
        operation = pick.choice([*OPERATIONS])
        kind = pick.choices(["good", "field", "body", "header", "noise"], [2, 6, 3, 2, 1])[0]
        if kind == "noise":
            return Frame(pick.randbytes(pick.randrange(1, 200)), kind, 0)
        if kind == "good":
            return Frame(protocol.pack(operation, 7, self.good(operation)), kind, operation)
        if kind == "header":
            body = bytearray()
            layout.put(self.good(operation), body)
            return Frame(self.header_wrong(bytes(body)), kind, operation)
        body_bytes = self.one_field_wrong(operation) if kind == "field" else self.body_wrong(operation)
        header = HEADER.pack(MAGIC, operation, 0, 7, len(body_bytes))
        return Frame(header + body_bytes, kind, operation)


class Attacker:
    """A session whose socket is opened again whenever the daemon had to close it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.session = self.secret = 0
        self.socket = self.open()
        self.reopened = self.unanswered = 0

    def open(self, greet: bool = True) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE)
        sock.connect(self.path)
        if greet:
            greeting = hello(self.session, self.secret, "fuzz")
            sock.sendall(protocol.pack(1, 1, greeting))
            _, welcome = self.reply(sock) or (None, None)
            assert isinstance(welcome, protocol.Welcome)
            self.session, self.secret = welcome.session, welcome.secret
        return sock

    @staticmethod
    def receive(sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))  # descriptors that come along are dropped by the kernel
            if not part:
                return data
            data += part
        return data

    def reply(self, sock: socket.socket) -> tuple[Header, object] | None:
        """The next reply, checked against the table; None at the end of the stream."""
        head = self.receive(sock, HEADER.size)
        if not head:
            return None
        header = protocol.unpack_header(head, protocol.MAX_REPLY)
        body = self.receive(sock, header.length)
        if not header.status:
            return header, layout.unpack(OPERATIONS[header.operation].reply, body)
        assert header.status in protocol.ERRORS
        failure = layout.unpack(protocol.Failure, body)
        assert failure.message
        assert "failed at this request" not in failure.message, failure.message
        return header, failure

    def attack(self, frame: Frame) -> object:
        """Send it; the reply, or None when the daemon closed the stream or says nothing within PATIENCE."""
        try:
            self.socket.sendall(frame.data)
            answer = self.reply(self.socket)
        except TimeoutError:
            self.unanswered += 1  # the frame is not over, or it asks the daemon to wait
            answer = None
        except OSError:
            answer = None
        header = answer[0] if answer else Header(0, 1, 0, 0)
        bye = not header.status and header.operation == 2
        if bye:
            self.session = self.secret = 0
        if bye or header.number == 0:
            self.socket.close()
            self.socket = self.open()
            self.reopened += 1
        return answer[1] if answer else None

    def close(self) -> None:
        self.socket.close()
