"""One process and a segment: what is read and written, what is refused, and what the files allow."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from smb import _native
from smb.errors import (
    Closed,
    NonFinite,
    NotPermitted,
    ProtocolError,
    RangeError,
    RequestError,
    TransportError,
    TypeMismatch,
)
from smb.segment import CHUNK_BYTES, Life, Mapping
from tests.native.processes import Child, open_descriptors

CHUNK = CHUNK_BYTES // 4  # float32 elements of a chunk
COUNT = 5 * CHUNK + 100


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    made = Mapping.create(COUNT, "float32", initial=np.arange(COUNT, dtype=np.float32))
    yield made
    made.close()


def read_all(mapping: Mapping) -> Any:
    out = np.empty(mapping.count, mapping.dtype)
    mapping.read(out)
    return out


@pytest.mark.parametrize("dtype", _native.DTYPES)
def test_every_dtype_comes_back_as_written(dtype: str) -> None:
    values = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 100, 300_000).astype(dtype)
    mapping = Mapping.create(values.size, dtype)
    assert not read_all(mapping).any()
    assert mapping.write(values) == 1
    np.testing.assert_array_equal(read_all(mapping), values)
    assert (mapping.nbytes, mapping.chunks) == (values.nbytes, -(-values.nbytes // CHUNK_BYTES))
    mapping.close()


@pytest.mark.parametrize("offset", [0, 1, CHUNK - 1, CHUNK, CHUNK + 3])
@pytest.mark.parametrize("length", [0, 1, 5, CHUNK - 2, 2 * CHUNK + 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_ranges_touch_just_what_they_name(mapping: Mapping, offset: int, length: int, threads: int) -> None:
    expected = read_all(mapping)
    values = -np.arange(1, length + 1, dtype=np.float32)
    mapping.write(values, offset, threads=threads)
    expected[offset : offset + length] = values
    np.testing.assert_array_equal(read_all(mapping), expected)
    mapping.accumulate(values, -0.5, offset=offset, threads=threads)
    expected[offset : offset + length] += np.float32(-0.5) * values
    np.testing.assert_array_equal(read_all(mapping), expected)
    local = np.full(length, 7, np.float32)
    mapping.exchange(local, 0.25, offset, threads)
    d = np.float32(0.25) * (np.float32(7) - expected[offset : offset + length])
    expected[offset : offset + length] += d
    np.testing.assert_array_equal(local, np.float32(7) - d)
    np.testing.assert_array_equal(read_all(mapping), expected)
    part = np.empty(length, np.float32)
    mapping.read(part, offset, threads=threads)
    np.testing.assert_array_equal(part, expected[offset : offset + length])


def test_long_reads_and_writes_past_the_caches() -> None:
    n = (9 << 20) // 4 + 5
    values = np.random.default_rng(1).random(n + 1, np.float32)
    mapping = Mapping.create(n + 2, "float32")
    mapping.write(values[1:], offset=1, threads=2)
    out = np.zeros(n + 3, np.float32)
    mapping.read(out[3:], offset=1, threads=2)
    np.testing.assert_array_equal(out[3:], values[1:])
    mapping.close()


def test_accumulate_takes_another_segment(mapping: Mapping) -> None:
    source = Mapping.create(2 * CHUNK, "float32", initial=np.ones(2 * CHUNK, np.float32))
    expected = read_all(mapping)
    expected[CHUNK // 2 : CHUNK // 2 + source.count] += 3
    assert mapping.accumulate(source, 3.0, offset=CHUNK // 2, threads=2) == 1
    np.testing.assert_array_equal(read_all(mapping), expected)
    source.write(np.array([np.nan], np.float32), CHUNK)
    with pytest.raises(NonFinite) as caught:
        mapping.accumulate(source)
    assert caught.value.element == CHUNK  # type: ignore[attr-defined]
    with pytest.raises(RangeError):
        mapping.accumulate(source, offset=COUNT - source.count + 1)
    source.close()
    with pytest.raises(Closed):
        mapping.accumulate(source)


def test_a_segment_is_not_added_to_itself(mapping: Mapping) -> None:
    again = Mapping.attach(mapping.control_fd, mapping.payload_fd, COUNT, "float32")
    for source in (mapping, again):
        with pytest.raises(RequestError, match="same segment"):
            mapping.accumulate(source)
    again.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("chunk", [0, 2, 5])
@pytest.mark.parametrize("name", ["exchange", "accumulate"])
def test_a_nan_stops_before_its_chunk_and_nothing_later_moves(
    mapping: Mapping, name: str, chunk: int, bad: float, threads: int
) -> None:
    start = read_all(mapping)
    local = start + 1
    at = chunk * CHUNK + 55
    local[at] = bad
    before = local.copy()
    with pytest.raises(NonFinite, match=f"element {at} .*chunk {chunk}") as caught:
        getattr(mapping, name)(local, 0.5, threads=threads)
    assert (caught.value.chunk, caught.value.element) == (chunk, at)  # type: ignore[attr-defined]
    now, border = read_all(mapping), chunk * CHUNK
    np.testing.assert_array_equal(now[border:], start[border:])
    np.testing.assert_array_equal(local[border:], before[border:])
    assert (now[:border] != start[:border]).all()
    if name == "exchange":
        np.testing.assert_allclose(now[:border] + local[:border], start[:border] + before[:border])
    assert mapping.version == 0
    assert mapping.holders() == []


def test_an_accumulate_that_would_overflow_by_its_scale_is_refused(mapping: Mapping) -> None:
    with pytest.raises(NonFinite):
        mapping.accumulate(np.full(3, 1e30, np.float32), 1e10)
    assert read_all(mapping)[2] == 2


def test_the_version_counts_finished_updates(mapping: Mapping) -> None:
    ones = np.ones(COUNT, np.float32)
    assert mapping.version == 0  # the initial values are no update
    assert [mapping.write(ones), mapping.accumulate(ones), mapping.exchange(ones, 0.5)] == [1, 2, 3]
    mapping.read(ones)
    assert mapping.version == 3


def test_wait_returns_when_the_version_comes_and_when_it_does_not(mapping: Mapping) -> None:
    one = np.ones(1, np.float32)
    assert not mapping.wait(1, 0.05)
    updater = threading.Timer(0.1, mapping.write, [one])
    updater.start()
    assert mapping.wait(1, 30)
    updater.join()
    control, payload = mapping.readonly_fds()
    watcher = Mapping.attach(control, payload, COUNT, "float32", readonly=True)
    updater = threading.Timer(0.1, mapping.write, [one])
    updater.start()
    assert watcher.wait(2, 30)
    updater.join()
    watcher.close()
    os.close(control)
    os.close(payload)


LATE = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.write(LATE, COUNT - 3), RangeError, f"4 elements at offset {COUNT - 3}.*{COUNT} elem"),
        (lambda m: m.read(LATE.copy(), -1), RangeError, "offset -1"),
        (lambda m: m.exchange(LATE.copy(), 0.5, 1 << 62), RangeError, "past the segment"),
        (lambda m: m.accumulate(np.ones(COUNT + 1, np.float32)), RangeError, "past the segment"),
        (lambda m: m.write(np.ones(4)), TypeMismatch, "segment holds float32, the array float64"),
        (lambda m: m.exchange(np.ones(4, np.int32), 0.5), TypeMismatch, "int32"),
        (lambda m: m.exchange(np.ones((4, 4), np.float32).T, 0.5), TypeMismatch, "contiguous"),
        (lambda m: m.exchange([1.0], 0.5), TypeMismatch, "numpy array"),
        (lambda m: m.exchange(LATE.copy(), 0.0), RequestError, "alpha is 0.0"),
        (lambda m: m.exchange(LATE.copy(), 1.01), RequestError, "alpha is 1.01"),
        (lambda m: m.exchange(LATE.copy(), float("nan")), RequestError, "alpha is nan"),
        (lambda m: m.accumulate(LATE, float("inf")), RequestError, "scale is inf"),
        (lambda m: m.accumulate(LATE, 1e300), RequestError, "scale"),
        (lambda m: m.exchange(), TypeError, "lacks argument 'local'"),
        (lambda m: m.exchange(LATE, 0.5, lr=1), TypeError, "'lr'"),
        (lambda m: m.exchange(LATE, 0.5, alpha=1), TypeError, "'alpha'"),
        (lambda m: m.read(LATE, 0, 1, 0, 1, 2), TypeError, "takes 5 arguments"),
        (lambda m: m.read(LATE, 0, 1, 2, 2), RequestError, "no stripe 2 of 2"),
        (lambda m: m.read(LATE, "x"), TypeError, "str"),
        (lambda m: m.write(LATE, offset=1 << 80), OverflowError, "."),
    ],
)
def test_wrong_requests_are_named_and_change_nothing(
    mapping: Mapping, call: Callable[[Mapping], object], error: type[Exception], words: str
) -> None:
    before = read_all(mapping)
    with pytest.raises(error, match=words):
        call(mapping)
    np.testing.assert_array_equal(read_all(mapping), before)
    assert mapping.version == 0


def test_only_float32_is_exchanged_and_accumulated() -> None:
    mapping = Mapping.create(10, "int64")
    with pytest.raises(TypeMismatch, match=r"float32.*int64"):
        mapping.exchange(np.ones(10, np.int64), 0.5)
    with pytest.raises(TypeMismatch, match=r"float32.*int64"):
        mapping.accumulate(np.ones(10, np.int64))
    mapping.close()


@pytest.mark.parametrize(
    ("count", "dtype", "error"), [(0, "float32", RangeError), (5, "float8", TypeMismatch)]
)
def test_segments_that_cannot_be_are_refused(count: int, dtype: str, error: type[Exception]) -> None:
    before = open_descriptors()
    with pytest.raises(error):
        Mapping.create(count, dtype)
    with pytest.raises(RangeError, match="3 elements for a segment of 4"):
        Mapping.create(4, "float32", initial=np.ones(3, np.float32))
    assert open_descriptors() == before


# What the memory files allow -----------------------------------------------------------------------------


def test_nobody_can_change_the_size_of_the_files(mapping: Mapping) -> None:
    for fd in (mapping.control_fd, mapping.payload_fd):
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_attach_refuses_files_that_could_shrink_or_have_another_size(mapping: Mapping) -> None:
    size = os.fstat(mapping.payload_fd).st_size
    loose = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, size)
    before = open_descriptors()
    with pytest.raises(ProtocolError, match="not sealed"):
        Mapping.attach(mapping.control_fd, loose, COUNT, "float32")
    with pytest.raises(ProtocolError, match="control file"):
        Mapping.attach(mapping.payload_fd, mapping.payload_fd, COUNT, "float32")
    with pytest.raises(ProtocolError, match=f"has {size} bytes"):
        Mapping.attach(mapping.control_fd, mapping.payload_fd, COUNT + 10_000, "float32")
    with open("/dev/zero", "rb") as zero, pytest.raises(ProtocolError, match="memory file"):
        Mapping.attach(zero.fileno(), mapping.payload_fd, COUNT, "float32")
    assert open_descriptors() == before
    os.close(loose)


@pytest.mark.parametrize("through", ["descriptors that cannot write", "a request"])
def test_a_read_only_mapping_reads_and_never_writes(mapping: Mapping, through: str) -> None:
    fds = mapping.readonly_fds() if through != "a request" else (mapping.control_fd, mapping.payload_fd)
    reader = Mapping.attach(*fds, COUNT, "float32", readonly=True)
    np.testing.assert_array_equal(read_all(reader), read_all(mapping))
    one = np.ones(1, np.float32)
    for call in (
        lambda: reader.write(one),
        lambda: reader.exchange(one, 0.5),
        lambda: reader.accumulate(one),
    ):
        with pytest.raises(NotPermitted, match="read-only"):
            call()
    with pytest.raises(NotPermitted):
        reader.repair()
    reader.close()
    if through != "a request":
        with pytest.raises(OSError, match="mmap"):
            Mapping.attach(*fds, COUNT, "float32")
        for fd in fds:
            os.close(fd)


def test_closing_gives_everything_back_and_twice_is_fine() -> None:
    before = open_descriptors()
    mapping = Mapping.create(COUNT, "float32")
    other = Mapping.attach(mapping.control_fd, mapping.payload_fd, COUNT, "float32")
    for one in (mapping, other):
        one.close()
        one.close()
        with pytest.raises(Closed):
            one.read(np.empty(1, np.float32))
        with pytest.raises(Closed):
            one.exchange(np.empty(1, np.float32), 0.5)
        with pytest.raises(Closed):
            _ = one.version
    assert open_descriptors() == before
    with open("/proc/self/maps") as maps:
        assert "smb-payload" not in maps.read()


def test_closing_under_an_operation_lets_it_end(mapping: Mapping) -> None:
    local = np.ones(COUNT, np.float32)
    stop, closed = threading.Event(), threading.Event()

    def exchange_until_closed() -> None:
        try:
            while not stop.is_set():
                mapping.exchange(local, 0.5, threads=2)
        except Closed:
            closed.set()

    worker = threading.Thread(target=exchange_until_closed)
    worker.start()
    mapping.wait(5, 30)
    mapping.close()
    worker.join(30)
    stop.set()
    worker.join(30)
    assert closed.is_set()


def test_pages_are_present_before_the_first_access() -> None:
    mapping = Mapping.create(CHUNK * 64, "float32", prefault_threads=2)
    with open("/proc/self/smaps") as smaps:
        entry = smaps.read().split("smb-payload")[1]
    resident = int(entry.split("Rss:")[1].split()[0])
    assert resident * 1024 >= mapping.nbytes
    mapping.close()


# Life ----------------------------------------------------------------------------------------------------


def test_operations_refuse_a_dead_daemon_but_its_values_are_rescued(mapping: Mapping) -> None:
    life = Life.create()
    client = Mapping.attach(
        mapping.control_fd, mapping.payload_fd, COUNT, "float32", life=Life.attach(life.fd)
    )
    read_all(client)
    life.close()
    life.close()
    assert not life.alive
    one = np.ones(1, np.float32)
    for call in (
        lambda: client.read(one),
        lambda: client.write(one),
        lambda: client.exchange(one, 0.5),
        lambda: client.accumulate(one),
        lambda: client.wait(1, 1),
    ):
        with pytest.raises(TransportError, match="daemon died"):
            call()
    out = np.empty(COUNT, np.float32)
    assert client.rescue(out) == 0
    np.testing.assert_array_equal(out, read_all(mapping))
    client.close()


def test_a_killed_daemon_is_seen_dead_and_a_forked_child_does_not_matter() -> None:
    receive, send = os.pipe()
    hold, release = os.pipe()

    def daemon() -> None:
        life = Life.create()
        with Child(life.close) as forked:  # inherits the object, not the thread: its end must say nothing
            assert forked.wait() == 0
        os.write(send, b"%d" % life.fd)
        os.read(hold, 1)

    with Child(daemon) as child:
        number = int(os.read(receive, 16))
        fd = os.open(f"/proc/{child.pid}/fd/{number}", os.O_RDONLY)
        life = Life.attach(fd)
        assert life.alive
        child.kill()
        assert not life.alive
    life.close()
    for each in (fd, receive, send, hold, release):
        os.close(each)


def test_clients_cannot_forge_the_daemons_death() -> None:
    life = Life.create()
    with pytest.raises(PermissionError):
        mmap.mmap(life.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(life.fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(life.fd, b"\0" * 8, 0)
    assert life.alive
    life.close()
