"""float32 to and from the 16-bit types, every value of them and every kind of float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from smb import _native

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]


def all_halves() -> U16:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def telling_floats() -> F32:
    """Every upper half with lower halves around the rounding boundaries, and random bits."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    noise = np.random.default_rng(5).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    return np.concatenate([*(upper | np.uint32(low) for low in lower), noise]).view(np.float32)


def nearest_bfloat16(x: F32) -> F32:
    """The nearer of the two neighbours, the even one of a tie; computed in float64."""
    bits = x.view(np.uint32)
    below = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    above_bits = ((bits >> 16) + 1) << 16
    above = above_bits.view(np.float32).astype(np.float64)
    exact = x.astype(np.float64)
    above = np.where(np.isinf(above), np.copysign(2.0**128, exact), above)  # what would follow the greatest
    to_above = np.abs(above - exact) < np.abs(exact - below)
    tie = np.abs(above - exact) == np.abs(exact - below)
    odd = (bits >> 16) & 1 == 1
    with np.errstate(over="ignore"):  # 2^128 becomes Inf, as it should
        return np.where(to_above | (tie & odd), above, below).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_float16_agrees_with_numpy_on_every_kind_of_value(threads: int) -> None:
    x = telling_floats()
    got = np.empty(x.size, np.float16)
    _native.to_float16(got, x, threads=threads)
    expected = x.astype(np.float16)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(got.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(got[~numbers]).all()
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


def test_every_float16_widens_exactly() -> None:
    halves = all_halves()
    got = np.empty(halves.size, np.float32)
    _native.from_float16(got, halves)
    expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, expected)  # NaN equals NaN here
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


def test_short_arrays_convert_like_long_ones() -> None:
    x = telling_floats()[::997]
    whole, parts = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    _native.to_float16(whole, np.ascontiguousarray(x))
    for at in range(0, x.size, 3):  # shorter than a vector register: the other way through the code
        part = np.ascontiguousarray(x[at : at + 3])
        _native.to_float16(parts[at : at + 3], part)
    np.testing.assert_array_equal(whole, parts)


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    x = telling_floats()
    bits = np.empty(x.size, np.uint16)
    _native.to_bfloat16(bits, x)
    got = (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(got[finite], nearest_bfloat16(x[finite]))
    np.testing.assert_array_equal(got[np.isinf(x)], x[np.isinf(x)])
    assert np.isnan(got[np.isnan(x)]).all()
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


def test_every_bfloat16_widens_exactly() -> None:
    halves = all_halves()
    got = np.empty(halves.size, np.float32)
    _native.from_bfloat16(got, halves)
    np.testing.assert_array_equal(got.view(np.uint32) >> 16, halves.astype(np.uint32))


def test_bfloat16_there_and_back_changes_no_bfloat16() -> None:
    halves = all_halves()
    floats, back = np.empty(halves.size, np.float32), np.empty(halves.size, np.uint16)
    _native.from_bfloat16(floats, halves)
    _native.to_bfloat16(back, floats)
    numbers = ~np.isnan(floats)
    np.testing.assert_array_equal(back[numbers], halves[numbers])
