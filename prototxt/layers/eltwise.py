"""Eltwise and Reduction: several bottoms into one, one bottom into sums."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from prototxt.layers.common import Apply, Function, axis_of, count, expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer


@layer("Eltwise")
def eltwise(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Sum (with a coefficient a bottom), product or maximum of bottoms of equal shape.

    Of equal values MAX takes the second bottom's over the first's, and never a later one. PROD's gradient is
    the product of the others; stable_prod_grad: false would divide instead, and give NaN at 0: it is not
    followed there.
    """
    expect(spec, (2, None))
    p = spec.eltwise_param
    _same_shapes(spec, bottoms)
    coefficients = list(p.coeff)
    if coefficients and p.operation != p.SUM:
        raise spec.error("coeff goes with operation SUM alone")
    if coefficients and len(coefficients) != len(bottoms):
        raise spec.error(
            f"coeff must be given once a bottom: {len(bottoms)} bottoms, {len(coefficients)} values"
        )
    operations: dict[int, Function] = {
        p.SUM: _weighted_sum(coefficients or [1.0] * len(bottoms)),
        p.PROD: lambda *xs: reduce(torch.mul, xs),
        p.MAX: _maximum,
    }
    operation = operations[p.operation]

    def run(*xs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if any(x.shape != xs[0].shape for x in xs[1:]):  # torch would broadcast
            _same_shapes(spec, [tuple(x.shape) for x in xs])
        return operation(*xs)

    return Built(Apply(run), [bottoms[0]])


def _same_shapes(spec: LayerSpec, bottoms: list[Shape]) -> None:
    for name, bottom in zip(spec.bottom, bottoms, strict=True):
        if bottom != bottoms[0]:
            first = f"{spec.bottom[0]} is {shape_text(bottoms[0])}"
            raise spec.error(f"all bottoms must have one shape: {first}, {name} is {shape_text(bottom)}")


def _weighted_sum(coefficients: list[float]) -> Function:
    first, *others = coefficients

    def run(x: Tensor, *xs: Tensor) -> Tensor:
        total = x if first == 1 else x * first
        for coefficient, other in zip(others, xs, strict=True):
            total = torch.add(total, other, alpha=coefficient)
        return total

    return run


def _maximum(a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
    """torch.maximum halves the gradient between equal values; a choice gives it to one."""
    best = torch.where(a > b, a, b)
    for other in others:
        best = torch.where(other > best, other, best)
    return best


@layer("Reduction")
def reduction(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """coeff times the sum, sum of absolutes, sum of squares or mean of all axes from ``axis`` on.

    top  the axes before ``axis``; a scalar for axis 0
    """
    expect(spec, 1)
    p = spec.reduction_param
    (bottom,) = bottoms
    axis, coefficient = axis_of(spec, p.axis, bottom), p.coeff
    operations: dict[int, Function] = {
        p.SUM: lambda x: x.sum(-1),
        p.ASUM: lambda x: x.abs().sum(-1),
        p.SUMSQ: lambda x: x.square().sum(-1),
        p.MEAN: lambda x: x.sum(-1) / max(1, x.shape[-1]),
    }
    operation = operations[p.operation]
    if count(bottom, axis) == 0:
        raise spec.error(f"nothing to reduce in a bottom of shape {shape_text(bottom)}")

    def run(x: Tensor) -> Tensor:
        total = operation(x.flatten(axis))
        assert isinstance(total, Tensor)
        return total if coefficient == 1 else total * coefficient

    return Built(Apply(run), [bottom[:axis]])
