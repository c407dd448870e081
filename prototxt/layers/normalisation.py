"""BatchNorm, MVN, and the learned Scale and Bias that usually follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prototxt.fillers import parameter
from prototxt.layers.common import Apply, axis_of, expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer


class BatchNorm(nn.Module):
    """Normalise each channel by the batch's mean and variance, or by the accumulated ones.

    The blobs hold running sums, not means: mean and variance weighted by fraction^age, and the sum of the
    weights. mean / weight is the average.
    """

    def __init__(self, channels: int, fraction: float, eps: float, accumulated: bool) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.variance = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.fraction, self.eps, self.accumulated = fraction, eps, accumulated

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, None, None)

    def scaled(self, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalised, times ``scale`` (C,), plus ``bias`` (C,): what a Scale layer behind would do."""
        flat = x if x.dim() > 1 else x.unsqueeze(1)
        normalise = self.by_accumulators if self.accumulated else self.by_batch
        y = normalise(flat, scale, bias)
        return y if x.dim() > 1 else y.squeeze(1)

    def accumulators(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, (C,) each; zeros before anything was accumulated."""
        with torch.no_grad():
            share = torch.where(self.weight == 0, 0.0, 1 / self.weight)
            return self.mean * share, self.variance * share

    def by_accumulators(self, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, variance = (value.to(x.dtype) for value in self.accumulators())
        return torch.batch_norm(x, scale, bias, mean, variance, False, 0.0, self.eps, False)

    def by_batch(self, x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Biased variance normalises, unbiased variance is accumulated."""
        samples = x.numel() // x.shape[1]
        mean, variance = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        if samples == 1:
            mean, y = x.detach().reshape(-1).to(mean.dtype), _affine(x - x, scale, bias)
        else:
            # A momentum of 1 hands the batch's own mean and unbiased variance out.
            y = torch.batch_norm(x, scale, bias, mean, variance, True, 1.0, self.eps, False)
        with torch.no_grad():
            self.mean.mul_(self.fraction).add_(mean)
            self.variance.mul_(self.fraction).add_(variance)
            self.weight.mul_(self.fraction).add_(1)
        return y


def _affine(y: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Over the one sample's channels, (1, C, 1..)."""
    spread = (1, -1) + (1,) * (y.dim() - 2)
    y = y if scale is None else y * scale.view(spread)
    return y if bias is None else y + bias.view(spread)


@layer("BatchNorm")
def batch_norm(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """(x - mean) / sqrt(variance + eps) a channel (axis 1), without a learned scale.

    blobs  sum of means (C,), sum of variances (C,), sum of weights (1,); a bottom of 1 axis is 1 channel
    """
    expect(spec, 1)
    p = spec.batch_norm_param
    (bottom,) = bottoms
    if not bottom:
        raise spec.error("BatchNorm needs a bottom of 1 axis or more")
    accumulated = p.use_global_stats if p.HasField("use_global_stats") else spec.phase == "TEST"
    channels = bottom[1] if len(bottom) > 1 else 1
    module = BatchNorm(channels, p.moving_average_fraction, p.eps, accumulated)
    return Built(module, [bottom], [module.mean, module.variance, module.weight], statistics=True)


class _Standardise(torch.autograd.Function):
    """(x - mean) / (std + eps) a row of x, (rows, n); eps stands outside the root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        std = centred.square().mean(1, keepdim=True).sqrt()
        y = centred / (std + eps)
        ctx.save_for_backward(y, std)
        ctx.eps = eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, std = ctx.saved_tensors
        width = std + ctx.eps
        # In a row of equal values y is 0 and its slope is taken as that of the centring alone.
        stretch = torch.where(std == 0, 1.0, width / std)
        along = y * (dy * y).mean(1, keepdim=True) * stretch
        return (dy - dy.mean(1, keepdim=True) - along) / width, None


@layer("MVN")
def mvn(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Take the mean away, and divide by the deviation, of each channel or (across_channels) each record.

    bottom up to 4 axes; top 4 axes: missing ones are added behind, as in Caffe
    """
    expect(spec, 1)
    p = spec.mvn_param
    (bottom,) = bottoms
    if len(bottom) > 4:
        raise spec.error(f"MVN takes a bottom of at most 4 axes, not {shape_text(bottom)}")
    across, divide, eps = p.across_channels, p.normalize_variance, p.eps
    added = (1,) * (4 - len(bottom))

    def run(x: Tensor) -> Tensor:
        shape = (*x.shape, *added)
        rows = x.reshape(shape).flatten(1) if across else x.reshape(shape).flatten(0, 1).flatten(1)
        if divide:
            y: Tensor = _Standardise.apply(rows, eps)  # type: ignore[no-untyped-call]
        else:
            y = rows - rows.mean(1, keepdim=True)
        return y.reshape(shape)

    return Built(Apply(run), [(*bottom, *added)])


class Affine(nn.Module):
    """x times and plus values that span some axes from ``axis`` on; either may be the second bottom."""

    scale: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, axis: int, scales: bool, scale: nn.Parameter | None, bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.axis, self.scales = axis, scales
        self.register_parameter("scale", scale)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        scale: Tensor | None = self.scale
        bias: Tensor | None = self.bias
        if given is not None:
            scale, bias = (given, bias) if self.scales else (None, given)
        if bias is None:
            assert scale is not None
            return x * self.spread(scale, x)
        if scale is None:
            return x + self.spread(bias, x)
        return torch.addcmul(self.spread(bias, x), x, self.spread(scale, x))

    def spread(self, value: Tensor, x: Tensor) -> Tensor:
        """With axes of 1 behind, so that it is broadcast over ``x``; a scalar spans all of it."""
        if value.dim() == 0:
            return value
        if value.shape != x.shape[self.axis : self.axis + value.dim()]:  # torch would broadcast an axis of 1
            raise ValueError(f"{shape_text(tuple(value.shape))} values from axis {self.axis} do not fit")
        return value.reshape(value.shape + (1,) * (x.dim() - self.axis - value.dim()))


def _spanned(spec: LayerSpec, p: Any, bottoms: list[Shape]) -> tuple[int, Shape]:
    """The axis where the values begin and their shape, from the second bottom or the parameters."""
    bottom = bottoms[0]
    if len(bottoms) == 2:
        shape = bottoms[1]
        axis = axis_of(spec, p.axis, bottom) if shape else 0
        if bottom[axis : axis + len(shape)] != shape:
            raise spec.error(
                f"{spec.bottom[1]} ({shape_text(shape)}) does not match {shape_text(bottom)} from axis {axis}"
            )
        return axis, shape
    if p.num_axes < -1:
        raise spec.error(f"num_axes must be -1 (to the end) or more, not {p.num_axes}")
    axis = axis_of(spec, p.axis, bottom)
    end = len(bottom) if p.num_axes == -1 else axis + p.num_axes
    if end > len(bottom):
        raise spec.error(f"axis {axis} and num_axes {p.num_axes} run past the bottom's {len(bottom)} axes")
    return axis, bottom[axis:end]


def _learned(spec: LayerSpec, shape: Shape, p: Any, field: str, default: float) -> nn.Parameter:
    if p.HasField(field):
        return parameter(shape, getattr(p, field), spec)
    return nn.Parameter(torch.full(shape, default))


@layer("Scale")
def scale(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """y = x s (+ b), s spanning ``num_axes`` axes from ``axis`` on.

    bottom  x, and s when it is not learned; top like x
    blobs   s (1 by default) unless it is the second bottom; b (0 by default) when bias_term
    """
    expect(spec, (1, 2))
    p = spec.scale_param
    axis, shape = _spanned(spec, p, bottoms)
    multiplier = _learned(spec, shape, p, "filler", 1.0) if len(bottoms) == 1 else None
    bias = _learned(spec, shape, p, "bias_filler", 0.0) if p.bias_term else None
    blobs = [blob for blob in (multiplier, bias) if blob is not None]
    return Built(Affine(axis, True, multiplier, bias), [bottoms[0]], blobs)


@layer("Bias")
def bias(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """y = x + b, b spanning ``num_axes`` axes from ``axis`` on, or given as the second bottom.

    blobs   b (0 by default) unless it is the second bottom
    """
    expect(spec, (1, 2))
    p = spec.bias_param
    axis, shape = _spanned(spec, p, bottoms)
    learned = _learned(spec, shape, p, "filler", 0.0) if len(bottoms) == 1 else None
    return Built(Affine(axis, False, None, learned), [bottoms[0]], [] if learned is None else [learned])
