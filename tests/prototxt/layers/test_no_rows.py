"""A batch of no rows, which Filter may leave, goes through every kind of layer both ways: the loss is 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.prototxt.nets import inputs, layer, net, product

FILTER = inputs(x=(3, 2, 1, 1), label=(3,), choice=(3,)) + layer("f", "Filter", "x label choice", "y m")
SUM = layer("sum", "Reduction", "z", "s", "loss_weight: 1")
SCORES = product("ip", "y", "z")
BEHIND = {
    "SoftmaxWithLoss": SCORES
    + layer("l", "SoftmaxWithLoss", "z m", "s")
    + layer("a", "Accuracy", "z m", "a"),
    "HingeLoss": SCORES + layer("l", "HingeLoss", "z m", "s"),
    "MultinomialLogisticLoss": SCORES + layer("l", "MultinomialLogisticLoss", "z m", "s"),
    "EuclideanLoss": layer("t", "TanH", "y", "z") + layer("l", "EuclideanLoss", "y z", "s"),
    "ContrastiveLoss": layer("t", "TanH", "y", "z") + layer("l", "ContrastiveLoss", "y z m", "s"),
    "SigmoidCrossEntropyLoss": layer(
        "l", "SigmoidCrossEntropyLoss", "y y", "s", "propagate_down: [true, false]"
    ),
    "Reduction": layer("l", "Reduction", "y", "s", "reduction_param { operation: MEAN } loss_weight: 1"),
    "Convolution": layer("c", "Convolution", "y", "z", "convolution_param { num_output: 2 kernel_size: 1 }")
    + SUM,
    "Pooling": layer("p", "Pooling", "y", "z", "pooling_param { kernel_size: 1 pool: AVE }") + SUM,
    "BatchNorm": layer("b", "BatchNorm", "y", "w") + layer("s", "Scale", "w", "z") + SUM,
    "LRN": layer("n", "LRN", "y", "z") + SUM,
    "MVN": layer("n", "MVN", "y", "z") + SUM,
    "Embed": layer("e", "Embed", "m", "z", "embed_param { num_output: 2 input_dim: 3 }") + SUM,
    "Reshape": layer("r", "Reshape", "y", "z", "reshape_param { shape { dim: 0 dim: -1 } }") + SUM,
    "Flatten": layer("r", "Flatten", "y", "z") + SUM,
    "Slice": layer("c", "Slice", "y", "z w") + SUM,
}


@pytest.mark.parametrize("kind", BEHIND)
def test_no_rows_are_no_error_and_no_nan(kind: str) -> None:
    with net("force_backward: true " + FILTER + BEHIND[kind], seed=1) as built:
        built.blobs["x"].data[...] = 1
        loss: Any = built.run().loss
        assert float(loss.detach()) == 0
        if loss.requires_grad:
            loss.backward()
        assert all(np.isfinite(blob.diff).all() for blobs in built.params.values() for blob in blobs)
        last = len(built.layers) - 1
        assert built.forward_range(0, last) == 0
        assert built.blobs["y"].shape == (0, 2, 1, 1)
        built.backward_range(last, 0)
        assert (built.blobs["x"].diff == 0).all()


def test_reshape_infers_as_many_values_a_row_as_with_rows() -> None:
    with net(FILTER + BEHIND["Reshape"]) as built:
        assert built.blobs["z"].shape == (3, 2)
        built.forward()
        assert built.blobs["z"].shape == (0, 2)
