"""Pooling lays Caffe's windows and gives their values, wherever torch's own would differ too."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from prototxt._native import Machine, Windows
from prototxt.layers.pooling import MaxPooling, Pool
from tests.prototxt.layers.single import Array, build, gradients, noise, run

LOWEST = np.float32(-3.4028234663852886e38)


class Lay(NamedTuple):
    """How the window is laid, (height, width) each."""

    k: list[int]
    s: list[int]
    p: list[int]
    ceil: bool = True

    def windows(self, size: tuple[int, ...], axis: int) -> int:
        k, s, p = self.k[axis], self.s[axis], self.p[axis]
        count = (math.ceil if self.ceil else math.floor)((size[axis] + 2 * p - k) / s) + 1
        return count - 1 if any(self.p) and (count - 1) * s >= size[axis] + p else count


def naive(x: Array, lay: Lay, method: str) -> tuple[Array, Array, Array]:
    """Top, mask and d(sum of tops)/dx, by the loops of the definition."""
    n, c, *size = x.shape
    k, s, p, _ = lay
    out = [lay.windows(tuple(size), i) for i in (0, 1)]
    top, mask, grad = np.zeros((n, c, *out)), np.full((n, c, *out), -1.0), np.zeros(x.shape)
    for i, j, h, w in np.ndindex(n, c, *out):
        start = [h * s[0] - p[0], w * s[1] - p[1]]
        reach = [min(start[a] + k[a], size[a] + p[a]) for a in (0, 1)]
        area = (reach[0] - start[0]) * (reach[1] - start[1])
        rows, columns = (range(max(start[a], 0), min(reach[a], size[a])) for a in (0, 1))
        places = [(y, z) for y in rows for z in columns]
        if method == "MAX":
            best = max(places, key=lambda yz: x[i, j, yz[0], yz[1]], default=None)  # the first of equals
            top[i, j, h, w] = LOWEST if best is None else x[i, j, best[0], best[1]]
            if best is not None:
                mask[i, j, h, w] = best[0] * size[1] + best[1]
                grad[i, j, best[0], best[1]] += 1
        else:
            for y, z in places:
                top[i, j, h, w] += x[i, j, y, z] / area
                grad[i, j, y, z] += 1 / area
    return top, mask, grad


def text(method: str, lay: Lay) -> str:
    names = zip(("kernel", "stride", "pad"), lay[:3], strict=True)
    fields = " ".join(f"{name}_h: {v[0]} {name}_w: {v[1]}" for name, v in names)
    mode = "CEIL" if lay.ceil else "FLOOR"
    return f'type: "Pooling" pooling_param {{ pool: {method} {fields} round_mode: {mode} }}'


def geometries() -> list[tuple[tuple[int, int], Lay]]:
    """Every kernel to 4, stride to 5, pad below the kernel, on four sizes; then unequal axes."""
    square = [
        (size, Lay([k, k], [s, s], [p, p], ceil))
        for size in ((7, 5), (8, 8), (4, 6), (3, 1))
        for k, s in itertools.product(range(1, 5), range(1, 6))
        for p in range(k)
        for ceil in (True, False)
    ]
    unequal = [
        ((7, 5), Lay([3, 2], [2, 3], [1, 0])),
        ((7, 5), Lay([3, 2], [2, 3], [0, 1])),
        ((8, 8), Lay([1, 4], [3, 1], [0, 3])),
        ((6, 9), Lay([2, 4], [5, 3], [1, 3], False)),
        ((6, 6), Lay([1, 1], [4, 2], [0, 0])),
    ]
    return [
        (size, lay) for size, lay in square + unequal if min(lay.windows(size, 0), lay.windows(size, 1)) >= 1
    ]


@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_every_geometry_gives_the_values_mask_and_gradient_of_the_definition(method: str) -> None:
    x0 = noise(1, 2, 8, 9).round(1)  # rounded: many ties
    for size, lay in geometries():
        x = np.ascontiguousarray(x0[:, :, : size[0], : size[1]])
        top, mask, grad = naive(x, lay, method)
        built = build(text(method, lay), x.shape, tops=2 if method == "MAX" else 1)
        got = run(built, x)
        message = f"{method} {size} {lay}"
        np.testing.assert_allclose(got[0], top, rtol=1e-5, atol=1e-6, err_msg=message)
        if method == "MAX":
            np.testing.assert_array_equal(got[1], mask, err_msg=message)
        np.testing.assert_allclose(gradients(built, x)[0], grad, rtol=1e-5, atol=1e-6, err_msg=message)


def test_the_geometries_reach_past_what_torch_can_do_alone() -> None:
    """The sweep is worth nothing unless it holds pads above k/2 and windows outside the image."""
    assert any(2 * lay.p[0] > lay.k[0] for _, lay in geometries())
    outside = [
        lay
        for size, lay in geometries()
        if not any(lay.p) and (lay.windows(size, 0) - 1) * lay.s[0] >= size[0]
    ]
    assert len(outside) > 5


@pytest.mark.parametrize(
    ("size", "k", "s", "p", "want"),
    [
        (64, 3, 2, 1, 33),
        (112, 3, 2, 1, 57),
        (129, 2, 2, 0, 65),
        (55, 3, 2, 0, 27),
        (6, 1, 2, 0, 4),
        (7, 1, 2, 0, 4),
    ],
)
def test_sizes_round_up(size: int, k: int, s: int, p: int, want: int) -> None:
    built = build(
        f'type: "Pooling" pooling_param {{ kernel_size: {k} stride: {s} pad: {p} }}', (1, 1, size, size)
    )
    assert built.tops == [(1, 1, want, want)]


def test_round_mode_floor() -> None:
    built = build(
        'type: "Pooling" pooling_param { kernel_size: 3 stride: 2 pad: 1 round_mode: FLOOR }', (1, 1, 64, 64)
    )
    assert built.tops == [(1, 1, 32, 32)]


def test_ave_counts_the_padding() -> None:
    built = build('type: "Pooling" pooling_param { pool: AVE kernel_size: 3 pad: 1 }', (1, 1, 3, 3))
    edge = 2 / 3
    np.testing.assert_allclose(
        run(built, np.ones((1, 1, 3, 3)))[0][0, 0],
        [[4 / 9, edge, 4 / 9], [edge, 1, edge], [4 / 9, edge, 4 / 9]],
        1e-6,
    )
    built = build('type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }', (1, 1, 4, 4))
    np.testing.assert_allclose(
        run(built, np.ones((1, 1, 4, 4)))[0][0, 0],
        [[0.4444, 0.6667, 0.3333], [0.6667, 1, 0.5], [0.3333, 0.5, 0.25]],
        atol=1e-4,
    )


@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_global_pooling_follows_the_image(method: str) -> None:
    built = build(f'type: "Pooling" pooling_param {{ pool: {method} global_pooling: true }}', (2, 3, 4, 5))
    for shape in ((2, 3, 4, 5), (1, 3, 7, 2)):
        x = noise(*shape)
        want = x.max((2, 3)) if method == "MAX" else x.mean((2, 3))
        got = built.module(torch.tensor(x)).numpy()
        np.testing.assert_allclose(got[:, :, 0, 0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_the_image_may_change_between_forwards(method: str) -> None:
    built = build(text(method, Lay([3, 3], [2, 2], [2, 2])), (1, 2, 8, 8))
    for size in ((8, 8), (5, 9), (8, 8)):
        x = noise(1, 2, *size)
        want = naive(x, Lay([3, 3], [2, 2], [2, 2]), method)[0]
        np.testing.assert_allclose(built.module(torch.tensor(x)).numpy(), want, rtol=1e-5, atol=1e-6)


def test_max_passes_nan_on() -> None:
    """A diverged activation must not vanish in a pooling layer."""
    built = build('type: "Pooling" pooling_param { kernel_size: 2 stride: 2 }', (1, 1, 2, 2))
    assert np.isnan(run(built, np.array([[[[1.0, np.nan], [0, 0]]]]))[0]).all()


ORDERS = [torch.contiguous_format, torch.channels_last]
MACHINES = [machine for machine in (Machine.avx512, Machine.avx2, Machine.plain) if machine.here]


def both_ways(layer: MaxPooling, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Top and gradient, of the layer and of torch's kernel; the numbers in the place of NaN."""
    x = x.detach().requires_grad_()
    made = [layer(x), layer.by_torch(x, layer.prepare(x))]
    seed = torch.arange(1.0, made[0].numel() + 1).reshape(made[0].shape).remainder(7)
    return [(top.detach().nan_to_num(-7.5), torch.autograd.grad(top, x, seed)[0]) for top in made]


