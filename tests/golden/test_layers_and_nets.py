"""Every reference case of layers and nets, through both executors: values, gradients, accumulators, loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prototxt.net import Net
from tests.golden.original import (
    Array,
    Case,
    assert_agrees,
    load_weights,
    replay_layer_by_layer,
    replay_whole_graph,
)

LAYER_CASES = """
    accuracy accuracy_k3 accuracy_ties accuracy_ties_k2 act_clip act_dropout_test act_elu_ties
    act_power act_power_sq act_prelu act_prelu_shared act_relu act_sigmoid act_swish act_threshold
    argmax argmax_axis argmax_ties bias_default bias_two bn_2d bn_global bn_m1 bn_scale_relu_inplace
    bn_test_phase bn_train_inplace concat contrastive_legacy_false contrastive_legacy_true conv_1d
    conv_1x1 conv_3d conv_axis2 conv_dilation conv_hw_nobias conv_multi_bottom conv_stride_pad_group
    crop crop_axis1 crop_default deconv_basic deconv_bilinear eltwise_max_ties eltwise_prod
    eltwise_prod_unstable eltwise_sum eltwise_sum_coeff embed euclidean flatten flatten_12 im2col
    infogain inplace_bias inplace_bnll inplace_clip inplace_elu inplace_exp inplace_power
    inplace_prelu inplace_relu_slope inplace_scale inplace_sigmoid ip ip_axis_neg1_nobias
    ip_transpose lrn_across_large lrn_within lstm_cont1 lstm_expose lstm_static lstm_unit mvn
    mvn_mean parameter pool_ave_floor_p1_8 pool_ave_global pool_ave_hw pool_ave_hw_8 pool_ave_k2s2
    pool_ave_k3s1p1 pool_ave_k3s1p1_8 pool_ave_k3s2_8 pool_ave_k3s2p1 pool_ave_k3s2p1_8
    pool_ave_k3s2p2_8 pool_ave_k8s9 pool_ave_k8s9_8 pool_ave_stride_gt_kernel_outside pool_max_floor
    pool_max_floor_8 pool_max_floor_p1_8 pool_max_global pool_max_hw pool_max_hw_8 pool_max_k3s1p1
    pool_max_k3s2 pool_max_k3s2p1_8 pool_max_k3s2p2 pool_max_k4s3p3 pool_max_k4s3p3_8
    pool_max_k8s9_8 pool_max_stride_gt_kernel_outside propagate_down_false reduction0_asum
    reduction0_mean reduction0_sum reduction0_sumsq reduction_mean reduction_sum reduction_sumsq
    reshape_a reshape_b reshape_c rnn rnn_cont1 rnn_static scale_axis2_n2 scale_bias
    scale_two_bottoms scale_two_bottoms_axis0 scale_two_bottoms_bias sigmoidce_full sigmoidce_ign
    sigmoidce_none sigmoidce_normalize_false sigmoidce_real sigmoidce_valid slice_eq slice_pts
    softmax softmax_axis2 softmax_big softmaxloss_all_ignored softmaxloss_batch softmaxloss_extreme
    softmaxloss_ign_batch softmaxloss_ign_full softmaxloss_none softmaxloss_normalize_true_ign
    softmaxloss_valid split_auto tile_axis2
"""
NET_CASES = """
    cifar10_full cifar10_full_sigmoid cifar10_full_sigmoid_bn cifar10_quick lenet_train
    mnist_autoencoder_small siamese tiny_alexnet tiny_inception_train tiny_resnet_test
"""
LAYERS, NETS = LAYER_CASES.split(), NET_CASES.split()
# Cases whose layers are not there yet, by name: none.
WAITING: list[str] = []
# The original reads a bottom that the layer has overwritten; ours is the gradient of what is computed.
DIFFERENT = ["inplace_bnll", "inplace_clip", "inplace_power"]
# The gradient of conv's bias is zero but for rounding, there and here.
NOISE = ["siamese"]

Replay = Callable[[Case], None]
EXECUTORS = pytest.mark.parametrize(
    "replay", [replay_layer_by_layer, replay_whole_graph], ids=["layer-by-layer", "whole-graph"]
)


def test_every_case_of_the_folder_is_listed(shared: Path) -> None:
    for kind, listed in (("layers", LAYERS), ("nets", NETS)):
        assert sorted(path.stem for path in (shared / "golden" / kind).glob("*.npz")) == listed
    assert set(WAITING) | set(DIFFERENT) <= set(LAYERS)


@EXECUTORS
@pytest.mark.parametrize("name", [n for n in LAYERS if n not in [*WAITING, *DIFFERENT]])
def test_layer(shared: Path, name: str, replay: Replay) -> None:
    replay(Case(shared / "golden" / "layers" / f"{name}.npz"))


@EXECUTORS
@pytest.mark.parametrize("name", [n for n in NETS if n not in NOISE])
def test_net(shared: Path, name: str, replay: Replay) -> None:
    replay(Case(shared / "golden" / "nets" / f"{name}.npz"))


@EXECUTORS
def test_siamese_differs_in_nothing_but_noise(shared: Path, replay: Replay) -> None:
    case = Case(shared / "golden" / "nets" / "siamese.npz")
    noise = "pdiff/conv/1"
    assert np.abs(case.arrays.pop(noise)).max() < 1e-6
    case.arrays.pop("pdiff/conv_p/1", None)  # the same shared blob
    replay(case)


def slope(name: str, h: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The layer's derivative at its bottom."""
    slopes = {
        "inplace_bnll": 1 / (1 + np.exp(-h)),
        "inplace_clip": ((h >= -0.5) & (h <= 1)).astype(np.float64),
        "inplace_power": 2 * (h + 1),
    }
    return np.asarray(slopes[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_in_place_layers_have_the_gradient_of_what_they_compute(shared: Path, name: str) -> None:
    """Values as the original's; the gradient by the chain rule through h = 1.5 x + .1, the layer, y = 2 h."""
    case = Case(shared / "golden" / "layers" / f"{name}.npz")
    with Net(case.prototxt, case.phase) as net:
        load_weights(net, case)
        net.forward(x=case.arrays["in/x"])
        for blob, array in case.group("", "blob"):
            assert_agrees(net.blobs[blob].data, array, blob)
        net.backward(y=case.arrays["topdiff/y"])
        h = 1.5 * case.arrays["in/x"].astype(np.float64) + 0.1
        want: Array = case.arrays["topdiff/y"] * 2 * slope(name, h).astype(np.float32) * 1.5
        assert_agrees(net.blobs["x"].diff, want, "diff x")
        assert not np.allclose(want, case.arrays["diff/x"], rtol=1e-2)
