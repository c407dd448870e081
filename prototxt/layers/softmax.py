"""Softmax, SoftmaxWithLoss, Accuracy and ArgMax: scores over classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prototxt import _native
from prototxt.layers.common import Apply, axis_of, count, expect, like_bottom, shape_text
from prototxt.layers.labels import Labels, divisor, labels_for, normalisation
from prototxt.registry import Built, LayerSpec, Shape, layer

SMALL = 1 << 14  # scores up to which one native pass costs less than the calls of torch's operations
LARGEST_LOSS = 87.33654475055310898657  # -log(FLT_MIN): no probability counts as less


@layer("Softmax")
def softmax(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """e^x over its sum along ``axis``."""
    expect(spec, 1)
    axis = axis_of(spec, spec.softmax_param.axis, bottoms[0])
    return like_bottom(spec, bottoms, lambda x: torch.softmax(x, axis))


class _CrossEntropy(torch.autograd.Function):
    """sum of -log(max(p of the label, FLT_MIN)) / divisor, over scores (outer, classes[, inner]).

    The gradient is (p - [class is the label]) / divisor, where the loss is clamped too: torch's would be 0.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, index: Tensor, kept: Tensor | None, by: Tensor | float) -> Tensor:
        log_p = torch.log_softmax(scores, 1)
        losses = log_p.gather(1, index).neg_().clamp_(max=LARGEST_LOSS)
        if kept is not None:
            losses = torch.where(kept, losses, 0.0)
        ctx.save_for_backward(log_p, index, kept)
        ctx.by = by
        return losses.sum() / by

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor, None, None, None]:
        log_p, index, kept = ctx.saved_tensors
        gradient = log_p.exp()
        gradient.scatter_add_(1, index, gradient.new_full((), -1.0).expand_as(index))
        if kept is not None:
            gradient = torch.where(kept, gradient, 0.0)
        return gradient.mul_(seed / ctx.by), None, None, None


class _SmallCrossEntropy(torch.autograd.Function):
    """The same in one native pass, over (outer, classes) contiguous float32 on the CPU."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, layer: SoftmaxWithLoss) -> Tensor:
        gradient = torch.empty_like(scores)
        outer, classes = scores.shape
        ignore = layer.labels.ignore
        total, kept, bad = _native.softmax_loss(
            scores.data_ptr(), labels.data_ptr(), gradient.data_ptr(), outer, classes,
            ignore is not None, float(ignore or 0), LARGEST_LOSS,
        )  # fmt: skip
        if bad >= 0:
            layer.labels.read(labels, scores)  # says which label it is
        by = max(1, kept) if layer.mode == layer.p.VALID else divisor(layer.mode, layer.p, outer, outer, None)
        ctx.gradient, ctx.by = gradient, by
        return torch.tensor(total / by, dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient * (seed.item() / ctx.by), None, None  # a number: one operation, not three


class SoftmaxWithLoss(nn.Module):
    def __init__(self, labels: Labels, mode: int, probabilities: bool) -> None:
        super().__init__()
        self.labels, self.mode, self.probabilities = labels, mode, probabilities
        self.p = labels.spec.loss_param

    def forward(self, x: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores = x if x.dim() == 2 and self.labels.axis == 1 else self.labels.split(x)
        if not self.probabilities and self._small(scores, labels):
            return _SmallCrossEntropy.apply(scores, labels, self)  # type: ignore[no-any-return, no-untyped-call]
        targets = self.labels.read(labels, scores)
        outer, full = scores.shape[0], targets.index.numel()
        by = divisor(self.mode, self.p, outer, full, targets.kept)
        loss: Tensor = _CrossEntropy.apply(scores, targets.index, targets.kept, by)  # type: ignore[no-untyped-call]
        if not self.probabilities:
            return loss
        return loss, torch.softmax(x.detach(), self.labels.axis)

    def _small(self, scores: Tensor, labels: Tensor) -> bool:
        return (
            scores.dim() == 2
            and 0 < scores.numel() <= SMALL
            and labels.numel() == scores.shape[0]
            and scores.dtype == labels.dtype == torch.float32
            and scores.device.type == labels.device.type == "cpu"
            and scores.is_contiguous()
            and labels.is_contiguous()
        )


@layer("SoftmaxWithLoss", loss=True)
def softmax_with_loss(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The multinomial logistic loss of softmax(x), at most 87.3365 a label.

    bottom  scores with classes on softmax_param.axis; labels, as many as there are scores a class
    top     the loss (); a second one holds the probabilities, without a gradient
    """
    expect(spec, 2, (1, 2), automatic=True)
    labels = labels_for(spec, spec.softmax_param.axis, bottoms, spec.loss_param)
    probabilities = len(spec.top) == 2
    module = SoftmaxWithLoss(labels, normalisation(spec.loss_param, spec.loss_param.VALID), probabilities)
    tops: list[Shape] = [(), bottoms[0]] if probabilities else [()]
    return Built(module, tops, labels=frozenset({1}))


