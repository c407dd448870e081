"""MemoryData and DummyData: the layers without a file."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from prototxt.errors import DataError, LayerError

MEMORY = (
    'name: "m" type: "MemoryData" top: "data" top: "label" '
    "memory_data_param { batch_size: 2 channels: 1 height: 2 width: 3 }"
)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def arrays(rows: int) -> tuple[Any, Any]:
    data = np.arange(rows * 6, dtype=np.float32).reshape(rows, 1, 2, 3)
    return data, np.arange(rows, dtype=np.float32)


def test_memory_data_goes_through_its_rows_and_wraps(open_layer: Any) -> None:
    built = open_layer(MEMORY)
    assert built.tops == [(2, 1, 2, 3), (2,)]
    data, labels = arrays(6)
    built.module.set_input_arrays(data, labels)
    for first in (0, 2, 4, 0, 2):
        got, label = built.module()
        np.testing.assert_array_equal(got.numpy(), data[first : first + 2])
        assert label.shape == (2, 1, 1, 1)
        assert label.flatten().tolist() == [first, first + 1]


def test_memory_data_uses_the_callers_array_and_starts_over_with_new_ones(open_layer: Any) -> None:
    built = open_layer(MEMORY)
    data, labels = arrays(4)
    built.module.set_input_arrays(data, labels.reshape(4, 1, 1, 1))
    built.module()
    data[2:] = -1
    assert (built.module()[0] == -1).all()
    built.module.reset(*arrays(2))
    assert built.module()[1].flatten().tolist() == [0, 1]


def test_memory_data_warns_that_it_does_not_transform(
    open_layer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    built = open_layer(f"{MEMORY} transform_param {{ scale: 2 }}")
    with caplog.at_level(logging.WARNING):
        built.module.set_input_arrays(*arrays(2))
    assert "MemoryData does not transform arrays" in caplog.text
    assert built.module()[0].flatten()[1] == 1


@pytest.mark.parametrize(
    ("data", "labels", "message"),
    [
        (zeros(3, 1, 2, 3), zeros(3), "3 rows are no multiple of batch_size 2"),
        (zeros(0, 1, 2, 3), zeros(0), "0 rows are no multiple of batch_size 2"),
        (zeros(2, 1, 3, 2), zeros(2), r"\(2, 1, 3, 2\), but rows are \(1, 2, 3\)"),
        (zeros(2, 1, 2, 3), zeros(4), "2 rows of data, but 4 labels"),
        (np.zeros((2, 1, 2, 3)), zeros(2), "data array must be float32"),
        (zeros(2, 1, 3, 2).swapaxes(2, 3), zeros(2), "C-contiguous"),
    ],
)
def test_memory_data_refuses_arrays_that_do_not_fit(
    open_layer: Any, data: Any, labels: Any, message: str
) -> None:
    module = open_layer(MEMORY).module
    with pytest.raises(DataError, match=message):
        module.set_input_arrays(data, labels)


def test_memory_data_without_arrays_says_what_to_call(open_layer: Any) -> None:
    with pytest.raises(DataError, match="layer 'm': MemoryData has no data: call set_input_arrays first"):
        open_layer(MEMORY).module()


def dummy(tops: int, parameters: str) -> str:
    names = " ".join(f'top: "t{i}"' for i in range(tops))
    return f'name: "d" type: "DummyData" {names} dummy_data_param {{ {parameters} }}'


@pytest.mark.parametrize(
    ("tops", "parameters", "shapes"),
    [
        (1, "shape { dim: 2 dim: 3 }", [(2, 3)]),
        (2, "shape { dim: 2 }", [(2,), (2,)]),
        (2, "shape { dim: 2 } shape { dim: 4 dim: 5 }", [(2,), (4, 5)]),
        (1, "num: 2 channels: 3 height: 4 width: 5", [(2, 3, 4, 5)]),
        (2, "num: 2 num: 7 channels: 3 height: 4 width: 5 width: 6", [(2, 3, 4, 5), (7, 3, 4, 6)]),
        (1, "shape { }", [()]),
    ],
)
def test_dummy_data_takes_every_form_of_shape(
    open_layer: Any, tops: int, parameters: str, shapes: list[tuple[int, ...]]
) -> None:
    built = open_layer(dummy(tops, parameters))
    made = built.module()
    assert built.tops == shapes
    assert [tuple(top.shape) for top in (made if tops > 1 else (made,))] == shapes
    assert all((top == 0).all() for top in (made if tops > 1 else (made,)))


def test_dummy_data_fills_constants_once_and_the_rest_each_time(open_layer: Any) -> None:
    built = open_layer(
        dummy(3, 'shape { dim: 50 } data_filler { value: 2.5 } data_filler { type: "uniform" min: 3 max: 4 } '
                 'data_filler { type: "gaussian" std: 2 }'),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    constant, uniform, gaussian = built.module()
    kept = uniform.clone(), gaussian.clone()
    again = built.module()
    assert (constant == 2.5).all()
    assert (again[0] == 2.5).all()
    assert ((uniform >= 3) & (uniform <= 4)).all()
    assert not (again[1] == kept[0]).any()
    assert not (again[2] == kept[1]).any()
    assert (uniform == kept[0]).all(), "the batch before must stand while the next is made"


@pytest.mark.parametrize(
    ("tops", "parameters", "message"),
    [
        (3, "shape { dim: 1 } data_filler { } data_filler { }", "data_filler must be given 0, 1 or 3 times"),
        (
            3,
            "shape { dim: 1 } shape { dim: 1 }",
            r"shape must be given once or once a top \(3 times\), not 2 times",
        ),
        (1, "", r"shape must be given once or once a top \(1 times\), not 0 times"),
        (1, "shape { dim: 1 } num: 1", "shape and num/channels/height/width are both given"),
        (
            1,
            "num: 1 channels: 2 height: 3",
            r"width must be given once or once a top \(1 times\), not 0 times",
        ),
        (1, "shape { dim: 2 dim: -3 }", r"every dimension must be above 0, not \(2, -3\)"),
        (1, 'shape { dim: 1 } data_filler { type: "xaver" }', "unknown filler type 'xaver'"),
    ],
)
def test_dummy_data_refuses_parameters_that_do_not_fit(
    open_layer: Any, tops: int, parameters: str, message: str
) -> None:
    with pytest.raises(LayerError, match=message):
        open_layer(dummy(tops, parameters))
