"""Layers that move values without changing them: joining, cutting, reshaping, repeating, choosing rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from prototxt.layers.common import Apply, axis_of, count, expect, refuse_in_place, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer


def _axis_or_dim(spec: LayerSpec, p: Any, dim: str, bottom: Shape) -> int:
    """``axis``, or the old unsigned field ``dim`` in its place."""
    if not p.HasField(dim):
        return axis_of(spec, p.axis, bottom)
    if p.HasField("axis"):
        raise spec.error(f"give either axis or {dim}, not both")
    if getattr(p, dim) >= len(bottom):
        raise spec.error(
            f"{dim} {getattr(p, dim)} is out of range for a bottom of shape {shape_text(bottom)}"
        )
    return int(getattr(p, dim))


@layer("Concat")
def concat(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The bottoms one after another along ``axis``; all other axes must be equal."""
    expect(spec, (1, None))
    first = bottoms[0]
    axis = _axis_or_dim(spec, spec.concat_param, "concat_dim", first)
    for i, other in enumerate(bottoms):
        if len(other) != len(first) or other[:axis] + other[axis + 1 :] != first[:axis] + first[axis + 1 :]:
            raise spec.error(
                f"bottom {i} ({spec.bottom[i]}) is {shape_text(other)}: all but axis {axis} must be as in"
                f" {spec.bottom[0]}, {shape_text(first)}"
            )
    top = (*first[:axis], sum(b[axis] for b in bottoms), *first[axis + 1 :])
    return Built(Apply(lambda *xs: torch.cat(xs, axis)), [top])


