"""BatchNorm keeps Caffe's three accumulators; Scale, Bias and MVN by their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.prototxt.layers.single import Array, build, gradients, noise, run, set_blobs


def blobs(built: object) -> list[Array]:
    return [blob.detach().numpy().copy() for blob in built.blobs]  # type: ignore[attr-defined]


def test_batch_norm_accumulates_by_the_worked_example() -> None:
    built = build('type: "BatchNorm"', (2, 1))
    assert built.statistics
    for x, want in (([[1], [3]], [2, 2, 1]), ([[5], [7]], [7.998, 3.998, 1.999])):
        np.testing.assert_allclose(run(built, x)[0], [[-0.999995], [0.999995]], atol=1e-6)
        np.testing.assert_allclose(np.concatenate(blobs(built)), want, rtol=1e-6)
    test = build('type: "BatchNorm"', (1, 1), phase="TEST")
    set_blobs(test, *blobs(built))
    np.testing.assert_allclose(run(test, [[4.0010005]])[0], 0, atol=1e-6)
    np.testing.assert_allclose(run(test, [[4.0010005 + np.sqrt(2 + 1e-5)]])[0], 1, rtol=1e-6)


def test_the_weight_grows_with_each_forward() -> None:
    """iter_size 2 means two forwards an iteration: the weights' sum says so."""
    built = build('type: "BatchNorm"', (2, 3))
    for want in (1, 1.999):
        run(built, noise(2, 3))
        np.testing.assert_allclose(blobs(built)[2], want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4), (2, 3, 4, 5), (6,), (2, 3, 2, 2, 2)])
def test_batch_norm_of_the_batch(shape: tuple[int, ...]) -> None:
    x = noise(*shape) * 3 + 1
    axes = tuple(i for i in range(len(shape)) if i != 1) if len(shape) > 1 else (0,)
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    y = (x - mean) / np.sqrt(variance + 1e-3)
    built = build('type: "BatchNorm" batch_norm_param { eps: 1e-3 moving_average_fraction: 0.9 }', shape)
    set_blobs(built, *[np.full(blob.shape, 2.0) for blob in built.blobs])
    np.testing.assert_allclose(run(built, x)[0], y, rtol=1e-4, atol=1e-5)
    m = x.size // max(1, mean.size)
    for got, old in zip(blobs(built), (mean.reshape(-1), variance.reshape(-1) * m / (m - 1), 1), strict=True):
        np.testing.assert_allclose(got, 1.8 + old, rtol=1e-4)
    seed = noise(*shape, seed=8)
    want = seed - seed.mean(axes, keepdims=True) - y * (seed * y).mean(axes, keepdims=True)
    got = gradients(built, x, seed=seed)[0]
    np.testing.assert_allclose(got, want / np.sqrt(variance + 1e-3), rtol=1e-3, atol=1e-4)


