"""Vector operations on segments where they lie, over every transport."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import smb
from smb import protocol
from smb.client import Box
from smb.segment import CHUNK_BYTES
from tests.smb.conftest import ON_HOST, TOKEN, Connect
from tests.smb.processes import chunk_held, wait_for

F32 = np.float32
PER_CHUNK = CHUNK_BYTES // 4
N = 4 * PER_CHUNK + 100


def drawn(seed: int, count: int = N) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(F32)


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_a_coordinator_computes_without_the_values_passing_through_it(box: Box) -> None:
    """One step of a line search: p = -g; x = x0 + a p; slope = g p."""
    g, x0 = drawn(1), drawn(2)
    gradient, start = box.create("g", N, initial=g), box.create("x0", N, initial=x0)
    direction, x = box.create("p", N), box.create("x", N)
    assert direction.copy_from(gradient) == 1
    assert direction.scale(-1.0) == 2
    slope = gradient.dot(direction)
    assert slope == pytest.approx(-np.dot(g.astype(float), g.astype(float)), rel=1e-12)
    assert gradient.norm() == pytest.approx(np.sqrt(-slope), rel=1e-12)
    x.copy_from(start)
    assert x.axpy(0.125, direction) == 2
    np.testing.assert_array_equal(x.read(), x0 - F32(0.125) * g)
    assert x.fill(0.0) == 3
    assert (x.norm(), x.sum(), x.dot(gradient)) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_combinations_may_cover_a_range(box: Box) -> None:
    x = drawn(1)
    segment, part = (
        box.create("x", N, initial=x),
        box.create("part", 2 * PER_CHUNK, initial=drawn(2, 2 * PER_CHUNK)),
    )
    y = part.read()
    at = PER_CHUNK // 2 + 3
    segment.fill(7.0, at, PER_CHUNK)
    segment.scale(3.0, N - 10)
    segment.scale(0.5, 5, 1)
    x[at : at + PER_CHUNK] = 7
    x[N - 10 :] *= 3
    x[5] *= F32(0.5)
    np.testing.assert_array_equal(segment.read(), x)
    segment.axpy(2.0, part, at)
    x[at : at + y.size] += 2 * y
    np.testing.assert_array_equal(segment.read(), x)
    segment.copy_from(part, at + 1)
    x[at + 1 : at + 1 + y.size] = y
    np.testing.assert_array_equal(segment.read(), x)
    assert segment.version == 5


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_a_copy_takes_every_type(box: Box) -> None:
    values = np.arange(3 * CHUNK_BYTES // 8 + 5, dtype=np.int64)
    source, target = (
        box.create("a", values.size, "int64", initial=values),
        box.create("b", values.size, "int64"),
    )
    target.copy_from(source)
    np.testing.assert_array_equal(target.read(), values)
    with pytest.raises(smb.TypeMismatch, match=r"'b'.*float32"):
        target.scale(2.0)


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_sums_keep_what_float32_would_lose(box: Box) -> None:
    values = np.full(N, 1e-3, F32)
    values[0] = 1e8
    segment = box.create("x", N, initial=values)
    assert segment.sum() == pytest.approx(values.astype(float).sum(), rel=1e-12)


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_sums_of_what_is_no_number_are_none_either(box: Box) -> None:
    segment = box.create("x", N)
    segment.write(np.array([np.nan], F32), offset=PER_CHUNK)
    assert np.isnan(segment.sum())
    assert np.isnan(segment.norm())


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_wrong_vector_operations_are_named_and_change_nothing(box: Box) -> None:
    x, short, ints = (
        box.create("x", N, initial=drawn(1)),
        box.create("short", 10),
        box.create("ints", N, "int32"),
    )
    wrong = [
        (lambda: x.copy_from(x), smb.RequestError, "'x'.*same segment"),
        (lambda: x.copy_from(short, N - 9), smb.RangeError, "'x'.*10 elements at offset"),
        (lambda: x.scale(float("nan")), smb.RequestError, "'x'|scalar"),
        (lambda: x.scale(1e300), smb.RequestError, "'x'|scalar"),
        (lambda: x.fill(1.0, N, 1), smb.RangeError, "'x'.*1 elements at offset"),
        (lambda: x.dot(short), smb.RangeError, "'x'.*one segment has"),
        (lambda: x.copy_from(ints), smb.TypeMismatch, "'x'.*int32"),
        (ints.sum, smb.TypeMismatch, "'ints'.*float32"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words):
            call()
    np.testing.assert_array_equal(x.read(), drawn(1))
    assert x.version == 0


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_axpy_keeps_nan_out_of_the_center(box: Box) -> None:
    center, delta = box.create("c", N), box.create("d", N)
    delta.write(np.array([np.nan], F32), offset=PER_CHUNK + 5)
    with pytest.raises(smb.NonFinite, match="'c'"):
        center.axpy(1.0, delta)
    assert np.isfinite(center.read()).all()
    assert center.version == 0


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_updates_of_both_kinds_lose_nothing(connect: Connect) -> None:
    first = connect()
    first.create("c", N)
    first.create("one", N, initial=np.ones(N, F32))
    boxes = [connect() for _ in range(3)]

    def work(rank: int) -> None:
        center, one = boxes[rank].attach("c"), boxes[rank].attach("one")
        ones = np.ones(N, F32)
        for _ in range(10):
            center.axpy(1.0, one) if rank else center.accumulate(ones)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    center = first.attach("c")
    np.testing.assert_array_equal(center.read(), 30)
    assert center.version == 30


def test_a_vector_operation_of_a_fenced_client_does_not_land_late(served: smb.Daemon) -> None:
    """The end of a session waits for the operation that is under way, so that none can come behind it."""
    client = smb.connect(served.addresses[1], token=TOKEN, timeout=10, name="fenced")
    client.create("c", PER_CHUNK, lifetime="stay", initial=np.ones(PER_CHUNK, F32))
    segment = client.attach("c")
    (mapping,) = [entry.mapping for entry in served.store._by_number.values()]
    (session,) = served.store.sessions()
    with chunk_held(mapping) as free, ThreadPoolExecutor(2) as pool:
        filling = pool.submit(segment.fill, 5.0)
        assert wait_for(lambda: session.remote._updates == 1)
        ending = pool.submit(served.store.end_session, session)
        time.sleep(0.1)
        early = ending.done()
        free.set()
        ending.result(10)
        with served.store.lock:
            seen = mapping.reduce("sum")
        time.sleep(0.1)
        assert mapping.reduce("sum") == seen
        assert not early
        filling.exception(20)
    client.close()


def test_the_daemon_itself_refuses_a_vector_operation_that_the_rights_do_not_allow(
    served: smb.Daemon,
) -> None:
    with (
        smb.connect(served.addresses[1], token=TOKEN) as owner,
        smb.connect(served.addresses[1], token=TOKEN) as guest,
    ):
        owner.create("c", 10, initial=np.ones(10, F32))
        segment = guest.attach("c", readonly=True)
        with pytest.raises(smb.NotPermitted, match="read-only"):
            segment.fill(0.0)
        request = protocol.Combine("fill", segment._number, 0, 0.0, 0, 10, True)
        with pytest.raises(smb.NotPermitted, match="read-only"):
            guest._call(request)
        with pytest.raises(smb.UnknownKey):
            guest._call(protocol.Reduce("sum", 999, 0))
        assert segment.sum() == 10


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_adagrads_step_is_made_beside_the_center(connect: Connect) -> None:
    """Of many at once: each parameter's squares are summed whole, and each step sees its own."""
    w, s, g = drawn(1), np.square(drawn(2)), drawn(3)
    first = connect()
    first.create("w", N, initial=w)
    first.create("s", N, initial=s)
    at, count = 5, N - 12
    boxes = [connect() for _ in range(3)]

    def push(rank: int) -> None:
        mine = boxes[rank].create(f"g{rank}", N, initial=g)
        center, squares = boxes[rank].attach("w"), boxes[rank].attach("s")
        for _ in range(4):
            center.adagrad(squares, mine, 0.1, scale=0.5, epsilon=1e-6, offset=at, count=count)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(push, range(3)))
    want, sums, q = w.astype(float), s.astype(float), 0.5 * g.astype(float)
    part = slice(at, at + count)
    for _ in range(12):
        sums[part] += np.square(q[part])
        want[part] -= 0.1 * q[part] / (np.sqrt(sums[part]) + 1e-6)
    center = first.attach("w")
    np.testing.assert_allclose(first.attach("s").read(), sums, rtol=1e-5)
    np.testing.assert_allclose(center.read(), want, atol=1e-5)
    assert center.version == 12
    assert center.adagrad(first.attach("s"), first.attach("g0"), 0.1, counts=False) == 12


