"""Layers of one formula: activations, dropout, sums and products, by values worked out in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.prototxt.layers.single import build, gradients, noise, run, set_blobs

X = np.array([[-3.0, -0.5, 0.0, 0.25, 2.0, 60.0]])
S = 1 / (1 + np.exp(-X))

# type and parameters -> value and slope at X
FORMULAS = {
    'type: "ReLU"': (np.maximum(X, 0), X > 0),
    'type: "ReLU" relu_param { negative_slope: 0.1 }': (np.where(X > 0, X, 0.1 * X), np.where(X > 0, 1, 0.1)),
    'type: "ReLU" relu_param { negative_slope: -1 }': (abs(X), np.where(X > 0, 1, -1)),
    'type: "Sigmoid"': (S, S * (1 - S)),
    'type: "TanH"': (np.tanh(X), 1 - np.tanh(X) ** 2),
    'type: "ELU" elu_param { alpha: 2 }': (
        np.where(X > 0, X, 2 * np.expm1(np.minimum(X, 0))),
        np.where(X > 0, 1, 2 * np.exp(np.minimum(X, 0))),
    ),
    'type: "BNLL"': (np.logaddexp(0, X), S),
    'type: "AbsVal"': (abs(X), np.sign(X)),
    'type: "Swish" swish_param { beta: 1 }': (X * S, S + X * S * (1 - S)),
    'type: "Clip" clip_param { min: -0.5 max: 2 }': (np.clip(X, -0.5, 2), (X >= -0.5) & (X <= 2)),
    'type: "Threshold" threshold_param { threshold: 0.25 }': (X > 0.25, 0 * X),
    'type: "Power"': (X, 0 * X + 1),
    'type: "Power" power_param { scale: 2 shift: 1 }': (2 * X + 1, 0 * X + 2),
    'type: "Power" power_param { power: 2 scale: 2 shift: 1 }': ((2 * X + 1) ** 2, 4 * (2 * X + 1)),
    'type: "Power" power_param { power: 3 }': (X**3, 3 * X**2),
    'type: "Power" power_param { power: 0 }': (0 * X + 1, 0 * X),
    'type: "Power" power_param { power: 2 scale: 0 shift: 3 }': (0 * X + 9, 0 * X),
    'type: "Exp" exp_param { scale: 0.1 shift: 1 }': (np.exp(0.1 * X + 1), 0.1 * np.exp(0.1 * X + 1)),
    'type: "Exp" exp_param { base: 2 scale: 0.5 }': (2 ** (0.5 * X), 0.5 * math.log(2) * 2 ** (0.5 * X)),
    'type: "Log" log_param { scale: 2 shift: 7 }': (np.log(2 * X + 7), 2 / (2 * X + 7)),
    'type: "Log" log_param { base: 10 shift: 4 }': (np.log10(X + 4), 1 / (X + 4) / math.log(10)),
}


@pytest.mark.parametrize("line", FORMULAS)
def test_value_and_slope(line: str) -> None:
    value, slope = FORMULAS[line]
    built = build(line, (1, 6))
    np.testing.assert_allclose(run(built, X)[0], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients(built, X)[0], slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("line", FORMULAS)
def test_the_bottom_is_left_alone(line: str) -> None:
    """An in-place top only takes the bottom's name: the numbers are needed for the gradient."""
    x = torch.tensor(X, dtype=torch.float32)
    before = x.clone()
    build(line, (1, 6)).module(x)
    assert torch.equal(x, before)


def test_in_place_relu_of_negative_slope_has_the_right_gradient() -> None:
    built = build('type: "ReLU" relu_param { negative_slope: -1 }', (1, 2), in_place=True)
    np.testing.assert_array_equal(run(built, [[-3, 2]])[0], [[3, 2]])
    np.testing.assert_array_equal(gradients(built, [[-3, 2]])[0], [[-1, 1]])


@pytest.mark.parametrize("shared", [False, True])
def test_prelu_learns_a_slope_a_channel_or_one(shared: bool) -> None:
    built = build(f'type: "PReLU" prelu_param {{ channel_shared: {str(shared).lower()} }}', (2, 3, 2))
    (slope,) = built.blobs
    assert slope.shape == (() if shared else (3,))
    np.testing.assert_array_equal(slope.detach().numpy(), 0.25)
    values = np.array(0.5) if shared else np.array([0.1, 0.2, 0.3])
    set_blobs(built, values)
    x = noise(2, 3, 2)
    x[0, 0, 0] = 0
    spread = values if shared else values[:, None]
    np.testing.assert_allclose(run(built, x)[0], np.where(x > 0, x, spread * x), rtol=1e-6)
    np.testing.assert_allclose(gradients(built, x)[0], np.where(x > 0, 1, spread + 0 * x), rtol=1e-6)
    want = np.where(x > 0, 0, x)
    assert slope.grad is not None
    np.testing.assert_allclose(slope.grad.numpy(), want.sum() if shared else want.sum((0, 2)), rtol=1e-5)


