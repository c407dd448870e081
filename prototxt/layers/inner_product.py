"""InnerProduct and Embed: rows of weights times, or chosen by, the bottom."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from prototxt.fillers import parameter
from prototxt.layers.common import axis_of, count, expect
from prototxt.registry import Built, LayerSpec, Shape, layer


class InnerProduct(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, axis: int, transpose: bool) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.axis, self.transpose = axis, transpose

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != self.axis + 1:
            x = x.flatten(self.axis)
        weight = self.weight.t() if self.transpose else self.weight
        return functional.linear(x, weight, self.bias)


@layer("InnerProduct")
def inner_product(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """y = W x + b over the axes from ``axis`` on.

    bottom (d0, .., rest..)  top (d0, .., num_output)
    blobs  W (num_output, prod(rest)), or its transpose; b (num_output,) when bias_term
    """
    expect(spec, 1)
    p = spec.inner_product_param
    (bottom,) = bottoms
    if p.num_output < 1:
        raise spec.error("num_output must be set")
    axis = axis_of(spec, p.axis, bottom)
    inputs = count(bottom, axis)
    shape = (inputs, p.num_output) if p.transpose else (p.num_output, inputs)
    weight = parameter(shape, p.weight_filler, spec)
    bias = parameter((p.num_output,), p.bias_filler, spec) if p.bias_term else None
    blobs = [weight] if bias is None else [weight, bias]
    return Built(InnerProduct(weight, bias, axis, p.transpose), [(*bottom[:axis], p.num_output)], blobs)


class Embed(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: LayerSpec, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.spec = spec
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        index, rows = x.detach().long(), self.weight.shape[0]
        if index.numel():
            low, high = index.aminmax()
            if low < 0 or high >= rows:
                worst = low if low < 0 else high
                raise self.spec.error(f"index {int(worst)} is out of range: allowed are 0..{rows - 1}")
        y = functional.embedding(index, self.weight)
        return y if self.bias is None else y + self.bias


@layer("Embed")
def embed(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The row of W that each value of the bottom names.

    bottom (d0, ..) whole numbers in [0, input_dim); top (d0, .., num_output)
    blobs  W (input_dim, num_output), b (num_output,) when bias_term
    """
    expect(spec, 1)
    p = spec.embed_param
    if p.num_output < 1 or p.input_dim < 1:
        raise spec.error("num_output and input_dim must be set")
    weight = parameter((p.input_dim, p.num_output), p.weight_filler, spec)
    bias = parameter((p.num_output,), p.bias_filler, spec) if p.bias_term else None
    blobs = [weight] if bias is None else [weight, bias]
    return Built(Embed(spec, weight, bias), [(*bottoms[0], p.num_output)], blobs, labels=frozenset({0}))