@pytest.mark.parametrize("order", ORDERS, ids=["planes", "channels_last"])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_the_native_kernel_gives_the_bits_of_torch(machine: Machine, order: torch.memory_format) -> None:
    """Ties, NaN and infinities too; channels below, at and above a register's."""
    for channels, (k, s, p) in itertools.product(
        (1, 3, 4, 15, 16, 20, 33), ((2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2), (1, 2, 0))
    ):
        x = torch.tensor(noise(2, channels, 13, 8, seed=channels)).mul(2).round()
        x[x == 2], x[x == -2], x[x == 3] = math.nan, -math.inf, math.inf
        pool = Pool((k, k), (s, s), (p, p))
        layer = MaxPooling(pool, mask=False)
        layer.prepare(x)
        if layer.native is None:
            continue
        counts = pool.counts((13, 8))
        layer.native = Windows((13, 8), counts, pool.kernel, pool.stride, pool.pad, machine)
        (got, got_gradient), (want, want_gradient) = both_ways(layer, x.to(memory_format=order))
        assert torch.equal(got, want)
        assert torch.equal(got_gradient, want_gradient)
        assert got.is_contiguous(memory_format=order)
        with torch.no_grad():
            assert torch.equal(layer(x.to(memory_format=order)).nan_to_num(-7.5), want)


