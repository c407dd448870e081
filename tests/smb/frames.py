"""Random frames for the daemon's socket, made from the protocol's own table: most are wrong in one field."""

from __future__ import annotations

import random
import re
import socket
import struct
from dataclasses import dataclass, replace
from typing import Any

from smb import auth, layout, network, protocol
from smb.layout import Blob, Choice, Number, Rows, Text, Truth
from smb.protocol import HEADER, MAGIC, OPERATIONS, Header

KEYS = [f"fuzz/{letter}" for letter in "abcdefgh"]
PATIENCE = 1.0  # seconds to wait for an answer; a valid request may ask the daemon to wait for ever
TOO_LONG = protocol.MAX_HEAD + protocol.MAX_PIECE + 1  # bytes of a body


def hello(session: int = 0, secret: int = 0, name: str = "x", mapped: bool = True) -> protocol.Hello:
    return protocol.Hello(protocol.VERSION, session, secret, 0, mapped, 1, name)


@dataclass
class Frame:
    data: bytes
    kind: str  # "good", "field", "header", "body" or "noise"
    operation: int


class Frames:
    """A seeded stream of frames. Three quarters are valid up to one field at least.

    remote  they are for a client without shared memory: more of the data operations
    """

    def __init__(self, seed: int, remote: bool = False) -> None:
        self.random = random.Random(seed)
        self.operations = [*OPERATIONS, *(3 * [*protocol.DATA] if remote else ())]
        self.remote = remote
        self.segments = [1, 2, 3]
        self.opened: dict[int, protocol.Opened] = {}
        self.applied = 0  # of the updates of the attacker's stream
        self.number = 10

    def value(self, name: str, kind: Any) -> Any:
        """A value that the daemon accepts."""
        pick = self.random
        if name in ("segment", "source", "other"):
            known = self.opened and pick.random() < 0.9
            return pick.choice([*self.opened] if known else self.segments)
        if isinstance(kind, Number):
            if kind.layout == "f64":
                return pick.choice([0.0, 0.001, 0.01] if name == "timeout" else [0.0, 0.5, 1.0])
            return min(kind.high, max(kind.low, pick.choice([1, 2, 3, pick.randrange(1, 1000)])))
        if isinstance(kind, Choice | Text):
            return pick.choice(kind.names if isinstance(kind, Choice) else KEYS)
        if isinstance(kind, Truth):
            return pick.random() < (0.9 if name == "publish" else 0.5)
        assert isinstance(kind, Blob)
        return pick.randbytes(min(kind.limit, pick.choice([0, 1, 20, 32])))

    def learn(self, record: object) -> None:
        """From a reply: the segments that the attacker is attached to, and which update comes next."""
        if isinstance(record, protocol.Opened):
            self.segments = [*self.segments, record.segment][-4:]
            self.opened = {n: o for n, o in self.opened.items() if n in self.segments}
            self.opened[record.segment] = record
        elif isinstance(record, protocol.Bye):
            self.opened, self.applied = {}, 0
        elif isinstance(record, protocol.Applied):
            self.applied += 1
        elif isinstance(record, protocol.Failure):
            told = re.search(r"acknowledges \d+, (\d+) are applied", record.message)
            following = re.search(r"the next one is (\d+)", record.message)
            gone = re.search(r"segment (\d+) is not attached|attached to no segment (\d+)", record.message)
            if gone:
                self.opened.pop(int(gone[1] or gone[2]), None)
            if told or following:
                self.applied = int(told[1]) if told else int(following[1]) - 1 if following else 0
            elif record.message.startswith(("write: ", "accumulate: ", "exchange: ")):
                self.applied += 1  # refused, in its turn

    def good(self, operation: int) -> Any:
        request = OPERATIONS[operation].request
        record = request(*(self.value(name, kind) for name, kind in layout.layout(request)))
        known = self.opened.get(getattr(record, "segment", 0))
        if known and hasattr(record, "offset") and hasattr(record, "count"):
            offset = self.random.randrange(known.count)
            record = replace(
                record, offset=offset, count=self.random.randrange(min(known.count - offset, 500) + 1)
            )
        if hasattr(record, "acknowledged"):
            record = replace(record, acknowledged=self.applied)
        if hasattr(record, "sequence"):
            record = replace(record, sequence=self.applied + 1)
        if self.remote and isinstance(record, protocol.Create) and not self.opened:
            record = replace(record, count=300, dtype="float32", or_attach=True, publish=True, meta=b"")
        return record

    def elements(self, record: Any) -> bytes:
        """What follows a request that carries elements: as many as it says, mostly."""
        if OPERATIONS[protocol.BY_REQUEST[type(record)].code].payload not in ("request", "both"):
            return b""
        known = self.opened.get(record.segment)
        item = protocol.DTYPES[known.dtype] if known else 4
        wire = getattr(record, "wire", "")
        count = min(record.count, 70_000)
        length = count * {"bfloat16": 2, "float16": 2, "float32": 4}.get(wire, item)
        if wire == "int8":
            length = count + 4 * -(-count // 256)
        if self.random.random() < 0.1:
            length = max(0, length + self.random.choice([-4, -1, 1, 4]))
        return bytes(length) if self.random.random() < 0.7 else self.random.randbytes(length)

    def frame(self, operation: int, body: bytes) -> bytes:
        self.number += 1
        return HEADER.pack(MAGIC, operation, 0, self.number, len(body)) + body + self.beside(operation)

    @staticmethod
    def beside(operation: int) -> bytes:
        """What an operation's descriptors travel with; here without them."""
        row = OPERATIONS.get(operation)
        return b"+" if row and row.brings else b""

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
        return bytes(body) + self.elements(request)

    def body_wrong(self, operation: int) -> bytes:
        """Cut short, too long, or with a flipped bit."""
        body = bytearray()
        request = self.good(operation)
        layout.put(request, body)
        body += self.elements(request)
        choice = self.random.randrange(3)
        if choice == 0:
            return bytes(body[: self.random.randrange(len(body) + 1)])
        if choice == 1 or not body:
            return bytes(body) + self.random.randbytes(self.random.randrange(1, 9))
        body[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
        return bytes(body)

    def header_wrong(self, body: bytes) -> bytes:
        pick = self.random
        self.number += 1
        magic, operation, status, length = MAGIC, pick.choice([*OPERATIONS]), 0, len(body)
        which = pick.randrange(4)
        if which == 0:
            magic = pick.choice([b"SMB2", b"\x00\x00\x00\x00", b"GET ", pick.randbytes(4)])
        elif which == 1:
            operation = pick.choice([0, 99, 255, 65535])
        elif which == 2:
            status = pick.randrange(1, 65536)
        else:
            length = pick.choice([TOO_LONG, 2**32 - 1])
        return HEADER.pack(magic, operation, status, self.number, length) + body + self.beside(operation)

    def next(self) -> Frame:
        pick = self.random
        operation = pick.choice(self.operations)
        kind = pick.choices(["good", "field", "body", "header", "noise"], [2, 6, 3, 2, 1])[0]
        if self.remote and not self.opened:
            operation, kind = 3, "good"
        if kind == "noise":
            return Frame(pick.randbytes(pick.randrange(1, 200)), kind, 0)
        if kind == "good":
            request, whole = self.good(operation), bytearray()
            layout.put(request, whole)
            return Frame(self.frame(operation, bytes(whole) + self.elements(request)), kind, operation)
        if kind == "header":
            body = bytearray()
            layout.put(self.good(operation), body)
            return Frame(self.header_wrong(bytes(body)), kind, operation)
        body_bytes = self.one_field_wrong(operation) if kind == "field" else self.body_wrong(operation)
        return Frame(self.frame(operation, body_bytes), kind, operation)


class Attacker:
    """A session whose socket is opened again whenever the daemon had to close it.

    where   a Unix socket's path, for a client that maps its segments, or tcp://HOST:PORT
    token   what the daemon asks for over TCP
    """

    def __init__(self, where: str, token: bytes = b"", patience: float = PATIENCE) -> None:
        self.where, self._patience = where, patience
        self.token = auth.Credential(auth.Token(token, "attacker"), True) if token else None
        self.session = self.secret = self.stream = 0
        self.socket = self.open()
        self.reopened = self.unanswered = 0

    def open(self, greet: bool = True) -> socket.socket:
        sock = self.connect()
        if greet:
            sock.settimeout(30)  # what is right gets its answer, however busy the machine is
            if self.token:
                auth.introduce(lambda record: self.ask(sock, record), self.token)
            greeting = hello(self.session, self.secret, "fuzz", mapped=not self.remote)
            welcome = self.ask(sock, replace(greeting, stream=self.stream))
            assert isinstance(welcome, protocol.Welcome), welcome
            self.session, self.secret, self.stream = welcome.session, welcome.secret, welcome.stream
        sock.settimeout(self._patience)
        return sock

    @property
    def remote(self) -> bool:
        return self.where.startswith("tcp://")

    def connect(self) -> socket.socket:
        if self.remote:
            sock = socket.create_connection(network.parse(self.where.removeprefix("tcp://")), 30)
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.where)
        sock.settimeout(self._patience)
        return sock

    def ask(self, sock: socket.socket, record: object) -> Any:
        """A request and its reply, which may be a Failure."""
        sock.sendall(protocol.pack(protocol.BY_REQUEST[type(record)].code, 1, record))
        answer = self.reply(sock)
        assert answer, "the daemon closed the connection"
        return answer[1]

    @staticmethod
    def receive(sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))  # descriptors that come along are dropped by the kernel
            if not part:
                return data
            data += part
        return data

    @staticmethod
    def reply(sock: socket.socket) -> tuple[Header, object] | None:
        """The next reply, checked against the table; None at the end of the stream."""
        head = Attacker.receive(sock, HEADER.size)
        if not head:
            return None
        header = protocol.unpack_header(head, protocol.MAX_REPLY)
        body = Attacker.receive(sock, header.length)
        if not header.status:
            operation = OPERATIONS[header.operation]
            if operation.payload in ("reply", "both"):
                return header, layout.get(operation.reply, memoryview(body), 0)[0]
            return header, layout.unpack(operation.reply, body)
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
            self.session = self.secret = self.stream = 0
            answer = header, protocol.Bye()
        if bye or header.number == 0:
            self.socket.close()
            self.socket = self.open()
            self.reopened += 1
        return answer[1] if answer else None

    def close(self) -> None:
        self.socket.close()
