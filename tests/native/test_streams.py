"""Data operations over sockets: nothing lost or doubled wherever a connection breaks, and what is refused."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from smb import _native, protocol, records
from smb.errors import (
    ProtocolError,
    RangeError,
    RequestError,
)
from smb.layout import layout
from smb.segment import Mapping
from smb.transport.stream import WIRES, Stream, Transfer
from tests.native.streams import (
    CHUNK,
    CODES,
    F32,
    NUMBER,
    TIMEOUT,
    Cut,
    Daemon,
    Network,
    ask,
    client,
    frame,
    noise,
    piece,
    read_all,
    receive,
)

COUNT = 2 * CHUNK + 100
SIZE: dict[str, Any] = {"count": COUNT, "dtype": "float32"}


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    made = Mapping.create(COUNT, "float32", initial=noise(COUNT, 1))
    yield made
    made.close()


def test_the_loop_knows_the_heads_that_the_protocol_declares() -> None:
    def size(record: type) -> int:
        return sum({"u64": 8, "f64": 8}.get(field.kind.layout, 1) for field in layout(record))

    declared = {code: size(protocol.OPERATIONS[code].request) for code in {*protocol.DATA, 23}}
    assert declared == _native.DATA_HEADS
    assert records.WIRES[: len(WIRES)] == WIRES


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
@pytest.mark.parametrize(("offset", "length"), [(0, 400_000), (399_990, 10), (65_530, 70_000), (5, 0)])
def test_what_is_written_through_a_socket_is_in_the_mapping_and_is_read_back(
    dtype: str, offset: int, length: int
) -> None:
    mapping = Mapping.create(400_000, dtype)
    size: dict[str, Any] = {"count": mapping.count, "dtype": dtype}
    values = np.random.default_rng(1).integers(0, 200, length).astype(dtype)
    expected = np.zeros(mapping.count, dtype)
    expected[offset : offset + length] = values
    daemon, stream = Daemon(mapping), client()
    out = np.empty(mapping.count, dtype)
    with daemon.served() as sock:
        version = stream.write(NUMBER, values, offset, **size).run(sock, TIMEOUT)
        stream.read(NUMBER, out, **size).run(sock, TIMEOUT)
        assert version == stream.version(NUMBER).run(sock, TIMEOUT) == mapping.version == (length > 0)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(read_all(mapping), expected)
    mapping.close()


def test_exchange_and_accumulate_are_the_mappings_bit_for_bit(mapping: Mapping) -> None:
    twin = Mapping.create(COUNT, "float32", initial=read_all(mapping))
    x, y, source = noise(COUNT - 7, 2), noise(COUNT - 7, 2), noise(100_000, 3)
    daemon, stream = Daemon(mapping), client()
    with daemon.served() as sock:
        assert stream.exchange(NUMBER, x, 0.3, 7, **SIZE).run(sock, TIMEOUT) == 1
        assert stream.accumulate(NUMBER, source, -2.5, 20, **SIZE).run(sock, TIMEOUT) == 2
    twin.exchange(y, 0.3, 7)
    twin.accumulate(source, -2.5, 20)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(read_all(mapping), read_all(twin))
    twin.close()


def test_the_daemon_tells_how_stale_an_exchange_was(mapping: Mapping) -> None:
    daemon, stream, local = Daemon(mapping), client(), noise(COUNT, 2)
    with daemon.served() as sock:
        stream.exchange(NUMBER, local, 0.3, **SIZE).run(sock, TIMEOUT)
        assert daemon.stream.staleness == -1
        for _ in range(3):
            mapping.write(local)
        stream.exchange(NUMBER, local, 0.3, **SIZE).run(sock, TIMEOUT)
    assert daemon.stream.staleness == 3


def test_one_segment_is_added_to_another_at_the_daemon(mapping: Mapping) -> None:
    before, source = read_all(mapping), Mapping.create(1000, "float32", initial=noise(1000, 4))
    daemon, stream = Daemon(mapping), client()
    daemon.table.add(8, source, False)
    with daemon.served() as sock:
        assert stream.accumulate_from(NUMBER, 8, 2.0, 50).run(sock, TIMEOUT) == 1
        with pytest.raises(RequestError, match="same segment"):
            stream.accumulate_from(NUMBER, NUMBER).run(sock, TIMEOUT)
        with pytest.raises(RangeError):
            stream.accumulate_from(NUMBER, 8, 1.0, COUNT - 999).run(sock, TIMEOUT)
    before[50:1050] += np.float32(2) * read_all(source)
    np.testing.assert_array_equal(read_all(mapping), before)
    source.close()


def workers(daemon: Daemon, mapping: Mapping, wire: str, rounds: int) -> list[F32]:
    """Three clients by socket and one by mapping exchange with fresh noise each round; their values after it.

    The noise that worker i adds over all rounds is noise(COUNT, 100 * i + round).
    """
    streams = [_native.Stream(daemon.table) for _ in range(3)]

    def work(rank: int) -> F32:
        local = noise(COUNT, rank)
        if rank == 3:
            for r in range(rounds):
                local += noise(COUNT, 100 * rank + r)
                mapping.exchange(local, 0.2)
            return local
        stream = client()
        with daemon.served(streams[rank]) as sock:
            for r in range(rounds):
                local += noise(COUNT, 100 * rank + r)
                stream.exchange(NUMBER, local, 0.2, wire=wire, **SIZE).run(sock, TIMEOUT)
        return local

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(4)))


@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_keeps_the_sum_of_workers_and_center(mapping: Mapping, wire: str) -> None:
    rounds = 12
    expected = read_all(mapping).astype(np.float64)
    for rank in range(4):
        expected += noise(COUNT, rank)
        for r in range(rounds):
            expected += noise(COUNT, 100 * rank + r)
    locals_ = workers(Daemon(mapping), mapping, wire, rounds)
    total = read_all(mapping).astype(np.float64) + sum(x.astype(np.float64) for x in locals_)
    # Values stay below 32, so each of the 4 * 12 exchanges and as many additions rounds by at most 2^-20.
    np.testing.assert_allclose(total, expected, rtol=0, atol=100 * 2.0**-20)
    assert mapping.version == 4 * rounds


@pytest.mark.parametrize("wire", WIRES[1:])
def test_a_narrow_wire_brings_a_worker_to_the_center_all_the_same(mapping: Mapping, wire: str) -> None:
    local, stream, daemon = noise(COUNT, 2), client(), Daemon(mapping)
    with daemon.served() as sock:
        for _ in range(8):
            stream.exchange(NUMBER, local, 0.5, wire=wire, **SIZE).run(sock, TIMEOUT)
    np.testing.assert_allclose(local, read_all(mapping), rtol=0, atol=1e-3)
    bits = {"bfloat16": 16, "float16": 16, "int8": 8.125}[wire]
    stats = stream.stats(NUMBER)
    assert stats.bytes_sent == pytest.approx(COUNT * (4 + 7 * bits / 8), rel=1e-3)
    assert stats.bytes_received == pytest.approx(stats.bytes_sent)
    assert daemon.stream.shadow_bytes == 3 * CHUNK * 4


@pytest.mark.parametrize("wire", WIRES[1:])
def test_what_a_narrow_accumulate_loses_goes_with_a_later_one(mapping: Mapping, wire: str) -> None:
    before, source, stream, daemon = read_all(mapping), noise(COUNT, 2), client(), Daemon(mapping)
    rounds = 200
    with daemon.served() as sock:
        for _ in range(rounds):
            stream.accumulate(NUMBER, source, 0.01, wire=wire, **SIZE).run(sock, TIMEOUT)
    moved = read_all(mapping).astype(np.float64) - before
    # Without what is owed, int8's steps of 0.01 * 4 / 127 would leave out whole elements: errors of 0.03.
    np.testing.assert_allclose(moved, rounds * 0.01 * source.astype(np.float64), rtol=0, atol=1e-3)
    assert 0 < stream.stats(NUMBER).squared_error < 1e-2 * stream.stats(NUMBER).squared_sum


@pytest.mark.parametrize("stripes", [2, 3])
def test_stripes_together_are_the_larger_segment(stripes: int) -> None:
    count = 7 * CHUNK + 33
    values = noise(count, 1)
    parts = [
        np.concatenate([values[c : c + CHUNK] for c in range(k * CHUNK, count, stripes * CHUNK)])
        for k in range(stripes)
    ]
    mappings = [Mapping.create(part.size, "float32", initial=part) for part in parts]
    chance = random.Random(3)
    for _ in range(8):
        offset = chance.randrange(count)
        length = chance.randint(1, count - offset)
        out = np.zeros(length, np.float32)
        for k, mapping in enumerate(mappings):
            with Daemon(mapping).served() as sock:
                size: dict[str, Any] = {
                    "count": mapping.count,
                    "dtype": "float32",
                    "stripe": k,
                    "stripes": stripes,
                }
                stream = client()
                stream.accumulate(NUMBER, np.ones(length, np.float32), 1.0, offset, **size).run(sock, TIMEOUT)
                stream.read(NUMBER, out, offset, **size).run(sock, TIMEOUT)
                assert mapping.version == 0  # the box counts, on the first stripe
        values[offset : offset + length] += np.float32(1)
        np.testing.assert_array_equal(out, values[offset : offset + length])
    for mapping in mappings:
        mapping.close()


# Exactly once ----------------------------------------------------------------------------------------------


Make = Callable[[Stream, F32], Transfer]
AT, LENGTH = CHUNK - 5, 12  # two pieces, in two chunks


def exchange_by(wire: str) -> Make:
    return lambda stream, local: stream.exchange(NUMBER, local, 0.3, AT, wire=wire, **SIZE)


MAKERS: dict[str, Make] = {
    "write": lambda stream, local: stream.write(NUMBER, local, AT, **SIZE),
    "accumulate": lambda stream, local: stream.accumulate(NUMBER, local, 2.0, AT, **SIZE),
    "accumulate-int8": lambda s, local: s.accumulate(NUMBER, local, 2.0, AT, wire="int8", **SIZE),
    **{f"exchange-{wire}": exchange_by(wire) for wire in WIRES},
}


def three_rounds(
    mapping: Mapping, start: F32, make: Make, out_cut: int, in_cut: int
) -> tuple[F32, F32, bool]:
    """Three operations, the second over a network that breaks there; center, local, whether it broke."""
    mapping.write(start)
    daemon, stream, local, broke = Daemon(mapping), client(), noise(LENGTH, 5), False
    for r in range(3):
        local += noise(LENGTH, 50 + r)
        transfer = make(stream, local)
        try:
            Network(daemon.stream, *((out_cut, in_cut) if r == 1 else ())).run(transfer)
        except Cut:
            broke = True
            Network(daemon.stream).run(transfer)
    assert daemon.stream.applied == 6
    return read_all(mapping)[AT : AT + LENGTH], local, broke


@pytest.mark.parametrize("name", MAKERS)
def test_a_connection_cut_at_any_byte_leaves_each_update_applied_once(mapping: Mapping, name: str) -> None:
    start = read_all(mapping)
    center, local, _ = three_rounds(mapping, start, MAKERS[name], 1 << 62, 1 << 62)
    version = mapping.version
    cuts = [(k, 1 << 62) for k in range(10_000)], [(1 << 62, k) for k in range(10_000)]
    for direction in cuts:
        broken = 0
        for cut in direction:
            got_center, got_local, broke = three_rounds(mapping, start, MAKERS[name], *cut)
            np.testing.assert_array_equal(got_center, center, err_msg=f"cut {cut}")
            np.testing.assert_array_equal(got_local, local, err_msg=f"cut {cut}")
            version += 4  # the write of the start, three operations
            assert mapping.version == version
            if not broke:
                break
            broken += 1
        assert broken > 50  # both frames of that direction were cut at each byte


def cut_after(daemon: Daemon, sock: socket.socket, bytes_more: int) -> threading.Thread:
    """Ends the connection once the daemon has taken so much more of it."""
    target = daemon.stream.bytes_in + bytes_more

    def cut() -> None:
        end = time.monotonic() + TIMEOUT
        while daemon.stream.bytes_in < target and time.monotonic() < end:
            time.sleep(0.0002)
        sock.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=cut)
    thread.start()
    return thread


def test_sockets_cut_in_mid_transfer_again_and_again_lose_and_double_nothing() -> None:
    count, chance = 64 * CHUNK, random.Random(1)
    mapping = Mapping.create(count, "float32", initial=noise(count, 1))
    expected, local = read_all(mapping).astype(np.float64), noise(count, 2)
    expected += local
    daemon, stream, cuts = Daemon(mapping), client(), 0
    for r in range(4):
        local += noise(count, 10 + r)
        expected += noise(count, 10 + r)
        transfer = stream.exchange(NUMBER, local, 0.3, count=count, dtype="float32")
        for _ in range(3):
            with daemon.served() as sock:
                cutter = cut_after(daemon, sock, chance.randrange(1, 3 * CHUNK * 4))
                with pytest.raises(ConnectionError):
                    transfer.run(sock, TIMEOUT)
                cutter.join()
                cuts += 1
        with daemon.served() as sock:
            assert transfer.run(sock, TIMEOUT) == r + 1
    assert cuts == 12
    np.testing.assert_allclose(read_all(mapping).astype(np.float64) + local, expected, rtol=0, atol=1e-4)
    mapping.close()


def test_a_sequence_that_skips_ahead_is_refused_and_one_that_was_applied_is_answered_again(
    mapping: Mapping,
) -> None:
    stream, before = Daemon(mapping).stream, read_all(mapping)[0]
    first = ask(stream, piece(1))
    assert first == (0, (1).to_bytes(8, "little"))
    assert ask(stream, piece(1)) == ask(stream, piece(1, value=5.0)) == first
    assert ask(stream, piece(3))[0] == CODES[ProtocolError]
    assert ask(stream, piece(2))[0] == 0
    assert read_all(mapping)[0] == np.float32(before + np.float32(1)) + np.float32(1)
    assert ask(stream, piece(3, acknowledged=2))[0] == 0
    assert ask(stream, piece(2))[0] == CODES[ProtocolError]  # its reply is gone
    assert ask(stream, piece(4, acknowledged=9))[0] == CODES[ProtocolError]
    assert stream.applied == mapping.version == 3


def test_a_write_that_came_whole_lands_once_and_its_repetition_is_passed_over(mapping: Mapping) -> None:
    daemon, count = Daemon(mapping), 8192

    def write(sequence: int, value: float, offset: int) -> bytes:
        elements = np.full(count, value, np.float32).tobytes()
        return frame(19, NUMBER, sequence, sequence - 1, offset, count, 1, elements=elements)

    here, there = socket.socketpair()
    with here, there:
        here.sendall(write(1, 1.0, 5) + write(1, 2.0, 5) + write(2, 3.0, 5 + count // 2))
        here.shutdown(socket.SHUT_WR)
        assert daemon.stream.serve(there.fileno(), TIMEOUT) is None
        versions = [receive(here) for _ in range(3)]
    assert versions == [(0, version.to_bytes(8, "little")) for version in (1, 1, 2)]
    values = read_all(mapping)[5 : 5 + count]
    assert (values[: count // 2] == 1).all()
    assert (values[count // 2 :] == 3).all()


def test_an_exchange_is_answered_by_its_increment_or_by_the_moved_values(mapping: Mapping) -> None:
    daemon, x, rate = Daemon(mapping), noise(100, 1), np.float32(0.25)
    center = read_all(mapping)[:100]
    for sequence, wire in ((1, 0), (2, 5)):
        d = rate * (x - center)
        request = frame(21, NUMBER, sequence, 0, 0, 100, 1, wire, rate, elements=x.tobytes())
        assert ask(daemon.stream, request)[1][8:] == (d if wire == 0 else x - d).tobytes()
        center += d
        np.testing.assert_array_equal(read_all(mapping)[:100], center)


def test_a_client_that_never_acknowledges_is_kept_to_the_window(mapping: Mapping) -> None:
    daemon = Daemon(mapping, window=16)
    statuses = [ask(daemon.stream, piece(k))[0] for k in range(1, 40)]
    assert statuses == [0] * 16 + [CODES[ProtocolError]] * 23
    assert (daemon.stream.held, daemon.stream.applied) == (16, 16)
    assert ask(daemon.stream, frame(25, 16)) == (0, b"")
    assert daemon.stream.held == 0
    assert ask(daemon.stream, piece(17, 16))[0] == 0


def test_kept_replies_of_a_long_exchange_stay_within_the_clients_window() -> None:
    count = 40 * CHUNK
    mapping = Mapping.create(count, "float32")
    daemon, stream, most = Daemon(mapping), client(), 0
    transfer = stream.exchange(NUMBER, noise(count, 1), 0.5, count=count, dtype="float32")
    with daemon.served() as sock, ThreadPoolExecutor(1) as pool:
        running = pool.submit(transfer.run, sock, TIMEOUT)
        while not running.done():
            most = max(most, daemon.stream.held)
        running.result()
        assert 0 < most <= 8
        stream.acknowledge().run(sock, TIMEOUT)
        assert (daemon.stream.held, daemon.stream.acknowledged) == (0, 40)
    mapping.close()
