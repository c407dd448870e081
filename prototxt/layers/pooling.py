"""Pooling by Caffe's rules, on torch's kernels wherever these agree; MAX on a native one of the same values.

The windows are counted upwards (CEIL, the default), so the last may reach past the image. With padding, a
last window that would begin behind the image is dropped. Without, it is kept, and with a stride above the
kernel it may lie wholly outside: MAX gives -FLT_MAX there and no gradient, AVE gives 0 (the original's AVE:
0/0 where such a window begins exactly at the border), STOCHASTIC 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from prototxt import _native
from prototxt.layers.common import expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer

LOWEST = -3.4028234663852886e38  # -FLT_MAX
PLACES = 256  # in a window of the native kernel: it keeps a byte for the winner's

Pair = tuple[int, int]


@dataclass(frozen=True)
class Pool:
    """The window's numbers, (height, width) each."""

    kernel: Pair
    stride: Pair
    pad: Pair
    ceil: bool = True

    def counts(self, size: Pair) -> Pair:
        """How many windows Caffe lays over an image of ``size``; below 1 where none fits."""
        return (self._count(0, size), self._count(1, size))

    def _count(self, axis: int, size: Pair) -> int:
        k, s, p = self.kernel[axis], self.stride[axis], self.pad[axis]
        span = size[axis] + 2 * p - k
        windows = (-(-span // s) if self.ceil else span // s) + 1
        if any(self.pad) and (windows - 1) * s >= size[axis] + p:
            windows -= 1
        return windows


@dataclass(frozen=True)
class Plan:
    """How torch's kernels give one image size Caffe's windows.

    direct   torch lays the same windows by itself, with this ceil_mode; None: the image is padded first
    after    padding behind the image's end, (height, width), when it is padded here
    """

    windows: Pair
    direct: bool | None
    after: Pair = (0, 0)


def plan_for(pool: Pool, size: Pair) -> Plan:
    windows = pool.counts(size)
    if all(2 * p <= k for p, k in zip(pool.pad, pool.kernel, strict=True)):
        for ceil_mode in (False, True):
            if all(_torch_count(pool, size, axis, ceil_mode) == windows[axis] for axis in (0, 1)):
                return Plan(windows, ceil_mode)
    ends = [(windows[i] - 1) * pool.stride[i] + pool.kernel[i] for i in (0, 1)]
    after = tuple(max(0, ends[i] - size[i] - pool.pad[i]) for i in (0, 1))
    return Plan(windows, None, (after[0], after[1]))


def _torch_count(pool: Pool, size: Pair, axis: int, ceil_mode: bool) -> int:
    k, s, p = pool.kernel[axis], pool.stride[axis], pool.pad[axis]
    span = size[axis] + 2 * p - k
    windows = (-(-span // s) if ceil_mode else span // s) + 1
    if ceil_mode and (windows - 1) * s >= size[axis] + p:
        windows -= 1
    return windows


class Pooling(nn.Module):
    """Keeps the plan of the last image size: shapes may change between forwards."""

    def __init__(self, pool: Pool | None) -> None:
        super().__init__()
        self.pool = pool  # None: one window over the whole image
        self.size: Pair = (-1, -1)
        self.plan = Plan((0, 0), None)

    def prepare(self, x: Tensor) -> Pool:
        """The window's numbers for this image, with ``plan`` made for its size."""
        size = (x.shape[2], x.shape[3])
        pool = self.pool or Pool(size, (1, 1), (0, 0))
        if size != self.size:
            self.plan, self.size = plan_for(pool, size), size
            self.renew(pool, size)
        return pool

    def renew(self, pool: Pool, size: Pair) -> None:
        """Called when the image size has changed."""

    def padded(self, x: Tensor, pool: Pool, value: float) -> Tensor:
        (top, left), (bottom, right) = pool.pad, self.plan.after
        return functional.pad(x, (left, right, top, bottom), value=value)


class NativeMax(torch.autograd.Function):
    """Both passes in C++ on torch's threads; x is (N, C, H, W) float32 on the CPU.

    It lies contiguous or with its channels last, and so do the top and the gradient. A byte a window says
    where in it the winner stands: torch's kernel keeps eight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: _native.Windows, counts: Pair) -> Tensor:
        won = torch.empty((*x.shape[:2], *counts), dtype=torch.uint8)
        y, order = greatest(x, windows, counts, won)
        ctx.won, ctx.windows, ctx.order, ctx.shape = won, windows, order, x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dy = dy.contiguous(memory_format=ctx.order)
        dx = torch.empty(ctx.shape, memory_format=ctx.order)
        n, c = ctx.shape[:2]
        last = ctx.order is torch.channels_last
        _native.max_pool_backward(
            dy.data_ptr(), ctx.won.data_ptr(), dx.data_ptr(), n, c, last, ctx.windows, torch.get_num_threads()
        )
        return dx, None, None


def greatest(
    x: Tensor, windows: _native.Windows, counts: Pair, won: Tensor | None
) -> tuple[Tensor, torch.memory_format]:
    """The windows' greatest values and the order in memory that they share with x; fills ``won``."""
    order = torch.contiguous_format
    if not x.is_contiguous():
        if x.is_contiguous(memory_format=torch.channels_last):
            order = torch.channels_last
        else:
            x = x.contiguous()
    n, c = x.shape[:2]
    y = torch.empty((n, c, *counts), memory_format=order)
    _native.max_pool_forward(
        x.data_ptr(), y.data_ptr(), 0 if won is None else won.data_ptr(), n, c, order is torch.channels_last,
        windows, torch.get_num_threads(),
    )  # fmt: skip
    return y, order


class MaxPooling(Pooling):
    """The first of equal values wins. A second top holds the winners' places, h W + w as floats."""

    def __init__(self, pool: Pool | None, mask: bool) -> None:
        super().__init__(pool)
        self.mask = mask
        self.native: _native.Windows | None = None  # where the native kernel does it

    def renew(self, pool: Pool, size: Pair) -> None:
        small = pool.kernel[0] * pool.kernel[1] <= PLACES
        if self.mask or self.plan.direct is None or not small:
            self.native = None
        else:
            self.native = _native.Windows(size, self.plan.windows, pool.kernel, pool.stride, pool.pad)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        pool = self.prepare(x)
        if self.native is not None and x.dtype == torch.float32 and x.device.type == "cpu":
            if torch.is_grad_enabled() and x.requires_grad:
                y: Tensor = NativeMax.apply(x, self.native, self.plan.windows)  # type: ignore[no-untyped-call]
                return y
            return greatest(x, self.native, self.plan.windows, None)[0]
        return self.by_torch(x, pool)

    def by_torch(self, x: Tensor, pool: Pool) -> Tensor | tuple[Tensor, Tensor]:
        direct = self.plan.direct
        if direct is None:
            source, pad, ceil_mode = self.padded(x, pool, LOWEST), (0, 0), False
        else:
            source, pad, ceil_mode = x, pool.pad, direct
        if not self.mask:
            return functional.max_pool2d(source, pool.kernel, pool.stride, pad, ceil_mode=ceil_mode)
        y, place = functional.max_pool2d_with_indices(
            source, pool.kernel, pool.stride, pad, ceil_mode=ceil_mode
        )
        return y, self.places(place, source.shape[3], pool).to(x.dtype)

    def places(self, place: Tensor, width: int, pool: Pool) -> Tensor:
        """From places in the padded image to places in the image; -1 where the padding won."""
        if self.plan.direct is not None:
            return place
        (height, real), h, w = self.size, place // width - pool.pad[0], place % width - pool.pad[1]
        inside = (h >= 0) & (h < height) & (w >= 0) & (w < real)
        return torch.where(inside, h * real + w, -1)


class AvePooling(Pooling):
    """Each window's sum over its area, padding included, what reaches past the padding not."""

    share: Tensor  # 1 / area of each window, (windows h, windows w); 0 for one outside the image

    def __init__(self, pool: Pool | None) -> None:
        super().__init__(pool)
        self.register_buffer("share", torch.empty(0), persistent=False)

    def renew(self, pool: Pool, size: Pair) -> None:
        if self.plan.direct is None:
            self.share = torch.outer(*(self._share(pool, size, axis) for axis in (0, 1)))

    def _share(self, pool: Pool, size: Pair, axis: int) -> Tensor:
        start = torch.arange(self.plan.windows[axis]) * pool.stride[axis] - pool.pad[axis]
        length = (start + pool.kernel[axis]).clamp(max=size[axis] + pool.pad[axis]) - start
        return torch.where(length > 0, 1.0 / length, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        pool = self.prepare(x)
        if self.plan.direct is not None:
            return functional.avg_pool2d(x, pool.kernel, pool.stride, pool.pad, self.plan.direct)
        total = functional.avg_pool2d(self.padded(x, pool, 0.0), pool.kernel, pool.stride, divisor_override=1)
        return total * self.share.to(x)


class StochasticPooling(Pooling):
    """Training: one value of each window, drawn with a probability in proportion to it; values are 0 or more.

    Testing: what that gives on average, sum of x^2 / sum of x; 0 where the sum is not above 0.
    Source: Zeiler and Fergus 2013.
    """

    def __init__(self, pool: Pool | None, generator: torch.Generator | None) -> None:
        super().__init__(pool)
        self.generator = generator  # None: testing

    def forward(self, x: Tensor) -> Tensor:
        pool = self.prepare(x)
        values = self.windows(x, pool)
        total = values.sum(-1)
        if self.generator is None:
            above = total > 0
            share = values.square().sum(-1) / torch.where(above, total, 1.0)
            return torch.where(above, share, 0.0)
        return values.gather(-1, self.drawn(values.detach(), total.detach()).unsqueeze(-1)).squeeze(-1)

    def windows(self, x: Tensor, pool: Pool) -> Tensor:
        """(N, C, h, w, window); zeros where a window reaches past the image: they are never drawn."""
        (ends, size), (high, wide) = (self.plan.windows, self.size), pool.stride
        after = [max(0, (ends[i] - 1) * pool.stride[i] + pool.kernel[i] - size[i]) for i in (0, 1)]
        x = functional.pad(x, (0, after[1], 0, after[0]))
        laid = x.unfold(2, pool.kernel[0], high).unfold(3, pool.kernel[1], wide)
        return laid[:, :, : ends[0], : ends[1]].flatten(4)

    def drawn(self, values: Tensor, total: Tensor) -> Tensor:
        """The first place in each window where the running sum reaches a random share of the whole."""
        own = self.generator
        assert own is not None
        where = values.device if own.device == values.device else own.device
        share = torch.rand(total.shape, generator=own, device=where, dtype=values.dtype).to(values.device)
        reached = values.cumsum(-1) >= (share * total).unsqueeze(-1)
        return reached.to(torch.uint8).argmax(-1)


def make_pooling(spec: LayerSpec, method: int, pool: Pool | None, mask: bool = False) -> Pooling:
    """``method`` by PoolMethod's numbers, the same in PoolingParameter and SPPParameter."""
    if method == 0:
        return MaxPooling(pool, mask)
    if method == 1:
        return AvePooling(pool)
    if pool is not None and any(pool.pad):
        raise spec.error(f"STOCHASTIC pooling takes no padding, here it is {shape_text(pool.pad)}")
    return StochasticPooling(pool, None if spec.phase == "TEST" else spec.context.generator)


def _pair(spec: LayerSpec, name: str, default: int | None) -> Pair:
    p = spec.pooling_param
    single = {"kernel": "kernel_size"}.get(name, name)
    high, wide = p.HasField(f"{name}_h"), p.HasField(f"{name}_w")
    if p.HasField(single) and (high or wide):
        raise spec.error(f"give either {single} or {name}_h and {name}_w, not both")
    if high != wide:
        raise spec.error(f"{name}_h and {name}_w must be set together")
    if high:
        return (getattr(p, f"{name}_h"), getattr(p, f"{name}_w"))
    if not p.HasField(single) and default is None:
        raise spec.error("kernel_size must be set (or global_pooling: true)")
    value = getattr(p, single)
    return (value, value)


def _windows(spec: LayerSpec) -> Pool | None:
    p = spec.pooling_param
    stride, pad = _pair(spec, "stride", 1), _pair(spec, "pad", 0)
    if p.global_pooling:
        if p.HasField("kernel_size") or p.HasField("kernel_h") or p.HasField("kernel_w"):
            raise spec.error("global_pooling takes no kernel size")
        if pad != (0, 0) or stride != (1, 1):
            raise spec.error("global_pooling takes pad 0 and stride 1 alone")
        return None
    kernel = _pair(spec, "kernel", None)
    if min(kernel) < 1 or min(stride) < 1:
        raise spec.error(f"kernel {shape_text(kernel)} and stride {shape_text(stride)} must be at least 1")
    if any(a >= k for a, k in zip(pad, kernel, strict=True)):
        raise spec.error(f"pad {shape_text(pad)} must be below the kernel {shape_text(kernel)}")
    return Pool(kernel, stride, pad, p.round_mode == p.CEIL)


@layer("Pooling")
def pooling(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The greatest value of each window, the mean, or one drawn in proportion to the values.

    bottom (N, C, H, W); top (N, C, h, w); a second top, for MAX alone, holds the places of the greatest
    """
    p = spec.pooling_param
    expect(spec, 1, (1, 2) if p.pool == p.MAX else 1)
    (bottom,) = bottoms
    if len(bottom) != 4:
        raise spec.error(f"Pooling needs a bottom of 4 axes (N, C, H, W), not {shape_text(bottom)}")
    pool = _windows(spec)
    windows = (1, 1) if pool is None else pool.counts((bottom[2], bottom[3]))
    if min(windows) < 1:
        image = shape_text(bottom[2:])
        raise spec.error(
            f"kernel {shape_text(pool.kernel if pool else ())} does not fit into {image} with its pad"
        )
    mask = len(spec.top) == 2
    top = (*bottom[:2], *windows)
    return Built(make_pooling(spec, p.pool, pool, mask), [top, top] if mask else [top])


class Pyramid(nn.Module):
    """The levels' poolings, each flattened, side by side on axis 1."""

    def __init__(self, spec: LayerSpec, method: int, height: int) -> None:
        super().__init__()
        self.spec, self.method, self.height = spec, method, height
        self.size: Pair = (-1, -1)
        self.levels = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        size = (x.shape[2], x.shape[3])
        if size != self.size:
            pools = [bins(self.spec, size, level) for level in range(self.height)]
            self.levels = nn.ModuleList([make_pooling(self.spec, self.method, pool) for pool in pools])
            self.size = size
        if self.height == 1:
            y: Tensor = self.levels[0](x)
            return y
        return torch.cat([level(x).flatten(1) for level in self.levels], 1)


def bins(spec: LayerSpec, size: Pair, level: int) -> Pool:
    """2^level windows an axis over an image of ``size``; raises LayerError where no kernel gives them."""
    number = 2**level
    kernel = (math.ceil(size[0] / number), math.ceil(size[1] / number))
    pad = ((kernel[0] * number - size[0] + 1) // 2, (kernel[1] * number - size[1] + 1) // 2)
    if any(p >= k for p, k in zip(pad, kernel, strict=True)):
        raise spec.error(
            f"level {level} of the pyramid asks for {number} bins: too many for {shape_text(size)}"
        )
    return Pool(kernel, kernel, pad)


@layer("SPP")
def spp(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Spatial pyramid pooling: 1, 4, 16, .. windows over the image, level by level.

    bottom (N, C, H, W); top (N, C (1 + 4 + ..)), or (N, C, 1, 1) for a pyramid of height 1
    """
    expect(spec, 1)
    p = spec.spp_param
    (bottom,) = bottoms
    if len(bottom) != 4:
        raise spec.error(f"SPP needs a bottom of 4 axes (N, C, H, W), not {shape_text(bottom)}")
    if p.pyramid_height < 1:
        raise spec.error("pyramid_height must be set")
    size = (bottom[2], bottom[3])
    windows = [bins(spec, size, level).counts(size) for level in range(p.pyramid_height)]
    make_pooling(spec, p.pool, None)
    total = sum(h * w for h, w in windows)
    top = (*bottom[:2], 1, 1) if p.pyramid_height == 1 else (bottom[0], bottom[1] * total)
    return Built(Pyramid(spec, p.pool, p.pyramid_height), [top])
