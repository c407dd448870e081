"""Local response normalisation: y = x (k + alpha/size sum of x^2 over a window)^-beta.

The native kernels go over the data once, forward and backward, and keep nothing but x between the two. They
take contiguous float32 on the CPU; anything else goes through torch operations of the same meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from prototxt import _native
from prototxt.layers.common import expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer


@dataclass(frozen=True)
class Normalisation:
    """The layer's numbers. ``alpha`` is the file's: it is divided by the window's size where it is used."""

    size: int
    alpha: float
    beta: float
    k: float
    within: bool

    @property
    def half(self) -> int:
        return (self.size - 1) // 2

    @property
    def window(self) -> int:
        """Elements in a full window; what lies outside the data counts as zero."""
        return self.size**2 if self.within else self.size

    def kernel(self) -> _native.Lrn:
        return _native.Lrn(self.half, self.alpha / self.window, self.beta, self.k)


class NativeLRN(torch.autograd.Function):
    """Both passes in C++ on torch's threads; x is (N, C, H, W) contiguous float32 on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lrn: Normalisation) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(x)
        ctx.lrn = lrn
        run = _native.lrn_within_forward if lrn.within else _native.lrn_across_forward
        run(x.data_ptr(), y.data_ptr(), *_extent(x, lrn), lrn.kernel(), torch.get_num_threads())
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        lrn, dy = ctx.lrn, dy.contiguous()
        dx = torch.empty_like(x)
        run = _native.lrn_within_backward if lrn.within else _native.lrn_across_backward
        threads = torch.get_num_threads()
        run(x.data_ptr(), dy.data_ptr(), dx.data_ptr(), *_extent(x, lrn), lrn.kernel(), threads)
        return dx, None


def _extent(x: Tensor, lrn: Normalisation) -> tuple[int, int, int]:
    n, c, h, w = x.shape
    return (n * c, h, w) if lrn.within else (n, c, h * w)


def reference(x: Tensor, lrn: Normalisation) -> Tensor:
    """The same by torch operations, for any device and floating dtype; x is (N, C, H, W)."""
    square = x * x
    axes = (2, 3) if lrn.within else (1,)
    for axis in axes:
        square = _window_sum(square, axis, min(lrn.half, x.shape[axis] - 1))
    return x * (lrn.k + lrn.alpha / lrn.window * square).pow(-lrn.beta)


def _window_sum(x: Tensor, axis: int, half: int) -> Tensor:
    size = x.shape[axis]
    total = x.clone()
    for shift in range(1, half + 1):
        upper = functional.pad(x.narrow(axis, shift, size - shift), _padding(x, axis, 0, shift))
        lower = functional.pad(x.narrow(axis, 0, size - shift), _padding(x, axis, shift, 0))
        total = total + upper + lower
    return total


def _padding(x: Tensor, axis: int, before: int, after: int) -> list[int]:
    """F.pad counts axes from the last one."""
    return [0, 0] * (x.dim() - 1 - axis) + [before, after]


class LocalResponse(nn.Module):
    def __init__(self, lrn: Normalisation) -> None:
        super().__init__()
        self.lrn = lrn

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.device.type == "cpu":
            y: Tensor = NativeLRN.apply(x.contiguous(), self.lrn)  # type: ignore[no-untyped-call]
            return y
        return reference(x, self.lrn)


@layer("LRN")
def lrn(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Windows of ``local_size`` channels, or of local_size x local_size within each channel.

    bottom, top  (N, C, H, W). Within a channel ``k`` is 1 whatever the file says, as in Caffe.
    """
    expect(spec, 1)
    p = spec.lrn_param
    if len(bottoms[0]) != 4:
        raise spec.error(f"LRN needs a bottom of 4 axes (N, C, H, W), not {shape_text(bottoms[0])}")
    if p.local_size % 2 == 0:
        raise spec.error(f"local_size must be odd, not {p.local_size}")
    within = p.norm_region == p.WITHIN_CHANNEL
    k = 1.0 if within else p.k
    return Built(LocalResponse(Normalisation(p.local_size, p.alpha, p.beta, k, within)), [bottoms[0]])
