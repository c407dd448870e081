"""A net is put together by Caffe's rules: each rule, and each way to break it, with its message."""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch

from prototxt import registry
from prototxt.errors import LayerError, NetError, ParseError, WeightsError
from prototxt.net import Net
from prototxt.registry import Built
from prototxt.text import NetSource, net_from_text
from tests.prototxt.nets import inputs, layer, net, product

DATA = inputs(data=(2, 3), label=(2,))
LOSS = layer("loss", "SoftmaxWithLoss", "ip label", "loss")
LENET = DATA + product("ip", "data", "ip", 4) + LOSS


def names(text: str, phase: Any = "TRAIN", **options: Any) -> list[str]:
    return net(text, phase, **options).layer_names


# Which layers belong to it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ("", True),
        ("include { }", True),
        ("include { phase: TRAIN }", True),
        ("include { phase: TEST }", False),
        ("include { phase: TEST } include { phase: TRAIN }", True),
        ("exclude { phase: TRAIN }", False),
        ("exclude { phase: TEST } exclude { min_level: 9 }", True),
        ("include { min_level: 3 }", True),
        ("include { min_level: 4 }", False),
        ("include { max_level: 2 }", False),
        ('include { stage: "a" }', True),
        ('include { stage: "a" stage: "b" }', True),
        ('include { stage: "a" stage: "c" }', False),
        ('include { not_stage: "a" }', False),
        ('include { not_stage: "c" }', True),
        ('exclude { stage: "a" phase: TEST }', True),
    ],
)
def test_rules_choose_layers_by_phase_level_and_stages(rules: str, kept: bool) -> None:
    text = inputs(data=(1,)) + layer("x", "ReLU", "data", "x", rules)
    assert ("x" in names(text, stages=("a", "b"), level=3)) == kept


def test_include_and_exclude_on_one_layer_are_refused() -> None:
    text = layer("x", "Input", "", "x", "include { phase: TRAIN } exclude { phase: TEST }")
    with pytest.raises(NetError, match="net:1: layer 'x': specify either include or exclude rules, not both"):
        net(text)


def test_a_nets_own_state_is_kept_and_the_calls_stages_are_added() -> None:
    text = 'state { stage: "own" level: 5 }\n' + layer(
        "x", "Input", "", "x", 'include { stage: "own" stage: "more" }'
    )
    assert names(text, stages=["more"]) == ["x"]
    assert names(text) == []
    assert net(text + layer("y", "Input", "", "y", "include { min_level: 5 }"), level=None).layer_names == [
        "y"
    ]


def test_digits_stages_keep_what_each_stage_needs() -> None:
    pairs = "input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } }"
    text = (
        layer("train-data", "Input", "", "data label", pairs + 'include { stage: "train" }')
        + layer("val-data", "Input", "", "data label", pairs + 'include { stage: "val" }')
        + layer(
            "deploy-data",
            "Input",
            "",
            "data",
            'input_param { shape { dim: 2 dim: 3 } } include { stage: "deploy" }',
        )
        + product("ip", "data", "ip")
        + layer("loss", "SoftmaxWithLoss", "ip label", "loss", 'exclude { stage: "deploy" }')
        + layer("softmax", "Softmax", "ip", "softmax", 'include { stage: "deploy" }')
    )
    assert names(text, stages=["train"]) == ["train-data", "ip", "loss"]
    assert names(text, "TEST", stages=["val"]) == ["val-data", "ip", "loss"]
    assert names(text, "TEST", stages=["deploy"]) == ["deploy-data", "ip", "softmax"]


# How they are connected -----------------------------------------------------------------------------------


def test_an_unknown_bottom_names_phase_stages_and_what_the_rules_dropped() -> None:
    text = layer("mnist", "Input", "", "data", "include { phase: TRAIN }") + product("conv1", "data", "conv1")
    message = (
        "net:2: Unknown bottom blob 'data' (layer 'conv1', bottom index 0) in phase TEST, stages val; "
        "the include or exclude rules drop layer 'mnist', which makes it"
    )
    with pytest.raises(NetError, match=re.escape(message)):
        net(text, "TEST", stages=["val"])


