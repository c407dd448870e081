"""Convolution, Deconvolution and Im2col over any number of spatial axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from prototxt.fillers import parameter
from prototxt.layers.common import Apply, axis_of, count, expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer

_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_DECONV: dict[int, Any] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


@dataclass(frozen=True)
class Windows:
    """How a kernel is laid over the spatial axes; one number an axis."""

    kernel: Shape
    stride: Shape
    pad: Shape
    dilation: Shape

    @property
    def extent(self) -> Shape:
        """What the kernel spans with its holes."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    def positions(self, spatial: Shape) -> Shape:
        """How often the kernel fits; below 1 where it is larger than the padded axis."""
        rows = zip(spatial, self.pad, self.extent, self.stride, strict=True)
        return tuple((size + 2 * p - e) // s + 1 for size, p, e, s in rows)

    def spread(self, spatial: Shape) -> Shape:
        """The spatial axes that a transposed convolution makes."""
        rows = zip(spatial, self.pad, self.extent, self.stride, strict=True)
        return tuple(s * (size - 1) + e - 2 * p for size, p, e, s in rows)


def _per_axis(spec: LayerSpec, name: str, axes: int, default: int | None) -> Shape:
    """A parameter given once, once a spatial axis, or (2-D only) as name_h and name_w."""
    p = spec.convolution_param
    values = list(getattr(p, name))
    pair = {"kernel_size": "kernel"}.get(name, name)
    if name != "dilation" and (p.HasField(f"{pair}_h") or p.HasField(f"{pair}_w")):
        if axes != 2:
            raise spec.error(f"{pair}_h and {pair}_w are for 2 spatial axes, this layer has {axes}")
        if values:
            raise spec.error(f"give either {name} or {pair}_h and {pair}_w, not both")
        return (getattr(p, f"{pair}_h"), getattr(p, f"{pair}_w"))
    if not values:
        if default is None and axes > 0:
            raise spec.error(f"{name} must be set")
        return (default or 0,) * axes
    if len(values) not in (1, axes):
        raise spec.error(
            f"{name} is given {len(values)} times for {axes} spatial axes: give it once, or {axes}"
        )
    return tuple(values * axes if len(values) == 1 else values)


def _windows(spec: LayerSpec, axes: int) -> Windows:
    windows = Windows(
        _per_axis(spec, "kernel_size", axes, None),
        _per_axis(spec, "stride", axes, 1),
        _per_axis(spec, "pad", axes, 0),
        _per_axis(spec, "dilation", axes, 1),
    )
    for name in ("kernel", "stride", "dilation"):
        if any(value < 1 for value in getattr(windows, name)):
            raise spec.error(f"{name} must be at least 1, not {shape_text(getattr(windows, name))}")
    return windows


def patches(x: Tensor, windows: Windows) -> Tensor:
    """(B, C, spatial) -> (B, C, kernel, positions), any number of spatial axes."""
    axes = len(windows.kernel)
    x = functional.pad(x, [p for pad in reversed(windows.pad) for p in (pad, pad)])
    for i in range(axes):
        x = x.unfold(2 + i, windows.extent[i], windows.stride[i])
        x = x[(..., slice(None, None, windows.dilation[i]))]
    return x.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))


class Convolution(nn.Module):
    """One set of weights over each bottom. ``axis`` is the channel axis: all before it is batch."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        *,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        windows: Windows,
        group: int,
        axis: int,
        turned: bool,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.windows, self.group, self.axis, self.turned = windows, group, axis, turned
        self.dense: Any = _CONV.get(len(windows.kernel)) if not turned else None

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        tops = tuple([self.one(x) for x in bottoms])
        return tops[0] if len(tops) == 1 else tops

    def one(self, x: Tensor) -> Tensor:
        if self.axis == 1:
            return self.batched(x)
        batch = x.shape[: self.axis]
        y = self.batched(x.reshape(-1, *x.shape[self.axis :]))
        return y.reshape(*batch, *y.shape[1:])

    def batched(self, x: Tensor) -> Tensor:
        w = self.windows
        if self.dense is not None:
            y: Tensor = self.dense(x, self.weight, self.bias, w.stride, w.pad, w.dilation, self.group)
            return y
        if self.turned:
            run = _DECONV[len(w.kernel)]
            y = run(x, self.weight, self.bias, w.stride, w.pad, 0, self.group, w.dilation)
            return y
        return self.general(x)

    def with_weights(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The same convolution, dense over 1 to 3 axes, by other numbers."""
        w = self.windows
        y: Tensor = self.dense(x, weight, bias, w.stride, w.pad, w.dilation, self.group)
        return y

    def general(self, x: Tensor) -> Tensor:
        """No or more than three spatial axes: the product of weights and patches."""
        columns = patches(x, self.windows)
        positions = columns.shape[2 + len(self.windows.kernel) :]
        columns = columns.reshape(x.shape[0], self.group, -1, count(positions))
        rows = self.weight.reshape(self.group, -1, columns.shape[2])
        y = torch.matmul(rows, columns).reshape(x.shape[0], -1, *positions)
        if self.bias is None:
            return y
        return y + self.bias.reshape(-1, *[1] * len(positions))


