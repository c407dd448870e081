"""Initial values of learned blobs, by the distributions of Caffe's fillers.

The numbers come from torch's generator: equal to Caffe's in distribution, not bit by bit. Fan-in and fan-out
follow the blob's shape alone, as in Caffe: axis 0 is left out for the one, axis 1 for the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prototxt.registry import LayerSpec, Shape
from prototxt.room import too_large

Fill = Callable[[Tensor, Any, torch.Generator, LayerSpec], None]


def fill(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    """Fill ``tensor`` in place as the FillerParameter ``filler`` says; ``spec`` names the layer in errors.

    A tensor on the meta device is left alone: the net asks builders for shapes that way.
    Raises LayerError for an unknown type, a wrong shape or a parameter out of range.
    """
    if filler.type not in _FILLERS:
        raise spec.error(f"unknown filler type {filler.type!r} (known: {', '.join(_FILLERS)})")
    if filler.sparse != -1 and filler.type != "gaussian":
        raise spec.error(f"sparse is an option of the gaussian filler, not of {filler.type!r}")
    if tensor.is_meta:
        return
    with torch.no_grad():
        _FILLERS[filler.type](tensor, filler, generator, spec)


def parameter(shape: Shape, filler: Any, spec: LayerSpec) -> nn.Parameter:
    """A new float32 parameter of ``shape``, filled by ``filler`` from the net's generator."""
    if reason := too_large(shape, taken=True):
        raise spec.error(reason)
    tensor = torch.empty(shape, dtype=torch.float32)
    fill(tensor, filler, spec.context.generator, spec)
    return nn.Parameter(tensor)


def _constant(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    tensor.fill_(filler.value)


def _uniform(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    if filler.min > filler.max:
        raise spec.error(f"uniform filler: min {filler.min:g} is above max {filler.max:g}")
    tensor.uniform_(filler.min, filler.max, generator=generator)


def _gaussian(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    """``sparse`` keeps each value with probability sparse / shape[0]: that many inputs a unit on average."""
    if filler.std <= 0:
        raise spec.error(f"gaussian filler: std must be above 0, not {filler.std:g}")
    if filler.sparse < -1:
        raise spec.error(f"gaussian filler: sparse must be 0 or more, not {filler.sparse}")
    tensor.normal_(filler.mean, filler.std, generator=generator)
    if filler.sparse >= 0:
        if tensor.dim() < 1 or filler.sparse > tensor.shape[0]:
            raise spec.error(
                f"gaussian filler: sparse {filler.sparse} is above axis 0 of {tuple(tensor.shape)}"
            )
        tensor.mul_(torch.empty_like(tensor).bernoulli_(filler.sparse / tensor.shape[0], generator=generator))


def _positive_unitball(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    if tensor.numel() == 0 or tensor.dim() < 1:
        raise spec.error(f"positive_unitball filler: cannot fill a blob of shape {tuple(tensor.shape)}")
    tensor.uniform_(0, 1, generator=generator)
    rows = tensor.view(tensor.shape[0], -1)
    rows.div_(rows.sum(1, keepdim=True))


def _xavier(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    bound = math.sqrt(3.0 / _fan(tensor, filler, spec))
    tensor.uniform_(-bound, bound, generator=generator)


def _msra(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    tensor.normal_(0, math.sqrt(2.0 / _fan(tensor, filler, spec)), generator=generator)


def _bilinear(tensor: Tensor, filler: Any, generator: torch.Generator, spec: LayerSpec) -> None:
    """The kernel of bilinear upsampling, the same for every pair of channels."""
    if tensor.dim() != 4 or tensor.shape[2] != tensor.shape[3]:
        raise spec.error(f"bilinear filler: needs a 4-D blob with a square kernel, not {tuple(tensor.shape)}")
    width = tensor.shape[3]
    factor = math.ceil(width / 2)
    centre = (width - 1) / (2 * factor)
    ramp = 1 - (torch.arange(width, dtype=torch.float64) / factor - centre).abs()
    tensor.copy_(torch.outer(ramp, ramp).to(tensor.dtype).expand_as(tensor))


def _fan(tensor: Tensor, filler: Any, spec: LayerSpec) -> float:
    """FAN_IN: count / shape[0]; FAN_OUT: count / shape[1], the count itself below 2 axes; AVERAGE of both."""
    count = tensor.numel()
    if count == 0 or tensor.dim() < 1:
        raise spec.error(f"{filler.type} filler: cannot fill a blob of shape {tuple(tensor.shape)}")
    fan_in = count / tensor.shape[0]
    fan_out = count / tensor.shape[1] if tensor.dim() > 1 else float(count)
    return (fan_in, fan_out, (fan_in + fan_out) / 2)[filler.variance_norm]


_FILLERS: dict[str, Fill] = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "positive_unitball": _positive_unitball,
    "xavier": _xavier,
    "msra": _msra,
    "bilinear": _bilinear,
}
