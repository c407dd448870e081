"""Parameters of a net: shared by name, multiplied as the file says, in Caffe's order."""

from __future__ import annotations

import pytest

from prototxt.errors import LayerError
from prototxt.net import Net
from tests.prototxt.nets import inputs, layer, net, product

DATA = inputs(data=(2, 3), label=(2,))
LOSS = layer("loss", "SoftmaxWithLoss", "ip label", "loss")
PAIR = inputs(a=(2, 3), b=(2, 3))
PAIR_LOSS = layer("loss", "EuclideanLoss", "x y", "loss")


def pair(left: str, right: str) -> Net:
    """Two InnerProducts, "l" and "r", with these param blocks, on two inputs."""
    return net(PAIR + product("l", "a", "x", 2, left) + product("r", "b", "y", 2, right) + PAIR_LOSS)


def test_equal_param_names_share_one_blob_and_its_gradient() -> None:
    built = pair('param { name: "w" } param { name: "b" }', 'param { name: "w" } param { name: "other" }')
    assert [(x.layer, x.index, x.shared_name) for x in built.learnable] == [
        ("l", 0, "w"), ("l", 1, "b"), ("r", 1, "other"),
    ]  # fmt: skip
    assert built.params["l"][0] is built.params["r"][0]
    built.params["l"][0].data[...] = 7
    assert built.layer_dict["r"].module.weight.min() == 7
    built.blobs["a"].data[...] = 1
    built.blobs["b"].data[...] = 2
    built.run().loss.backward()
    whole = built.params["l"][0].diff.copy()
    built.clear_param_diffs()
    built.forward()
    built.backward()
    assert built.params["l"][0].diff == pytest.approx(whole)
    assert abs(whole).min() > 0


@pytest.mark.parametrize(
    ("left", "right", "multipliers"),
    [
        ("lr_mult: 2", "lr_mult: 2", (2, 1)),
        ("", "lr_mult: 3 decay_mult: 0", (3, 0)),
        ("lr_mult: 4 decay_mult: 5", "", (4, 5)),
    ],
)
def test_the_first_layer_that_sets_a_shared_multiplier_decides(
    left: str, right: str, multipliers: tuple[float, float]
) -> None:
    built = pair(f'param {{ name: "w" {left} }}', f'param {{ name: "w" {right} }}')
    assert (built.learnable[0].lr_mult, built.learnable[0].decay_mult) == multipliers


def test_a_misnamed_shared_parameter_is_legal_and_trains_alone() -> None:
    """Two towers of which one calls its bias otherwise; learnable shows what is shared."""
    left, right = 'param { name: "w" } param { name: "b" }', 'param { name: "w" } param { name: "b_right" }'
    text = inputs(x=(2, 3)) + product("ip", "x", "y", 2, left) + product("ip_p", "x", "z", 2, right)
    built = net(text)
    assert [(p.layer, p.index, p.shared_name) for p in built.learnable] == [
        ("ip", 0, "w"),
        ("ip", 1, "b"),
        ("ip_p", 1, "b_right"),
    ]
    assert built.params["ip"][0].param is built.params["ip_p"][0].param
    assert built.params["ip"][1].param is not built.params["ip_p"][1].param


@pytest.mark.parametrize("name", ["lr_mult", "decay_mult"])
def test_different_multipliers_of_a_shared_parameter_are_refused(name: str) -> None:
    with pytest.raises(
        LayerError, match=f"net:4: layer 'r': Shared param 'w' has mismatched {name}: 2 here, 1 in layer 'l'"
    ):
        pair(f'param {{ name: "w" {name}: 1 }}', f'param {{ name: "w" {name}: 2 }}')


def test_strict_sharing_wants_one_shape_and_permissive_one_count() -> None:
    text = (
        inputs(a=(2, 3), b=(3, 2))
        + product("l", "a", "x", 2, 'param { name: "w" }')
        + product("r", "b", "y", 3, 'param { name: "w" MODE }')
        + layer("s", "Reduction", "x", "s", "loss_weight: 1")
        + layer("t", "Reduction", "y", "t", "loss_weight: 1")
    )
    with pytest.raises(
        LayerError, match=r"shape mismatch: the owner's is \(2, 3\), here it is \(3, 2\); share_mode: PERM"
    ):
        net(text.replace("MODE", ""))
    with pytest.raises(LayerError, match=r"count mismatch: the owner's is \(2, 3\), here it is \(4, 2\)"):
        net(text.replace("MODE", "share_mode: PERMISSIVE").replace("num_output: 3", "num_output: 4"))
    built = net(text.replace("MODE", "share_mode: PERMISSIVE"))
    assert len(built.learnable) == 3
    built.blobs["a"].data[...] = 1
    built.blobs["b"].data[...] = 10
    built.params["l"][0].data[...] = 5
    assert built.params["r"][0].data.min() == 5
    for _ in range(2):
        built.clear_param_diffs()
        built.run().loss.backward()
        assert built.params["l"][0].diff == pytest.approx(2 * 1.0 + 3 * 10.0)
        built.clear_param_diffs()
        built.forward()
        built.backward()
        assert built.params["l"][0].diff == pytest.approx(32)


def test_too_many_param_blocks_are_refused() -> None:
    with pytest.raises(LayerError, match="too many param blocks: 3, but the layer has 2 blobs"):
        net(inputs(data=(1, 2)) + product("ip", "data", "ip", 2, "param { } param { } param { }"))


def test_learnable_parameters_come_in_layer_order_with_their_multipliers() -> None:
    text = DATA + product("a", "data", "a", 3, "param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }")
    text += layer("bn", "BatchNorm", "a", "a") + product("ip", "a", "ip", 4, "param { lr_mult: 0 }") + LOSS
    got = [(x.layer, x.index, x.lr_mult, x.decay_mult, x.statistics) for x in net(text).learnable]
    assert got == [
        ("a", 0, 1, 1, False), ("a", 1, 2, 0, False), ("bn", 0, 0, 1, True), ("bn", 1, 0, 1, True),
        ("bn", 2, 0, 1, True), ("ip", 0, 0, 1, False), ("ip", 1, 1, 1, False),
    ]  # fmt: skip


def test_batch_norm_statistics_cannot_be_trained() -> None:
    text = inputs(data=(2, 3)) + layer("bn", "BatchNorm", "data", "y", "param { lr_mult: 1 }")
    with pytest.raises(
        LayerError, match="Cannot configure batch normalization statistics as layer parameters"
    ):
        net(text)
    three = text.replace("param { lr_mult: 1 }", "param { lr_mult: 1 } " * 3)
    assert [(x.lr_mult, x.decay_mult) for x in net(three).learnable] == [(0, 0)] * 3
