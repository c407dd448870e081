"""Fillers have Caffe's distributions: the shape alone decides the fan."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from prototxt.errors import LayerError
from prototxt.fillers import fill
from prototxt.registry import BuildContext, LayerSpec
from prototxt.text import parse_text

SHAPE = (40, 30, 5, 5)
COUNT = math.prod(SHAPE)


def filled(text: str, shape: tuple[int, ...] = SHAPE, seed: int = 1) -> Tensor:
    filler: Any = parse_text(text, "FillerParameter")
    layer = parse_text('name: "c" type: "Convolution"', "LayerParameter")
    spec = LayerSpec(layer, "net", 7, BuildContext("TRAIN"))
    tensor = torch.full(shape, 77.0)
    fill(tensor, filler, torch.Generator().manual_seed(seed), spec)
    return tensor


def test_constant_is_the_default_and_0_its_value() -> None:
    assert filled("").unique().tolist() == [0]
    assert filled('type: "constant" value: 2.5').unique().tolist() == [2.5]


def test_uniform_fills_its_range_evenly() -> None:
    got = filled('type: "uniform" min: -1 max: 3')
    assert (float(got.min()), float(got.max())) == (pytest.approx(-1, abs=0.01), pytest.approx(3, abs=0.01))
    assert float(got.mean()) == pytest.approx(1, abs=0.05)
    assert float(got.std()) == pytest.approx(4 / math.sqrt(12), rel=0.03)


def test_gaussian_has_its_mean_and_deviation() -> None:
    got = filled('type: "gaussian" mean: 2 std: 0.1')
    assert float(got.mean()) == pytest.approx(2, abs=0.005)
    assert float(got.std()) == pytest.approx(0.1, rel=0.03)
    assert float(((got - 2).abs() < 0.1).float().mean()) == pytest.approx(0.683, abs=0.02)


def test_sparse_keeps_that_many_of_axis_0() -> None:
    got = filled('type: "gaussian" sparse: 10')
    assert float((got != 0).float().mean()) == pytest.approx(10 / 40, abs=0.02)
    assert not filled('type: "gaussian" sparse: 0').any()


def test_positive_unitball_rows_add_up_to_1() -> None:
    got = filled('type: "positive_unitball"')
    torch.testing.assert_close(got.flatten(1).sum(1), torch.ones(40))
    assert bool((got >= 0).all())


FANS = [
    ("", COUNT / 40),
    ("variance_norm: FAN_OUT", COUNT / 30),
    ("variance_norm: AVERAGE", (COUNT / 40 + COUNT / 30) / 2),
]


@pytest.mark.parametrize(("norm", "fan"), FANS)
def test_xavier_and_msra_take_their_spread_from_the_fan(norm: str, fan: float) -> None:
    xavier = filled(f'type: "xavier" {norm}')
    assert float(xavier.abs().max()) == pytest.approx(math.sqrt(3 / fan), rel=0.01)
    assert float(xavier.std()) == pytest.approx(math.sqrt(1 / fan), rel=0.03)
    assert float(filled(f'type: "msra" {norm}').std()) == pytest.approx(math.sqrt(2 / fan), rel=0.03)


def test_the_fan_out_of_one_axis_is_its_count() -> None:
    assert float(filled('type: "xavier" variance_norm: FAN_OUT', (3000,)).abs().max()) == pytest.approx(
        math.sqrt(3 / 3000), rel=0.01
    )
    assert float(filled('type: "xavier"', (3000,)).abs().max()) == pytest.approx(math.sqrt(3), rel=0.01)


def test_bilinear_is_the_same_pyramid_for_every_pair_of_channels() -> None:
    got = filled('type: "bilinear"', (2, 3, 4, 4))
    row = [0.25, 0.75, 0.75, 0.25]
    want = torch.tensor([[a * b for b in row] for a in row])
    torch.testing.assert_close(got, want.expand(2, 3, 4, 4))
    centre = filled('type: "bilinear"', (1, 1, 3, 3))[0, 0]
    torch.testing.assert_close(centre, torch.tensor([[0.25, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 0.25]]))


def test_one_seed_gives_one_filling() -> None:
    assert torch.equal(filled('type: "msra"'), filled('type: "msra"'))
    assert not torch.equal(filled('type: "msra"'), filled('type: "msra"', seed=2))


def test_shapes_alone_are_asked_for_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert filled('type: "msra"').is_meta


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ('type: "xaver"', SHAPE, "unknown filler type 'xaver' .known: constant, uniform, gaussian"),
        ('type: "gaussian" std: 0', SHAPE, "gaussian filler: std must be above 0, not 0"),
        ('type: "gaussian" sparse: -2', SHAPE, "gaussian filler: sparse must be 0 or more, not -2"),
        ('type: "gaussian" sparse: 41', SHAPE, "gaussian filler: sparse 41 is above axis 0"),
        ('type: "xavier" sparse: 3', SHAPE, "sparse is an option of the gaussian filler, not of 'xavier'"),
        ('type: "uniform" min: 2', SHAPE, "uniform filler: min 2 is above max 1"),
        ('type: "bilinear"', (2, 2, 3, 4), "bilinear filler: needs a 4-D blob with a square kernel"),
        ('type: "msra"', (0, 3), r"msra filler: cannot fill a blob of shape \(0, 3\)"),
    ],
)
def test_wrong_fillers_name_the_layer_and_the_limit(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayerError, match=f"net:7: layer 'c': {message}"):
        filled(text, shape)
