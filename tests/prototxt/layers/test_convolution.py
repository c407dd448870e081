"""Convolution, Deconvolution and Im2col against plain loops, over any number of spatial axes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.prototxt.layers.single import Array, build, noise, run, set_blobs


class Lay(NamedTuple):
    """How the kernel is laid, one number an axis."""

    k: list[int]
    s: list[int]
    p: list[int]
    d: list[int]

    @property
    def fields(self) -> str:
        names = ("kernel_size", "stride", "pad", "dilation")
        return " ".join(f"{name}: {v}" for name, values in zip(names, self, strict=True) for v in values)


def patch(x: Array, at: tuple[int, ...], lay: Lay) -> Array:
    """The values under the kernel at one position; zero in the padding. x is (C, spatial..)."""
    wide = np.pad(x, [(0, 0), *[(v, v) for v in lay.p]])
    cut = tuple(slice(a * s, a * s + d * (k - 1) + 1, d) for a, k, s, _, d in zip(at, *lay, strict=True))
    found: Array = wide[(slice(None), *cut)]
    return found


def convolve(x: Array, w: Array, b: Array, lay: Lay, group: int = 1) -> Array:
    """x (N, C, spatial..), w (O, C / group, kernel..)."""
    rows = zip(x.shape[2:], *lay, strict=True)
    out = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in rows]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    each, made = w.shape[1], w.shape[0] // group
    for n, o, *at in np.ndindex(*y.shape):
        g = o // made
        y[(n, o, *at)] = (patch(x[n, g * each : (g + 1) * each], tuple(at), lay) * w[o]).sum() + b[o]
    return y


CASES = {
    "1 axis": ((2, 3, 9), 4, Lay([3], [2], [1], [1]), 1),
    "2 axes": ((2, 4, 7, 6), 6, Lay([3, 3], [2, 2], [1, 1], [1, 1]), 1),
    "1x1": ((2, 4, 3, 5), 3, Lay([1, 1], [1, 1], [0, 0], [1, 1]), 1),
    "groups": ((1, 4, 5, 5), 6, Lay([3, 3], [1, 1], [1, 1], [1, 1]), 2),
    "dilation": ((1, 2, 9, 9), 2, Lay([3, 3], [1, 1], [2, 2], [2, 2]), 1),
    "unequal": ((1, 2, 7, 8), 3, Lay([3, 2], [2, 1], [1, 0], [1, 1]), 1),
    "3 axes": ((1, 2, 4, 5, 3), 3, Lay([3, 2, 2], [1, 2, 1], [1, 0, 1], [1, 1, 1]), 1),
    "4 axes": ((1, 2, 3, 4, 3, 3), 4, Lay([2, 2, 2, 2], [1, 2, 1, 1], [0, 1, 0, 0], [1, 1, 2, 1]), 2),
    "no axis": ((3, 4), 6, Lay([], [], [], []), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_convolution_is_its_definition(name: str) -> None:
    shape, outputs, lay, group = CASES[name]
    fields = lay.fields
    built = build(
        f'type: "Convolution" convolution_param {{ num_output: {outputs} {fields} group: {group} }}', shape
    )
    w, b = noise(outputs, shape[1] // group, *lay.k, seed=1), noise(outputs, seed=2)
    assert [tuple(blob.shape) for blob in built.blobs] == [w.shape, b.shape]
    set_blobs(built, w, b)
    x = noise(*shape)
    np.testing.assert_allclose(run(built, x)[0], convolve(x, w, b, lay, group), rtol=1e-4, atol=1e-5)


def test_all_before_the_channel_axis_is_batch() -> None:
    built = build(
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 axis: -2 bias_term: false }',
        (2, 3, 4, 9),
    )
    w, x = noise(2, 4, 3, seed=1), noise(2, 3, 4, 9)
    set_blobs(built, w)
    want = convolve(x.reshape(6, 4, 9), w, np.zeros(2), Lay([3], [1], [0], [1])).reshape(2, 3, 2, 7)
    np.testing.assert_allclose(run(built, x)[0], want, rtol=1e-4, atol=1e-5)


def test_several_bottoms_share_the_weights() -> None:
    built = build(
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 2 }', *[(1, 3, 4, 4)] * 3, tops=3
    )
    w, b = noise(2, 3, 2, 2, seed=1), noise(2, seed=2)
    set_blobs(built, w, b)
    xs = [noise(1, 3, 4, 4, seed=i) for i in range(3)]
    for x, top in zip(xs, run(built, *xs), strict=True):
        np.testing.assert_allclose(
            top, convolve(x, w, b, Lay([2, 2], [1, 1], [0, 0], [1, 1])), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("fields", "k", "s", "p"),
    [
        ("kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 0", [3, 2], [2, 1], [1, 0]),
        ("kernel_size: 3 pad_h: 2", [3, 3], [1, 1], [2, 0]),
        ("kernel_size: 3 kernel_size: 1", [3, 1], [1, 1], [0, 0]),
    ],
)
def test_a_kernel_may_be_given_by_axis(fields: str, k: list[int], s: list[int], p: list[int]) -> None:
    built = build(f'type: "Convolution" convolution_param {{ num_output: 2 {fields} }}', (1, 2, 7, 6))
    w, b, x = noise(2, 2, *k, seed=1), noise(2, seed=2), noise(1, 2, 7, 6)
    set_blobs(built, w, b)
    np.testing.assert_allclose(
        run(built, x)[0], convolve(x, w, b, Lay(k, s, p, [1, 1])), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["1 axis", "2 axes", "groups", "dilation", "unequal", "3 axes"])
def test_deconvolution_is_the_transpose_of_convolution(name: str) -> None:
    """<conv(x), y> = <x, deconv(y)> for the same weights."""
    shape, outputs, lay, group = CASES[name]
    fields = lay.fields
    w = noise(outputs, shape[1] // group, *lay.k, seed=1)
    y_shape = convolve(noise(*shape), w, np.zeros(outputs), lay, group).shape
    built = build(
        'type: "Deconvolution" convolution_param { bias_term: false'
        f" num_output: {shape[1]} {fields} group: {group} }}",
        y_shape,
    )
    assert tuple(built.blobs[0].shape) == w.shape
    set_blobs(built, w)
    y = noise(*y_shape, seed=5)
    (back,) = run(built, y)
    x = noise(*back.shape, seed=6)
    left = (convolve(x, w, np.zeros(outputs), lay, group) * y).sum()
    np.testing.assert_allclose((x * back).sum(), left, rtol=1e-4)


def test_im2col_lists_channel_then_kernel_position() -> None:
    built = build(
        'type: "Im2col" convolution_param { kernel_size: 3 kernel_size: 2 stride: 2 pad: 1 }', (2, 3, 5, 6)
    )
    x = noise(2, 3, 5, 6)
    (got,) = run(built, x)
    for n, h, w in np.ndindex(2, *got.shape[2:]):
        want = patch(x[n], (h, w), Lay([3, 2], [2, 2], [1, 1], [1, 1])).reshape(-1)
        np.testing.assert_array_equal(got[n, :, h, w], want)


def test_the_batch_and_the_image_may_change_between_forwards() -> None:
    built = build('type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 }', (1, 2, 5, 5))
    assert built.module(torch.zeros(3, 2, 8, 4)).shape == (3, 2, 6, 2)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("axis", "shape"), [(1, (2, 3, 4)), (2, (2, 3, 4)), (-1, (2, 3, 4)), (0, (2, 3)), (1, (5, 4))]
)
def test_inner_product_spans_the_axes_from_axis_on(
    transpose: bool, axis: int, shape: tuple[int, ...]
) -> None:
    built = build(
        'type: "InnerProduct" inner_product_param { num_output: 6'
        f" axis: {axis} transpose: {str(transpose).lower()} }}",
        shape,
    )
    front = shape[:axis]
    inputs = int(np.prod(shape[axis:]))
    w, b, x = noise(6, inputs, seed=1), noise(6, seed=2), noise(*shape)
    set_blobs(built, w.T if transpose else w, b)
    assert tuple(built.blobs[0].shape) == ((inputs, 6) if transpose else (6, inputs))
    np.testing.assert_allclose(run(built, x)[0], x.reshape(*front, inputs) @ w.T + b, rtol=1e-4, atol=1e-5)


def test_embed_takes_rows() -> None:
    built = build('type: "Embed" embed_param { num_output: 3 input_dim: 4 }', (2, 2))
    w, b = noise(4, 3, seed=1), noise(3, seed=2)
    set_blobs(built, w, b)
    np.testing.assert_allclose(run(built, [[0, 3], [1, 1]])[0], w[[[0, 3], [1, 1]]] + b, rtol=1e-6)
