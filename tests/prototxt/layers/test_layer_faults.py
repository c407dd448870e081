"""Wrong parameters and bottoms: one message each, with the layer, what was asked, and the limit."""

from __future__ import annotations

import re

import pytest
import torch

from prototxt.errors import LayerError
from prototxt.registry import Shape
from tests.prototxt.layers.single import build

IMAGE: Shape = (2, 6, 7, 5)

# text, bottoms, tops, what the message says after "net.prototxt:7: layer 'it': "
FAULTS: list[tuple[str, list[Shape], int, str]] = [
    ('type: "Relu"', [IMAGE], 1, "unknown layer type 'Relu' (did you mean ReLU"),
    ('type: "ReLU"', [IMAGE, IMAGE], 1, "ReLU takes 1 bottom, not 2"),
    ('type: "ReLU"', [IMAGE], 2, "ReLU takes 1 top, not 2"),
    # Convolution
    ('type: "Convolution" convolution_param { num_output: 2 }', [IMAGE], 1, "kernel_size must be set"),
    ('type: "Convolution" convolution_param { kernel_size: 3 }', [IMAGE], 1, "num_output must be set"),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 group: 4 }',
        [IMAGE],
        1,
        "group 4 does not divide the 6 channels of the bottom",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 group: 3 }',
        [IMAGE],
        1,
        "group 3 does not divide num_output 4",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 9 }',
        [IMAGE],
        1,
        "kernel 9 x 9 does not fit into 7 x 5 with its pad",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 kernel_h: 3 kernel_w: 3 }',
        [IMAGE],
        1,
        "give either kernel_size or kernel_h and kernel_w, not both",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_h: 3 kernel_w: 3 }',
        [(2, 3, 9)],
        1,
        "kernel_h and kernel_w are for 2 spatial axes, this layer has 1",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: [3, 3, 3] }',
        [IMAGE],
        1,
        "kernel_size is given 3 times for 2 spatial axes",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 stride: 0 }',
        [IMAGE],
        1,
        "stride must be at least 1, not 0 x 0",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 axis: 5 }',
        [IMAGE],
        1,
        "axis 5 is out of range for a bottom of shape 2 x 6 x 7 x 5",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 3 }',
        [IMAGE, (2, 6, 7, 6)],
        2,
        "all bottoms must have one shape, not 2 x 6 x 7 x 5, 2 x 6 x 7 x 6",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 1 }',
        [IMAGE],
        2,
        "takes 1 top, not 2",
    ),
    (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 1 bias_filler { type: "x" } }',
        [IMAGE],
        1,
        "unknown filler type 'x'",
    ),
    # Pooling
    ('type: "Pooling"', [IMAGE], 1, "kernel_size must be set (or global_pooling: true)"),
    (
        'type: "Pooling" pooling_param { kernel_h: 3 }',
        [IMAGE],
        1,
        "kernel_h and kernel_w must be set together",
    ),
    (
        'type: "Pooling" pooling_param { kernel_size: 2 kernel_h: 3 kernel_w: 3 }',
        [IMAGE],
        1,
        "give either kernel_size or kernel_h and kernel_w, not both",
    ),
    (
        'type: "Pooling" pooling_param { kernel_size: 2 pad: 2 }',
        [IMAGE],
        1,
        "pad 2 x 2 must be below the kernel 2 x 2",
    ),
    ('type: "Pooling" pooling_param { kernel_size: 0 }', [IMAGE], 1, "must be at least 1"),
    (
        'type: "Pooling" pooling_param { global_pooling: true kernel_size: 2 }',
        [IMAGE],
        1,
        "global_pooling takes no kernel size",
    ),
    (
        'type: "Pooling" pooling_param { global_pooling: true pad: 1 }',
        [IMAGE],
        1,
        "global_pooling takes pad 0 and stride 1 alone",
    ),
    (
        'type: "Pooling" pooling_param { kernel_size: 2 }',
        [(2, 3)],
        1,
        "needs a bottom of 4 axes (N, C, H, W), not 2 x 3",
    ),
    ('type: "Pooling" pooling_param { kernel_size: 9 }', [IMAGE], 1, "kernel 9 x 9 does not fit into 7 x 5"),
    ('type: "Pooling" pooling_param { kernel_size: 2 pool: AVE }', [IMAGE], 2, "Pooling takes 1 top, not 2"),
    (
        'type: "Pooling" pooling_param { kernel_size: 2 pad: 1 pool: STOCHASTIC }',
        [IMAGE],
        1,
        "STOCHASTIC pooling takes no padding, here it is 1 x 1",
    ),
    ('type: "SPP"', [IMAGE], 1, "pyramid_height must be set"),
    (
        'type: "SPP" spp_param { pyramid_height: 3 }',
        [IMAGE],
        1,
        "level 2 of the pyramid asks for 4 bins: too many for 7 x 5",
    ),
    # InnerProduct, Embed
    ('type: "InnerProduct"', [IMAGE], 1, "num_output must be set"),
    (
        'type: "InnerProduct" inner_product_param { num_output: 2 axis: 4 }',
        [IMAGE],
        1,
        "axis 4 is out of range",
    ),
    ('type: "Embed" embed_param { num_output: 2 }', [(3,)], 1, "num_output and input_dim must be set"),
    # LRN, Dropout, activations
    ('type: "LRN" lrn_param { local_size: 4 }', [IMAGE], 1, "local_size must be odd, not 4"),
    ('type: "LRN"', [(2, 3)], 1, "LRN needs a bottom of 4 axes (N, C, H, W), not 2 x 3"),
    (
        'type: "Dropout" dropout_param { dropout_ratio: 1 }',
        [IMAGE],
        1,
        "dropout_ratio must be in [0, 1), not 1",
    ),
    (
        'type: "Dropout" dropout_param { dropout_ratio: -0.5 }',
        [IMAGE],
        1,
        "dropout_ratio must be in [0, 1), not -0.5",
    ),
    ('type: "PReLU"', [(3,)], 1, "PReLU needs a bottom of 2 axes or more"),
    ('type: "Exp" exp_param { base: -2 }', [IMAGE], 1, "base must be above 0, or -1 for e, not -2"),
    ('type: "Log" log_param { base: 1 }', [IMAGE], 1, "base must not be 1"),
    # joining and cutting
    (
        'type: "Concat"',
        [(2, 3, 4), (2, 3, 5)],
        1,
        "bottom 1 (b) is 2 x 3 x 5: all but axis 1 must be as in a, 2 x 3 x 4",
    ),
    ('type: "Concat"', [(2, 3), (2, 3, 1)], 1, "bottom 1 (b) is 2 x 3 x 1"),
    (
        'type: "Concat" concat_param { axis: 1 concat_dim: 1 }',
        [IMAGE],
        1,
        "give either axis or concat_dim, not both",
    ),
    ('type: "Concat" concat_param { concat_dim: 4 }', [IMAGE], 1, "concat_dim 4 is out of range"),
    ('type: "Slice"', [IMAGE], 4, "4 tops do not divide an axis of 6: give slice_point"),
    (
        'type: "Slice" slice_param { slice_point: 1 }',
        [IMAGE],
        3,
        "3 tops need 2 values of slice_point, not 1",
    ),
    (
        'type: "Slice" slice_param { slice_point: 3 slice_point: 2 }',
        [IMAGE],
        3,
        "slice_point must rise between 0 and the axis's 6, not [3, 2]",
    ),
    (
        'type: "Slice" slice_param { slice_point: 6 }',
        [IMAGE],
        2,
        "slice_point must rise between 0 and the axis's 6",
    ),
    ('type: "Flatten" flatten_param { axis: 2 end_axis: 1 }', [IMAGE], 1, "axis 2 lies behind end_axis 1"),
    ('type: "Reshape" reshape_param { shape { dim: 7 } }', [IMAGE], 1, "2 x 6 x 7 x 5 is 420 values, 7 is 7"),
    (
        'type: "Reshape" reshape_param { shape { dim: 11 dim: -1 } }',
        [IMAGE],
        1,
        "the 420 values of 2 x 6 x 7 x 5 cannot be divided by 11",
    ),
    ('type: "Reshape" reshape_param { shape { dim: -1 dim: -1 } }', [IMAGE], 1, "shape may hold one -1"),
    (
        'type: "Reshape" reshape_param { shape { dim: 2 dim: 0 } axis: 3 }',
        [IMAGE],
        1,
        "shape has a 0 at place 1, but the bottom has no axis 4 to copy",
    ),
    (
        'type: "Reshape" reshape_param { axis: 2 num_axes: 5 }',
        [IMAGE],
        1,
        "axis 2 and num_axes 5 run past the bottom's 4 axes",
    ),
    ('type: "Tile"', [IMAGE], 1, "tiles must be set"),
    (
        'type: "Crop" crop_param { offset: 6 }',
        [IMAGE, IMAGE],
        1,
        "axis 2: offset 6 and size 7 run past the bottom's 7",
    ),
    ('type: "Crop"', [IMAGE, (2, 6)], 1, "both bottoms must have as many axes"),
    (
        'type: "Crop" crop_param { offset: 0 offset: 0 offset: 0 }',
        [IMAGE, IMAGE],
        1,
        "offset must be given once, or once for each of the 2 axes cropped",
    ),
    (
        'type: "BatchReindex"',
        [IMAGE, (2, 1)],
        1,
        "the second bottom must have 1 axis of row numbers, not 2 x 1",
    ),
    ('type: "Filter"', [IMAGE, (3,)], 1, "as many rows as the selector's 3 are needed"),
    # Eltwise, Reduction
    ('type: "Eltwise"', [IMAGE], 1, "Eltwise takes at least 2 bottoms, not 1"),
    (
        'type: "Eltwise"',
        [IMAGE, (2, 6, 7, 6)],
        1,
        "all bottoms must have one shape: a is 2 x 6 x 7 x 5, b is 2 x 6 x 7 x 6",
    ),
    (
        'type: "Eltwise" eltwise_param { coeff: 1 }',
        [IMAGE, IMAGE],
        1,
        "coeff must be given once a bottom: 2 bottoms, 1 values",
    ),
    (
        'type: "Eltwise" eltwise_param { operation: PROD coeff: 1 coeff: 1 }',
        [IMAGE, IMAGE],
        1,
        "coeff goes with operation SUM alone",
    ),
    ('type: "Reduction" reduction_param { axis: 4 }', [IMAGE], 1, "axis 4 is out of range"),
    # losses
    (
        'type: "SoftmaxWithLoss"',
        [(4, 10), (4, 2)],
        1,
        "b (4 x 2) has 8 labels for the 4 predictions in a (4 x 10, classes on axis 1)",
    ),
    ('type: "SoftmaxWithLoss"', [(4, 10)], 1, "SoftmaxWithLoss takes 2 bottoms, not 1"),
    ('type: "SoftmaxWithLoss"', [(4, 10), (4,)], 3, "SoftmaxWithLoss takes 0 to 2 tops, not 3"),
    ('type: "SoftmaxWithLoss" softmax_param { axis: 2 }', [(4, 10), (4,)], 1, "axis 2 is out of range"),
    ('type: "EuclideanLoss"', [(4, 10), (4, 11)], 1, "a (4 x 10) and b (4 x 11) must have as many values"),
    ('type: "EuclideanLoss"', [(4, 10), (5, 8)], 1, "a (4 x 10) and b (5 x 8) must have as many records"),
    ('type: "SigmoidCrossEntropyLoss"', [(4, 2), (4,)], 1, "a (4 x 2) and b (4) must have as many values"),
    ('type: "HingeLoss"', [(4, 3), (5,)], 1, "a (4 x 3) and b (5) must have as many records"),
    (
        'type: "ContrastiveLoss"',
        [(4, 3), (4, 3), (4, 3)],
        1,
        "c (4 x 3) must hold one value for each of 4 pairs",
    ),
    ('type: "InfogainLoss"', [(4, 3), (4,)], 1, "infogain_loss_param needs source, or a third bottom"),
    ('type: "InfogainLoss"', [(4, 3), (4,), (2, 2)], 1, "c (2 x 2) must be 3 x 3"),
    (
        'type: "InfogainLoss" loss_param { normalize: true }',
        [(4, 3), (4,), (3, 3)],
        1,
        "takes normalization, not the old normalize",
    ),
    (
        'type: "Accuracy" accuracy_param { top_k: 11 }',
        [(4, 10), (4,)],
        1,
        "top_k must be between 1 and the number of classes, 10, not 11",
    ),
    ('type: "Accuracy"', [(4, 10), (3,)], 1, "has 3 labels for the 4 predictions"),
    ('type: "ArgMax" argmax_param { top_k: 211 }', [IMAGE], 1, "top_k must be between 1 and 210"),
    # Scale, Bias, BatchNorm, MVN
    ('type: "Scale"', [IMAGE, (7,)], 1, "b (7) does not match 2 x 6 x 7 x 5 from axis 1"),
    (
        'type: "Scale" scale_param { axis: 3 num_axes: 2 }',
        [IMAGE],
        1,
        "axis 3 and num_axes 2 run past the bottom's 4 axes",
    ),
    (
        'type: "Bias" bias_param { num_axes: -2 }',
        [IMAGE],
        1,
        "num_axes must be -1 (to the end) or more, not -2",
    ),
    ('type: "BatchNorm"', [()], 1, "BatchNorm needs a bottom of 1 axis or more"),
    ('type: "MVN"', [(1, 1, 1, 1, 1)], 1, "MVN takes a bottom of at most 4 axes"),
    # recurrent
    ('type: "LSTM"', [(4, 3, 5), (4, 3)], 1, "num_output must be set"),
    (
        'type: "RNN" recurrent_param { num_output: 2 }',
        [(4, 3, 5), (3, 4)],
        1,
        "needs bottoms T x N x .. and T x N, not 4 x 3 x 5 and 3 x 4",
    ),
    (
        'type: "LSTM" recurrent_param { num_output: 2 expose_hidden: true }',
        [(4, 3, 5), (4, 3), (1, 3, 2), (1, 3, 3)],
        3,
        "the state must be 1 x 3 x 2, not 1 x 3 x 3",
    ),
    # Input
    (
        'type: "Input" input_param { shape { dim: 1 } shape { dim: 2 } }',
        [],
        3,
        "give one shape for all tops, or one each: 3 tops, 2 shapes",
    ),
    ('type: "Input" input_param { shape { dim: -1 } }', [], 1, "a shape must not hold a negative size: -1"),
]


