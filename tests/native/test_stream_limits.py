"""Data operations over sockets: what is refused, what is bounded, and how a stream ends."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from smb import _native, protocol
from smb.errors import (
    Closed,
    NonFinite,
    NotPermitted,
    OutOfMemory,
    ProtocolError,
    RangeError,
    RequestError,
    TransportError,
    TypeMismatch,
)
from smb.network import tick
from smb.segment import Mapping
from tests.native.processes import wait_for
from tests.native.streams import (
    CHUNK,
    CODES,
    NUMBER,
    TIMEOUT,
    Daemon,
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


def test_a_nan_in_a_middle_piece_stops_there_and_the_stream_goes_on(mapping: Mapping) -> None:
    before, local = read_all(mapping), noise(COUNT, 2)
    local[CHUNK + 3] = np.nan
    mine = local.copy()
    daemon, stream = Daemon(mapping), client()
    with daemon.served() as sock:
        with pytest.raises(NonFinite, match=f"element {CHUNK + 3} ") as caught:
            stream.exchange(NUMBER, local, 0.5, **SIZE).run(sock, TIMEOUT)
        assert (caught.value.chunk, caught.value.element) == (1, CHUNK + 3)  # type: ignore[attr-defined]
        assert mapping.version == 0
        np.testing.assert_array_equal(read_all(mapping)[CHUNK:], before[CHUNK:])
        np.testing.assert_array_equal(local[CHUNK:], mine[CHUNK:])
        d = np.float32(0.5) * (mine[:CHUNK] - before[:CHUNK])
        np.testing.assert_array_equal(read_all(mapping)[:CHUNK], before[:CHUNK] + d)
        np.testing.assert_array_equal(local[:CHUNK], mine[:CHUNK] - d)
        assert stream.write(NUMBER, before, **SIZE).run(sock, TIMEOUT) == 1
        with pytest.raises(
            NonFinite, match=f"accumulate: element {CHUNK + 3} of the values is NaN or Inf"
        ) as caught:
            stream.accumulate(NUMBER, mine, 0.5, **SIZE).run(sock, TIMEOUT)
        assert (caught.value.chunk, caught.value.element) == (1, CHUNK + 3)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(read_all(mapping)[CHUNK:], before[CHUNK:])
        assert mapping.version == 1


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_a_refusal_is_told_before_a_nan_in_a_later_piece(mapping: Mapping, wire: str) -> None:
    """A narrow wire's client finds the NaN while the pieces before it are under way: those were not done."""
    before, source = read_all(mapping), noise(COUNT, 2)
    source[CHUNK + 3] = np.nan
    with Daemon(mapping, writable=False).served() as sock, pytest.raises(NotPermitted, match="read-only"):
        client().accumulate(NUMBER, source, wire=wire, **SIZE).run(sock, TIMEOUT)
    np.testing.assert_array_equal(read_all(mapping), before)


def test_the_daemon_refuses_a_nan_and_the_pieces_of_its_operation_that_were_under_way(
    mapping: Mapping,
) -> None:
    daemon, before = Daemon(mapping), read_all(mapping)
    sent = [
        piece(1, last=0),
        piece(2, last=0, value=float("inf"), offset=CHUNK),
        piece(3, last=0, offset=CHUNK + 1),
        piece(4, last=1, offset=CHUNK + 2),
        piece(5, last=1, offset=CHUNK + 3),
    ]
    with daemon.served() as sock:
        sock.sendall(b"".join(sent))
        statuses = [receive(sock)[0] for _ in sent]
    bad = CODES[NonFinite]
    assert statuses == [0, bad, bad, bad, 0]
    before[[0, CHUNK + 3]] += np.float32(1)
    np.testing.assert_array_equal(read_all(mapping), before)
    assert mapping.version == 1


def test_rights_hold_for_each_segment(mapping: Mapping) -> None:
    before, daemon, stream = read_all(mapping), Daemon(mapping, writable=False), client()
    with daemon.served() as sock:
        for verb in ("write", "accumulate"):
            with pytest.raises(NotPermitted, match="read-only"):
                getattr(stream, verb)(NUMBER, before * 2, **SIZE).run(sock, TIMEOUT)
        with pytest.raises(NotPermitted):
            stream.exchange(NUMBER, noise(COUNT, 1), 0.5, **SIZE).run(sock, TIMEOUT)
        with pytest.raises(NotPermitted):
            stream.accumulate_from(NUMBER, NUMBER).run(sock, TIMEOUT)
        with pytest.raises(Closed, match="segment 9 is not attached"):
            stream.read(9, np.empty(5, np.float32), count=5, dtype="float32").run(sock, TIMEOUT)
        stream.read(NUMBER, out := np.empty_like(before), **SIZE).run(sock, TIMEOUT)
    np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(read_all(mapping), before)
    assert mapping.version == 0


