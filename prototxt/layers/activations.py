"""Layers that work element by element.

In place they give the gradient of what they compute. The original's BNLL, Clip, Power and Log (and ReLU with
a slope below 0) read their own output as if it were the input there, and get another one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from prototxt.fillers import parameter
from prototxt.layers.common import Function, expect, like_bottom, refuse_in_place
from prototxt.registry import Built, LayerSpec, Shape, layer


@layer("ReLU")
def relu(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """y = max(x, 0) + negative_slope min(x, 0); at x = 0 the gradient is negative_slope."""
    slope: float = spec.relu_param.negative_slope
    if slope == 0:
        return like_bottom(spec, bottoms, torch.relu)
    return like_bottom(spec, bottoms, lambda x: functional.leaky_relu(x, slope))


@layer("Sigmoid")
def sigmoid(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    return like_bottom(spec, bottoms, torch.sigmoid)


@layer("TanH")
def tanh(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    return like_bottom(spec, bottoms, torch.tanh)


@layer("ELU")
def elu(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """x above 0, alpha (e^x - 1) elsewhere."""
    alpha: float = spec.elu_param.alpha
    return like_bottom(spec, bottoms, lambda x: functional.elu(x, alpha))


@layer("BNLL")
def bnll(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """log(1 + e^x); above 50 it is x to the last bit."""
    return like_bottom(spec, bottoms, lambda x: functional.softplus(x, threshold=50.0))


@layer("AbsVal")
def absolute(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """|x|; the gradient at 0 is 0."""
    refuse_in_place(spec)
    return like_bottom(spec, bottoms, torch.abs)


@layer("Swish")
def swish(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    beta: float = spec.swish_param.beta
    return like_bottom(spec, bottoms, lambda x: x * torch.sigmoid(beta * x))


@layer("Clip")
def clip(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """x kept within [min, max]; the gradient is 1 on the limits themselves."""
    p = spec.clip_param
    if not (p.HasField("min") and p.HasField("max")):
        raise spec.error("clip_param needs both min and max")
    low, high = p.min, p.max
    return like_bottom(spec, bottoms, lambda x: torch.clamp(x, low, high))


@layer("Threshold")
def threshold(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """1 where x is above the threshold, else 0; no gradient."""
    limit: float = spec.threshold_param.threshold
    return like_bottom(spec, bottoms, lambda x: (x > limit).to(x.dtype))


@layer("Power")
def power(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """(shift + scale x)^power; with power or scale 0 a constant of gradient 0."""
    p = spec.power_param
    exponent, scale, shift = p.power, p.scale, p.shift
    if exponent * scale == 0:
        value = 1.0 if exponent == 0 else math.pow(shift, exponent)
        return like_bottom(spec, bottoms, lambda x: torch.full_like(x, value))
    return like_bottom(spec, bottoms, _power_of_line(exponent, scale, shift))


def _power_of_line(exponent: float, scale: float, shift: float) -> Function:
    line = _Line(scale, shift)
    if exponent == 1:
        return line
    if exponent == 2:
        return lambda x: line(x).square()
    return lambda x: line(x).pow(exponent)


class _Line(nn.Module):
    """x -> shift + scale x, without the operations that change nothing. Never the bottom itself."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x: Tensor) -> Tensor:
        if self.shift == 0:
            return x * self.scale
        return (x if self.scale == 1 else x * self.scale) + self.shift


@layer("Exp")
def exp(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """base^(shift + scale x); base -1 stands for e."""
    p = spec.exp_param
    log_base = _log_of_base(spec, p.base)
    line = _Line(p.scale * log_base, p.shift * log_base)
    return like_bottom(spec, bottoms, lambda x: line(x).exp())


@layer("Log")
def log(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """log_base(shift + scale x); base -1 stands for e."""
    p = spec.log_param
    log_base = _log_of_base(spec, p.base)
    if log_base == 0:
        raise spec.error("base must not be 1")
    line = _Line(p.scale, p.shift)
    return like_bottom(spec, bottoms, lambda x: line(x).log() / log_base)


def _log_of_base(spec: LayerSpec, base: float) -> float:
    if base == -1:
        return 1.0
    if base <= 0:
        raise spec.error(f"base must be above 0, or -1 for e, not {base:g}")
    return math.log(base)


class PReLU(nn.Module):
    def __init__(self, slope: nn.Parameter) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return functional.prelu(x, self.slope.reshape(-1))


@layer("PReLU")
def prelu(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """x above 0, slope x elsewhere, with a learned slope a channel (axis 1) or one for all.

    blobs  slope (C,), or () when channel_shared; .25 by default
    """
    expect(spec, 1)
    p = spec.prelu_param
    (bottom,) = bottoms
    if len(bottom) < 2:
        raise spec.error("PReLU needs a bottom of 2 axes or more")
    shape: Shape = () if p.channel_shared else (bottom[1],)
    if p.HasField("filler"):
        slope = parameter(shape, p.filler, spec)
    else:
        slope = nn.Parameter(torch.full(shape, 0.25))
    return Built(PReLU(slope), [bottom], [slope])


class Dropout(nn.Module):
    """y = x mask / (1 - ratio); the mask is drawn from the net's generator."""

    def __init__(self, ratio: float, generator: torch.Generator) -> None:
        super().__init__()
        self.keep = 1 - ratio
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        own = self.generator if self.generator.device == x.device else None
        mask = torch.empty_like(x, requires_grad=False).bernoulli_(self.keep, generator=own)
        return x * mask.div_(self.keep)


@layer("Dropout")
def dropout(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Zero each value with probability dropout_ratio while training; afterwards the identity."""
    ratio: float = spec.dropout_param.dropout_ratio
    if not 0 <= ratio < 1:
        raise spec.error(f"dropout_ratio must be in [0, 1), not {ratio:g}")
    if spec.phase == "TEST" or ratio == 0:
        return like_bottom(spec, bottoms, lambda x: x)
    expect(spec, 1)
    return Built(Dropout(ratio, spec.context.generator), [bottoms[0]])