def test_a_blob_that_nobody_makes_before_its_use_is_unknown() -> None:
    text = inputs(data=(1, 2)) + layer("b", "ReLU", "a", "b") + layer("a", "ReLU", "data", "a")
    with pytest.raises(
        NetError, match=r"net:2: Unknown bottom blob 'a' \(layer 'b', bottom index 0\).*no layer before"
    ):
        net(text)


@pytest.mark.parametrize(
    "second",
    [
        layer("b", "ReLU", "data", "a"),
        layer("b", "Slice", "data", "x x"),
        layer("b", "Eltwise", "data a", "a"),
    ],
    ids=["two layers", "one layer", "in place at another index"],
)
def test_two_sources_of_one_blob_are_refused(second: str) -> None:
    text = inputs(data=(1, 2)) + layer("a", "ReLU", "data", "a") + second
    with pytest.raises(LayerError, match=r"net:3: layer 'b': Top blob '[ax]' produced by multiple sources"):
        net(text)


def test_a_layer_in_place_on_a_blob_that_another_uses_is_told_to_rename_its_top() -> None:
    text = DATA + product("ip", "data", "ip", 4) + layer("other", "TanH", "ip", "y")
    message = (
        r"net:5: layer 'relu': Top blob 'ip' produced by multiple sources \(first by layer 'ip'\); "
        "it cannot work in place, as another layer uses its bottom too: rename the top"
    )
    with pytest.raises(LayerError, match=message):
        net(text + layer("relu", "ReLU", "ip", "ip"))


def test_an_in_place_layer_keeps_the_blobs_name_and_slot() -> None:
    built = net(DATA + product("ip", "data", "ip", 4) + layer("relu", "ReLU", "ip", "ip") + LOSS)
    ip, relu = built.layer_dict["ip"], built.layer_dict["relu"]
    assert ip.top_slots == relu.bottom_slots == relu.top_slots
    assert list(built.blobs) == ["data", "label", "ip", "loss"]


def test_a_layer_that_changes_the_shape_cannot_work_in_place() -> None:
    text = inputs(data=(1, 1, 4, 4)) + layer(
        "p", "Pooling", "data", "data", "pooling_param { kernel_size: 2 }"
    )
    message = r"net:2: layer 'p': cannot work in place: it turns shape \(1, 1, 4, 4\) into \(1, 1, 3, 3\)"
    with pytest.raises(LayerError, match=message):
        net(text)


def test_a_blob_used_twice_is_split_behind_its_last_in_place_layer_with_caffes_names() -> None:
    text = DATA + product("ip", "data", "ip", 4) + layer("relu", "ReLU", "ip", "ip") + LOSS
    built = net(text + layer("accuracy", "Accuracy", "ip label", "accuracy"))
    assert built.layer_names == [
        "data", "label", "label_label_0_split", "ip", "relu", "ip_relu_0_split", "loss", "accuracy",
    ]  # fmt: skip
    assert built.top_names["ip_relu_0_split"] == ["ip_relu_0_split_0", "ip_relu_0_split_1"]
    assert built.bottom_names["loss"] == ["ip_relu_0_split_0", "label_label_0_split_0"]
    assert built.bottom_names["accuracy"] == ["ip_relu_0_split_1", "label_label_0_split_1"]


def test_an_explicit_loss_weight_counts_as_a_use_and_moves_to_the_split() -> None:
    text = inputs(data=(2, 3)) + layer("sum", "Reduction", "data", "sum", "loss_weight: 2.5")
    built = net(text + layer("relu", "ReLU", "sum", "y"))
    assert built.layer_names == ["data", "sum", "sum_sum_0_split", "relu"]
    assert built.layer_dict["sum"].loss_weights == [0.0]
    assert built.layer_dict["sum_sum_0_split"].loss_weights == [2.5, 0.0]
    assert built.bottom_names["relu"] == ["sum_sum_0_split_1"]
    assert built.outputs == ["sum_sum_0_split_0", "y"]
    built.blobs["data"].data[...] = 1
    assert float(built.run().loss) == 15


