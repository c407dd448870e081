"""The vector kernels against numpy, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from smb import _native
from smb.errors import TypeMismatch

F32 = npt.NDArray[np.float32]
LENGTHS = [0, 1, 7, 16, 17, 1023, 65_537, 300_001]
LONG = 300_001  # several blocks, so that threads share it


def vector(n: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", LENGTHS)
def test_accumulate_and_axpy_agree_with_numpy(n: int, threads: int) -> None:
    dst, src = vector(n, 1), vector(n, 2)
    expected = dst + np.float32(0.3) * src
    other = dst.copy()
    _native.accumulate(dst, src, 0.3, threads=threads)
    _native.axpy(0.3, src, other, threads=threads)
    np.testing.assert_array_equal(dst, expected)
    np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", LENGTHS)
def test_exchange_agrees_with_numpy(n: int, threads: int) -> None:
    x, g = vector(n, 1), vector(n, 2)
    d = np.float32(0.3) * (x - g)
    expected_x, expected_g = x - d, g + d
    assert _native.exchange(x, g, 0.3, threads=threads) == -1
    np.testing.assert_array_equal(x, expected_x)
    np.testing.assert_array_equal(g, expected_g)


@pytest.mark.parametrize("n", LENGTHS)
def test_elastic_pull_returns_what_the_center_is_owed(n: int) -> None:
    x, c = vector(n, 1), vector(n, 2)
    d = np.float32(0.3) * (x - c)
    expected = x - d
    np.testing.assert_array_equal(_native.elastic_pull(x, c, 0.3), d)
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("n", LENGTHS)
def test_adagrad_agrees_with_float64(n: int) -> None:
    sums, gradient = np.square(vector(n, 1)), vector(n, 2)
    q = 0.3 * gradient.astype(float)
    history = sums + np.square(q)
    step = 0.1 * q / (np.sqrt(history) + 1e-8)
    _native.adagrad(sums, gradient, 0.1, scale=0.3)
    np.testing.assert_allclose(sums, history, rtol=1e-6)
    np.testing.assert_allclose(gradient, step, rtol=1e-6)


def test_adagrad_takes_no_step_beyond_its_rate_whatever_the_sums() -> None:
    sums = np.array([np.nan, -1.0, 0.0, 1e38], np.float32)
    gradient = np.array([2.0, -2.0, 0.0, 2.0], np.float32)
    _native.adagrad(sums, gradient, 0.5)
    np.testing.assert_allclose(gradient, [0.5, -0.5, 0.0, 1e-19], rtol=1e-6)
    np.testing.assert_array_equal(sums, np.array([4.0, 4.0, 0.0, 1e38], np.float32))
    sums, gradient = np.zeros(2, np.float32), np.array([1e18, -1e18], np.float32)
    _native.adagrad(sums, gradient, 1e38)
    np.testing.assert_allclose(gradient, [1e38, -1e38], rtol=1e-6)


def test_elastic_pull_fills_the_array_it_is_given() -> None:
    x, c, out = vector(100, 1), vector(100, 2), np.zeros(100, np.float32)
    assert _native.elastic_pull(x, c, 0.5, out=out) is out
    assert np.abs(out).sum() > 0


def test_scale_fill_and_copy() -> None:
    x = vector(LONG, 1)
    expected = x * np.float32(-1.7)
    _native.scale(x, -1.7, threads=2)
    np.testing.assert_array_equal(x, expected)
    y = np.empty_like(x)
    _native.copy(y, x)
    np.testing.assert_array_equal(y, x)
    _native.fill(x, 2.5)
    assert (x == 2.5).all()


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_copies_past_the_caches_reach_every_element(shift: int) -> None:
    n = (8 << 20) // 4 + 1000 + shift  # above the size from which stores are non-temporal
    src, dst = vector(n + 4, 1), np.zeros(n + 4, np.float32)
    _native.copy(dst[shift : shift + n], src[3 : 3 + n], threads=2)
    np.testing.assert_array_equal(dst[shift : shift + n], src[3 : 3 + n])
    assert not dst[:shift].any()
    assert not dst[shift + n :].any()


def test_dot_sums_in_float64_and_alike_for_any_thread_count() -> None:
    x, y = vector(LONG, 1), vector(LONG, 2)
    exact = float(np.dot(x.astype(np.float64), y.astype(np.float64)))
    alone, shared = _native.dot(x, y), _native.dot(x, y, threads=2)
    assert alone == shared
    assert alone == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 4095, 4096, 9998, 9999])
def test_the_first_value_that_is_no_number_is_found(bad: float, at: int) -> None:
    x = vector(10_000, 1)
    assert _native.first_nonfinite(x) == -1
    x[at] = bad
    x[9999] = bad
    assert _native.first_nonfinite(x) == at


def test_the_greatest_and_smallest_numbers_are_numbers() -> None:
    limits = np.finfo(np.float32)
    extremes = np.array([limits.max, limits.min, limits.tiny, limits.smallest_subnormal, -0.0], np.float32)
    assert _native.first_nonfinite(extremes) == -1


def test_exchange_of_a_nan_moves_nothing_from_its_block_on() -> None:
    x, g = vector(200_000, 1), vector(200_000, 2)
    x[70_000] = np.nan
    before_x, before_g = x.copy(), g.copy()
    assert _native.exchange(x, g, 0.5) == 70_000
    np.testing.assert_array_equal(x[65_536:], before_x[65_536:])
    np.testing.assert_array_equal(g[65_536:], before_g[65_536:])
    assert (g[:65_536] != before_g[:65_536]).mean() > 0.99


def test_tensors_are_taken_as_they_are() -> None:
    torch: Any = pytest.importorskip("torch")
    x, y = torch.ones(100), torch.zeros(100)
    _native.axpy(2.0, x, y)
    assert bool((y == 2).all())
    with pytest.raises(TypeMismatch, match="contiguous"):
        _native.scale(torch.ones(10, 10).t(), 2.0)
    with pytest.raises(TypeMismatch, match="float64"):
        _native.scale(torch.ones(10, dtype=torch.float64), 2.0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: _native.scale([1.0], 2.0), TypeMismatch, "numpy array"),
        (lambda: _native.scale(np.ones(3), 2.0), TypeMismatch, "float32"),
        (lambda: _native.scale(np.ones((3, 3), np.float32).T[:, :2], 2.0), TypeMismatch, "contiguous"),
        (lambda: _native.scale(np.ones(3, ">f4"), 2.0), TypeMismatch, "format"),
        (lambda: _native.axpy(1.0, vector(3, 1), vector(4, 1)), ValueError, "4 elements"),
        (lambda: _native.elastic_pull(vector(3, 1), vector(3, 1), 1.5), ValueError, "alpha is 1.5"),
        (lambda: _native.elastic_pull(vector(3, 1), vector(3, 1), 0.0), ValueError, "alpha"),
        (lambda: _native.elastic_pull(vector(3, 1), vector(3, 1), float("nan")), ValueError, "alpha"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_read_only_array_is_not_written() -> None:
    x = np.ones(10, np.float32)
    x.flags.writeable = False
    with pytest.raises(TypeMismatch, match="writable"):
        _native.scale(x, 2.0)
    assert (x == 1).all()