class Accuracy(nn.Module):
    """The share of labels among the top_k scores; a class with an equal score counts as better.

    So does every class when the label's score is NaN: a diverged net scores 0 (the original: 1).
    """

    def __init__(self, labels: Labels, top_k: int, by_class: bool) -> None:
        super().__init__()
        self.labels, self.top_k, self.by_class = labels, top_k, by_class

    @torch.no_grad()
    def forward(self, x: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores = self.labels.split(x)
        targets = self.labels.read(labels, scores)
        worse = (scores < scores.gather(1, targets.index)).sum(1, keepdim=True)
        right = scores.shape[1] - worse <= self.top_k
        kept = torch.ones_like(right) if targets.kept is None else targets.kept
        right &= kept
        share = right.sum() / kept.sum().clamp(min=1)
        if not self.by_class:
            return share.to(x.dtype)
        own = targets.index.flatten()
        hits, total = (
            x.new_zeros(scores.shape[1]).index_add_(0, own, mask.flatten().to(x.dtype))
            for mask in (right, kept)
        )
        return share.to(x.dtype), hits / total.clamp(min=1)


@layer("Accuracy")
def accuracy(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """How often the label is among the ``top_k`` best classes; no gradient.

    bottom  scores with classes on ``axis``; labels
    top     the accuracy (); a second one, that of each class, (classes,)
    """
    expect(spec, 2, (1, 2))
    p = spec.accuracy_param
    labels = labels_for(spec, p.axis, bottoms, p)
    classes = bottoms[0][labels.axis]
    if not 1 <= p.top_k <= classes:
        raise spec.error(f"top_k must be between 1 and the number of classes, {classes}, not {p.top_k}")
    by_class = len(spec.top) == 2
    tops: list[Shape] = [(), (classes,)] if by_class else [()]
    return Built(Accuracy(labels, p.top_k, by_class), tops, labels=frozenset({0, 1}))


@layer("ArgMax")
def arg_max(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """The places of the ``top_k`` greatest values, of equal ones the last first; no gradient.

    Without ``axis`` each record is one row and the top is (N, 1, top_k, 1..), or (N, 2, top_k, 1..) with the
    values behind the places when out_max_val; with it the axis shrinks to top_k and holds the values when
    out_max_val, the places otherwise.
    """
    expect(spec, 1)
    p = spec.argmax_param
    (bottom,) = bottoms
    along = p.HasField("axis")
    axis = axis_of(spec, p.axis, bottom) if along else 1
    length = bottom[axis] if along else count(bottom, 1)
    if not 1 <= p.top_k <= length:
        raise spec.error(
            f"top_k must be between 1 and {length}, the values of {shape_text(bottom)}, not {p.top_k}"
        )
    top_k, values_too = p.top_k, p.out_max_val

    def run(x: Tensor) -> Tensor:
        x = x.detach() if along else x.detach().flatten(1)
        values, places = x.flip(axis).sort(stable=True, dim=axis, descending=True)
        values = values.narrow(axis, 0, top_k)
        places = (x.shape[axis] - 1 - places.narrow(axis, 0, top_k)).to(x.dtype)
        if along:
            return values if values_too else places
        rows = torch.stack((places, values), 1) if values_too else places.unsqueeze(1)
        return rows.reshape(*rows.shape, *(1,) * (len(bottom) - 3))

    if along:
        top: Shape = (*bottom[:axis], top_k, *bottom[axis + 1 :])
    else:
        top = (bottom[0], 2 if values_too else 1, top_k, *(1,) * (len(bottom) - 3))
    return Built(Apply(run), [top], labels=frozenset({0}))