@pytest.mark.parametrize("tops", ["loss", "loss prob"])
@pytest.mark.parametrize("use", ["", "loss_weight: 2"], ids=["unweighted use", "weighted use"])
def test_a_loss_of_implied_weight_keeps_its_gradient_when_another_layer_uses_it(tops: str, use: str) -> None:
    loss = layer("loss", "SoftmaxWithLoss", "ip label", tops)
    text = DATA + product("ip", "data", "ip", 4) + loss + layer("s", "Power", "loss", "s", use)
    built, plain = net(text, seed=1), net(LENET, seed=1)
    assert built.top_names["loss_loss_0_split"] == ["loss_loss_0_split_0", "loss_loss_0_split_1"]
    assert built.layer_dict["loss_loss_0_split"].loss_weights == [1.0, 0.0]
    for each in (built, plain):
        each.blobs["data"].data[...] = np.arange(each.blobs["data"].count).reshape(each.blobs["data"].shape)
    factor, last = (3 if use else 1), len(built.layers) - 1
    whole, wanted = built.run().loss, plain.run().loss
    assert float(whole.detach()) == pytest.approx(factor * float(wanted.detach()))
    for seed in (whole, wanted):
        seed.backward()  # type: ignore[no-untyped-call]
    want = factor * plain.params["ip"][0].diff
    np.testing.assert_allclose(built.params["ip"][0].diff, want, rtol=1e-5)
    for _ in range(2):  # the second pass sees what the first one left in the diffs
        built.clear_param_diffs()
        assert built.forward_range(0, last) == pytest.approx(factor * float(wanted.detach()))
        built.backward_range(last, 0)
        np.testing.assert_allclose(built.params["ip"][0].diff, want, rtol=1e-5)


def test_a_loss_that_is_used_further_counts_once() -> None:
    text = LENET.replace('"loss"  }', '"loss" loss_weight: 3 }') + layer("s", "Power", "loss", "s")
    built, plain = net(text, seed=1), net(LENET, seed=1)
    assert float(built.run().loss.detach()) == pytest.approx(3 * float(plain.run().loss.detach()))
    assert built.forward_range(0, len(built.layers) - 1) == pytest.approx(3 * plain.forward_range(0, 3))


def test_outputs_are_the_unused_blobs_in_alphabetical_order() -> None:
    text = inputs(z=(1, 2), b=(1, 2), m=(1, 2)) + layer("r", "ReLU", "m", "a")
    built = net(text)
    assert built.outputs == ["a", "b", "z"]
    assert built.inputs == ["z", "b", "m"]
    assert list(built.run().outputs) == ["a", "b", "z"]


def test_a_loss_without_a_top_gets_an_automatic_one() -> None:
    built = net(LENET.replace('top: "loss"', ""))
    assert built.outputs == []
    assert built.layer_dict["loss"].loss_weights == [1.0]
    assert float(built.run().loss.detach()) == pytest.approx(built.forward_range(0, 3), rel=1e-6)


def test_tops_that_a_layer_does_not_make_are_refused() -> None:
    with pytest.raises(LayerError, match=r"net:2: layer 'r': .*top"):
        net(inputs(data=(1, 2)) + layer("r", "ReLU", "data", "a b"))


# Losses ---------------------------------------------------------------------------------------------------


def test_loss_weights_come_once_a_top_or_never() -> None:
    assert net(LENET).layer_dict["loss"].loss_weights == [1.0]
    assert net(LENET.replace('"loss"  }', '"loss" loss_weight: 0.5 }')).layer_dict["loss"].loss_weights == [
        0.5
    ]
    with pytest.raises(
        LayerError, match="loss_weight must be unspecified or specified once per top blob: 2 for 1"
    ):
        net(LENET.replace('"loss"  }', '"loss" loss_weight: 1 loss_weight: 0 }'))


def test_training_without_a_loss_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    text = inputs(data=(2, 3)) + product("ip", "data", "ip")
    with caplog.at_level(logging.WARNING):
        net(text, "TEST")
        assert caplog.records == []
        net(text)
    assert "no layer contributes to the loss" in caplog.text


# Which gradients are computed -----------------------------------------------------------------------------

CHAIN = (
    DATA
    + product("a", "data", "a", 3, "A")
    + product("b", "a", "b", 3, "B")
    + product("ip", "b", "ip", 4, "C")
    + LOSS
)