def test_a_clients_own_mistakes_are_found_before_anything_is_sent() -> None:
    stream, x = client(), noise(10, 1)
    with pytest.raises(RangeError, match="exchange: 10 elements at offset 95 run past the segment"):
        stream.exchange(NUMBER, x, 0.5, 95, count=100, dtype="float32")
    with pytest.raises(TypeMismatch, match="the segment holds float64, the array float32"):
        stream.write(NUMBER, x, count=100, dtype="float64")
    with pytest.raises(TypeMismatch, match="needs a segment of float32"):
        stream.accumulate(NUMBER, x.astype(np.float64), count=100, dtype="float64")
    with pytest.raises(TypeMismatch, match="writable"):
        stream.read(NUMBER, b"1234", count=100, dtype="uint8")
    with pytest.raises(RequestError, match=r"alpha is 1\.5"):
        stream.exchange(NUMBER, x, 1.5, count=100, dtype="float32")
    with pytest.raises(RequestError, match="unknown wire type 'int4'"):
        stream.accumulate(NUMBER, x, wire="int4", count=100, dtype="float32")


HUGE = (1 << 64) - 1
WRONG = {
    "a range past the end": (frame(18, NUMBER, COUNT, 1), RangeError),
    "an offset that overflows": (frame(18, NUMBER, HUGE, 2), RangeError),
    "a read of nothing": (frame(18, NUMBER, 0, 0), ProtocolError),
    "an unknown segment": (frame(18, HUGE, 0, 1), Closed),
    "a count that overflows": (frame(19, NUMBER, 1, 0, 1, HUGE, 1, elements=b"1234"), RangeError),
    "fewer elements than said": (frame(19, NUMBER, 1, 0, 0, 2, 1, elements=b"1234"), ProtocolError),
    "more elements than said": (frame(19, NUMBER, 1, 0, 0, 1, 1, elements=b"12345678"), ProtocolError),
    "a piece over a chunk's border": (
        frame(19, NUMBER, 1, 0, CHUNK - 1, 2, 1, elements=b"12345678"),
        ProtocolError,
    ),
    "last 3": (frame(19, NUMBER, 1, 0, 0, 1, 3, elements=b"1234"), ProtocolError),
    "an empty piece in the middle": (frame(19, NUMBER, 1, 0, 0, 0, 0), ProtocolError),
    "an unknown wire type": (frame(21, NUMBER, 1, 0, 0, 1, 1, 6, 0.5, elements=b"1234"), ProtocolError),
    "moved values of an accumulate": (
        frame(20, NUMBER, 1, 0, 0, 1, 1, 5, 1.0, elements=b"1234"),
        ProtocolError,
    ),
    "a shadow of an accumulate": (frame(20, NUMBER, 1, 0, 0, 1, 1, 4, 1.0, elements=b"1234"), ProtocolError),
    "an endless scale": (frame(20, NUMBER, 1, 0, 0, 1, 1, 0, np.inf, elements=b"1234"), RequestError),
    "alpha 0": (frame(21, NUMBER, 1, 0, 0, 1, 1, 0, 0.0, elements=b"1234"), RequestError),
    "alpha that is none": (frame(21, NUMBER, 1, 0, 0, 1, 1, 0, np.nan, elements=b"1234"), RequestError),
    "no shadow": (frame(21, NUMBER, 1, 0, 0, 1, 1, 1, 0.5, elements=b"12"), RequestError),
    "a NaN for a scale of int8": (
        frame(20, NUMBER, 1, 0, 0, 1, 1, 3, 1.0, elements=np.float32(np.nan).tobytes() + b"1"),
        NonFinite,
    ),
    "sequence 0": (frame(19, NUMBER, 0, 0, 0, 1, 1, elements=b"1234"), ProtocolError),
    "a body shorter than the head": (frame(18, NUMBER, 0, 1, length=20)[:40], ProtocolError),
    "an acknowledgement of the future": (frame(25, 1), ProtocolError),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_head_is_refused_by_its_error_and_harms_nothing(mapping: Mapping, name: str) -> None:
    request, kind = WRONG[name]
    before, daemon = read_all(mapping), Daemon(mapping)
    held = _native.stream_memory()
    with daemon.served() as sock:
        sock.sendall(request)
        status, body = receive(sock)
        assert status == CODES[kind], body
        assert len(body) == 4 + int.from_bytes(body[:4], "little")
        sock.sendall(frame(18, NUMBER, 5, 2))  # the framing stands
        assert receive(sock) == (0, before[5:7].tobytes())
    np.testing.assert_array_equal(read_all(mapping), before)
    assert mapping.version == 0
    assert _native.stream_memory() <= held


def test_random_heads_never_stop_the_daemon_nor_change_what_is_not_theirs(mapping: Mapping) -> None:
    chance, daemon, other = random.Random(7), Daemon(mapping, writable=False), noise(COUNT, 1)
    values = [0, 1, 2, NUMBER, 255, CHUNK, COUNT, 1 << 32, 1 << 63, HUGE]
    mapping.write(other)
    answered = 0
    with daemon.served() as sock:
        for _ in range(3000):
            code = chance.choice(sorted(_native.DATA_HEADS))
            head = b"".join(chance.choice(values).to_bytes(8, "little") for _ in range(7))
            elements = chance.randbytes(chance.choice([0, 1, 4, 8, 600]))
            body = head[: _native.DATA_HEADS[code]] + (elements if code in (19, 20, 21) else b"")
            sock.sendall(protocol.HEADER.pack(protocol.MAGIC, code, 0, 1, len(body)) + body)
            answered += receive(sock)[0] in protocol.ERRORS
        sock.sendall(frame(18, NUMBER, 0, 3))
        assert receive(sock) == (0, other[:3].tobytes())
    assert answered > 1000
    np.testing.assert_array_equal(read_all(mapping), other)


@pytest.mark.parametrize(
    "header",
    [
        protocol.HEADER.pack(b"SMB1", 9, 0, 3, 12),
        protocol.HEADER.pack(b"GET ", 19, 0, 3, 41),
        protocol.HEADER.pack(b"SMB1", 19, 0, 3, (1 << 32) - 1),
        protocol.HEADER.pack(b"SMB1", 19, 4, 3, 41),
        protocol.HEADER.pack(b"SMB1", 18, 0, 3, 25),
    ],
    ids=["control", "magic", "length", "status", "more than a head"],
)
def test_a_frame_that_is_no_data_request_goes_back_with_its_body_unread(
    mapping: Mapping, header: bytes
) -> None:
    daemon, (ours, theirs) = Daemon(mapping), socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(23, NUMBER) + header + b"the body")
        assert daemon.stream.serve(theirs.fileno(), 1.0) == header
        assert theirs.recv(100) == b"the body"


