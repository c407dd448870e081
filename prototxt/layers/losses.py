"""Losses other than SoftmaxWithLoss: one scalar each, of loss_weight 1 unless the file says otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from prototxt.caffemodel import blob_array, read_message
from prototxt.layers.common import Apply, Function, count, expect, shape_text
from prototxt.layers.labels import divisor, labels_for, normalisation
from prototxt.registry import Built, LayerSpec, Shape, layer

LEAST = 1e-20  # probabilities below are taken as this one


def _loss(function: Function, *labels: int) -> Built:
    return Built(Apply(function), [()], labels=frozenset(labels))


def _same_batch(spec: LayerSpec, bottoms: list[Shape]) -> None:
    first, second = bottoms[:2]
    if first[:1] != second[:1]:
        raise spec.error(
            f"{spec.bottom[0]} ({shape_text(first)}) and {spec.bottom[1]} ({shape_text(second)})"
            " must have as many records"
        )


def _same_count(spec: LayerSpec, bottoms: list[Shape]) -> None:
    _same_batch(spec, bottoms)
    if count(bottoms[0]) != count(bottoms[1]):
        raise spec.error(
            f"{spec.bottom[0]} ({shape_text(bottoms[0])}) and {spec.bottom[1]} ({shape_text(bottoms[1])})"
            " must have as many values"
        )


def _records(x: Tensor) -> int:
    """What a sum over records is divided by: a batch without records, which Filter may leave, has loss 0."""
    return max(1, x.shape[0])


def _with_gradient_of(value: Tensor, carrier: Tensor) -> Tensor:
    """``value``, with the gradient of ``carrier``."""
    return value.detach() + (carrier - carrier.detach())


@layer("EuclideanLoss", loss=True)
def euclidean_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """sum of (a - b)^2 / (2 N); the gradient goes to both bottoms."""
    expect(spec, 2, 1, automatic=True)
    _same_count(spec, bottoms)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return (a - b.reshape(a.shape)).square().sum() / (2 * _records(a))

    return _loss(run)


@layer("SigmoidCrossEntropyLoss", loss=True)
def sigmoid_cross_entropy_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """sum of -t log s(x) - (1 - t) log(1 - s(x)); targets t may be any numbers. Divided by N by default."""
    expect(spec, 2, 1, automatic=True)
    _same_count(spec, bottoms)
    p = spec.loss_param
    mode = normalisation(p, p.BATCH_SIZE)
    ignore = p.ignore_label if p.HasField("ignore_label") else None

    def run(x: Tensor, t: Tensor) -> Tensor:
        t = t.detach().reshape(x.shape)
        losses = functional.binary_cross_entropy_with_logits(x, t, reduction="none")
        kept = None if ignore is None else t.long() != ignore
        if kept is not None:
            losses = torch.where(kept, losses, 0.0)
        return losses.sum() / divisor(mode, p, x.shape[0], x.numel(), kept)

    return _loss(run, 1)


@layer("HingeLoss", loss=True)
def hinge_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """sum of max(0, 1 - x) at the label and max(0, 1 + x) elsewhere, or of their squares (L2), over N."""
    expect(spec, 2, 1, automatic=True)
    _same_batch(spec, bottoms)
    p = spec.hinge_loss_param
    squared = p.norm == p.L2
    labels = labels_for(spec, 1, [(bottoms[0][0], count(bottoms[0], 1)), bottoms[1]], None)

    def run(x: Tensor, given: Tensor) -> Tensor:
        scores = x.flatten(1)
        index = labels.read(given, scores).index
        sign = torch.ones_like(scores).scatter_(1, index, -1.0)
        margins = torch.relu(1 + sign * scores)
        return (margins.square() if squared else margins).sum() / _records(x)

    return _loss(run, 1)


@layer("MultinomialLogisticLoss", loss=True)
def multinomial_logistic_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """-log(max(p of the label, 1e-20)) / N of given probabilities; the gradient is -1 / max(p, 1e-20)."""
    expect(spec, 2, 1, automatic=True)
    _same_batch(spec, bottoms)
    labels = labels_for(spec, 1, [(bottoms[0][0], count(bottoms[0], 1)), bottoms[1]], None)

    def run(p: Tensor, given: Tensor) -> Tensor:
        flat = p.flatten(1)
        chosen = flat.gather(1, labels.read(given, flat).index)
        safe = chosen.detach().clamp(min=LEAST)
        return -_with_gradient_of(safe.log(), chosen / safe).sum() / _records(p)

    return _loss(run, 1)


@layer("ContrastiveLoss", loss=True)
def contrastive_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """(s d^2 + (1 - s) max(margin - d, 0)^2) / (2 N), d the distance of a and b, s whether they are alike.

    legacy_version takes max(margin - d^2, 0). The gradient of the distance divides by d + 1e-4.
    """
    expect(spec, 3, 1, automatic=True)
    a, b, alike = bottoms
    if len(a) < 2 or count(a, 2) != 1 or (count(b), b[:1]) != (count(a), a[:1]):
        raise spec.error(f"needs two bottoms of N x C, not {shape_text(a)} and {shape_text(b)}")
    if count(alike) != a[0]:
        raise spec.error(
            f"{spec.bottom[2]} ({shape_text(alike)}) must hold one value for each of {a[0]} pairs"
        )
    p = spec.contrastive_loss_param
    margin, legacy = p.margin, p.legacy_version

    def run(x: Tensor, y: Tensor, similar: Tensor) -> Tensor:
        square = (x - y.reshape(x.shape)).flatten(1).square().sum(1)
        same = similar.detach().reshape(-1).long() != 0
        with torch.no_grad():
            distance = square.sqrt()
            left = (margin - (square if legacy else distance)).clamp(min=0)
            losses = torch.where(same, square, left if legacy else left * left)
            slope = -(left > 0).to(x.dtype) if legacy else -left / (distance + 1e-4)
            slope = torch.where(same, 1.0, slope)
        return _with_gradient_of(losses.sum(), (slope * square).sum()) / (2 * _records(x))

    return _loss(run, 2)


@layer("InfogainLoss", loss=True)
def infogain_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """-sum over classes of H[label, class] log(max(p, 1e-20)), p = softmax(x).

    bottom  scores with classes on infogain_loss_param.axis; labels; H (classes x classes) unless the file
            ``source`` holds it. top  the loss (); a second one holds the probabilities
    """
    expect(spec, (2, 3), (1, 2), automatic=True)
    p, q = spec.loss_param, spec.infogain_loss_param
    if p.HasField("normalize"):
        raise spec.error("InfogainLoss takes normalization, not the old normalize")
    labels = labels_for(spec, q.axis, bottoms, p)
    classes = bottoms[0][labels.axis]
    matrix = _matrix_from_file(spec, classes) if len(bottoms) == 2 else None
    if matrix is None and count(bottoms[2]) != classes**2:
        raise spec.error(f"{spec.bottom[2]} ({shape_text(bottoms[2])}) must be {classes} x {classes}")
    mode = normalisation(p, p.VALID)
    probabilities = len(spec.top) == 2

    def run(x: Tensor, given: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores = labels.split(x)
        targets = labels.read(given, scores)
        gains = (rest[0].detach() if matrix is None else matrix.to(x)).reshape(classes, classes)
        log_p = torch.log_softmax(scores, 1)
        clamped = _with_gradient_of(log_p.detach().clamp(min=math.log(LEAST)), log_p)
        weights = gains[targets.index.squeeze(1)].movedim(-1, 1)
        losses = -(weights * clamped).sum(1, keepdim=True)
        if targets.kept is not None:
            losses = torch.where(targets.kept, losses, 0.0)
        loss = losses.sum() / divisor(mode, p, scores.shape[0], targets.index.numel(), targets.kept)
        return (loss, torch.softmax(x.detach(), labels.axis)) if probabilities else loss

    tops: list[Shape] = [(), bottoms[0]] if probabilities else [()]
    return Built(Apply(run), tops, labels=frozenset({1, 2}))


def _matrix_from_file(spec: LayerSpec, classes: int) -> Tensor:
    q = spec.infogain_loss_param
    if not q.HasField("source"):
        raise spec.error("infogain_loss_param needs source, or a third bottom")
    values = blob_array(read_message(q.source, "BlobProto"))
    if values.size != classes**2:
        raise spec.error(f"{q.source} holds {values.size} values, not {classes} x {classes}")
    return torch.tensor(values, device="cpu")