def chain(a: str = "", b: str = "", c: str = "", head: str = "") -> Net:
    text = CHAIN.replace(" A }", f" {a} }}").replace(" B }", f" {b} }}").replace(" C }", f" {c} }}")
    return net(head + text)


def needs(built: Net) -> dict[str, list[bool]]:
    return {node.name: node.need_bottom for node in built.layers if node.need_backward}


def test_gradients_stop_where_nothing_before_is_trained() -> None:
    assert needs(chain()) == {"a": [False], "b": [True], "ip": [True], "loss": [True, False]}
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    built = chain(a=frozen, b=frozen)
    assert needs(built) == {"ip": [False], "loss": [True, False]}
    built.run().loss.backward()
    assert [x.param.grad is not None for x in built.learnable] == [False] * 4 + [True] * 2


def test_propagate_down_false_blocks_both_executors() -> None:
    built = chain(b="propagate_down: false")
    assert needs(built)["b"] == [False]
    assert "a" not in needs(built)
    built.run().loss.backward()
    built.forward()
    built.backward()
    assert [bool(built.params[name][0].diff.any()) for name in ("a", "b", "ip")] == [False, True, True]


def test_propagate_down_true_gives_the_data_a_gradient() -> None:
    built = chain(a="propagate_down: true")
    built.blobs["data"].data[...] = 1
    built.forward()
    assert built.backward()["data"].any()


def test_propagate_down_comes_once_a_bottom() -> None:
    with pytest.raises(
        NetError, match="net:3: layer 'a': propagate_down is given never or once a bottom, not 2 times for 1"
    ):
        chain(a="propagate_down: true propagate_down: true")


def test_force_backward_gives_every_bottom_but_labels_a_gradient() -> None:
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    built = chain(a=frozen, b=frozen, c=frozen, head="force_backward: true\n")
    assert needs(built) == {
        "data": [],
        "label": [],
        "a": [True],
        "b": [True],
        "ip": [True],
        "loss": [True, False],
    }
    built.forward()
    assert built.backward()["data"].any()
    assert built.params["a"][0].diff.shape == (3, 3)


def test_what_feeds_no_loss_needs_no_gradient() -> None:
    built = net(LENET + product("side", "ip", "side"))
    assert "side" not in needs(built)
    assert "ip" in needs(built)


def test_labels_made_by_trained_layers_are_refused() -> None:
    text = inputs(data=(2, 3)) + product("ip", "data", "ip", 4) + product("label", "data", "label", 1) + LOSS
    with pytest.raises(
        LayerError, match=r"net:4: layer 'loss': cannot backpropagate to bottom 1 \('label'\)"
    ):
        net(text)
    net(text.replace('top: "loss"', 'top: "loss" propagate_down: true propagate_down: false'))


# Faults and ends ------------------------------------------------------------------------------------------


def test_an_unknown_layer_type_names_the_nearest() -> None:
    with pytest.raises(
        LayerError, match=r"net:2: layer 'p': unknown layer type 'Poolin' \(did you mean Pooling"
    ):
        net(inputs(data=(1, 2)) + layer("p", "Poolin", "data", "p"))
    with pytest.raises(LayerError, match=r"unknown layer type 'Qqq' .known: .*ReLU"):
        net(inputs(data=(1, 2)) + layer("p", "Qqq", "data", "p"))


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("Permute", "it comes from SSD Caffe, a fork of Caffe that is not supported"),
        ("ReLU6", "it comes from the MobileNet forks, .* Clip with min: 0 and max: 6 computes the same"),
        ("pooling", "did you mean Pooling?"),
        ("Convolutional", "did you mean Convolution"),
        ("", "type must be set"),
    ],
)
def test_an_unknown_layer_type_is_explained(kind: str, hint: str) -> None:
    with pytest.raises(LayerError, match=rf"net:1: layer 'a': unknown layer type '{kind}' \({hint}"):
        net(layer("a", kind, "", "a"))


def test_num_output_has_to_be_set() -> None:
    with pytest.raises(LayerError, match="net:2: layer 'ip': num_output must be set"):
        net(inputs(data=(1, 2)) + layer("ip", "InnerProduct", "data", "ip"))


