"""Each layer gives the same tops and gradients in a whole-graph run and layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from prototxt import schema
from prototxt.net import Net
from tests.prototxt.layers.single import Array
from tests.prototxt.layers.test_gradients import CASES, bottoms_of

# Their tops are random, or as many as the data decides: the two runs would need one state.
ALONE = {"Dropout", "Pooling stochastic"}
# Bottoms that cannot be made by a layer with weights.
FIXED = {
    "BatchReindex": {1},
    "ContrastiveLoss": {2},
    "Embed": {0},
    "Filter": {1},
    "InfogainLoss": {1, 2},
    "LSTM": {1},
    "LSTMUnit": {2},
    "RNN": {1},
    "HingeLoss": {1},
    "MultinomialLogisticLoss": {1},
    "SigmoidCrossEntropyLoss": {1},
    "SoftmaxWithLoss": {1},
}


def net_of(name: str) -> tuple[Any, list[str]]:
    """The layer over Parameter layers (Input where no gradient goes), and a loss of each top's squares."""
    fields, shapes, tops = CASES[name]
    kind = name.split(" ", maxsplit=1)[0]
    fixed, lines = FIXED.get(kind, set()), ["force_backward: true"]
    bottoms = [f"b{i}" for i in range(len(shapes))]
    for i, shape in enumerate(shapes):
        source, field = ("Input", "input_param") if i in fixed else ("Parameter", "parameter_param")
        dims = " ".join(f"dim: {d}" for d in shape)
        lines.append(
            f'layer {{ name: "{bottoms[i]}" type: "{source}" top: "b{i}" {field} {{ shape {{ {dims} }} }} }}'
        )
    scalar = kind.endswith("Loss")  # Reduction wants an axis
    used = " ".join(f'bottom: "{b}"' for b in bottoms)
    made = " ".join(f'top: "y{i}"' for i in range(tops))
    lines.append(f'layer {{ name: "it" type: "{kind}" {used} {made} {fields} }}')
    square = "power_param { power: 2 }" if scalar else "reduction_param { operation: SUMSQ }"
    for i in range(tops):
        lines.append(
            f'layer {{ name: "s{i}" type: "{"Power" if scalar else "Reduction"}" bottom: "y{i}" top: "s{i}"'
            f" loss_weight: {i + 2} {square} }}"
        )
    return text_format.Parse("\n".join(lines), schema.NetParameter()), bottoms


def prepare(net: Net, name: str, bottoms: list[str]) -> None:
    kind = name.split(" ", maxsplit=1)[0]
    for bottom, value in zip(bottoms, bottoms_of(kind, CASES[name][1]), strict=True):
        target = net.params[bottom][0] if bottom in net.params else net.blobs[bottom]
        target.data[...] = value.float().numpy()
    generator = np.random.default_rng(4)
    for blob in net.params.get("it", []):
        values = generator.standard_normal(blob.shape)
        blob.data[...] = abs(values) + 1 if kind == "BatchNorm" else values
    net.clear_param_diffs()


def results(net: Net, tops: int) -> tuple[list[Array], list[Array]]:
    values = [net.blobs[f"y{i}"].data.copy() for i in range(tops)]
    return values, [blob.diff.copy() for blobs in net.params.values() for blob in blobs]


@pytest.mark.parametrize("name", [n for n in CASES if n not in ALONE])
def test_both_executors_agree(name: str) -> None:
    message, bottoms = net_of(name)
    tops = CASES[name][2]
    with Net(message, seed=1) as whole, Net(message, seed=1) as layered:
        prepare(whole, name, bottoms)
        loss = whole.run().loss
        loss.backward()  # type: ignore[no-untyped-call]
        prepare(layered, name, bottoms)
        total = layered.forward_range(0, len(layered.layers) - 1)
        layered.backward_range(len(layered.layers) - 1, 0)
        assert total == pytest.approx(float(loss.detach()), rel=1e-5)
        for one, other in zip(results(whole, tops), results(layered, tops), strict=True):
            for got, want in zip(one, other, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert any(np.abs(diff).max() > 0 for diff in results(whole, tops)[1])
    assert torch.is_grad_enabled()