def test_a_single_sample_a_channel_is_zero_and_counts() -> None:
    built = build('type: "BatchNorm"', (1, 3))
    np.testing.assert_array_equal(run(built, [[1, 2, 3]])[0], 0)
    np.testing.assert_allclose(np.concatenate(blobs(built)), [1, 2, 3, 0, 0, 0, 1])
    np.testing.assert_array_equal(gradients(built, [[1, 2, 3]])[0], 0)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ('type: "BatchNorm"', "TEST"),
        ('type: "BatchNorm" batch_norm_param { use_global_stats: true }', "TRAIN"),
    ],
)
def test_global_statistics_are_used_and_kept(line: str, phase: str) -> None:
    built = build(line, (2, 3, 2), phase=phase)  # type: ignore[arg-type]
    set_blobs(built, [2, 4, 6], [8, 8, 8], [2])
    x = noise(2, 3, 2)
    want = (x - np.array([1, 2, 3])[:, None]) / np.sqrt(4 + 1e-5)
    np.testing.assert_allclose(run(built, x)[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients(built, x)[0], 1 / np.sqrt(4 + 1e-5), rtol=1e-5)
    np.testing.assert_array_equal(np.concatenate(blobs(built)), [2, 4, 6, 8, 8, 8, 2])


def test_empty_accumulators_count_as_zero_and_not_as_nan() -> None:
    built = build('type: "BatchNorm"', (1, 2), phase="TEST")
    np.testing.assert_allclose(
        run(built, [[0.01, -0.01]])[0], np.array([[0.01, -0.01]]) / np.sqrt(1e-5), rtol=1e-5
    )


def test_statistics_are_taken_in_the_test_phase_when_the_file_says_so() -> None:
    built = build('type: "BatchNorm" batch_norm_param { use_global_stats: false }', (2, 1), phase="TEST")
    run(built, [[1], [3]])
    np.testing.assert_allclose(np.concatenate(blobs(built)), [2, 2, 1])


def test_accumulators_never_ask_for_a_gradient() -> None:
    assert not any(blob.requires_grad for blob in build('type: "BatchNorm"', (2, 3)).blobs)


@pytest.mark.parametrize(
    ("fields", "blob"),
    [
        ("", (3,)),
        ("axis: 0", (2,)),
        ("axis: 1 num_axes: 2", (3, 4)),
        ("axis: -1", (4,)),
        ("axis: 0 num_axes: -1", (2, 3, 4)),
        ("num_axes: 0", ()),
    ],
)
def test_scale_and_bias_span_the_axes_of_the_file(fields: str, blob: tuple[int, ...]) -> None:
    x = noise(2, 3, 4)
    start = {"": 1, "axis: -1": 2, "axis: 1 num_axes: 2": 1}.get(fields, 0)
    wide = (1,) * start + blob + (1,) * (3 - start - len(blob))
    w, b = noise(*blob, seed=1).reshape(blob), noise(*blob, seed=2).reshape(blob)
    scale = build(f'type: "Scale" scale_param {{ {fields} bias_term: true }}', x.shape)
    np.testing.assert_array_equal(
        np.concatenate([v.flatten() for v in blobs(scale)]), np.repeat([1, 0], np.prod(blob, dtype=int))
    )
    set_blobs(scale, w, b)
    np.testing.assert_allclose(run(scale, x)[0], x * w.reshape(wide) + b.reshape(wide), rtol=1e-5, atol=1e-6)
    bias = build(f'type: "Bias" bias_param {{ {fields} }}', x.shape)
    assert bias.blobs[0].shape == blob
    set_blobs(bias, b)
    np.testing.assert_allclose(run(bias, x)[0], x + b.reshape(wide), rtol=1e-5, atol=1e-6)


def test_the_second_bottom_scales_or_shifts() -> None:
    x, s = noise(2, 3, 4), noise(3, 4, seed=1)
    scale = build('type: "Scale" scale_param { bias_term: true }', x.shape, s.shape)
    assert [tuple(b.shape) for b in scale.blobs] == [(3, 4)]
    b = noise(3, 4, seed=2)
    set_blobs(scale, b)
    np.testing.assert_allclose(run(scale, x, s)[0], x * s + b, rtol=1e-5, atol=1e-6)
    to_x, to_s = gradients(scale, x, s)
    np.testing.assert_allclose(to_x, np.broadcast_to(s, x.shape))
    np.testing.assert_allclose(to_s, x.sum(0), rtol=1e-5, atol=1e-6)
    bias = build('type: "Bias" bias_param { axis: 0 }', x.shape, (2,))
    np.testing.assert_allclose(run(bias, x, [1, 2])[0], x + np.array([1, 2])[:, None, None], rtol=1e-6)
    scalar = build('type: "Scale"', x.shape, ())
    np.testing.assert_allclose(run(scalar, x, 3.0)[0], 3 * x, rtol=1e-6)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("divide", [False, True])
def test_mvn(across: bool, divide: bool) -> None:
    x = noise(2, 3, 4)
    rows = x.reshape(2 if across else 6, -1)
    want = rows - rows.mean(1, keepdims=True)
    if divide:
        want = want / (rows.std(1, keepdims=True) + 1e-9)
    flags = f"across_channels: {str(across).lower()} normalize_variance: {str(divide).lower()}"
    (got,) = run(build(f'type: "MVN" mvn_param {{ {flags} }}', x.shape), x)
    np.testing.assert_allclose(got, want.reshape(2, 3, 4, 1), rtol=1e-4, atol=1e-5)


def test_mvn_of_equal_values_is_finite_both_ways() -> None:
    built = build('type: "MVN" mvn_param { eps: 1e-3 }', (1, 1, 2, 2))
    x = np.ones((1, 1, 2, 2))
    np.testing.assert_array_equal(run(built, x)[0], 0)
    assert np.isfinite(gradients(built, x, seed=noise(1, 1, 2, 2))[0]).all()


def test_batch_norm_is_right_on_a_strided_bottom() -> None:
    built = build('type: "BatchNorm"', (2, 3, 4, 5))
    x = noise(2, 3, 4, 5)
    last = torch.tensor(x).to(memory_format=torch.channels_last)
    want = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(built.module(last).numpy(), want, rtol=1e-4, atol=1e-5)