# Waiting and ending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_the_loop_ends_when_the_stream_does(mapping: Mapping, blocking: bool) -> None:
    stream = Daemon(mapping).stream

    def serve(sock: socket.socket, idle: float) -> bytes | None:
        sock.setblocking(blocking)
        return stream.serve(sock.fileno(), idle)

    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        with pytest.raises(TimeoutError, match="nothing came"):
            serve(theirs, 0.05)
        waiting = pool.submit(serve, theirs, 30.0)
        time.sleep(0.05)
        theirs.shutdown(socket.SHUT_RDWR)
        assert waiting.result(5) is None
    for part in (frame(18, NUMBER, 0, 1)[:30], frame(18, NUMBER, 0, 1)[:7]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(part)
            ours.close()
            with pytest.raises(ConnectionError, match="ended in a frame"):
                serve(theirs, 1.0)


def test_revoking_ends_an_operation_that_waits_and_nothing_lands_afterwards(mapping: Mapping) -> None:
    before, daemon, stream = read_all(mapping), Daemon(mapping), client()
    mapping.hold_chunk(1, half_written=False)
    with daemon.served() as sock, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream.exchange(NUMBER, noise(COUNT, 2), 0.5, **SIZE).run, sock, TIMEOUT)
        wait_for(lambda: daemon.stream.applied == 1)
        start = time.monotonic()
        daemon.table.revoke()
        assert time.monotonic() - start < 2
        mapping.release_chunk(1)
        with pytest.raises(ConnectionError):
            running.result(5)
        seen = read_all(mapping)
    np.testing.assert_array_equal(seen[CHUNK:], before[CHUNK:])
    with pytest.raises(Closed, match="revoked"):
        ask(daemon.stream, piece(2))
    assert isinstance(daemon.ended[0], Closed)
    np.testing.assert_array_equal(read_all(mapping), seen)


