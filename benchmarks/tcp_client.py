"""What benchmarks/tcp.py runs as a client of the box and of plain sockets, and as the plain server.

tcp_client.py --serve                              prints HOST:PORT, answers plain reads and writes
tcp_client.py --plain HOST:PORT --box ADDRESS --mib N    prints {"plain read": [seconds], ...}
tcp_client.py --box ADDRESS --mib N --wire TYPE
tcp_client.py --small ADDRESS
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import smb
from smb.network import parse, tune

REPEAT = 3
ALPHA = 0.05
SMALL = 2000  # round trips


def receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        count = sock.recv_into(into)
        if not count:
            raise ConnectionError("the other end is gone")
        into = into[count:]


def serve() -> None:
    """R and a size: send so much; W and a size: take so much, then say so."""
    with socket.socket() as listener:
        tune(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        print("{}:{}".format(*listener.getsockname()), flush=True)
        memory = memoryview(np.full(256 << 20, 1, np.uint8))
        while True:
            sock, _ = listener.accept()
            with sock:
                tune(sock)
                head = bytearray(9)
                try:
                    while True:
                        receive(sock, memoryview(head))
                        size = int.from_bytes(head[1:], "little")
                        if head[:1] == b"R":
                            sock.sendall(memory[:size])
                        else:
                            receive(sock, memory[:size])
                            sock.sendall(b"k")
                except ConnectionError:
                    continue


class Plain:
    """Two plain sockets with the box's options."""

    def __init__(self, where: str, local: Any) -> None:
        self.sock = socket.socket()
        tune(self.sock)
        self.sock.connect(parse(where))
        self.memory = memoryview(local).cast("B")

    def _ask(self, what: bytes) -> None:
        self.sock.sendall(what + self.memory.nbytes.to_bytes(8, "little"))

    def read(self) -> None:
        self._ask(b"R")
        receive(self.sock, self.memory)

    def write(self) -> None:
        self._ask(b"W")
        self.sock.sendall(self.memory)
        receive(self.sock, memoryview(bytearray(1)))


def taken(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each, in a shuffled order, each warmed once."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in random.sample(list(calls) * repeat, len(calls) * repeat):
        began = time.perf_counter()
        calls[name]()
        seconds[name].append(time.perf_counter() - began)
    return seconds


def large(given: argparse.Namespace) -> dict[str, list[float]]:
    count = (given.mib << 20) // 4
    random_values = np.random.default_rng(0).normal(size=count).astype(np.float32)
    local = random_values * np.float32(0.05)
    with smb.connect(given.box) as box:
        center = box.create(f"bench/{given.mib}", count, or_attach=True)
        assert center.transport == "tcp"
        if given.wire:
            name = f"exchange {given.wire}"
            return taken({name: lambda: center.exchange(local, ALPHA, wire=given.wire)}, REPEAT)
        plain, other = Plain(given.plain, np.ones(count, np.float32)), np.empty(count, np.float32)
        return taken(
            {
                "plain read": plain.read,
                "plain write": plain.write,
                "box read": lambda: center.read(other),
                "box write": lambda: center.write(local),
                "box exchange": lambda: center.exchange(local, ALPHA),
            },
            REPEAT,
        )


def small(address: str) -> dict[str, list[float]]:
    out = np.empty(1024, np.float32)
    with smb.connect(address) as box:
        segment = box.create("bench/small", 1024, or_attach=True)
        seconds = taken({"small read": lambda: segment.read(out)}, SMALL)
    return {name: [float(np.median(times))] for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--plain", metavar="HOST:PORT")
    parser.add_argument("--box", metavar="ADDRESS")
    parser.add_argument("--small", metavar="ADDRESS")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--wire")
    given = parser.parse_args()
    if given.serve:
        serve()
    else:
        print(json.dumps(small(given.small) if given.small else large(given)))


if __name__ == "__main__":
    main()
