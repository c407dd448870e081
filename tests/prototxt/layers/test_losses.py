"""Losses and Accuracy: normalisation, ignored labels, clamps, ties and wrong labels, by worked-out values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prototxt import schema
from prototxt.errors import LayerError, WeightsError
from tests.prototxt.layers.single import build, gradients, noise, run

LARGEST = -math.log(1.17549435e-38)  # -log(FLT_MIN)
LABELS = [[[[0, 1]]], [[[1, 255]]]]


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ("normalization: VALID", 0.693147),
        ("", 0.693147),
        ("normalize: true", 0.693147),
        ("normalization: BATCH_SIZE", 1.039721),
        ("normalize: false", 1.039721),
        ("normalization: FULL", 0.519860),
        ("normalization: NONE", 2.079442),
        ("normalization: FULL normalize: false", 0.519860),
    ],
)
def test_softmax_loss_is_divided_as_the_file_asks(fields: str, want: float) -> None:
    built = build(
        f'type: "SoftmaxWithLoss" loss_param {{ ignore_label: 255 {fields} }}', (2, 2, 1, 2), (2, 1, 1, 2)
    )
    (loss,) = run(built, np.zeros((2, 2, 1, 2)), LABELS)
    assert loss == pytest.approx(want, abs=1e-6)
    by = {0.693147: 3, 1.039721: 2, 0.519860: 4, 2.079442: 1}[want]
    grad, _ = gradients(built, np.zeros((2, 2, 1, 2)), LABELS)
    want_grad = np.full((2, 2, 1, 2), 0.5)
    for n, position, label in ((0, 0, 0), (0, 1, 1), (1, 0, 1)):
        want_grad[n, label, 0, position] -= 1
    want_grad[1, :, 0, 1] = 0
    np.testing.assert_allclose(grad, want_grad / by, atol=1e-6)


def test_a_batch_without_labels_gives_zero_and_no_nan() -> None:
    built = build('type: "SoftmaxWithLoss" loss_param { ignore_label: 255 }', (3, 4), (3,))
    x, t = noise(3, 4), [255, 255, 255]
    assert str(run(built, x, t)[0]) == "0.0"  # the log would show a -0
    np.testing.assert_array_equal(gradients(built, x, t)[0], 0)


def test_the_loss_is_clamped_and_its_gradient_is_not() -> None:
    built = build('type: "SoftmaxWithLoss"', (1, 2), (1,))
    assert run(built, [[1000, 0]], [1])[0] == pytest.approx(87.336545, abs=1e-5)
    assert pytest.approx(87.336545, abs=1e-6) == LARGEST
    np.testing.assert_allclose(gradients(built, [[1000, 0]], [1])[0], [[1, -1]])


def test_softmax_loss_agrees_with_the_formula_on_any_axis() -> None:
    shape, axis = (2, 3, 5, 2), 2
    built = build(f'type: "SoftmaxWithLoss" softmax_param {{ axis: {axis} }}', shape, (2, 3, 2), tops=2)
    x, t = noise(*shape), np.random.default_rng(1).integers(0, 5, (2, 3, 2))
    e = np.exp(x - x.max(axis, keepdims=True))
    p = e / e.sum(axis, keepdims=True)
    picked = np.take_along_axis(p, t[:, :, None], axis)
    loss, probabilities = run(built, x, t)
    assert loss == pytest.approx(-np.log(picked).mean(), rel=1e-5)
    np.testing.assert_allclose(probabilities, p, rtol=1e-5)
    hot = (np.arange(5)[None, None, :, None] == t[:, :, None]).astype(float)
    np.testing.assert_allclose(gradients(built, x, t)[0], (p - hot) / t.size, atol=1e-6)


def test_labels_are_cut_to_whole_numbers() -> None:
    built = build('type: "SoftmaxWithLoss"', (1, 3), (1,))
    assert run(built, [[1, 2, 3]], [1.9])[0] == run(built, [[1, 2, 3]], [1])[0]


@pytest.mark.parametrize("label", [3, -1, 1456, math.nan])
@pytest.mark.parametrize("kind", ["SoftmaxWithLoss", "Accuracy", "HingeLoss", "MultinomialLogisticLoss"])
def test_a_label_out_of_range_names_layer_label_record_and_range(kind: str, label: float) -> None:
    built = build(f'type: "{kind}"', (3, 3), (3,))
    with pytest.raises(
        LayerError,
        match=rf"net.prototxt:7: layer 'it': label {label:g} of record 1 is out of range: "
        r"allowed are 0\.\.2",
    ):
        built.module(torch.rand(3, 3), torch.tensor([0.0, label, 1.0]))


def test_a_wrong_label_among_positions_names_the_position() -> None:
    built = build('type: "SoftmaxWithLoss" loss_param { ignore_label: 255 }', (2, 3, 2, 2), (2, 2, 2))
    labels = torch.zeros(2, 2, 2)
    labels[0, 0, 0], labels[1, 1, 0] = 255, 7
    with pytest.raises(LayerError, match=r"label 7 of record 1, position 2 .* 0\.\.2 and ignore_label 255"):
        built.module(torch.zeros(2, 3, 2, 2), labels)


def test_negative_ignore_label() -> None:
    built = build('type: "SoftmaxWithLoss" loss_param { ignore_label: -1 }', (2, 3), (2,))
    assert run(built, np.zeros((2, 3)), [-1, 2])[0] == pytest.approx(math.log(3), rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "by"),
    [
        ("", 2),
        ("normalize: true", 6),
        ("normalize: false", 2),
        ("normalization: FULL", 6),
        ("normalization: NONE", 1),
    ],
)
def test_sigmoid_cross_entropy_is_divided_by_the_batch_by_default(fields: str, by: int) -> None:
    built = build(f'type: "SigmoidCrossEntropyLoss" loss_param {{ {fields} }}', (2, 3), (2, 3))
    assert run(built, np.zeros((2, 3)), np.ones((2, 3)))[0] == pytest.approx(6 * math.log(2) / by, rel=1e-6)


def test_sigmoid_cross_entropy_takes_any_target_and_ignores_labels() -> None:
    built = build(
        'type: "SigmoidCrossEntropyLoss" loss_param { ignore_label: 5 normalization: VALID }', (2, 2), (2, 2)
    )
    x, t = np.array([[100.0, -2.0], [3.0, -50.0]]), np.array([[0.3, 5.0], [0.9, 5.5]])
    s = 1 / (1 + np.exp(-x))
    kept = np.array([[True, False], [True, False]])
    terms = np.maximum(x, 0) - x * t + np.log1p(np.exp(-np.abs(x)))
    assert run(built, x, t)[0] == pytest.approx(terms[kept].sum() / 2, rel=1e-5)
    np.testing.assert_allclose(gradients(built, x, t)[0], np.where(kept, s - t, 0) / 2, atol=1e-6)


def test_euclidean_is_half_the_mean_over_records() -> None:
    built = build('type: "EuclideanLoss"', (2, 3), (2, 3, 1))
    assert run(built, np.ones((2, 3)), np.zeros((2, 3, 1)))[0] == 1.5
    a, b = noise(2, 3), noise(2, 3, 1, seed=9)
    got = gradients(built, a, b)
    np.testing.assert_allclose(got[0], (a - b[..., 0]) / 2, rtol=1e-6)
    np.testing.assert_allclose(got[1][..., 0], (b[..., 0] - a) / 2, rtol=1e-6)


@pytest.mark.parametrize("norm", ["L1", "L2"])
def test_hinge(norm: str) -> None:
    x, t = noise(4, 3) * 2, [0, 2, 1, 0]
    sign = np.ones((4, 3))
    sign[range(4), t] = -1
    margins = np.maximum(0, 1 + sign * x)
    want = margins.sum() if norm == "L1" else (margins**2).sum()
    built = build(f'type: "HingeLoss" hinge_loss_param {{ norm: {norm} }}', (4, 3), (4,))
    assert run(built, x, t)[0] == pytest.approx(want / 4, rel=1e-5)
    slope = (margins > 0) * sign if norm == "L1" else 2 * margins * sign
    np.testing.assert_allclose(gradients(built, x, t)[0], slope / 4, atol=1e-6)


def test_multinomial_logistic_clamps_at_1e_20() -> None:
    built = build('type: "MultinomialLogisticLoss"', (2, 2), (2,))
    p, t = np.array([[0.25, 0.75], [0.0, 1.0]]), [0, 0]
    assert run(built, p, t)[0] == pytest.approx((math.log(4) - math.log(1e-20)) / 2, rel=1e-5)
    grad = gradients(built, p, t)[0]
    np.testing.assert_allclose(grad, np.array([[-2, 0], [-0.5e20, 0]]), rtol=1e-5)


@pytest.mark.parametrize("legacy", [False, True])
def test_contrastive(legacy: bool) -> None:
    a, b, alike = noise(6, 3), noise(6, 3, seed=9), np.array([1, 0, 0, 1, 0, 0])
    b[1] = a[1]  # distance 0
    fields = f"margin: 2 legacy_version: {str(legacy).lower()}"
    built = build(f'type: "ContrastiveLoss" contrastive_loss_param {{ {fields} }}', a.shape, b.shape, (6,))
    square = ((a - b) ** 2).sum(1)
    d = np.sqrt(square)
    apart = np.maximum(2 - square, 0) if legacy else np.maximum(2 - d, 0) ** 2
    assert run(built, a, b, alike)[0] == pytest.approx(np.where(alike, square, apart).sum() / 12, rel=1e-5)
    factor = np.where(square < 2, -1, 0) if legacy else -np.maximum(2 - d, 0) / (d + 1e-4)
    want = np.where(alike, 1, factor)[:, None] * (a - b) / 6
    grads = gradients(built, a, b, alike)
    np.testing.assert_allclose(grads[0], want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads[1], -want, rtol=1e-4, atol=1e-6)


def test_infogain_of_the_unit_matrix_is_softmax_loss() -> None:
    x, t = noise(4, 3), [0, 2, 1, 0]
    infogain = build('type: "InfogainLoss"', (4, 3), (4,), (1, 1, 3, 3), tops=2)
    plain = build('type: "SoftmaxWithLoss"', (4, 3), (4,), tops=2)
    for got, want in zip(run(infogain, x, t, np.eye(3)[None, None]), run(plain, x, t), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    got, want = gradients(infogain, x, t, np.eye(3)[None, None])[0], gradients(plain, x, t)[0]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_infogain_reads_its_matrix_from_a_file(tmp_path: Path) -> None:
    gains = noise(3, 3, seed=5)
    for size, name in ((3, "good"), (2, "small")):
        blob: Any = schema.BlobProto()
        blob.shape.dim.extend([1, 1, size, size])
        blob.data.extend(gains[:size, :size].flatten().tolist())
        (tmp_path / name).write_bytes(blob.SerializeToString())
    x, t = noise(4, 3), [0, 2, 1, 0]
    line = f'type: "InfogainLoss" infogain_loss_param {{ source: "{tmp_path}/%s" }}'
    from_bottom = run(build('type: "InfogainLoss"', (4, 3), (4,), (3, 3)), x, t, gains)
    np.testing.assert_allclose(run(build(line % "good", (4, 3), (4,)), x, t), from_bottom, rtol=1e-6)
    with pytest.raises(LayerError, match=r"small holds 4 values, not 3 x 3"):
        build(line % "small", (4, 3), (4,))
    with pytest.raises(WeightsError, match=r"cannot read .*none"):
        build(line % "none", (4, 3), (4,))


def test_accuracy_counts_ties_against_the_label() -> None:
    scores, labels = [[1, 1, 1], [3, 1, 3], [0, 5, 1]], [0, 1, 1]
    assert run(build('type: "Accuracy"', (3, 3), (3,)), scores, labels)[0] == pytest.approx(1 / 3)
    top2 = build('type: "Accuracy" accuracy_param { top_k: 2 }', (3, 3), (3,))
    assert run(top2, scores, labels)[0] == pytest.approx(1 / 3)
    top3 = build('type: "Accuracy" accuracy_param { top_k: 3 }', (3, 3), (3,))
    assert run(top3, scores, labels)[0] == 1


def test_accuracy_by_class_and_ignored_labels() -> None:
    built = build('type: "Accuracy" accuracy_param { ignore_label: 9 }', (5, 3), (5,), tops=2)
    scores = [[9, 0, 0], [9, 0, 0], [0, 9, 0], [0, 9, 0], [0, 0, 9]]
    share, by_class = run(built, scores, [0, 1, 1, 9, 0])
    assert share == 0.5
    np.testing.assert_allclose(by_class, [0.5, 0.5, 0])


def test_accuracy_of_all_ignored_is_zero() -> None:
    built = build('type: "Accuracy" accuracy_param { ignore_label: 9 }', (2, 3), (2,))
    assert run(built, np.zeros((2, 3)), [9, 9])[0] == 0


def test_a_diverged_net_has_no_accuracy() -> None:
    assert run(build('type: "Accuracy"', (2, 3), (2,)), np.full((2, 3), np.nan), [0, 1])[0] == 0


def test_accuracy_along_another_axis() -> None:
    built = build('type: "Accuracy" accuracy_param { axis: -1 }', (2, 3, 4), (2, 3))
    x = noise(2, 3, 4)
    t = x.argmax(2)
    t[0, 0] = (t[0, 0] + 1) % 4
    assert run(built, x, t)[0] == pytest.approx(5 / 6)


@pytest.mark.parametrize("max_val", [False, True])
def test_argmax_takes_the_last_of_equals_first(max_val: bool) -> None:
    x = np.array([[3.0, 7.0, 7.0, 1.0], [0, 0, 0, 0]])
    line = f'type: "ArgMax" argmax_param {{ top_k: 3 out_max_val: {str(max_val).lower()} }}'
    (got,) = run(build(line, (2, 4)), x)
    np.testing.assert_array_equal(got[:, 0], [[2, 1, 0], [3, 2, 1]])
    if max_val:
        np.testing.assert_array_equal(got[:, 1], [[7, 7, 3], [0, 0, 0]])
    (along,) = run(build(line[:-1] + "axis: 1 }", (2, 4)), x)
    np.testing.assert_array_equal(along, [[7, 7, 3], [0, 0, 0]] if max_val else [[2, 1, 0], [3, 2, 1]])


@pytest.mark.parametrize("fields", ["", "ignore_label: 2", "ignore_label: 2 normalization: FULL"])
def test_few_scores_and_many_give_one_loss_and_one_gradient(fields: str) -> None:
    built = build(f'type: "SoftmaxWithLoss" loss_param {{ {fields} }}', (64, 10), (64,))
    few = torch.randn(64, 10, generator=torch.Generator().manual_seed(3)) * 4
    labels = torch.arange(64.0) % 10
    many = torch.stack((few, few), 2)[:, :, 0]  # not contiguous: the way of many scores
    losses, slopes = [], []
    for scores in (few, many):
        assert built.module._small(scores, labels) is (scores is few)
        scores.requires_grad_()
        loss = built.module(scores, labels)
        (slope,) = torch.autograd.grad(loss, scores)
        losses.append(loss.detach())
        slopes.append(slope)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-5, atol=1e-8)
