"""Joining, cutting, reshaping and choosing: values, shapes, and gradients that go back to their place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prototxt.errors import LayerError
from tests.prototxt.layers.single import build, gradients, noise, run


@pytest.mark.parametrize("fields", ["", "axis: 1", "axis: -2", "concat_dim: 1"])
def test_concat(fields: str) -> None:
    a, b = noise(2, 1, 4), noise(2, 3, 4, seed=1)
    built = build(f'type: "Concat" concat_param {{ {fields} }}', a.shape, b.shape)
    np.testing.assert_array_equal(run(built, a, b)[0], np.concatenate([a, b], 1))
    seed = noise(2, 4, 4, seed=2)
    to_a, to_b = gradients(built, a, b, seed=seed)
    np.testing.assert_array_equal(np.concatenate([to_a, to_b], 1), seed)


@pytest.mark.parametrize(
    ("fields", "edges"),
    [("", [2, 4]), ("slice_point: 1 slice_point: 5", [1, 5]), ("axis: -2", [2, 4]), ("slice_dim: 1", [2, 4])],
)
def test_slice(fields: str, edges: list[int]) -> None:
    x = noise(2, 6, 3)
    tops = run(build(f'type: "Slice" slice_param {{ {fields} }}', x.shape, tops=3), x)
    for top, want in zip(tops, np.split(x, edges, 1), strict=True):
        np.testing.assert_array_equal(top, want)


def test_split_sums_the_gradients() -> None:
    built = build('type: "Split"', (2, 3), tops=3)
    x = torch.ones(2, 3, requires_grad=True)
    a, b, c = built.module(x)
    (a + 2 * b + 3 * c).sum().backward()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.full((2, 3), 6))


def test_silence_has_no_top() -> None:
    assert run(build('type: "Silence"', (2,), (3,), tops=0), [1, 2], [3, 4, 5]) == []


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ("", (2, 60)),
        ("axis: 2", (2, 3, 20)),
        ("axis: 1 end_axis: 2", (2, 12, 5)),
        ("axis: 0", (120,)),
        ("axis: -1", (2, 3, 4, 5)),
    ],
)
def test_flatten(fields: str, want: tuple[int, ...]) -> None:
    x = noise(2, 3, 4, 5)
    np.testing.assert_array_equal(
        run(build(f'type: "Flatten" flatten_param {{ {fields} }}', x.shape), x)[0], x.reshape(want)
    )


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ("shape { dim: 0 dim: 2 dim: -1 }", (2, 2, 4)),
        ("shape { dim: 2 dim: 4 } axis: 1", (2, 2, 4)),
        ("shape { dim: 2 dim: 4 } axis: -2", (2, 2, 4)),
        ("shape { dim: 1 dim: 2 } num_axes: 1", (1, 2, 8)),
        ("shape { dim: 1 } num_axes: 0", (1, 2, 8)),
        ("shape { dim: 1 } axis: -1 num_axes: 0", (2, 8, 1)),
        ("shape { dim: -1 }", (16,)),
    ],
)
def test_reshape(fields: str, want: tuple[int, ...]) -> None:
    x = noise(2, 8)
    built = build(f'type: "Reshape" reshape_param {{ {fields} }}', x.shape)
    np.testing.assert_array_equal(run(built, x)[0], x.reshape(want))


def test_reshape_copies_and_infers_anew_for_another_batch() -> None:
    built = build('type: "Reshape" reshape_param { shape { dim: 0 dim: -1 dim: 2 } }', (2, 8))
    assert built.module(torch.zeros(5, 6)).shape == (5, 3, 2)
    with pytest.raises(LayerError, match="cannot be divided"):
        built.module(torch.zeros(5, 7))


def test_tile_repeats_whole_blocks() -> None:
    x = noise(2, 3, 2)
    (got,) = run(build('type: "Tile" tile_param { tiles: 3 axis: 1 }', x.shape), x)
    np.testing.assert_array_equal(got, np.concatenate([x, x, x], 1))
    np.testing.assert_array_equal(
        gradients(build('type: "Tile" tile_param { tiles: 3 }', x.shape), x)[0], np.full(x.shape, 3)
    )


@pytest.mark.parametrize(
    ("fields", "like", "cut"),
    [
        ("", (1, 1, 2, 3), np.s_[:, :, 0:2, 0:3]),
        ("offset: 1", (1, 1, 2, 3), np.s_[:, :, 1:3, 1:4]),
        ("offset: 2 offset: 0", (1, 1, 2, 3), np.s_[:, :, 2:4, 0:3]),
        ("axis: 1 offset: 1 offset: 2 offset: 0", (1, 2, 2, 3), np.s_[:, 1:3, 2:4, 0:3]),
        ("axis: -1 offset: 2", (1, 1, 9, 3), np.s_[:, :, :, 2:5]),
    ],
)
def test_crop(fields: str, like: tuple[int, ...], cut: tuple[slice, ...]) -> None:
    x = noise(2, 3, 4, 5)
    built = build(f'type: "Crop" crop_param {{ {fields} }}', x.shape, like)
    np.testing.assert_array_equal(run(built, x, np.zeros(like))[0], x[cut])
    to_x, to_like = gradients(built, x, np.zeros(like))
    want = np.zeros_like(x)
    want[cut] = 1
    np.testing.assert_array_equal(to_x, want)
    np.testing.assert_array_equal(to_like, 0)


def test_batch_reindex_gathers_and_scatters_back() -> None:
    x, rows = noise(3, 2), [2, 0, 2, 2]
    built = build('type: "BatchReindex"', x.shape, (4,))
    np.testing.assert_array_equal(run(built, x, rows)[0], x[rows])
    np.testing.assert_array_equal(gradients(built, x, rows)[0], [[1, 1], [0, 0], [3, 3]])
    with pytest.raises(LayerError, match=r"out of range: allowed are 0\.\.2"):
        built.module(torch.zeros(3, 2), torch.tensor([3.0]))


def test_filter_keeps_the_rows_that_are_selected() -> None:
    built = build('type: "Filter"', (4, 2), (4, 1, 1), (4, 1), tops=2)
    x, y = torch.randn(4, 2), torch.randn(4, 1, 1)
    tops = built.module(x, y, torch.tensor([[0.0], [1], [0], [5]]))
    assert torch.equal(tops[0], x[[1, 3]])
    assert torch.equal(tops[1], y[[1, 3]])
    assert built.module(x, y, torch.zeros(4, 1))[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("fields", "tops", "want"),
    [
        ("shape { dim: 2 dim: 3 }", 2, [(2, 3), (2, 3)]),
        ("shape { dim: 2 } shape { dim: 0 dim: 1 }", 2, [(2,), (0, 1)]),
        ("", 1, [(0,)]),
        ("shape { }", 1, [()]),
    ],
)
def test_input_shapes(fields: str, tops: int, want: list[tuple[int, ...]]) -> None:
    built = build(f'type: "Input" input_param {{ {fields} }}', tops=tops)
    assert built.feed
    assert built.tops == want


def test_parameter_is_a_learned_top() -> None:
    built = build('type: "Parameter" parameter_param { shape { dim: 2 dim: 3 } }')
    top = built.module()
    top.sum().backward()
    grad = built.blobs[0].grad
    assert grad is not None
    np.testing.assert_array_equal(grad.numpy(), np.ones((2, 3)))
