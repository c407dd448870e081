"""What one daemon gives to clients over TCP, and how fast, is limited."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

import smb
from smb import protocol
from smb.limits import Limits
from smb.options import ServeOptions
from tests.smb.frames import Attacker
from tests.smb.strangers import TOKEN, Raw


def limited(limits: Limits, memory: int | None = None) -> smb.Daemon:
    return smb.serve(tcp="127.0.0.1:0", token=TOKEN, options=ServeOptions(memory, 30.0, limits))


def test_clients_segments_and_memory_are_limited() -> None:
    with limited(Limits(clients=3, segments=4), 1 << 20) as daemon:
        boxes = [smb.connect(daemon.addresses[0], token=TOKEN) for _ in range(3)]
        with pytest.raises(smb.OutOfMemory, match=r"3 clients are there, the limit \(--max-clients\)"):
            smb.connect(daemon.addresses[0], token=TOKEN)
        kept = [boxes[0].create(f"k{i}", 10) for i in range(4)]
        with pytest.raises(smb.OutOfMemory, match=r"4 segments exist, which is the limit \(--max-segments\)"):
            boxes[1].create("another", 10)
        kept.pop().detach()
        with pytest.raises(smb.OutOfMemory, match=r"memory limit 1\.0 MiB"):
            boxes[1].create("large", 1 << 20)
        boxes.pop().close()
        boxes.append(smb.connect(daemon.addresses[0], token=TOKEN))
        for box in boxes:
            box.close()


def test_one_client_has_a_bounded_number_of_connections() -> None:
    with limited(Limits(connections=3)) as daemon:
        attacker = Attacker(daemon.addresses[0], TOKEN)
        sockets = []
        for _ in range(2):
            attacker.stream = 0
            sockets.append(attacker.open())
        attacker.stream = 0
        with pytest.raises(AssertionError, match="this client has 3 connections, which is the limit"):
            attacker.open()
        for sock in sockets:
            sock.close()
        attacker.close()


def test_what_one_client_has_under_way_is_bounded() -> None:
    """It never says that it has its replies, on any of its many streams; the daemon keeps them for it."""
    count = 1 << 16  # a chunk
    with limited(Limits(streams=4 << 20)) as daemon:
        attacker = Attacker(daemon.addresses[0], TOKEN)
        Raw(attacker).ask(protocol.Create("c", count, "float32", "owner", b"", False, True, 0.0))
        answers, sockets, before = Counter[str](), list[socket.socket](), psutil.Process().memory_info().rss
        for _ in range(10):
            attacker.stream = 0
            attacker.socket = attacker.open()
            sockets.append(attacker.socket)
            raw = Raw(attacker)
            segment = raw.attach("c", readonly=False)
            for sequence in range(1, 9):
                exchange = protocol.Exchange(segment, sequence, 0, 0, count, 1, "float32", 0.5)
                answers[type(raw.ask(exchange, bytes(4 * count))).__name__] += 1
        assert answers["Applied"] >= 8
        assert answers["Failure"] >= 50
        assert psutil.Process().memory_info().rss - before < 24 << 20
        with smb.connect(daemon.addresses[0], token=TOKEN) as box:
            assert box.attach("c").read().shape == (count,)
        for sock in sockets:
            sock.close()
        attacker.close()


@pytest.mark.parametrize("operation", ["read", "control"])
def test_who_asks_too_often_is_slowed_at_nobody_elses_cost(operation: str) -> None:
    with limited(Limits(rate=100.0)) as daemon, smb.connect(daemon.addresses[0], token=TOKEN) as box:
        segment = box.create("c", 10)
        acts: dict[str, Callable[[], object]] = {
            "read": segment.read,
            "control": lambda: box.counter("n").value,
        }
        start, count = time.monotonic(), 0
        while time.monotonic() - start < 1.5:
            acts[operation]()
            count += 1
        assert 100 <= count <= 270
        start = time.monotonic()
        with smb.connect(daemon.addresses[0], token=TOKEN) as other:
            assert other.list() == ["c"]
        assert time.monotonic() - start < 1
