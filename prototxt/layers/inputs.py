"""Input and Parameter: tops that come from the caller, or that are learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prototxt.layers.common import Apply, expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer
from prototxt.room import too_large


def _checked(spec: LayerSpec, message: Any) -> Shape:
    shape = tuple(message.dim)
    if any(d < 0 for d in shape):
        raise spec.error(f"a shape must not hold a negative size: {shape_text(shape)}")
    return shape


@layer("Input")
def input_(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Tops that the caller fills; one shape for all, one each, or none: (0,) until they are reshaped."""
    expect(spec, 0, (1, None))
    shapes = [_checked(spec, shape) for shape in spec.input_param.shape]
    tops = len(spec.top)
    if len(shapes) not in (0, 1, tops):
        raise spec.error(f"give one shape for all tops, or one each: {tops} tops, {len(shapes)} shapes")
    return Built(Apply(lambda: ()), (shapes or [(0,)]) * tops if len(shapes) < 2 else shapes, feed=True)


class Parameter(nn.Module):
    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        return self.value.view_as(self.value)


@layer("Parameter")
def parameter_(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """A learned blob, zero at first, as a top."""
    expect(spec, 0)
    shape = _checked(spec, spec.parameter_param.shape)
    if reason := too_large(shape, taken=True):
        raise spec.error(reason)
    value = nn.Parameter(torch.zeros(shape))
    return Built(Parameter(value), [shape], [value])
