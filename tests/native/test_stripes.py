"""Stripes of a larger segment, and vector operations, on mappings of this process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from smb.errors import NonFinite, RangeError, RequestError, TypeMismatch
from smb.pieces import before, pieces
from smb.segment import CHUNK_BYTES, Mapping

CHUNK = CHUNK_BYTES // 4
F32 = np.float32


def stripes_of(count: int, stripes: int, dtype: str = "float32") -> list[Mapping | None]:
    """Empty stripes, None where nothing of so short a segment lies."""
    per_chunk = CHUNK_BYTES // np.dtype(dtype).itemsize
    sizes = [before(count, per_chunk, i, stripes) for i in range(stripes)]
    return [Mapping.create(size, dtype) if size else None for size in sizes]


def do(parts: list[Mapping | None], method: str, *arguments: Any) -> None:
    for i, part in enumerate(parts):
        if part:
            getattr(part, method)(*arguments, 1, i, len(parts))


def drawn(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(F32)


@pytest.mark.parametrize("stripes", [1, 2, 3, 5])
def test_every_element_lies_in_one_stripe_in_order(stripes: int) -> None:
    for offset, count in [(0, 1), (0, 40), (3, 29), (7, 1), (10, 20), (39, 1), (5, 0)]:
        found = []
        for i in range(stripes):
            here = list(pieces(offset, count, 8, i, stripes))
            assert [p.begin for p in here] == sorted(p.begin for p in here)
            for p in here:
                chunk = (offset + p.at) // 8
                assert chunk % stripes == i
                assert p.begin == chunk // stripes * 8 + (offset + p.at) % 8
                found += range(offset + p.at, offset + p.at + p.count)
        assert sorted(found) == list(range(offset, offset + count))


@pytest.mark.parametrize("dtype", ["float32", "int16", "float64"])
@pytest.mark.parametrize("stripes", [2, 3])
def test_stripes_read_and_write_what_a_plain_segment_does(stripes: int, dtype: str) -> None:
    per_chunk = CHUNK_BYTES // np.dtype(dtype).itemsize
    count = 4 * per_chunk + 17
    plain, parts = Mapping.create(count, dtype), stripes_of(count, stripes, dtype)
    for offset, n in [(0, count), (5, 1), (per_chunk - 1, 2), (3, 3 * per_chunk), (count - 20, 20)]:
        values = (1000 * drawn(offset, n)).astype(dtype)
        plain.write(values, offset)
        do(parts, "write", values, offset)
        want, got = np.empty(n, dtype), np.zeros(n, dtype)
        plain.read(want, offset)
        do(parts, "read", got, offset)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("threads", [1, 2])
def test_stripes_move_what_a_plain_segment_does(threads: int) -> None:
    count = 9 * CHUNK + 100
    plain, parts = Mapping.create(count, "float32"), stripes_of(count, 2)
    for offset, n in [(0, count), (CHUNK // 2, 4 * CHUNK), (count - 3, 3)]:
        mine, theirs = drawn(offset, n), drawn(offset, n)
        plain.exchange(mine, 0.25, offset)
        plain.accumulate(mine, 2.0, offset)
        for i, part in enumerate(parts):
            assert part
            part.exchange(theirs, 0.25, offset, threads, i, 2)
            part.accumulate(theirs, 2.0, offset, threads, i, 2)
        np.testing.assert_array_equal(theirs, mine)
    want, got = np.empty(count, F32), np.empty(count, F32)
    plain.read(want)
    do(parts, "read", got, 0)
    np.testing.assert_array_equal(got, want)
    assert [part.version for part in parts if part] == [0, 0]  # counted by count_update alone
    assert parts[0] is not None
    assert parts[0].count_update() == parts[0].version == 1


def test_a_bad_value_is_named_as_the_callers_array_has_it() -> None:
    parts = stripes_of(6 * CHUNK, 3)
    values = np.zeros(5 * CHUNK, F32)
    values[3 * CHUNK + 7] = np.nan  # element 3.5 chunks + 7 of the segment: chunk 3, of stripe 0
    assert parts[0] is not None
    with pytest.raises(NonFinite, match=r"chunk 3.*1 chunks before it that lie there") as caught:
        parts[0].exchange(values, 0.5, CHUNK // 2, 1, 0, 3)
    assert vars(caught.value) == {"chunk": 3, "element": 3 * CHUNK + 7}


def test_a_stripe_refuses_what_runs_past_its_end() -> None:
    part = Mapping.create(CHUNK, "float32")
    with pytest.raises(RangeError, match="past the segment"):
        part.write(np.zeros(3 * CHUNK, F32), 0, 1, 0, 2)
    for stripe, stripes in [(-1, 2), (0, 0), (0, 1 << 40)]:
        with pytest.raises(RequestError, match="no stripe"):
            part.read(np.zeros(1, F32), 0, 1, stripe, stripes)


COUNT = 3 * CHUNK + 100


def test_combinations_do_what_they_say_to_the_range_alone() -> None:
    x, y = drawn(1, COUNT), drawn(2, 2 * CHUNK)
    segment, source = (
        Mapping.create(COUNT, "float32", initial=x),
        Mapping.create(2 * CHUNK, "float32", initial=y),
    )
    at, end = CHUNK // 2, CHUNK // 2 + 2 * CHUNK
    assert segment.combine("scale", 3.0, None, at, 2 * CHUNK) == 1
    x[at:end] *= F32(3)
    assert segment.combine("axpy", -0.5, source, at, 2 * CHUNK) == 2
    x[at:end] -= F32(0.5) * y
    got = np.empty(COUNT, F32)
    segment.read(got)
    np.testing.assert_array_equal(got, x)
    assert segment.combine("fill", 7.0, None, 10, 5, False) == 2  # not counted
    assert segment.combine("copy", 0.0, source, 100, 2 * CHUNK, True, 2) == 3
    x[10:15], x[100 : 100 + 2 * CHUNK] = 7, y
    segment.read(got)
    np.testing.assert_array_equal(got, x)


def test_a_copy_takes_any_type() -> None:
    values = np.arange(100_000, dtype=np.int64)
    target, source = (
        Mapping.create(values.size, "int64"),
        Mapping.create(values.size, "int64", initial=values),
    )
    target.combine("copy", 0.0, source, 0, values.size)
    got = np.empty_like(values)
    target.read(got)
    np.testing.assert_array_equal(got, values)


def test_sums_are_float64_and_the_same_bits_by_any_number_of_threads() -> None:
    x, y = drawn(1, COUNT), drawn(2, COUNT)
    a, b = Mapping.create(COUNT, "float32", initial=x), Mapping.create(COUNT, "float32", initial=y)
    for how, other, want in [
        ("dot", b, np.dot(x.astype(float), y.astype(float))),
        ("dot", a, np.dot(x.astype(float), x.astype(float))),
        ("sum", None, x.astype(float).sum()),
    ]:
        assert a.reduce(how, other) == pytest.approx(want, rel=1e-12)
        assert a.reduce(how, other, 2) == a.reduce(how, other)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m, o: m.combine("copy", 0.0, m, 0, 10), RequestError, "same segment"),
        (lambda m, o: m.combine("axpy", 1.0, None, 0, 10), RequestError, "axpy without a source"),
        (lambda m, o: m.combine("cube", 1.0, None, 0, 10), RequestError, "no combination cube"),
        (lambda m, o: m.combine("fill", float("nan"), None, 0, 10), RequestError, "nan is no finite"),
        (lambda m, o: m.combine("scale", 1e300, None, 0, 10), RequestError, "no finite float32"),
        (lambda m, o: m.combine("scale", 1.0, None, COUNT - 1, 2), RangeError, "past the segment"),
        (lambda m, o: m.combine("scale", 1.0, None, -1, 2), RangeError, "past the segment"),
        (lambda m, o: m.combine("copy", 0.0, o, 0, 101), RangeError, "past the segment"),
        (
            lambda m, o: m.combine("copy", 0.0, np.zeros(3, F32), 0, 3),
            RequestError,
            "a segment of the same box",
        ),
        (lambda m, o: o.reduce("dot", m), RangeError, "100 elements, the other"),
        (lambda m, o: m.reduce("dot"), RequestError, "no reduction dot without"),
        (lambda m, o: m.reduce("sum", m), RequestError, "no reduction sum with"),
        (lambda m, o: m.reduce("dot", Mapping.create(COUNT, "int32")), TypeMismatch, "float32.*int32"),
    ],
)
def test_wrong_vector_operations_are_named_and_change_nothing(call: Any, error: Any, words: str) -> None:
    mapping, other = (
        Mapping.create(COUNT, "float32"),
        Mapping.create(100, "float32", initial=np.ones(100, F32)),
    )
    with pytest.raises(error, match=words):
        call(mapping, other)
    got = np.empty(COUNT, F32)
    mapping.read(got)
    np.testing.assert_array_equal(got, 0)
    assert mapping.version == 0


def test_vector_operations_and_exchanges_exclude_one_another() -> None:
    """Of equal values every update makes equal ones; half of an update inside a chunk would show."""
    segment = Mapping.create(CHUNK, "float32", initial=np.ones(CHUNK, F32))
    ones = Mapping.create(CHUNK, "float32", initial=np.ones(CHUNK, F32))

    def combine() -> None:
        for _ in range(300):
            segment.combine("scale", 0.5, None, 0, CHUNK)
            segment.combine("axpy", 1.0, ones, 0, CHUNK)

    def add() -> None:
        more = np.ones(CHUNK, F32)
        for _ in range(300):
            segment.accumulate(more)

    threads = [threading.Thread(target=work) for work in (combine, combine, add)]
    for thread in threads:
        thread.start()
    got = np.empty(CHUNK, F32)
    while any(thread.is_alive() for thread in threads):
        segment.read(got)
        assert (got == got[0]).all()
        mean = segment.reduce("sum") / CHUNK
        assert F32(mean) == mean  # a sum over half an update is no multiple of the count
    assert segment.version == 2 * 600 + 300
