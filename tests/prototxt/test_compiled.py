"""What torch's compiler joins gives what the layers give one by one, and the rest stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prototxt.errors import NetError
from prototxt.net import Net
from tests.prototxt.nets import inputs, layer, net, product

CONV = (
    "convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: 'xavier' } "
    "bias_filler { type: 'gaussian' std: 0.5 } }"
)
SCALE = "scale_param { filler { type: 'uniform' min: 0.5 max: 2 } bias_term: true }"
ALONE = (
    ("prelu", "PReLU", ""), ("sigmoid", "Sigmoid", ""), ("tanh", "TanH", ""), ("elu", "ELU", ""),
    ("bnll", "BNLL", ""), ("abs", "AbsVal", ""), ("swish", "Swish", ""),
    ("clip", "Clip", "clip_param { min: -0.4 max: 0.9 }"), ("bias", "Bias", ""),
    ("power", "Power", "power_param { power: 2 scale: 0.5 shift: 2 }"),
    ("log", "Log", "log_param { shift: 1 }"), ("exp", "Exp", "exp_param { scale: 0.5 }"),
)  # fmt: skip


def chain() -> str:
    """A layer of each kind that is joined, one behind the other."""
    names = ["sum", *(name for name, _, _ in ALONE)]
    return "".join(
        layer(name, kind, below, name, more)
        for below, (name, kind, more) in zip(names[:-1], ALONE, strict=True)
    )


# Two parts, between layers that stay as they are; in the first a ReLU in place, and a sum of two branches.
NET = (
    inputs(data=(4, 3, 6, 6), label=(4,))
    + layer("conv", "Convolution", "data", "conv", CONV)
    + layer("side", "Convolution", "data", "side", CONV)
    + layer("bn", "BatchNorm", "conv", "conv")
    + layer("scale", "Scale", "conv", "conv", SCALE)
    + layer("relu", "ReLU", "conv", "conv")
    + layer("sum", "Eltwise", "conv side", "sum")
    + chain()
    + layer("pool", "Pooling", "exp", "pool", "pooling_param { pool: AVE kernel_size: 2 stride: 2 }")
    + layer("norm", "Scale", "pool", "norm", SCALE)
    + layer("join", "Concat", "norm pool", "join")
    + product("scores", "join", "scores", 5)
    + layer("loss", "SoftmaxWithLoss", "scores label", "loss")
)


def filled(phase: Any, compile: bool) -> Net:
    built = net(NET, phase, seed=5, compile=compile)
    fill(built, 4)
    for blob in built.params["bn"]:
        blob.data[...] = np.random.default_rng(2).uniform(1, 3, blob.shape)
    return built


def fill(built: Net, records: int) -> None:
    random = np.random.default_rng(1)
    built.blobs["data"].data[...] = random.normal(size=(records, 3, 6, 6))
    built.blobs["label"].data[...] = random.integers(0, 5, records)


def passes(built: Net) -> list[float]:
    """Losses of two passes; the second is what the compiled code gives when it is there already."""
    losses = []
    for _ in range(2):
        built.clear_param_diffs()
        loss = built.run().loss
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.timeout(600)
def test_compiled_parts_give_what_the_layers_give() -> None:
    joined, plain = filled("TRAIN", True), filled("TRAIN", False)
    assert joined.compile_account == (
        "compile: 16 layers in 2 parts, made at the first pass; as they are: "
        "BatchNorm, Convolution, InnerProduct, Pooling, SoftmaxWithLoss"
    )
    assert not plain.compile_account
    assert passes(joined) == pytest.approx(passes(plain), rel=1e-4)
    for name, blobs in plain.params.items():
        for mine, theirs in zip(joined.params[name], blobs, strict=True):
            np.testing.assert_allclose(mine.data, theirs.data, rtol=1e-5, err_msg=name)
            scale = np.abs(theirs.diff).max()
            np.testing.assert_allclose(
                mine.diff, theirs.diff, rtol=1e-3, atol=1e-4 * scale + 1e-6, err_msg=name
            )
    with pytest.raises(NetError, match=r"inside of a compiled part.* read it after forward\(\)"):
        joined.blobs["tanh"].data  # noqa: B018
    for name in ("exp", "pool", "join", "scores"):
        np.testing.assert_allclose(joined.blobs[name].data, plain.blobs[name].data, rtol=1e-4, err_msg=name)
    joined.forward()
    assert np.isfinite(joined.blobs["tanh"].data).all()

    for built in (joined, plain):  # another batch size: the layers as they are
        built.blobs["data"].reshape(2, 3, 6, 6)
        built.blobs["label"].reshape(2)
        built.reshape()
        fill(built, 2)
    assert passes(joined) == pytest.approx(passes(plain), rel=1e-4)


def test_a_net_without_neighbours_to_join_says_so_and_runs() -> None:
    text = inputs(data=(2, 3)) + product("ip", "data", "ip", 2) + layer("relu", "ReLU", "ip", "ip")
    built = net(text, "TEST", compile=True)
    assert built.compile_account.startswith("compile: nothing here")
    assert built.run().outputs["ip"].shape == (2, 2)


def test_what_the_data_gives_its_shape_is_not_compiled() -> None:
    text = (
        inputs(data=(4, 3), keep=(4, 1))
        + layer("filter", "Filter", "data keep", "some")
        + layer("a", "Sigmoid", "some", "a")
        + layer("b", "TanH", "a", "b")
    )
    assert net(text, "TEST", compile=True).compile_account.startswith("compile: nothing here")


def test_a_missing_compiler_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(NetError, match=r"no 'no-such-compiler' here: install g\+\+, or name .* CXX; without"):
        net(NET, compile=True)
    net(NET)


def test_what_the_compiler_refuses_names_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def refuse(*inputs: Any) -> Any:
        raise TorchDynamoException("a.cpp:3:1: error: no such header\nand more")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    built = filled("TRAIN", True)
    with pytest.raises(NetError, match=r"layer 'relu' \(ReLU\) up to 'exp': .*no such header; without"):
        built.run()
