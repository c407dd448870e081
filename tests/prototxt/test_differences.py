"""A net that meets one of the original's faults says so once, and only then."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from prototxt.differences import DIFFERENCES
from tests.prototxt.nets import inputs, layer, net, product

IP = inputs(data=(2, 3), label=(2,)) + product("ip", "data", "ip", 4)
LOSS = layer("loss", "SoftmaxWithLoss", "ip label", "loss")
IMAGE = inputs(data=(1, 1, 6, 6))


def in_place(kind: str, more: str = "") -> str:
    return IP + layer("it", kind, "ip", "ip", more) + LOSS


def before(kind: str, next_kind: str = "ReLU", more: str = "") -> str:
    return (
        IP
        + layer("it", kind, "ip", "y", more)
        + layer("next", next_kind, "y", "y")
        + layer("s", "Reduction", "y", "s", "loss_weight: 1")
    )


MET = {
    "bnll": (in_place("BNLL"), "the gradient of a layer in place"),
    "clip": (in_place("Clip", "clip_param { min: -1 max: 1 }"), "the gradient of a layer in place"),
    "log": (in_place("Log"), "the gradient of a layer in place"),
    "power": (in_place("Power", "power_param { power: 2 }"), "the gradient of a layer in place"),
    "relu": (in_place("ReLU", "relu_param { negative_slope: -1 }"), "the gradient of a layer in place"),
    "sigmoid then relu": (before("Sigmoid"), "the gradient of a layer whose top the next one overwrites"),
    "pooling": (
        IMAGE + layer("it", "Pooling", "data", "y", "pooling_param { kernel_size: 1 stride: 2 }"),
        "a pooling window wholly outside the image",
    ),
    "two tops": (
        IP + layer("loss", "SoftmaxWithLoss", "ip label", "loss prob"),
        "SoftmaxWithLoss with two tops",
    ),
    "loss used": (IP + LOSS + layer("s", "Power", "loss", "s"), "a loss without loss_weight that another"),
    "split": (
        IP
        + layer("split", "Split", "ip", "a b")
        + layer("it", "ReLU", "a", "a")
        + layer("sum", "Eltwise", "a b", "c"),
        "a layer in place behind one top of a Split",
    ),
    "product": (
        IP
        + product("other", "data", "other", 4)
        + layer(
            "it", "Eltwise", "ip other", "y", "eltwise_param { operation: PROD stable_prod_grad: false }"
        ),
        "the gradient of a product",
    ),
    "cube": (
        IP + layer("it", "Power", "ip", "y", "power_param { power: 3 }"),
        "the gradient of a power at 0",
    ),
}
NOT_MET = {
    "plain": IP + LOSS,
    "relu in place": in_place("ReLU"),
    "line in place": in_place("Power", "power_param { scale: 2 shift: 1 }"),
    "sigmoid in place": in_place("Sigmoid"),
    "sigmoid then dropout out of place": IP
    + layer("it", "Sigmoid", "ip", "y")
    + layer("d", "Dropout", "y", "z"),
    "padded pooling": IMAGE
    + layer("it", "Pooling", "data", "y", "pooling_param { kernel_size: 3 stride: 2 pad: 1 }"),
    "loss with a weight": IP
    + LOSS.replace('"loss"  }', '"loss" loss_weight: 1 }')
    + layer("s", "Power", "loss", "s"),
}


def said(text: str, caplog: pytest.LogCaptureFixture, phase: Any = "TRAIN", **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        net(text, phase, **options).close()
    return [line for line in caplog.messages if "differs here from the original" in line]


@pytest.mark.parametrize("case", MET)
def test_a_net_that_meets_a_fault_says_so_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    text, topic = MET[case]
    (line,) = said(text, caplog)
    assert line.startswith("net:")
    assert topic in line
    assert said(text, caplog, rank=1) == []  # one worker speaks for all


@pytest.mark.parametrize("case", NOT_MET)
def test_other_nets_say_nothing(case: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said(NOT_MET[case], caplog) == []


def test_differences_of_gradients_are_not_said_where_nothing_runs_backward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert said(in_place("BNLL"), caplog, "TEST") == []
    assert len(said(MET["pooling"][0], caplog, "TEST")) == 1


def test_several_layers_are_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    text = IP + layer("one", "BNLL", "ip", "ip") + layer("two", "Log", "ip", "ip") + LOSS
    (line,) = said(text, caplog)
    assert line.startswith("net:4: layer 'one' (BNLL) (and 1 more): ")


def test_every_entry_that_a_net_can_meet_is_met_here() -> None:
    topics = {topic for _, topic in MET.values()}
    for entry in DIFFERENCES:
        assert entry.met is None or any(entry.topic.startswith(topic) for topic in topics), entry.topic