def test_values_in_the_nets_own_message_take_the_fillers_place() -> None:
    given = "blobs { shape { dim: 4 dim: 3 } " + " ".join(f"data: {i}" for i in range(12)) + " } "
    bias = "blobs { num: 1 channels: 1 height: 1 width: 4 data: 1 data: 2 data: 3 data: 4 }"
    built = net(DATA + product("ip", "data", "ip", 4, given + bias))
    assert built.params["ip"][0].data.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert built.params["ip"][1].data.tolist() == [1, 2, 3, 4]
    with pytest.raises(LayerError, match="layer 'ip': 1 blobs are given, but the layer has 2"):
        net(DATA + product("ip", "data", "ip", 4, given))
    with pytest.raises(LayerError, match="layer 'ip': blob 1 holds 12 values, 4 are needed"):
        net(DATA + product("ip", "data", "ip", 4, given + given))


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(NetError, match="the phase is TRAIN or TEST, not 'train'"):
        net(DATA, "train")


def test_a_message_is_a_source_too_and_stays_as_it_was() -> None:
    message = net_from_text(LENET).message
    before = message.SerializeToString(deterministic=True)
    assert Net(message).layer_names == net(LENET).layer_names
    assert message.SerializeToString(deterministic=True) == before
    message.layers.add(name="old")
    with pytest.raises(ParseError, match="<message>: refusing to upgrade"):
        Net(message)


def test_a_seed_fixes_the_fillers_for_every_rank_and_dropout_for_one() -> None:
    text = LENET.replace(LOSS, "") + layer("drop", "Dropout", "ip", "drop")
    first, again, other = net(text, seed=3), net(text, seed=3), net(text, seed=3, rank=1, world=2)
    assert (first.params["ip"][0].data == other.params["ip"][0].data).all()
    assert not (first.params["ip"][0].data == net(text, seed=4).params["ip"][0].data).all()
    assert not (net(text).params["ip"][0].data == net(text, seed=-1).params["ip"][0].data).all()
    masks = []
    for built in (first, again, other):
        built.params["ip"][1].data[...] = 1
        masks.append(torch.stack([built.run().outputs["drop"].detach() != 0 for _ in range(8)]))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_closed_net_says_so_and_closing_twice_is_fine() -> None:
    with net(LENET) as built:
        built.run()
    built.close()
    with pytest.raises(NetError, match="net: the net is closed"):
        built.run()
    with pytest.raises(NetError, match="the net is closed"):
        built.forward()


class Counted(torch.nn.Module):
    """A data layer that notes its closing."""

    closed = 0

    def forward(self) -> torch.Tensor:
        return torch.zeros(1, 2)

    def close(self) -> None:
        Counted.closed += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    build = lambda spec, bottoms: Built(Counted(), [(1, 2)], source=True)  # noqa: E731
    monkeypatch.setitem(registry._BUILDERS, "Counted", build)
    monkeypatch.setattr(Counted, "closed", 0)
    return Counted


def test_data_layers_are_closed_when_a_later_layer_fails(counted: type[Counted]) -> None:
    with pytest.raises(LayerError, match="num_output"):
        net(layer("d", "Counted", "", "data") + layer("ip", "InnerProduct", "data", "ip"))
    assert counted.closed == 1


def test_data_layers_are_closed_once_by_close_or_by_the_nets_end(counted: type[Counted]) -> None:
    text = layer("d", "Counted", "", "data") + layer("r", "ReLU", "data", "r")
    built = net(text)
    assert built.run().outputs["r"].shape == (1, 2)
    assert built.forward()["r"].shape == (1, 2)
    built.close()
    built.close()
    assert counted.closed == 1
    del built
    gc.collect()
    assert counted.closed == 1
    net(text)
    gc.collect()
    assert counted.closed == 2


def test_data_layers_are_closed_when_the_weights_do_not_load(counted: type[Counted]) -> None:
    with pytest.raises(WeightsError):
        net(layer("d", "Counted", "", "data"), weights="nowhere")
    gc.collect()
    assert counted.closed == 1


def test_a_net_source_names_its_file_in_errors() -> None:
    message = net_from_text(LENET.replace("num_output: 4", "num_output: 0")).message
    with pytest.raises(LayerError, match=r"my\.prototxt:12: layer 'ip'"):
        Net(NetSource(message, "my.prototxt", [1, 2, 12, 13]))
