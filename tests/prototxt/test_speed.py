"""Layers done together, in place or in another order of memory give what the single layers give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prototxt import speed
from prototxt.errors import NetError
from prototxt.net import Net
from tests.prototxt.nets import inputs, layer, net, product

CONV = (
    "convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: 'xavier' } "
    "bias_filler { type: 'gaussian' std: 0.5 } %s }"
)
UNBIASED = CONV.replace("bias_filler { type: 'gaussian' std: 0.5 }", "bias_term: false")
SCALE = (
    "scale_param { filler { type: 'uniform' min: 0.5 max: 2 } bias_term: true bias_filler { value: 0.3 } }"
)
# Every pair that is folded, one whose middle is looked at, and layers that read memory in its usual order.
NET = (
    inputs(data=(4, 3, 6, 6), label=(4,))
    + layer("conv", "Convolution", "data", "conv", CONV % "")
    + layer("bn", "BatchNorm", "conv", "conv")
    + layer("scale", "Scale", "conv", "conv", SCALE)
    + layer("relu", "ReLU", "conv", "conv")
    + layer("bare", "Convolution", "conv", "bare", UNBIASED % "group: 2")
    + layer("bare_bn", "BatchNorm", "bare", "bare")
    + layer("half", "Convolution", "conv", "half", CONV % "stride: 2")
    + layer("half_scale", "Scale", "half", "half", SCALE.replace("bias_term: true", ""))
    + layer("apart", "Convolution", "bare", "apart", CONV % "stride: 2")
    + layer("apart_bn", "BatchNorm", "apart", "apart_bn")
    + layer("sum", "Eltwise", "apart_bn half", "sum")
    + layer("sum_relu", "ReLU", "sum", "sum")
    + layer("soft", "Softmax", "sum", "soft")
    + layer("rows", "Reshape", "soft", "rows", "reshape_param { shape { dim: 0 dim: -1 } }")
    + product("scores", "rows", "scores", 5)
    + layer("loss", "SoftmaxWithLoss", "scores label", "loss")
)


def filled(phase: Any) -> Net:
    built = net(NET, phase, seed=5)
    random = np.random.default_rng(1)
    built.blobs["data"].data[...] = random.normal(size=built.blobs["data"].shape)
    built.blobs["label"].data[...] = random.integers(0, 5, 4)
    for name in ("bn", "bare_bn", "apart_bn"):
        for blob in built.params[name]:
            blob.data[...] = random.uniform(1, 3, blob.shape)
    return built


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "usual order"])
def test_the_fast_ways_give_what_the_single_layers_give(
    phase: Any, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "channels_last_pays", lambda graph: last)
    whole, layered = filled(phase), filled(phase)
    outcome = whole.run()
    layered.forward()
    for name in layered.blobs:
        np.testing.assert_allclose(
            whole.blobs[name].data, layered.blobs[name].data, rtol=1e-4, atol=1e-5, err_msg=name
        )
    if phase == "TRAIN":
        torch.autograd.backward(outcome.loss)
        layered.backward()
    for name, blobs in layered.params.items():
        for mine, theirs in zip(whole.params[name], blobs, strict=True):
            np.testing.assert_allclose(mine.data, theirs.data, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(mine.diff, theirs.diff, rtol=1e-3, atol=1e-5, err_msg=name)


def test_what_is_done_together_is_only_what_nobody_can_look_at() -> None:
    graph = filled("TEST")._graph
    done = {graph.nodes[index].name for index, way in speed.replacements(graph, False).items() if way is None}
    assert done == {"bn", "scale", "bare_bn", "half_scale"}  # apart_bn's bottom has a name of its own
    done = {graph.nodes[index].name for index, way in speed.replacements(graph, True).items() if way is None}
    assert done == {"scale"}


def test_a_normalised_batch_of_one_value_a_channel_is_scaled_too() -> None:
    text = (
        inputs(data=(1, 3))
        + layer("bn", "BatchNorm", "data", "bn")
        + layer("scale", "Scale", "bn", "bn", SCALE)
    )
    built = net(text + layer("loss", "Reduction", "bn", "loss", "loss_weight: 1"), "TRAIN", seed=5)
    built.run()
    np.testing.assert_allclose(built.blobs["bn"].data, np.full((1, 3), 0.3), rtol=1e-6)


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_bf16_gives_about_the_same_and_leaves_the_parameters_float32(phase: Any) -> None:
    exact, narrow = filled(phase), net(NET, phase, seed=5, precision="bf16")
    for name in ("data", "label"):
        narrow.blobs[name].data[...] = exact.blobs[name].data
    for name in ("bn", "bare_bn", "apart_bn"):
        for mine, theirs in zip(narrow.params[name], exact.params[name], strict=True):
            mine.data[...] = theirs.data
    wanted, outcome = exact.run(), narrow.run()
    assert {top.dtype for top in outcome.outputs.values()} == {torch.float32}
    loss, exactly = float(outcome.loss.detach()), float(wanted.loss.detach())
    assert loss == pytest.approx(exactly, rel=0.02)
    assert loss != exactly
    if phase == "TRAIN":
        torch.autograd.backward(outcome.loss)
        torch.autograd.backward(wanted.loss)
        for mine, theirs in zip(narrow.learnable, exact.learnable, strict=True):
            assert mine.param.dtype == torch.float32
            if theirs.param.grad is not None and theirs.layer != "bare":  # its sum is 0 but for rounding
                assert mine.param.grad is not None
                apart = (mine.param.grad - theirs.param.grad).abs().max()
                assert apart <= 0.15 * theirs.param.grad.abs().max() + 1e-3, mine.layer


def test_another_precision_is_refused() -> None:
    with pytest.raises(NetError, match="the precision is float32 or bf16, not 'half'"):
        net(NET, precision="half")