def test_a_late_piece_of_a_fenced_client_does_not_land(mapping: Mapping) -> None:
    daemon, before = Daemon(mapping), read_all(mapping)
    late = frame(19, NUMBER, 1, 0, 0, CHUNK, 1, elements=bytes(4 * CHUNK))
    with daemon.served() as sock:
        sock.sendall(late[:-1])
        wait_for(lambda: daemon.stream.operations == 1)
        daemon.table.revoke()
        sock.sendall(late[-1:])
        wait_for(lambda: daemon.ended)
    assert isinstance(daemon.ended[0], Closed)
    np.testing.assert_array_equal(read_all(mapping), before)


def test_reads_through_a_socket_are_never_torn_inside_a_chunk(mapping: Mapping) -> None:
    daemon, stream, stop = Daemon(mapping), client(), threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            mapping.write(np.full(CHUNK, value, np.float32))

    mapping.write(np.zeros(COUNT, np.float32))
    writer = threading.Thread(target=write)
    out = np.empty(CHUNK, np.float32)
    seen: set[float] = set()
    end = time.monotonic() + TIMEOUT
    with daemon.served() as sock:
        writer.start()
        try:
            while len(seen) < 30 and time.monotonic() < end:
                stream.read(NUMBER, out, **SIZE).run(sock, TIMEOUT)
                assert (out == out[0]).all()
                seen.add(float(out[0]))
        finally:
            stop.set()
            writer.join()
    assert len(seen) == 30


@pytest.mark.parametrize("ticking", [False, True])
def test_a_silent_daemon_is_named_within_the_timeout(ticking: bool) -> None:
    ours, theirs = socket.socketpair()
    if ticking:
        tick(ours, 0.9)
    transfer = client().read(NUMBER, np.empty(5, np.float32), count=5, dtype="float32")
    start = time.monotonic()
    with ours, theirs, pytest.raises(TimeoutError, match="the daemon under test"):
        transfer.run(ours, 1.0, ticking)
    assert time.monotonic() - start < 1.8  # the wait for the tick is part of it


def test_a_signal_ends_the_wait_for_a_silent_daemon() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    tick(ours, 0.2)
    transfer = client().read(NUMBER, np.empty(5, np.float32), count=5, dtype="float32")
    before, start = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with ours, theirs, pytest.raises(KeyboardInterrupt):
            transfer.run(ours, 1.0, True)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < TIMEOUT


def test_more_than_the_reply_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(protocol.HEADER.pack(protocol.MAGIC, 18, 0, 1, 20) + bytes(20) + b"more")
    with ours, theirs, pytest.raises(TransportError, match="more than the reply that was asked for"):
        client().read(NUMBER, np.empty(5, np.float32), count=5, dtype="float32").run(ours, TIMEOUT)


def half_a_reply(count: int, upto: int) -> bytes:
    """The beginning of what answers a first exchange: elements that are 2.0000002."""
    elements = np.full(count, 2.0000002, np.float32).tobytes()
    return (protocol.HEADER.pack(protocol.MAGIC, 21, 0, 1, 8 + 4 * count) + bytes(8) + elements)[:upto]