@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_adagrad_refuses_what_is_no_number_before_anything_moves(connect: Connect) -> None:
    box, other = connect(), connect()
    w, s, g = (box.create(name, N, initial=drawn(i)) for i, name in enumerate("wsg"))
    short, ints = box.create("short", 10), box.create("ints", N, "int32")
    for bad in (np.nan, np.inf, 1e30):  # whose square is not finite
        g.write(np.array([bad], F32), offset=3 * PER_CHUNK)
        with pytest.raises(smb.NonFinite, match=r"'w'.*NaN or Inf"):
            w.adagrad(s, g, 0.1, offset=0, count=N)
        kept = slice(3 * PER_CHUNK, 4 * PER_CHUNK)
        np.testing.assert_array_equal(w.read()[kept], drawn(0)[kept])
        np.testing.assert_array_equal(s.read()[kept], drawn(1)[kept])
    if len(getattr(w._attachment, "_parts", [w])) == 1:  # one daemon
        np.testing.assert_array_equal(w.read(), drawn(0))
        np.testing.assert_array_equal(s.read(), drawn(1))
    g.write(np.array([0.0], F32), offset=3 * PER_CHUNK)
    w.write(drawn(0))  # where the box is several daemons, those without the bad chunk have made their part
    s.write(drawn(1))
    before = w.version
    readonly = other.attach("s", readonly=True)
    wrong = [
        (lambda: w.adagrad(s, s, 0.1), smb.RequestError),
        (lambda: w.adagrad(s, w, 0.1), smb.RequestError),
        (lambda: w.adagrad(s, g, float("nan")), smb.RequestError),
        (lambda: w.adagrad(s, g, 0.1, epsilon=0.0), smb.RequestError),
        (lambda: w.adagrad(short, g, 0.1), smb.RangeError),
        (lambda: w.adagrad(s, g, 0.1, offset=1, count=N), smb.RangeError),
        (lambda: w.adagrad(ints, g, 0.1), smb.TypeMismatch),
        (lambda: other.attach("w").adagrad(readonly, other.attach("g"), 0.1), smb.NotPermitted),
    ]
    for call, error in wrong:
        with pytest.raises(error):
            call()
    np.testing.assert_array_equal(w.read(), drawn(0))
    np.testing.assert_array_equal(s.read(), drawn(1))
    assert w.version == before