def test_dropout_keeps_its_share_and_the_mean() -> None:
    built = build('type: "Dropout" dropout_param { dropout_ratio: 0.3 }', (100, 100))
    x = np.full((100, 100), 2.0)
    (y,) = run(built, x)
    np.testing.assert_allclose(np.unique(y), [0, 2 / 0.7], rtol=1e-6)
    assert abs((y == 0).mean() - 0.3) < 0.02
    torch.manual_seed(0)
    inputs = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    top = built.module(inputs)
    top.sum().backward()
    assert inputs.grad is not None
    np.testing.assert_allclose(inputs.grad.numpy(), top.detach().numpy() / 2, rtol=1e-6)


def test_dropout_draws_from_the_net_s_generator() -> None:
    line = 'type: "Dropout"'
    first, second = (run(build(line, (4, 50)), np.ones((4, 50)))[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    again = build(line, (4, 50))
    tops = [run(again, np.ones((4, 50)))[0] for _ in range(2)]
    assert (tops[0] != tops[1]).any()


def test_dropout_is_the_identity_outside_training() -> None:
    x = noise(3, 4)
    np.testing.assert_array_equal(run(build('type: "Dropout"', (3, 4), phase="TEST"), x)[0], x)
    np.testing.assert_array_equal(run(build('type: "Dropout" phase: TEST', (3, 4)), x)[0], x)


def test_softmax_along_an_axis() -> None:
    x = noise(2, 3, 4) * 50
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(
        run(build('type: "Softmax"', x.shape), x)[0], e / e.sum(1, keepdims=True), rtol=1e-5, atol=1e-30
    )


# ------------------------------------------------------------ Eltwise and Reduction


def test_eltwise_sum_with_coefficients() -> None:
    a, b, c = (noise(2, 3, seed=i) for i in range(3))
    built = build('type: "Eltwise" eltwise_param { coeff: 1 coeff: -2 coeff: 0.5 }', *[(2, 3)] * 3)
    np.testing.assert_allclose(run(built, a, b, c)[0], a - 2 * b + 0.5 * c, rtol=1e-5, atol=1e-6)
    for got, want in zip(gradients(built, a, b, c), (1, -2, 0.5), strict=True):
        np.testing.assert_allclose(got, np.full((2, 3), want))


@pytest.mark.parametrize("stable", [True, False])
def test_eltwise_product_has_a_gradient_at_zero(stable: bool) -> None:
    a, b, c = (noise(2, 3, seed=i) for i in range(3))
    a[0, 0] = 0
    built = build(
        f'type: "Eltwise" eltwise_param {{ operation: PROD stable_prod_grad: {str(stable).lower()} }}',
        *[(2, 3)] * 3,
    )
    np.testing.assert_allclose(run(built, a, b, c)[0], a * b * c, rtol=1e-5)
    for got, want in zip(gradients(built, a, b, c), (b * c, a * c, a * b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_eltwise_max_gives_a_tie_to_one_bottom() -> None:
    """The second before the first; of the rest the earlier."""
    a, b, c = np.array([[1.0, 5, 2, 3]]), np.array([[1.0, 4, 2, 3]]), np.array([[1.0, 5, 9, 3]])
    built = build('type: "Eltwise" eltwise_param { operation: MAX }', *[(1, 4)] * 3)
    np.testing.assert_array_equal(run(built, a, b, c)[0], [[1, 5, 9, 3]])
    got = gradients(built, a, b, c)
    np.testing.assert_array_equal(np.concatenate(got), [[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]])


@pytest.mark.parametrize("operation", ["SUM", "ASUM", "SUMSQ", "MEAN"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_reduction_from_an_axis_on(operation: str, axis: int) -> None:
    x = noise(2, 3, 4)
    x[0, 0, 0] = 0
    built = build(
        f'type: "Reduction" reduction_param {{ operation: {operation} axis: {axis} coeff: 2.5 }}', x.shape
    )
    flat = x.reshape(*x.shape[:axis], -1)
    terms = {"SUM": flat, "ASUM": abs(flat), "SUMSQ": flat**2, "MEAN": flat / flat.shape[-1]}[operation]
    slope = {"SUM": 1, "ASUM": np.sign(x), "SUMSQ": 2 * x, "MEAN": 1 / flat.shape[-1]}[operation]
    np.testing.assert_allclose(run(built, x)[0], 2.5 * terms.sum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients(built, x)[0], 2.5 * slope + 0 * x, rtol=1e-5, atol=1e-6)
