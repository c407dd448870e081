"""Every differentiable layer's gradient, to bottoms and blobs, against finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prototxt.layers.activations import Dropout
from prototxt.layers.pooling import StochasticPooling
from prototxt.layers.recurrent import Recurrent
from prototxt.registry import Built, Shape, layer_types
from tests.prototxt.layers.single import build

LABELS = torch.tensor([0.0, 2, 1])
# Layers without a gradient, or without a forward of their own.
WITHOUT = {"Accuracy", "ArgMax", "Input", "Silence", "Threshold"}
# Readers of data: their tops come from files and have no gradient.
SOURCES = {"Data", "DummyData", "HDF5Data", "HDF5Output", "ImageData", "MemoryData", "WindowData"}

# name -> type and parameters, bottom shapes, tops; bottoms that get no gradient are filled by VALUES.
CASES: dict[str, tuple[str, list[Shape], int]] = {
    "AbsVal": ("", [(2, 3)], 1),
    "BNLL": ("", [(2, 3)], 1),
    "BatchNorm": ("", [(3, 2, 2)], 1),
    "BatchNorm accumulated": ("batch_norm_param { use_global_stats: true }", [(3, 2, 2)], 1),
    "BatchReindex": ("", [(3, 2), (4,)], 1),
    "Bias": ("", [(2, 3, 2)], 1),
    "Bias of a bottom": ("bias_param { axis: 0 }", [(2, 3), (2,)], 1),
    "Clip": ("clip_param { min: -0.5 max: 0.7 }", [(3, 4)], 1),
    "Concat": ("", [(2, 1, 2), (2, 3, 2)], 1),
    "ContrastiveLoss": ("contrastive_loss_param { margin: 3 }", [(3, 2), (3, 2), (3,)], 1),
    "ContrastiveLoss legacy": (
        "contrastive_loss_param { margin: 6 legacy_version: true }",
        [(3, 2), (3, 2), (3,)],
        1,
    ),
    "Convolution": (
        "convolution_param { num_output: 4 kernel_size: 2 pad: 1 stride: 2 group: 2 }",
        [(2, 2, 3, 3)],
        1,
    ),
    "Convolution of 4 axes": (
        "convolution_param { num_output: 2 kernel_size: 2 pad: 1 dilation: 2 }",
        [(1, 1, 2, 2, 2, 2)],
        1,
    ),
    "Convolution of two bottoms": (
        "convolution_param { num_output: 2 kernel_size: 2 }",
        [(1, 2, 3), (1, 2, 3)],
        2,
    ),
    "Crop": ("crop_param { offset: 1 }", [(1, 2, 3, 3), (1, 2, 2, 2)], 1),
    "Deconvolution": ("convolution_param { num_output: 2 kernel_size: 2 stride: 2 }", [(1, 2, 2, 2)], 1),
    "Dropout": ("", [(3, 4)], 1),
    "ELU": ("elu_param { alpha: 1.5 }", [(3, 4)], 1),
    "Eltwise": ("eltwise_param { coeff: 2 coeff: -1 }", [(2, 3), (2, 3)], 1),
    "Eltwise product": ("eltwise_param { operation: PROD }", [(2, 3), (2, 3), (2, 3)], 1),
    "Eltwise max": ("eltwise_param { operation: MAX }", [(2, 3), (2, 3), (2, 3)], 1),
    "Embed": ("embed_param { num_output: 2 input_dim: 3 }", [(3,)], 1),
    "EuclideanLoss": ("", [(2, 3), (2, 3)], 1),
    "Exp": ("exp_param { base: 3 scale: 0.5 shift: 1 }", [(2, 3)], 1),
    "Filter": ("", [(3, 2), (3,)], 1),
    "Flatten": ("", [(2, 2, 2)], 1),
    "HingeLoss": ("", [(3, 3), (3,)], 1),
    "HingeLoss L2": ("hinge_loss_param { norm: L2 }", [(3, 3), (3,)], 1),
    "Im2col": ("convolution_param { kernel_size: 2 pad: 1 stride: 2 }", [(1, 2, 3, 3)], 1),
    "InfogainLoss": ("", [(3, 3), (3,), (3, 3)], 1),
    "InnerProduct": ("inner_product_param { num_output: 2 }", [(2, 3)], 1),
    "InnerProduct transposed": (
        "inner_product_param { num_output: 2 transpose: true axis: 2 }",
        [(2, 2, 3)],
        1,
    ),
    "LRN": ("lrn_param { local_size: 3 alpha: 2 k: 1.5 }", [(1, 4, 2, 2)], 1),
    "LRN within": ("lrn_param { local_size: 3 alpha: 2 norm_region: WITHIN_CHANNEL }", [(1, 2, 3, 3)], 1),
    "LSTM": ("recurrent_param { num_output: 2 }", [(3, 2, 2), (3, 2), (2, 2)], 1),
    "LSTMUnit": ("", [(1, 2, 2), (1, 2, 8), (1, 2)], 2),
    "Log": ("log_param { shift: 5 base: 2 }", [(2, 3)], 1),
    "MVN": ("mvn_param { eps: 0.1 }", [(2, 2, 2, 2)], 1),
    "MVN centring": ("mvn_param { normalize_variance: false across_channels: true }", [(2, 2, 2, 2)], 1),
    "MultinomialLogisticLoss": ("", [(3, 3), (3,)], 1),
    "PReLU": ("", [(2, 3, 2)], 1),
    "Parameter": ("parameter_param { shape { dim: 2 } }", [], 1),
    "Pooling": ("pooling_param { kernel_size: 3 stride: 2 pad: 2 }", [(1, 2, 4, 4)], 1),
    "Pooling average": ("pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 2 }", [(1, 2, 4, 4)], 1),
    "Pooling global": ("pooling_param { pool: AVE global_pooling: true }", [(1, 2, 3, 4)], 1),
    "Pooling stochastic": ("pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 3 }", [(1, 2, 5, 6)], 1),
    "Power": ("power_param { power: 3 scale: 2 shift: 1 }", [(2, 3)], 1),
    "RNN": ("recurrent_param { num_output: 2 }", [(3, 2, 2), (3, 2)], 1),
    "ReLU": ("relu_param { negative_slope: 0.2 }", [(3, 4)], 1),
    "Reduction": ("reduction_param { operation: ASUM coeff: 2 axis: 1 }", [(2, 3)], 1),
    "Reshape": ("reshape_param { shape { dim: -1 } }", [(2, 3)], 1),
    "SPP": ("spp_param { pyramid_height: 2 pool: AVE }", [(1, 2, 4, 4)], 1),
    "Scale": ("scale_param { bias_term: true }", [(2, 3, 2)], 1),
    "Scale of a bottom": ("scale_param { bias_term: true axis: 0 }", [(2, 3), (2, 3)], 1),
    "Sigmoid": ("", [(2, 3)], 1),
    "SigmoidCrossEntropyLoss": ("loss_param { ignore_label: 2 }", [(3,), (3,)], 1),
    "Slice": ("", [(2, 4)], 2),
    "Softmax": ("", [(2, 3, 2)], 1),
    "SoftmaxWithLoss": ("loss_param { ignore_label: 2 }", [(3, 3), (3,)], 1),
    "Split": ("", [(2, 3)], 2),
    "Swish": ("swish_param { beta: 1.5 }", [(2, 3)], 1),
    "TanH": ("", [(2, 3)], 1),
    "Tile": ("tile_param { tiles: 2 }", [(2, 3)], 1),
}
# Bottoms that hold labels, row numbers, flags or a matrix rather than activations.
VALUES: dict[str, dict[int, Tensor]] = {
    "BatchReindex": {1: torch.tensor([2.0, 0, 2, 1])},
    "ContrastiveLoss": {2: torch.tensor([1.0, 0, 0])},
    "Embed": {0: LABELS},
    "Filter": {1: torch.tensor([1.0, 0, 1])},
    "InfogainLoss": {1: LABELS, 2: torch.rand(3, 3)},
    "LSTM": {1: torch.tensor([[0.0, 1], [1, 1], [1, 0]])},
    "LSTMUnit": {2: torch.tensor([[1.0, 0]])},
    "RNN": {1: torch.tensor([[0.0, 1], [1, 1], [1, 0]])},
}
LOSSES = {"HingeLoss", "MultinomialLogisticLoss", "SigmoidCrossEntropyLoss", "SoftmaxWithLoss"}


def bottoms_of(kind: str, shapes: list[Shape]) -> list[Tensor]:
    """Distinct numbers about zero, positive where they are probabilities; labels where they belong."""
    torch.manual_seed(5)
    given = VALUES.get(kind, {1: LABELS} if kind in LOSSES else {})
    made = [
        given[i].double() if i in given else torch.randn(shape).double() for i, shape in enumerate(shapes)
    ]
    if kind == "MultinomialLogisticLoss":
        made[0] = made[0].abs() + 0.1
    return made


def repeatable(built: Built) -> Callable[..., tuple[Tensor, ...]]:
    """The layer as a function of its bottoms and blobs, the same at every call."""
    names = [name for name, _ in built.module.named_parameters()]
    count = len(names)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        if isinstance(built.module, (Dropout, StochasticPooling)):
            assert built.module.generator is not None
            built.module.generator.manual_seed(1)
        if isinstance(built.module, Recurrent):
            built.module.state = ()
        bottoms, blobs = values[: len(values) - count], values[len(values) - count :]
        made = torch.func.functional_call(built.module, dict(zip(names, blobs, strict=True)), tuple(bottoms))
        return (made,) if isinstance(made, Tensor) else tuple(made)

    return function


@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str) -> None:
    fields, shapes, tops = CASES[name]
    kind = name.split(" ", maxsplit=1)[0]
    built = build(f'type: "{kind}" {fields}', *shapes, tops=tops)
    bottoms = bottoms_of(kind, shapes)
    for i, bottom in enumerate(bottoms):
        bottom.requires_grad_(i not in built.labels)
    torch.manual_seed(6)
    blobs = [
        torch.randn(b.shape, dtype=torch.float64).requires_grad_(not built.statistics)
        for b in (dict(built.module.named_parameters()).values())
    ]
    if kind == "BatchNorm":
        blobs = [b.abs() + 1 for b in blobs]
    assert any(tensor.requires_grad for tensor in (*bottoms, *blobs))
    loose = 2e-4 if name == "ContrastiveLoss" else 1e-6  # its gradient divides by the distance + 1e-4
    assert torch.autograd.gradcheck(
        repeatable(built), (*bottoms, *blobs), rtol=loose, atol=1e-7, check_undefined_grad=False
    )


def test_no_layer_is_left_out() -> None:
    checked = {name.split(" ", maxsplit=1)[0] for name in CASES}
    assert set(layer_types()) - SOURCES - WITHOUT - {"Python"} == checked