@pytest.mark.parametrize("order", ORDERS, ids=["planes", "channels_last"])
def test_threads_change_no_maximum(order: torch.memory_format) -> None:
    x = torch.tensor(noise(5, 24, 61, 37)).round().to(memory_format=order)
    layer, before, results = MaxPooling(Pool((3, 3), (2, 2), (0, 0)), mask=False), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += both_ways(layer, x)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])


def test_what_the_native_kernel_does_not_take_goes_to_torch() -> None:
    """Other dtypes, strides of neither order, and windows of more than 256 places."""
    x = torch.tensor(noise(2, 3, 17, 18))
    layer = MaxPooling(Pool((2, 2), (2, 2), (0, 0)), mask=False)
    want = torch.nn.functional.max_pool2d(x, 2, 2, ceil_mode=True)
    assert layer(x.double()).dtype == torch.float64
    assert torch.equal(layer(x.double()).float(), want)
    (got, got_gradient), (_, want_gradient) = both_ways(layer, x.transpose(2, 3))
    assert torch.equal(got, torch.nn.functional.max_pool2d(x.transpose(2, 3), 2, 2, ceil_mode=True))
    assert torch.equal(got_gradient, want_gradient)
    whole = MaxPooling(None, mask=False)
    (got, got_gradient), (want, want_gradient) = both_ways(whole, x)
    assert whole.native is None
    assert torch.equal(got, want)
    assert torch.equal(got_gradient, want_gradient)


def test_no_images_give_no_maxima() -> None:
    for order in ORDERS:
        x = torch.zeros(0, 20, 8, 8).to(memory_format=order).requires_grad_()
        top = MaxPooling(Pool((2, 2), (2, 2), (0, 0)), mask=False)(x)
        top.sum().backward()
        assert top.shape == (0, 20, 4, 4)


STOCHASTIC = 'type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }'


def test_stochastic_pooling_draws_in_proportion_to_the_values() -> None:
    x = np.tile(np.array([[1, 2], [0, 5]], np.float32), (4000, 1, 1, 1))
    drawn = run(build(STOCHASTIC, x.shape), x)[0].flatten()
    for value in (0, 1, 2, 5):
        assert (drawn == value).mean() == pytest.approx(value / 8, abs=0.03)


def test_the_gradient_of_stochastic_pooling_goes_to_the_drawn_value() -> None:
    x = np.abs(noise(2, 3, 5, 5)) + 0.1
    built = build(STOCHASTIC, x.shape)
    inputs = torch.tensor(x, requires_grad=True)
    top = built.module(inputs)
    top.backward(torch.arange(1.0, top.numel() + 1).reshape(top.shape))
    assert inputs.grad is not None
    for n, c, h, w in np.ndindex(*top.shape):
        window = x[n, c, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2]
        given = inputs.grad.numpy()[n, c, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2]
        assert (given != 0).sum() == 1
        assert window[given != 0] == top.detach().numpy()[n, c, h, w]


def test_stochastic_pooling_is_its_own_average_in_the_test_phase() -> None:
    x = np.abs(noise(2, 3, 5, 4))
    x[0, 0, :2, :2] = 0
    built = build(STOCHASTIC, x.shape, phase="TEST")
    got = run(built, x)[0]
    for n, c, h, w in np.ndindex(*got.shape):
        window = x[n, c, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2]
        want = (window**2).sum() / window.sum() if window.any() else 0
        assert got[n, c, h, w] == pytest.approx(want, rel=1e-5)
    inputs = torch.tensor(x + 0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(built.module, inputs)


def test_equal_seeds_draw_equal_values() -> None:
    x = np.abs(noise(2, 3, 6, 6))
    first, second = (run(build(STOCHASTIC, x.shape), x)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_stochastic_windows_outside_the_image_give_zero() -> None:
    text = 'type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 1 stride: 2 }'
    for phase in ("TRAIN", "TEST"):
        got = run(build(text, (1, 1, 6, 6), phase=phase), np.ones((1, 1, 6, 6)))[0]
        assert got.shape == (1, 1, 4, 4)
        assert (got[..., :3, :3] == 1).all()
        assert (got[..., 3, :] == 0).all()
        assert (got[..., :, 3] == 0).all()


def test_spp_is_its_levels_side_by_side() -> None:
    x = noise(2, 3, 7, 9)
    (got,) = run(build('type: "SPP" spp_param { pyramid_height: 3 pool: AVE }', x.shape), x)
    levels = []
    for bins in (1, 2, 4):
        k = [math.ceil(x.shape[2] / bins), math.ceil(x.shape[3] / bins)]
        p = [(k[i] * bins - x.shape[2 + i] + 1) // 2 for i in (0, 1)]
        levels.append(naive(x, Lay(k, k, p), "AVE")[0].reshape(2, -1))
    np.testing.assert_allclose(got, np.concatenate(levels, 1), rtol=1e-5, atol=1e-6)


def test_spp_of_one_level_is_global_pooling() -> None:
    x = noise(2, 3, 4, 4)
    (got,) = run(build('type: "SPP" spp_param { pyramid_height: 1 }', x.shape), x)
    np.testing.assert_array_equal(got[:, :, 0, 0], x.max((2, 3)))
