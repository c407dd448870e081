"""The native LRN agrees with float64 arithmetic of the definition, forward and backward, up to every edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prototxt.layers.lrn import Normalisation, reference
from tests.prototxt.layers.single import Array, build, gradients, noise, run


def definition(x: Array, lrn: Normalisation) -> Array:
    x = x.astype(np.float64)
    n, c, h, w = x.shape
    r = lrn.half
    s = np.zeros_like(x)
    for i, j, k in np.ndindex(c, h, w):
        if lrn.within:
            near = x[:, i, max(0, j - r) : j + r + 1, max(0, k - r) : k + r + 1]
            s[:, i, j, k] = (near**2).reshape(n, -1).sum(1)
        else:
            s[:, i, j, k] = (x[:, max(0, i - r) : i + r + 1, j, k] ** 2).sum(1)
    return x * (lrn.k + lrn.alpha / lrn.window * s) ** -lrn.beta


def text(lrn: Normalisation) -> str:
    region = "WITHIN_CHANNEL" if lrn.within else "ACROSS_CHANNELS"
    return (
        f'type: "LRN" lrn_param {{ local_size: {lrn.size} alpha: {lrn.alpha} beta: {lrn.beta} k: {lrn.k}'
        f" norm_region: {region} }}"
    )


ACROSS = [(1, 1, 1, 1), (2, 2, 3, 3), (1, 3, 1, 7), (2, 5, 4, 4), (1, 8, 5, 5), (3, 17, 1, 1), (1, 6, 23, 23)]
WITHIN = [(1, 1, 1, 1), (2, 2, 1, 7), (1, 2, 7, 1), (1, 1, 5, 6), (2, 3, 9, 8), (1, 1, 20, 3)]


@pytest.mark.parametrize("beta", [0.5, 0.75, 1.0, 0.6])
@pytest.mark.parametrize("size", [1, 3, 5, 7, 61])
@pytest.mark.parametrize("within", [False, True], ids=["across", "within"])
def test_forward_and_backward_agree_with_float64(within: bool, size: int, beta: float) -> None:
    """Sizes around the window's edges; 61 is more than any of the shapes has channels, rows or columns."""
    lrn = Normalisation(size, 2.0, beta, 1.0 if within else 1.5, within)
    for shape in WITHIN if within else ACROSS:
        x, seed = noise(*shape), noise(*shape, seed=4)
        built = build(text(lrn), shape)
        np.testing.assert_allclose(run(built, x)[0], definition(x, lrn), rtol=2e-6, atol=2e-6)
        double = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        seeds = torch.tensor(seed, dtype=torch.float64)
        (want,) = torch.autograd.grad(reference(double, lrn), double, seeds)
        np.testing.assert_allclose(gradients(built, x, seed=seed)[0], want.numpy(), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("within", [False, True], ids=["across", "within"])
def test_the_torch_form_is_the_definition(within: bool) -> None:
    lrn = Normalisation(3, 2.0, 0.6, 1.0 if within else 1.5, within)
    x = noise(2, 5, 6, 7)
    np.testing.assert_allclose(
        reference(torch.tensor(x).double(), lrn).numpy(), definition(x, lrn), rtol=1e-12
    )


@pytest.mark.parametrize("within", [False, True], ids=["across", "within"])
def test_threads_change_nothing(within: bool) -> None:
    """Large enough for several threads and blocks; each value is computed by one thread in one order."""
    lrn = Normalisation(5, 1.0, 0.75, 1.0, within)
    x, seed = noise(3, 24, 61, 37), noise(3, 24, 61, 37, seed=4)
    built, before, results = build(text(lrn), x.shape), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((run(built, x)[0], gradients(built, x, seed=seed)[0]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        np.testing.assert_array_equal(other[0], results[0][0])
        np.testing.assert_array_equal(other[1], results[0][1])


def test_a_large_value_leaves_no_trace_in_later_channels() -> None:
    """A window that has passed 1000 is as good as new: a running sum in float would be .06 off."""
    x = np.full((1, 40, 1, 1), 0.01, np.float32)
    x[0, 3] = 1000
    lrn = Normalisation(5, 1.0, 0.75, 0.001, False)
    (got,) = run(build(text(lrn), x.shape), x)
    np.testing.assert_allclose(got[0, 6:, 0, 0], definition(x, lrn)[0, 6:, 0, 0], rtol=1e-5)


def test_the_file_alpha_is_divided_by_the_window() -> None:
    x = np.ones((1, 3, 1, 1))
    (got,) = run(build('type: "LRN" lrn_param { local_size: 3 alpha: 3 beta: 1 }', x.shape), x)
    np.testing.assert_allclose(got.flatten(), [1 / 3, 1 / 4, 1 / 3], rtol=1e-6)


def test_a_window_above_the_channels_gives_no_nan() -> None:
    x = noise(1, 3, 2, 2)
    (got,) = run(build('type: "LRN" lrn_param { local_size: 61 }', x.shape), x)
    assert np.isfinite(got).all()


def test_within_a_channel_k_is_one() -> None:
    line = 'type: "LRN" lrn_param { local_size: 3 alpha: 1 beta: 1 k: 9 norm_region: WITHIN_CHANNEL }'
    (got,) = run(build(line, (1, 1, 3, 3)), np.ones((1, 1, 3, 3)))
    corner, edge = 0.692308, 0.6
    np.testing.assert_allclose(
        got[0, 0], [[corner, edge, corner], [edge, 0.5, edge], [corner, edge, corner]], atol=1e-6
    )


def test_strided_and_double_bottoms_are_right_too() -> None:
    lrn = Normalisation(3, 1.0, 0.75, 1.0, False)
    built, x = build(text(lrn), (2, 4, 5, 6)), noise(2, 4, 5, 6)
    last = torch.tensor(x).to(memory_format=torch.channels_last)
    np.testing.assert_allclose(built.module(last).numpy(), definition(x, lrn), rtol=2e-6, atol=2e-6)
    double = built.module(torch.tensor(x, dtype=torch.float64))
    assert double.dtype == torch.float64
    np.testing.assert_allclose(double.numpy(), definition(x, lrn), rtol=1e-12)


def test_nan_stays_visible() -> None:
    x = np.ones((1, 5, 1, 1))
    x[0, 0] = np.nan
    (got,) = run(build('type: "LRN" lrn_param { local_size: 3 }', x.shape), x)
    assert np.isnan(got[0, :2]).all()


def test_an_empty_batch_is_no_error() -> None:
    built = build('type: "LRN" lrn_param { local_size: 3 }', (0, 3, 2, 2))
    assert run(built, np.zeros((0, 3, 2, 2)))[0].shape == (0, 3, 2, 2)