@layer("Slice")
def slice_(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The bottom cut along ``axis`` at slice_point, or into equal parts."""
    expect(spec, 1, (1, None))
    p = spec.slice_param
    (bottom,) = bottoms
    axis = _axis_or_dim(spec, p, "slice_dim", bottom)
    sizes = _slice_sizes(spec, list(p.slice_point), bottom[axis], len(spec.top))
    equal = not p.slice_point

    def run(x: Tensor) -> tuple[Tensor, ...]:
        parts: Any = x.shape[axis] // len(sizes) if equal else sizes
        return torch.split(x, parts, axis)

    return Built(Apply(run), [(*bottom[:axis], size, *bottom[axis + 1 :]) for size in sizes])


def _slice_sizes(spec: LayerSpec, points: list[int], size: int, tops: int) -> list[int]:
    if not points:
        if size % tops or size < tops:
            raise spec.error(f"{tops} tops do not divide an axis of {size}: give slice_point")
        return [size // tops] * tops
    if len(points) != tops - 1:
        raise spec.error(f"{tops} tops need {tops - 1} values of slice_point, not {len(points)}")
    edges = [0, *points, size]
    if any(a >= b for a, b in pairwise(edges)):
        raise spec.error(f"slice_point must rise between 0 and the axis's {size}, not {points}")
    return [b - a for a, b in pairwise(edges)]


@layer("Split")
def split(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The bottom under several names; their gradients are summed."""
    expect(spec, 1, (1, None))
    refuse_in_place(spec)
    tops = len(spec.top)
    return Built(Apply(lambda x: tuple([x.view_as(x) for _ in range(tops)])), [bottoms[0]] * tops)


@layer("Silence")
def silence(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Takes bottoms that nobody else wants."""
    expect(spec, (1, None), 0)
    return Built(Apply(lambda *xs: ()), [])


@layer("Flatten")
def flatten(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The axes from ``axis`` to ``end_axis`` as one."""
    expect(spec, 1)
    refuse_in_place(spec)
    p = spec.flatten_param
    (bottom,) = bottoms
    start, end = axis_of(spec, p.axis, bottom), axis_of(spec, p.end_axis, bottom, "end_axis")
    if start > end:
        raise spec.error(f"axis {p.axis} lies behind end_axis {p.end_axis}")
    top = (*bottom[:start], count(bottom, start, end + 1), *bottom[end + 1 :])
    return Built(Apply(lambda x: x.flatten(start, end)), [top])


class Reshape(nn.Module):
    """``dims`` in place of the axes [start, end); 0 copies the bottom's axis, -1 takes what is left."""

    def __init__(self, spec: LayerSpec, dims: Shape, start: int, end: int) -> None:
        super().__init__()
        self.spec, self.dims, self.start, self.end = spec, dims, start, end

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape(tuple(x.shape)))

    def shape(self, bottom: Shape) -> Shape:
        middle = [bottom[self.start + i] if d == 0 else d for i, d in enumerate(self.dims)]
        shape = (*bottom[: self.start], *middle, *bottom[self.end :])
        fixed, total = count(tuple(d for d in shape if d != -1)), count(bottom)
        if -1 not in shape and fixed != total:
            raise self.spec.error(f"{shape_text(bottom)} is {total} values, {shape_text(shape)} is {fixed}")
        if -1 in shape and total == 0:  # no rows, which Filter may leave: as many values a row as with some
            fixed, total = (count(tuple(d or 1 for d in s if d != -1)) for s in (shape, bottom))
        if -1 in shape and (fixed == 0 or total % fixed):
            raise self.spec.error(f"the {total} values of {shape_text(bottom)} cannot be divided by {fixed}")
        return tuple(total // fixed if d == -1 else d for d in shape)


@layer("Reshape")
def reshape(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The same values under another shape: ``shape`` replaces ``num_axes`` axes from ``axis`` on."""
    expect(spec, 1)
    refuse_in_place(spec)
    p = spec.reshape_param
    (bottom,) = bottoms
    axes = len(bottom)
    start = p.axis if p.axis >= 0 else axes + p.axis + 1
    if not 0 <= start <= axes:
        raise spec.error(f"axis {p.axis} is out of range for a bottom of shape {shape_text(bottom)}")
    if p.num_axes < -1:
        raise spec.error(f"num_axes must be -1 (to the end) or more, not {p.num_axes}")
    end = axes if p.num_axes == -1 else start + p.num_axes
    if end > axes:
        raise spec.error(f"axis {start} and num_axes {p.num_axes} run past the bottom's {axes} axes")
    dims = tuple(p.shape.dim)
    if dims.count(-1) > 1 or any(d < -1 for d in dims):
        raise spec.error(f"shape may hold one -1 and otherwise 0 or sizes, not {list(dims)}")
    for i, dim in enumerate(dims):
        if dim == 0 and start + i >= axes:
            raise spec.error(f"shape has a 0 at place {i}, but the bottom has no axis {start + i} to copy")
    module = Reshape(spec, dims, start, end)
    return Built(module, [module.shape(bottom)])


@layer("Tile")
def tile(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """``tiles`` copies of the bottom one after another along ``axis``."""
    expect(spec, 1)
    p = spec.tile_param
    (bottom,) = bottoms
    if p.tiles < 1:
        raise spec.error("tiles must be set, and at least 1")
    axis, tiles = axis_of(spec, p.axis, bottom), p.tiles
    top = (*bottom[:axis], bottom[axis] * tiles, *bottom[axis + 1 :])
    return Built(Apply(lambda x: torch.cat([x] * tiles, axis)), [top])


@layer("Crop")
def crop(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The first bottom cut to the second one's sizes from ``axis`` on, beginning at ``offset``.

    The gradient of the second bottom is zero.
    """
    expect(spec, 2)
    p = spec.crop_param
    data, like = bottoms
    axis = axis_of(spec, p.axis, data)
    offsets = list(p.offset) or [0]
    if len(like) != len(data):
        raise spec.error(f"both bottoms must have as many axes: {shape_text(data)} and {shape_text(like)}")
    if len(offsets) not in (1, len(data) - axis):
        raise spec.error(
            f"offset must be given once, or once for each of the {len(data) - axis} axes cropped"
        )
    starts = offsets * (len(data) - axis) if len(offsets) == 1 else offsets
    for i, start in enumerate(starts, axis):
        if start + like[i] > data[i]:
            raise spec.error(f"axis {i}: offset {start} and size {like[i]} run past the bottom's {data[i]}")

    def run(x: Tensor, reference: Tensor) -> Tensor:
        for i, start in enumerate(starts, axis):
            x = x.narrow(i, start, reference.shape[i])
        return x

    return Built(Apply(run), [(*data[:axis], *like[axis:])])


@layer("BatchReindex")
def batch_reindex(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The rows (axis 0) that the second bottom, of one axis, names."""
    expect(spec, 2)
    data, index = bottoms
    if len(index) != 1:
        raise spec.error(f"the second bottom must have 1 axis of row numbers, not {shape_text(index)}")

    def run(x: Tensor, rows: Tensor) -> Tensor:
        chosen = rows.detach().long()
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < x.shape[0]:
            raise spec.error(f"a row number is out of range: allowed are 0..{x.shape[0] - 1}")
        return x.index_select(0, chosen)

    return Built(Apply(run), [(*index, *data[1:])], labels=frozenset({1}))


@layer("Filter")
def filter_(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Of each bottom but the last the rows where the last, one value a row, is not 0.

    How many rows that is, only the data tells: tops may have none.
    """
    expect(spec, (2, None), len(bottoms) - 1)
    selector = bottoms[-1]
    if count(selector, 1) != 1:
        raise spec.error(f"the last bottom must hold one value a row, not {shape_text(selector)}")
    for name, bottom in zip(spec.bottom, bottoms, strict=True):
        if bottom[:1] != selector[:1]:
            raise spec.error(
                f"{name} has {shape_text(bottom)}: as many rows as the selector's {selector[0]} are needed"
            )

    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        rows = xs[-1].detach().flatten().nonzero().flatten()
        return tuple([x.index_select(0, rows) for x in xs[:-1]])

    return Built(Apply(run), list(bottoms[:-1]), labels=frozenset({len(bottoms) - 1}))