@pytest.mark.parametrize(("line", "bottoms", "tops", "message"), FAULTS, ids=[f[3][:50] for f in FAULTS])
def test_a_fault_has_its_message(line: str, bottoms: list[Shape], tops: int, message: str) -> None:
    with pytest.raises(LayerError, match=rf"^net\.prototxt:7: layer 'it': .*{re.escape(message)}"):
        build(line, *bottoms, tops=tops)


@pytest.mark.parametrize("line", ['type: "AbsVal"', 'type: "Flatten"', 'type: "Reshape"', 'type: "Split"'])
def test_some_layers_refuse_to_work_in_place(line: str) -> None:
    with pytest.raises(LayerError, match="cannot work in place"):
        build(line, (2, 3), in_place=True)


@pytest.mark.parametrize("line", ['type: "Eltwise"', 'type: "Scale" scale_param { axis: 0 }'])
def test_shapes_that_changed_after_the_build_are_not_broadcast(line: str) -> None:
    built = build(line, (2, 3), (2, 3))
    built.module(torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(
        ValueError, match=r"must have one shape: a is 4 x 3, b is 1 x 3|1 x 3 values from axis 0"
    ):
        built.module(torch.ones(4, 3), torch.ones(1, 3))


def test_the_table_is_as_long_as_promised() -> None:
    assert len(FAULTS) > 80
