"""Wrong input: one clear message each, and the box stays usable for its sender and for everybody else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import smb
from smb.client import Box, Segment
from tests.smb.conftest import ON_HOST, Connect
from tests.smb.processes import wait_for

N = 1000
F32 = np.float32
Fault = Callable[[Box, Segment], object]
NAN = np.full(N, np.nan, F32)
BAD_KEY = r"1 to 255 letters, digits or any of . _ - / : @ \+ = ,"


def detached(box: Box) -> Segment:
    segment = box.attach("c")
    segment.detach()
    return segment


def closed(box: Box) -> Box:
    other = smb.connect(box.address) if box.transport == "shm" else box
    other.close()
    return other


def frozen(box: Box) -> np.ndarray:
    array = np.zeros(N, F32)
    array.flags.writeable = False
    return array


FAULTS: dict[str, tuple[Fault, type[smb.SmbError], str]] = {
    "key exists": (lambda b, s: b.create("c", N), smb.KeyExists, "segment 'c' exists already"),
    "another count": (
        lambda b, s: b.create("c", N + 1, or_attach=True),
        smb.KeyExists,
        "segment 'c' exists with count 1000, not 1001",
    ),
    "another dtype": (
        lambda b, s: b.create("c", N, "float64", or_attach=True),
        smb.KeyExists,
        "segment 'c' exists with dtype float32, not float64",
    ),
    "another lifetime": (
        lambda b, s: b.create("c", N, lifetime="stay", or_attach=True),
        smb.KeyExists,
        "segment 'c' exists with lifetime attached, not stay",
    ),
    "another job's center": (
        lambda b, s: b.create("c", N, meta=b"cifar", or_attach=True),
        smb.KeyExists,
        r"segment 'c' exists with other meta: b'' \(0 bytes\), not b'cifar' \(5 bytes\)",
    ),
    "unknown key": (lambda b, s: b.attach("d"), smb.UnknownKey, "no segment 'd'"),
    "unknown key, similar known": (
        lambda b, s: b.attach("center"),
        smb.UnknownKey,
        r"no segment 'center' \(known: c\)",
    ),
    "free of an unknown key": (lambda b, s: b.free("d"), smb.UnknownKey, "no segment 'd'"),
    "stat of an unknown key": (lambda b, s: b.stat("d"), smb.UnknownKey, "no segment 'd'"),
    "empty key": (lambda b, s: b.create("", N), smb.RequestError, f"bad key '': {BAD_KEY}"),
    "key with a space": (lambda b, s: b.attach("a b"), smb.RequestError, f"bad key 'a b': {BAD_KEY}"),
    "key of 256 letters": (lambda b, s: b.create("k" * 256, N), smb.RequestError, "bad key 'kkk.*1 to 255"),
    "key that is a number": (lambda b, s: b.create(7, N), smb.RequestError, "bad key 7"),
    "key that is not ASCII": (lambda b, s: b.counter("zähler"), smb.RequestError, "bad key 'zähler'"),
    "zero count": (lambda b, s: b.create("d", 0), smb.RequestError, "segment 'd': count: 0 is not in 1.."),
    "negative count": (
        lambda b, s: b.create("d", -1),
        smb.RequestError,
        "segment 'd': count: -1 is not in 1..",
    ),
    "fractional count": (
        lambda b, s: b.create("d", 1.5),
        smb.RequestError,
        "segment 'd': count: 1.5 is no u64",
    ),
    "unknown dtype": (
        lambda b, s: b.create("d", N, "complex64"),
        smb.TypeMismatch,
        "'d': dtype 'complex64' is none of float32",
    ),
    "unknown lifetime": (
        lambda b, s: b.create("d", N, lifetime="forever"),
        smb.RequestError,
        "'d': lifetime: 'forever' is none of owner, attached, stay",
    ),
    "too long meta": (
        lambda b, s: b.create("d", N, meta=bytes(70_000)),
        smb.RequestError,
        "'d': meta: 70000 bytes, at most 65536",
    ),
    "initial of another size": (
        lambda b, s: b.create("d", N, initial=np.zeros(9, F32)),
        smb.RangeError,
        "'d': 9 initial values for 1000 elements",
    ),
    "initial of another dtype": (
        lambda b, s: b.create("d", N, initial=np.zeros(N)),
        smb.TypeMismatch,
        "'d': initial values are float64, the segment is float32",
    ),
    "more memory than there is": (
        lambda b, s: b.create("d", 1 << 44),
        smb.OutOfMemory,
        r"'d' of [\d.]+ TiB does not fit: segments hold 3.9 KiB, memory limit none, MemAvailable .*, cgroup",
    ),
    "read past the end": (
        lambda b, s: s.read(np.zeros(N + 1, F32)),
        smb.RangeError,
        r"'c': read: 1001 elements at offset 0 run past the segment \(1000 elements\)",
    ),
    "write past the end": (
        lambda b, s: s.write(np.zeros(10, F32), offset=N - 9),
        smb.RangeError,
        "'c': write: 10 elements at offset 991 run past",
    ),
    "exchange past the end": (
        lambda b, s: s.exchange(np.zeros(N, F32), 0.5, offset=1),
        smb.RangeError,
        "'c': exchange: 1000 elements at offset 1 run past",
    ),
    "negative offset": (
        lambda b, s: s.write(np.zeros(1, F32), offset=-1),
        smb.RangeError,
        "'c': write: 1 elements at offset -1",
    ),
    "offset past the end": (
        lambda b, s: s.read(offset=N + 1),
        smb.RangeError,
        "'c': offset 1001 is not in 0..1000",
    ),
    "wrong dtype": (
        lambda b, s: s.exchange(np.zeros(N), 0.5),
        smb.TypeMismatch,
        "'c': exchange: .*float64",
    ),
    "accumulate into integers": (
        lambda b, s: b.create("d", N, "int32").accumulate(np.zeros(N, np.int32)),
        smb.TypeMismatch,
        "'d': accumulate: needs a segment of float32, this one holds int32",
    ),
    "not contiguous": (
        lambda b, s: s.write(np.zeros((N, 2), F32)[:, 0]),
        smb.TypeMismatch,
        "'c': write: .*contiguous",
    ),
    "read into a frozen array": (
        lambda b, s: s.read(frozen(b)),
        smb.TypeMismatch,
        "'c': read: must be a C-contiguous writable array",
    ),
    "a list": (lambda b, s: s.write([1.0]), smb.TypeMismatch, "'c': write: .*list"),
    "alpha of zero": (
        lambda b, s: s.exchange(np.zeros(N, F32), 0.0),
        smb.RequestError,
        "'c': exchange: alpha is 0.0",
    ),
    "alpha above one": (
        lambda b, s: s.exchange(np.zeros(N, F32), 1.1),
        smb.RequestError,
        "'c': exchange: alpha is 1.1",
    ),
    "alpha not a number": (
        lambda b, s: s.exchange(np.zeros(N, F32), float("nan")),
        smb.RequestError,
        "'c': exchange: alpha is nan",
    ),
    "NaN in the weights": (
        lambda b, s: s.exchange(NAN.copy(), 0.5),
        smb.NonFinite,
        r"'c' by test \(pid \d+\): exchange: element 0 .* is NaN or Inf",
    ),
    "accumulate of itself": (lambda b, s: s.accumulate(s), smb.RequestError, "'c': accumulate: "),
    "write to a read-only segment": (
        lambda b, s: b.attach("c", readonly=True).write(np.zeros(1, F32)),
        smb.NotPermitted,
        "'c': the segment is attached read-only",
    ),
    "exchange with a read-only segment": (
        lambda b, s: b.attach("c", readonly=True).exchange(np.zeros(N, F32), 0.5),
        smb.NotPermitted,
        "'c': the segment is attached read-only",
    ),
    "use of a detached segment": (
        lambda b, s: detached(b).read(),
        smb.Closed,
        "segment 'c': it was detached",
    ),
    "negative timeout": (
        lambda b, s: b.barrier("b", 2, timeout=-1),
        smb.RequestError,
        "timeout -1 is not in 0",
    ),
    "barrier for nobody": (
        lambda b, s: b.barrier("b", 0, 1),
        smb.RequestError,
        "parties: 0 is not in 1..65536",
    ),
    "counter that overflows": (
        lambda b, s: (b.counter("n").add(2**63 - 1), b.counter("n").add(1)),
        smb.RangeError,
        "counter 'n': 9223372036854775807 . 1 leaves 64 bits",
    ),
    "counter by a fraction": (
        lambda b, s: b.counter("n").add(0.5),
        smb.RequestError,
        "amount: 0.5 is no i64",
    ),
    "release of a free lock": (
        lambda b, s: b.lock("l").release(),
        smb.RequestError,
        "lock 'l' is not held by this object",
    ),
}


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gets_its_message_and_harms_nobody(connect: Connect, name: str) -> None:
    act, kind, message = FAULTS[name]
    neighbour, box = connect(name="neighbour"), connect()
    segment = box.create("c", N, initial=np.arange(N, dtype=F32))
    theirs = neighbour.attach("c")
    with pytest.raises(kind, match=message) as caught:
        act(box, segment)
    assert type(caught.value) is kind
    for one in (segment, theirs):
        np.testing.assert_array_equal(one.read(), np.arange(N))
    assert segment.version == 0
    assert "c" in neighbour.list() and box.counter("m").add(1) == 0  # noqa: PT018


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_a_held_lock_cannot_be_taken_again_by_its_object(box: Box) -> None:
    lock = box.lock("l")
    with lock, pytest.raises(smb.RequestError, match="lock 'l' is held by this object already"):
        lock.acquire()


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_a_barrier_expects_one_number(connect: Connect, served: smb.Daemon) -> None:
    one, other = connect(), connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.barrier, "b", 2, 10)
        assert wait_for(lambda: served.store.rendezvous._barriers)
        with pytest.raises(smb.RequestError, match="barrier 'b' waits for 2, not for 3"):
            other.barrier("b", 3, timeout=5)
        other.barrier("b", 2, timeout=5)
        waiting.result(5)


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_a_closed_box_says_so(connect: Connect) -> None:
    box = connect()
    segment = box.create("c", N)
    box.close()
    with pytest.raises(smb.Closed, match="this box is closed"):
        box.list()
    with pytest.raises(smb.Closed, match=r"^segment 'c': the box is closed"):
        segment.exchange(np.zeros(N, F32), 0.5)


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_chunks_before_a_bad_one_have_moved_on_both_sides(box: Box) -> None:
    count = 3 * 65536
    x = np.ones(count, F32)
    x[2 * 65536 + 7] = np.inf
    center = box.create("big", count)
    with pytest.raises(smb.NonFinite, match="chunk 2") as caught:
        center.exchange(x, 0.5)
    assert (caught.value.chunk, caught.value.element) == (2, 2 * 65536 + 7)
    got = center.read()
    np.testing.assert_array_equal(got[: 2 * 65536], 0.5)
    np.testing.assert_array_equal(got[2 * 65536 :], 0)
    np.testing.assert_array_equal(x[: 2 * 65536], 0.5)


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("tcp://localhost:1", smb.TransportError, "no daemon answers at localhost:1: Connection refused"),
        ("[::1]:1", smb.TransportError, r"no daemon answers at \[::1\]:1: "),
        ("tcp://no-such-host.invalid:7100", smb.TransportError, "host 'no-such-host.invalid' is not known"),
        ("tcp://localhost", smb.RequestError, "bad address 'localhost': HOST:PORT is expected"),
        ("tcp://::1:7100", smb.RequestError, r"write an IPv6 host in brackets, such as \[::1\]:7100"),
        ("rdma://localhost:1", smb.SmbError, "RDMA|no daemon answers"),
        ("nonsense", smb.RequestError, "bad address 'nonsense': unix:PATH, tcp://HOST:PORT"),
        ("unix:", smb.RequestError, "bad address 'unix:': nothing behind unix:"),
        (
            "unix:/nowhere/box.sock",
            smb.TransportError,
            "no daemon answers at /nowhere/box.sock: No such file",
        ),
        ("unix:/" + "x" * 120, smb.RequestError, "is longer than the kernel's 107 bytes"),
    ],
)
def test_a_wrong_address_is_refused(address: str, kind: type[smb.SmbError], message: str) -> None:
    with pytest.raises(kind, match=message):
        smb.connect(address)