@pytest.mark.parametrize("parts", [1, 3, 1000])
@pytest.mark.parametrize("odd", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [100, 50_000])
def test_an_exchange_that_is_cut_in_an_element_leaves_it_as_it_was(count: int, odd: int, parts: int) -> None:
    """Bytes of the old and the new one together would be another number."""
    ours, theirs = socket.socketpair()
    old, local = np.float32(1.9999999), np.full(count, 1.9999999, np.float32)
    reply = half_a_reply(count, 28 + 4 * (count // 2) + odd)
    transfer = client().exchange(NUMBER, local, 0.5, count=count, dtype="float32")

    def answer() -> None:
        theirs.recv(1 << 20)
        for part in np.array_split(np.frombuffer(reply, np.uint8), parts):
            theirs.sendall(part.tobytes())
        theirs.shutdown(socket.SHUT_WR)
        while theirs.recv(1 << 20):
            pass

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConnectionError):
        transfer.run(ours, TIMEOUT)
    ours.close()
    thread.join(TIMEOUT)
    theirs.close()
    assert (local[: count // 2] == np.float32(2.0000002)).all()
    assert (local[count // 2 :] == old).all()


@pytest.mark.parametrize("sizes", [[1], [3], [28, 1], [7, 16384], [16384]])
def test_bytes_of_an_exchange_in_any_parts_are_put_together(sizes: list[int]) -> None:
    """As TLS gives them."""
    count = 10_000
    local = np.zeros(count, np.float32)
    native = client().exchange(NUMBER, local, 0.5, count=count, dtype="float32")._native
    while len(sent := native.outgoing()):
        native.sent(len(sent))
    reply, at = half_a_reply(count, 1 << 30), 0
    for size in itertools.cycle(sizes):
        if native.finished:
            break
        native.absorb(reply[at : at + size])
        at += size
    assert at >= len(reply)
    assert native.outcome() == 0
    assert (local == np.float32(2.0000002)).all()


def test_an_answer_to_another_request_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(protocol.HEADER.pack(protocol.MAGIC, 18, 0, 77, 20) + bytes(20))
    with ours, theirs, pytest.raises(TransportError, match="answer to request 77 instead of 1"):
        client().read(NUMBER, np.empty(5, np.float32), count=5, dtype="float32").run(ours, TIMEOUT)


def test_an_interrupted_exchange_leaves_the_sum_as_it_was() -> None:
    count = 256 * CHUNK  # takes 30 ms and more
    mapping, local = Mapping.create(count, "float32"), np.ones(count, np.float32)
    daemon, stream = Daemon(mapping), client()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with daemon.served() as sock:
            transfer = stream.exchange(NUMBER, local, 0.5, count=count, dtype="float32")
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            with pytest.raises(KeyboardInterrupt):
                transfer.run(sock, TIMEOUT)
            assert 0 < local.sum() < count  # some of it was done
            np.testing.assert_array_equal(local + read_all(mapping), 1)
            assert mapping.version == 0
            stream.write(NUMBER, local, count=count, dtype="float32").run(sock, TIMEOUT)
    finally:
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_array_equal(read_all(mapping), local)
    mapping.close()


# Limits ----------------------------------------------------------------------------------------------------


def test_requests_over_the_rate_are_slowed_not_refused(mapping: Mapping) -> None:
    daemon, stream, out = Daemon(mapping, rate=20.0, burst=5.0), client(), np.empty(5, np.float32)
    start = time.monotonic()
    with daemon.served() as sock:
        for _ in range(15):
            stream.read(NUMBER, out, **SIZE).run(sock, TIMEOUT)
    assert time.monotonic() - start >= 0.49  # 10 over the burst, at 20 a second
    assert daemon.stream.throttled >= 3  # a busy machine may be that slow by itself


def test_shadows_stay_within_their_limit(mapping: Mapping) -> None:
    daemon, stream = Daemon(mapping, shadow_limit=2 * 4 * CHUNK), client()
    before, local = read_all(mapping), noise(COUNT, 2)
    with daemon.served() as sock:
        with pytest.raises(OutOfMemory, match="no room for a shadow"):
            stream.exchange(NUMBER, local, 0.5, wire="int8", **SIZE).run(sock, TIMEOUT)
        assert daemon.stream.shadow_bytes == 2 * 4 * CHUNK
        for _ in range(2):
            stream.exchange(NUMBER, local[: 2 * CHUNK], 0.5, wire="int8", **SIZE).run(sock, TIMEOUT)
    total = read_all(mapping).astype(np.float64) + local
    np.testing.assert_allclose(total, before.astype(np.float64) + noise(COUNT, 2), rtol=0, atol=1e-5)


def test_all_streams_together_stay_within_the_processs_limit(mapping: Mapping) -> None:
    daemon, stream, before = Daemon(mapping), client(), read_all(mapping)
    _native.limit_stream_memory(100)  # whatever streams that end just now still hold
    try:
        with daemon.served() as sock, pytest.raises(OutOfMemory, match="no room for 262144 bytes"):
            stream.write(NUMBER, np.zeros(COUNT, np.float32), **SIZE).run(sock, TIMEOUT)
    finally:
        _native.limit_stream_memory((1 << 64) - 1)
    np.testing.assert_array_equal(read_all(mapping), before)
