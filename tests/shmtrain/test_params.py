"""The flat vectors: regions, order, views, shared parameters, fingerprint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prototxt.net import Net
from prototxt.text import net_from_text
from shmtrain.params import Params

LAYERS = """
name: "mixed"
layer { name: "d" type: "DummyData" top: "x" top: "t" dummy_data_param {
  shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 }
  data_filler { type: "gaussian" } data_filler { value: 1 } } }
layer { name: "frozen" type: "InnerProduct" bottom: "x" top: "a" param { lr_mult: 0 } param { lr_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } bias_filler { value: 0.5 } } }
layer { name: "bn" type: "BatchNorm" bottom: "a" top: "b" }
layer { name: "one" type: "InnerProduct" bottom: "b" top: "c"
  param { name: "w" lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "two" type: "InnerProduct" bottom: "c" top: "e"
  param { name: "w" } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "last" type: "InnerProduct" bottom: "e" top: "y"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""


@pytest.fixture
def net() -> Net:
    return Net(net_from_text(LAYERS), seed=3)


def test_the_regions_are_trained_frozen_and_statistics_each_in_order(net: Net) -> None:
    params = Params(net)
    assert [(s.layer, s.index) for s in params.slots] == [
        ("one", 0), ("one", 1), ("two", 1), ("last", 0), ("last", 1),
        ("frozen", 0), ("frozen", 1),
        ("bn", 0), ("bn", 1), ("bn", 2),
    ]  # fmt: skip
    assert (params.trained, params.frozen_stop, params.n) == (9 + 3 + 3 + 6 + 2, 23 + 9 + 3, 35 + 3 + 3 + 1)
    assert [(s.layer, s.index) for s in params.in_file_order()][:3] == [
        ("frozen", 0),
        ("frozen", 1),
        ("bn", 0),
    ]


def test_equal_multipliers_of_neighbours_are_one_run(net: Net) -> None:
    runs = [(r.slice.start, r.slice.stop, r.lr_mult, r.decay_mult) for r in Params(net).runs]
    assert runs == [(0, 9, 1.0, 1.0), (9, 15, 2.0, 0.0), (15, 23, 1.0, 1.0)]


def test_the_nets_parameters_and_their_values_are_in_the_vector(net: Net) -> None:
    before = {name: [blob.data.copy() for blob in blobs] for name, blobs in net.params.items()}
    params = Params(net)
    for slot in params.slots:
        np.testing.assert_array_equal(params.array[slot.slice], before[slot.layer][slot.index].ravel())
    params.array[:] = 7
    assert all((blob.data == 7).all() for blobs in net.params.values() for blob in blobs)
    net.params["last"][0].data[...] = 3
    assert params.vector[15] == 3


def test_gradients_land_in_the_flat_vector_once_for_a_shared_parameter(net: Net) -> None:
    params = Params(net)
    for batches in (1, 2):
        params.clear_gradient()
        for _ in range(batches):
            torch.autograd.backward(net.run().loss)
        assert (params.gradient[params.trained :] == 0).all()
        assert (params.trained_gradient != 0).all()
        np.testing.assert_array_equal(net.params["two"][0].diff.ravel(), params.gradient[:9])


def test_the_fingerprint_tells_layers_shapes_and_regions_apart(net: Net) -> None:
    mine = Params(net).fingerprint()
    assert Params(Net(net_from_text(LAYERS), seed=9)).fingerprint() == mine
    for old, new in (
        ('name: "last"', 'name: "end"'),
        ("lr_mult: 0", "lr_mult: 1"),
        ('name: "w" lr_mult: 1', ""),
    ):
        assert old in LAYERS
        assert Params(Net(net_from_text(LAYERS.replace(old, new)))).fingerprint() != mine
    assert b"10 parameters, 42 floats, 23 trained" in mine


def test_holding_other_weights_gives_the_own_back_even_after_an_error(net: Net) -> None:
    params = Params(net)
    own = params.array.copy()

    def fail() -> None:
        with params.holding(np.full(params.n, 5, np.float32)):
            assert (net.params["last"][0].data == 5).all()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    np.testing.assert_array_equal(params.array, own)


def test_saved_weights_load_into_the_vector(net: Net, tmp_path: Path) -> None:
    params = Params(net)
    net.save(tmp_path / "w.caffemodel")
    saved = params.array.copy()
    params.array[:] = 0
    net.copy_from(tmp_path / "w.caffemodel")
    np.testing.assert_array_equal(params.array, saved)