def _channels(spec: LayerSpec, channels: int) -> tuple[int, int]:
    """num_output and group, checked."""
    p = spec.convolution_param
    if p.num_output < 1:
        raise spec.error("num_output must be set")
    if p.group < 1 or channels % p.group:
        raise spec.error(f"group {p.group} does not divide the {channels} channels of the bottom")
    if p.num_output % p.group:
        raise spec.error(f"group {p.group} does not divide num_output {p.num_output}")
    return p.num_output, p.group


def _build(spec: LayerSpec, bottoms: list[Shape], turned: bool) -> Built:
    expect(spec, (1, None), len(bottoms))
    p = spec.convolution_param
    bottom = bottoms[0]
    if any(other != bottom for other in bottoms):
        raise spec.error(f"all bottoms must have one shape, not {', '.join(map(shape_text, bottoms))}")
    axis = axis_of(spec, p.axis, bottom)
    channels, spatial = bottom[axis], bottom[axis + 1 :]
    windows = _windows(spec, len(spatial))
    outputs, group = _channels(spec, channels)
    if turned and len(spatial) not in _DECONV:
        raise spec.error(f"Deconvolution works over 1 to 3 spatial axes, not {len(spatial)}")
    made = windows.spread(spatial) if turned else windows.positions(spatial)
    if any(size < 1 for size in made):
        raise spec.error(
            f"kernel {shape_text(windows.extent)} does not fit into {shape_text(spatial)} with its pad"
        )
    across = (channels, outputs // group) if turned else (outputs, channels // group)
    weight = parameter((*across, *windows.kernel), p.weight_filler, spec)
    bias = parameter((outputs,), p.bias_filler, spec) if p.bias_term else None
    module = Convolution(weight=weight, bias=bias, windows=windows, group=group, axis=axis, turned=turned)
    top = (*bottom[:axis], outputs, *made)
    return Built(module, [top] * len(bottoms), [weight] if bias is None else [weight, bias])


@layer("Convolution")
def convolution(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Convolve each bottom with the same weights.

    bottom  (batch.., C, spatial..) with C at ``axis``; top (batch.., num_output, positions..)
    blobs   W (num_output, C / group, kernel..), b (num_output,) when bias_term
    """
    return _build(spec, bottoms, turned=False)


@layer("Deconvolution")
def deconvolution(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The transpose of Convolution.

    blobs   W (C, num_output / group, kernel..), b (num_output,) when bias_term
    """
    return _build(spec, bottoms, turned=True)


@layer("Im2col")
def im2col(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The patches that Convolution multiplies by its weights.

    bottom  (batch.., C, spatial..); top (batch.., C x prod(kernel), positions..), channels in the order
    of bottom channel, then kernel position
    """
    expect(spec, 1)
    (bottom,) = bottoms
    axis = axis_of(spec, spec.convolution_param.axis, bottom)
    spatial = bottom[axis + 1 :]
    windows = _windows(spec, len(spatial))
    positions = windows.positions(spatial)
    if any(size < 1 for size in positions):
        raise spec.error(
            f"kernel {shape_text(windows.extent)} does not fit into {shape_text(spatial)} with its pad"
        )
    channels = bottom[axis] * count(windows.kernel)

    def run(x: Tensor) -> Tensor:
        flat = x.reshape(-1, *x.shape[axis:])
        columns = patches(flat, windows)
        return columns.reshape(*x.shape[:axis], channels, *columns.shape[2 + len(windows.kernel) :])

    return Built(Apply(run), [(*bottom[:axis], channels, *positions)])
