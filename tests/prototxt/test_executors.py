"""Both executors give the same numbers, and the blobs behave as pycaffe's do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prototxt.errors import NetError
from prototxt.net import Net
from tests.prototxt.nets import inputs, layer, net, product

CONV = (
    "convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: 'xavier' } "
    "bias_filler { type: 'gaussian' std: 0.5 } }"
)
# In-place layers, a batch norm, a split blob, two losses of which one has a weight, an accuracy beside them.
RICH = (
    inputs(data=(4, 3, 6, 6), label=(4,), target=(4, 5))
    + layer("conv", "Convolution", "data", "conv", CONV)
    + layer("bn", "BatchNorm", "conv", "conv")
    + layer("scale", "Scale", "conv", "conv", "scale_param { bias_term: true }")
    + layer("relu", "ReLU", "conv", "conv")
    + layer("pool", "Pooling", "conv", "pool", "pooling_param { kernel_size: 2 stride: 2 }")
    + product("left", "pool", "left", 5)
    + layer("sig", "Sigmoid", "left", "left")
    + product("right", "pool", "right", 5)
    + layer("sum", "Eltwise", "left right", "sum")
    + layer("loss", "SoftmaxWithLoss", "sum label", "loss")
    + layer("side", "EuclideanLoss", "left target", "side", "loss_weight: 0.25")
    + layer("accuracy", "Accuracy", "sum label", "accuracy")
)


def rich(phase: Any = "TRAIN") -> Net:
    built = net(RICH, phase, seed=5)
    random = np.random.default_rng(1)
    for name in ("data", "target"):
        built.blobs[name].data[...] = random.normal(size=built.blobs[name].shape)
    built.blobs["label"].data[...] = random.integers(0, 5, 4)
    return built


def gradients(built: Net) -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"{name}/{index}": blob.diff.copy()
        for name, blobs in built.params.items()
        for index, blob in enumerate(blobs)
    }


# Two executors, one result --------------------------------------------------------------------------------


def test_both_executors_agree_on_loss_blobs_and_gradients() -> None:
    whole, layered = rich(), rich()
    outcome = whole.run()
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    loss = layered.forward_range(0, len(layered.layers) - 1)
    layered.backward()
    assert float(outcome.loss.detach()) == pytest.approx(loss, rel=1e-6)
    assert list(outcome.outputs) == layered.outputs == ["accuracy", "loss", "side"]
    for name in layered.blobs:
        np.testing.assert_allclose(whole.blobs[name].data, layered.blobs[name].data, rtol=1e-5, atol=1e-6)
    ours, theirs = gradients(layered), gradients(whole)
    assert any(abs(value).max() > 0.01 for value in ours.values())
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_test_phase_runs_without_gradients_but_can_go_backward_by_layers() -> None:
    built = rich("TEST")
    assert not built.run().loss.requires_grad
    built.forward()
    built.backward()
    assert built.params["left"][0].diff.any()


def test_parameter_gradients_add_up_and_bottom_diffs_do_not() -> None:
    built = rich()
    built.forward()
    built.backward()
    once, blob = gradients(built), built.blobs["pool"].diff.copy()
    built.backward()
    for name, value in once.items():
        np.testing.assert_allclose(built.params[name[:-2]][int(name[-1])].diff, 2 * value, rtol=1e-6)
    np.testing.assert_array_equal(built.blobs["pool"].diff, blob)
    built.clear_param_diffs()
    assert not any(value.any() for value in gradients(built).values())


# In place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["", "BatchNorm"])
def test_two_half_batches_are_one_batch_unless_statistics_are_taken_of_each(norm: str) -> None:
    """What iter_size: 2 does: gradients add up and are halved. BatchNorm sees each pass by itself."""

    def gradient(rows: int) -> tuple[Any, Any]:
        middle = layer("bn", norm, "h", "n") if norm else layer("id", "Power", "h", "n")
        text = inputs(x=(rows, 3), t=(rows, 2)) + product("one", "x", "h") + middle
        built = net(text + product("two", "n", "y") + layer("loss", "EuclideanLoss", "y t", "loss"), seed=2)
        data = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
        for first in range(0, 4, rows):
            built.blobs["x"].data[...] = data[first : first + rows, :3]
            built.blobs["t"].data[...] = data[first : first + rows, 3:]
            built.run().loss.backward()  # type: ignore[no-untyped-call]
        weight = built.params["bn"][2].data.copy() if norm else None
        return built.params["one"][0].diff * (rows / 4), weight

    (halves, passes), (whole, once) = gradient(2), gradient(4)
    if norm:
        assert not np.allclose(halves, whole, rtol=1e-2)
        assert (float(passes[0]), float(once[0])) == (pytest.approx(1.999), 1.0)
    else:
        np.testing.assert_allclose(halves, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["BNLL", "Power", "Sigmoid", "ReLU"])
def test_an_in_place_layer_has_the_gradient_of_one_that_is_not(kind: str) -> None:
    more = "power_param { power: 3 }" if kind == "Power" else ""
    results = []
    for top in ("x", "y"):
        built = net("force_backward: true\n" + inputs(x=(2, 3)) + layer("f", kind, "x", top, more))
        built.blobs["x"].data[...] = [[-2, -1, 0.5], [1, 2, 3]]
        built.forward()
        built.blobs[top].diff[...] = [[1, 2, 3], [4, 5, 6]]
        built.backward()
        results.append(built.blobs["x"].diff.copy())
    assert results[0].any()
    np.testing.assert_array_equal(results[0], results[1])


def test_a_layer_before_an_in_place_one_keeps_its_own_input() -> None:
    chain = layer("square", "Power", "x", "y", "power_param { power: 2 }")
    text = "force_backward: true\n" + inputs(x=(1, 2)) + chain + layer("relu", "ReLU", "y", "z")
    text += layer("again", "Power", "z", "z", "power_param { shift: 100 }")
    built = net(text)
    built.blobs["x"].data[...] = [3, 4]
    assert built.forward()["z"].tolist() == [[109, 116]]
    built.blobs["z"].diff[...] = 1
    assert built.backward()["x"].tolist() == [[6, 8]]


def test_an_explicit_split_before_an_in_place_layer_leaves_its_other_top_alone() -> None:
    text = (
        inputs(x=(1, 2))
        + layer("s", "Split", "x", "a b")
        + layer("f", "Power", "a", "a", "power_param { shift: 1 }")
    )
    built = net(text)
    built.blobs["x"].data[...] = [1, 2]
    built.forward()
    by_layers = {name: blob.data.tolist() for name, blob in built.blobs.items()}
    built.run()
    assert by_layers == {name: blob.data.tolist() for name, blob in built.blobs.items()}
    assert by_layers == {"x": [[1, 2]], "a": [[2, 3]], "b": [[1, 2]]}


# pycaffe's forward and backward ---------------------------------------------------------------------------


def test_start_and_end_run_a_part_from_what_the_blobs_hold() -> None:
    built = rich()
    whole = {name: array.copy() for name, array in built.forward(blobs=["pool", "conv"]).items()}
    assert set(whole) == {"accuracy", "loss", "side", "pool", "conv"}
    built.blobs["pool"].data[...] *= 2
    assert set(built.forward(start="pool", end="pool")) == {"pool"}
    np.testing.assert_array_equal(built.blobs["pool"].data, whole["pool"])
    built.blobs["conv"].data[...] = 0
    assert set(built.forward(start="pool", end="left")) == {"left"}
    assert not built.blobs["pool"].data.any()


def test_backward_takes_seeds_and_stops_at_its_end() -> None:
    text = inputs(x=(1, 2)) + product("a", "x", "a", 2) + product("b", "a", "b", 2)
    built = net("force_backward: true\n" + text)
    built.params["a"][0].data[...] = [[1, 2], [3, 4]]
    built.params["b"][0].data[...] = [[1, 1], [0, 1]]
    built.forward(x=[[5, 6]])
    assert built.backward(b=np.array([[1, 10]]))["x"].tolist() == [[34, 46]]
    assert built.params["a"][0].diff.tolist() == [[5, 6], [55, 66]]
    built.clear_param_diffs()
    built.blobs["a"].diff[...] = 0
    got = built.backward(start="b", end="b", diffs=["b"])
    assert {name: array.tolist() for name, array in got.items()} == {"a": [[1, 11]], "b": [[1, 10]]}
    assert not built.params["a"][0].diff.any()


def test_diffs_that_scripts_write_between_layers_are_used() -> None:
    built = rich()
    built.forward()
    built.backward(end="sum")
    built.blobs["left_sig_0_split_0"].diff[...] = 0
    built.blobs["left_sig_0_split_1"].diff[...] = 0
    built.backward(start="left_sig_0_split")
    assert not built.params["left"][0].diff.any()
    built.blobs["left_sig_0_split_0"].diff[...] = 1
    built.backward(start="left_sig_0_split")
    assert built.params["left"][0].diff.any()


def test_the_loss_weight_in_the_losss_diff_counts() -> None:
    built = rich()
    last = len(built.layers) - 1
    full = built.forward_range(0, last)
    assert built.blobs["side"].diff == 0.25
    built.blobs["side"].diff[...] = 0
    assert built.forward_range(0, last) == pytest.approx(
        full - 0.25 * float(built.blobs["side"].data), rel=1e-5
    )


def test_a_split_adds_its_tops_diffs_and_shares_its_bottoms_data() -> None:
    built = rich()
    built.forward()
    built.backward()
    parts = [built.blobs[f"pool_pool_0_split_{k}"] for k in (0, 1)]
    np.testing.assert_allclose(built.blobs["pool"].diff, parts[0].diff + parts[1].diff, rtol=1e-6)
    assert np.shares_memory(parts[0].data, built.blobs["pool"].data)
    assert not np.shares_memory(parts[0].diff, built.blobs["pool"].diff)


def test_callbacks_see_every_layer_in_order() -> None:
    built = rich()
    seen: list[tuple[str, int]] = []
    for name in ("before_forward", "after_forward", "before_backward", "after_backward"):
        getattr(built.layerwise, name).append(lambda index, name=name: seen.append((name, index)))
    built.forward(start="pool", end="pool")
    built.forward()
    seen.clear()
    built.forward(start="conv", end="bn")
    first = built.layer_names.index("conv")
    assert seen == [
        ("before_forward", first), ("after_forward", first),
        ("before_forward", first + 1), ("after_forward", first + 1),
    ]  # fmt: skip
    seen.clear()
    built.backward(start="pool", end="pool")
    assert seen == [("before_backward", first + 4), ("after_backward", first + 4)]


def test_backward_without_a_forward_works_on_the_numbers_in_the_blobs() -> None:
    built, other = rich(), rich()
    other.blobs["conv"].data[...] = np.random.default_rng(0).normal(size=other.blobs["conv"].shape)
    built.blobs["conv"].data[...] = other.blobs["conv"].data
    other.forward(start="pool", end="pool")
    for each in (built, other):
        each.blobs["pool"].diff[...] = 1
        each.backward(start="pool", end="pool")
    assert (built.blobs["pool"].data == 0).all()
    np.testing.assert_array_equal(built.blobs["conv"].diff, other.blobs["conv"].diff)
    assert np.abs(built.blobs["conv"].diff).max() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda n: n.forward(data=1),
            "input arguments do not match the net's inputs: got data; the net has data, label",
        ),
        (lambda n: n.forward(start="nope"), "the net has no layer 'nope' .layers: data,"),
        (lambda n: n.forward(blobs=["nope"]), "the net has no blob 'nope' .blobs: data,"),
        (lambda n: n.backward(loss=1), "output arguments do not match the net's outputs: got loss"),
        (
            lambda n: n.forward(data=np.zeros((9, 3, 6, 6)), label=[0] * 4, target=np.zeros((4, 5))),
            r"input 'data' is not batch sized: 9 rows for shape \(4, 3, 6, 6\)",
        ),
        (
            lambda n: n.forward(data=np.zeros((4, 3, 7, 6)), label=[0] * 4, target=np.zeros((4, 5))),
            r"input 'data': shape \(4, 3, 7, 6\) does not fit \(4, 3, 6, 6\)",
        ),
    ],
)
def test_wrong_calls_say_what_the_net_has(call: Any, message: str) -> None:
    with pytest.raises(NetError, match=message):
        call(rich())


@pytest.mark.parametrize("way", ["run", "forward"])
def test_a_layer_that_fails_while_running_is_named_with_its_shapes(way: str) -> None:
    built = net(inputs(data=(2, 3)) + product("ip", "data", "ip", 4))
    built.blobs["data"].reshape(2, 5)
    with pytest.raises(NetError, match=r"net:2: layer 'ip' \(InnerProduct\): .*\(bottom shapes: \(2, 5\)\)"):
        getattr(built, way)()


@pytest.mark.parametrize("way", ["run", "forward"])
def test_what_a_script_writes_into_a_blob_that_is_filled_once_stays(way: str) -> None:
    shapes = (
        'shape { dim: 2 dim: 3 } shape { dim: 2 } data_filler { type: "gaussian" } data_filler { value: 7 }'
    )
    text = layer("d", "DummyData", "", "x y", f"dummy_data_param {{ {shapes} }}")
    built = net(text + layer("p", "Power", "y", "p"))
    getattr(built, way)()
    assert built.blobs["p"].data.tolist() == [7, 7]
    built.blobs["x"].data[...] = 5
    built.blobs["y"].data[...] = [1, 2]
    getattr(built, way)()
    assert built.blobs["p"].data.tolist() == built.blobs["y"].data.tolist() == [1, 2]
    assert not (built.blobs["x"].data == 5).any()


def test_a_constant_that_a_layer_overwrites_in_place_is_filled_again() -> None:
    text = layer("d", "DummyData", "", "y", "dummy_data_param { shape { dim: 2 } data_filler { value: 7 } }")
    built = net(text + layer("p", "Power", "y", "y", "power_param { scale: 2 }"))
    for _ in range(2):
        assert built.forward()["y"].tolist() == [14, 14]


# Blobs ----------------------------------------------------------------------------------------------------


def test_views_that_a_script_holds_stay_valid() -> None:
    built = rich()
    held = {name: (blob.data, blob.diff) for name, blob in built.blobs.items()}
    weights, gradient = built.params["conv"][0].data, built.params["conv"][0].diff
    for _ in range(2):
        built.forward()
        built.backward()
    for name, (data, diff) in held.items():
        assert np.shares_memory(data, built.blobs[name].data), name
        assert np.shares_memory(diff, built.blobs[name].diff), name
    assert held["loss"][0] == built.blobs["loss"].data != 0
    weights[...] = 0
    assert not built.params["conv"][0].data.any()
    assert gradient.any()
    assert np.shares_memory(gradient, built.params["conv"][0].diff)


def test_a_held_view_follows_whole_graph_runs_too() -> None:
    built = rich()
    pool = built.blobs["pool"].data
    before = pool.copy()
    built.run()
    assert pool.any()
    assert not before.any()
    built.blobs["data"].data[...] *= 3
    built.params["conv"][0].data[...] *= -1
    after = pool.copy()
    built.run()
    assert not (pool == after).all()


def test_blobs_show_a_run_whose_shapes_changed() -> None:
    built = rich()
    built.blobs["data"].reshape(2, 3, 6, 6)
    built.blobs["label"].reshape(2)
    built.blobs["target"].reshape(2, 5)
    built.run()
    assert built.blobs["pool"].shape == (2, 4, 3, 3)
    assert built.blobs["pool"].data.shape == (2, 4, 3, 3)
    assert built.blobs["left_sig_0_split_1"].shape == (2, 5)


def test_a_run_can_be_continued_layer_by_layer() -> None:
    built = rich()
    outcome = built.run()
    loss = float(outcome.loss.detach())
    built.forward(start="pool")
    assert built.blobs["loss"].data + 0.25 * built.blobs["side"].data == pytest.approx(loss, rel=1e-5)


def test_reshape_carries_the_inputs_shapes_through_the_net_without_running_it() -> None:
    built = rich()
    before = built.params["bn"][2].data.copy()
    built.blobs["data"].reshape(7, 3, 6, 6)
    built.blobs["label"].reshape(7)
    built.blobs["target"].reshape(7, 5)
    built.reshape()
    assert built.blobs["conv"].shape == (7, 4, 6, 6)
    assert built.blobs["sum"].data.shape == (7, 5)
    assert built.blobs["loss"].shape == ()
    assert (built.params["bn"][2].data == before).all()
    built.blobs["data"].reshape(7, 3, 8, 8)
    with pytest.raises(
        NetError, match=r"layer 'left': bottom shape .* does not fit its weights: parameter 0 has shape"
    ):
        built.reshape()


def test_old_names_of_sizes_count_missing_axes_as_1() -> None:
    blob = net(inputs(x=(5, 4))).blobs["x"]
    assert (blob.num, blob.channels, blob.height, blob.width, blob.count) == (5, 4, 1, 1, 20)
    blob.reshape(1, 2, 3, 4, 5)
    with pytest.raises(NetError, match="at most 4 axes"):
        _ = blob.num
    with pytest.raises(NetError, match="0 or more elements"):
        blob.reshape(2, -1)
    with pytest.raises(NetError, match="at most 32 axes"):
        blob.reshape(*[1] * 33)


# Parameters in somebody else's storage --------------------------------------------------------------------


def test_parameters_can_live_in_one_flat_vector() -> None:
    built = rich()
    vector = torch.cat([entry.param.detach().flatten() for entry in built.learnable])
    gradient = torch.zeros_like(vector)
    before = float(built.run().loss.detach())
    start = 0
    for entry in built.learnable:
        count = entry.param.numel()
        built.set_param(
            entry.layer, entry.index, vector[start : start + count], gradient[start : start + count]
        )
        start += count
    outcome = built.run()
    assert float(outcome.loss.detach()) == pytest.approx(before, rel=1e-5)
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    flat = np.concatenate([blob.diff.ravel() for blobs in built.params.values() for blob in blobs])
    assert gradient.any()
    np.testing.assert_array_equal(gradient.numpy(), flat)
    vector.zero_()
    assert not any(blob.data.any() for blobs in built.params.values() for blob in blobs)


def test_a_vector_part_of_another_size_is_refused() -> None:
    with pytest.raises(
        NetError, match=r"parameter 0 of layer 'conv' is 108 x torch.float32, not 3 x torch.float32"
    ):
        rich().set_param("conv", 0, torch.zeros(3))


def test_a_permissively_shared_parameter_follows_its_owner_into_the_vector() -> None:
    share = 'param { name: "w" share_mode: PERMISSIVE }'
    built = net(
        inputs(a=(1, 3), b=(1, 2)) + product("l", "a", "x", 2, share) + product("r", "b", "y", 3, share)
    )
    vector: Tensor = torch.full((6,), 4.0)
    built.set_param("l", 0, vector)
    assert built.params["r"][0].data.min() == 4
    vector.fill_(9)
    assert built.params["r"][0].data.tolist() == [[9, 9]] * 3


def test_nets_share_parameters_by_layer_name() -> None:
    train, test = rich(), rich("TEST")
    test.share_with(train)
    train.params["left"][1].data[...] = 42
    assert (test.params["left"][1].data == 42).all()
