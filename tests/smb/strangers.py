"""Who comes to a daemon at a TCP port: one that works on the box, ones that speak frames by hand."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np

import smb
from smb import layout, network, protocol
from smb.protocol import HEADER, MAGIC
from tests.smb.frames import Attacker

TOKEN = b"the token of these tests"
N = 1000
F32 = np.float32
ELSEWHERE = "127.0.0.2"  # where attackers come from


class Innocent:
    """A client that works on the box, and says whether it still can."""

    def __init__(self, address: str, token: bytes | None = TOKEN) -> None:
        self.box = smb.connect(address, token=token, name="innocent", timeout=10)
        self.center = self.box.create("center", N, initial=np.full(N, 2, F32))
        self.updates = 0

    def unharmed(self) -> bool:
        start = time.monotonic()
        local = np.full(N, 2, F32)
        self.updates += 1
        same = self.center.exchange(local, 0.5) == self.updates and bool((self.center.read() == 2).all())
        return same and time.monotonic() - start < 2


def knock(daemon: smb.Daemon, source: str = ELSEWHERE) -> socket.socket:
    place = network.parse(daemon.addresses[0].removeprefix("tcp://"))
    return socket.create_connection(place, 10, source_address=(source, 0))


def ask(sock: socket.socket, record: object) -> Any:
    """A request over a bare socket, and its reply."""
    sock.sendall(protocol.pack(protocol.BY_REQUEST[type(record)].code, 1, record))
    answer = Attacker.reply(sock)
    if answer is None:
        raise ConnectionError("closed")
    return answer[1]


def failure(answer: object) -> str:
    assert isinstance(answer, protocol.Failure), answer
    return answer.message


def is_closed(sock: socket.socket, seconds: float) -> bool:
    """Whether the daemon ends the connection in time; what it says before that is thrown away."""
    sock.settimeout(seconds)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


class Raw:
    """A session over one bare socket, whose every field one may choose."""

    def __init__(self, attacker: Attacker) -> None:
        self.socket = attacker.socket
        self.socket.settimeout(10)
        self.number = 10
        self.applied = 0

    def send(self, record: object, elements: bytes = b"") -> None:
        body = bytearray()
        layout.put(record, body)
        self.number += 1
        code = protocol.BY_REQUEST[type(record)].code
        self.socket.sendall(
            HEADER.pack(MAGIC, code, 0, self.number, len(body) + len(elements)) + body + elements
        )

    def ask(self, record: object, elements: bytes = b"") -> Any:
        self.send(record, elements)
        answer = Attacker.reply(self.socket)
        assert answer
        assert answer[0].number == self.number
        return answer[1]

    def attach(self, key: str, readonly: bool) -> int:
        return int(self.ask(protocol.Attach(key, readonly, False, b"")).segment)

    def updates(self, segment: int, source: int) -> list[tuple[object, bytes]]:
        """One valid update of each kind, with its elements."""
        ones = np.ones(N, F32).tobytes()
        n = self.applied
        return [
            (protocol.Write(segment, n + 1, n, 0, N, 1), ones),
            (protocol.Accumulate(segment, n + 2, n, 0, N, 1, "float32", 1.0), ones),
            (protocol.Exchange(segment, n + 3, n, 0, N, 1, "float32", 0.5), ones),
            (protocol.AccumulateFrom(segment, n + 4, n, source, 0, 1.0), b""),
        ]
