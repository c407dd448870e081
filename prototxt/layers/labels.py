"""Labels of predictions: how they are read, checked, ignored, and counted into a loss's divisor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prototxt.layers.common import axis_of, count, shape_text
from prototxt.registry import LayerSpec, Shape


@dataclass(frozen=True)
class Targets:
    """The labels of one forward.

    index  (outer, 1, inner) whole numbers in [0, classes); 0 where the label is ignored
    kept   (outer, 1, inner) bool, False where the label is ignored; None when nothing can be
    """

    index: Tensor
    kept: Tensor | None


@dataclass(frozen=True)
class Labels:
    """Reads labels for predictions whose classes lie on ``axis``."""

    spec: LayerSpec
    axis: int
    ignore: int | None

    def split(self, scores: Tensor) -> Tensor:
        """The scores as (outer, classes, inner), or (outer, classes) when inner is 1: a cheaper layout."""
        outer, classes, inner = self.extent(tuple(scores.shape))
        return scores.reshape(outer, classes) if inner == 1 else scores.reshape(outer, classes, inner)

    def extent(self, shape: Shape) -> tuple[int, int, int]:
        return count(shape, 0, self.axis), shape[self.axis], count(shape, self.axis + 1)

    def read(self, labels: Tensor, scores: Tensor) -> Targets:
        """The labels of ``scores`` (as ``split`` gives them), truncated to whole numbers as Caffe does.

        Raises LayerError for a wrong number of labels, and for one out of range: with its record.
        """
        shape = (scores.shape[0], 1, *scores.shape[2:])
        if labels.numel() != count(shape):
            raise self.spec.error(f"{labels.numel()} labels for {count(shape)} predictions")
        index, kept = labels.detach().reshape(shape).long(), None
        if self.ignore is not None:
            kept = index != self.ignore
            index = torch.where(kept, index, 0)
        if index.numel():
            low, high = index.aminmax()
            if low.item() < 0 or high.item() >= scores.shape[1]:  # items compare faster than tensors
                raise self.out_of_range(labels, index, scores.shape[1])
        return Targets(index, kept)

    def out_of_range(self, labels: Tensor, index: Tensor, classes: int) -> Exception:
        bad = int(((index < 0) | (index >= classes)).flatten().nonzero()[0])
        records = labels.shape[0] if labels.dim() else 1
        record, rest = divmod(bad, max(1, labels.numel() // records))
        place = f"record {record}" if labels.numel() == records else f"record {record}, position {rest}"
        value = float(labels.detach().flatten()[bad])
        ignored = "" if self.ignore is None else f" and ignore_label {self.ignore}"
        return self.spec.error(
            f"label {value:g} of {place} is out of range: allowed are 0..{classes - 1}{ignored}"
        )


def labels_for(spec: LayerSpec, axis: int, bottoms: list[Shape], ignoring: Any) -> Labels:
    """A reader for a layer with predictions and labels as its first two bottoms, their counts checked.

    ignoring  the parameter message that may hold ``ignore_label``
    """
    scores, labels = bottoms[:2]
    reader = Labels(
        spec,
        axis_of(spec, axis, scores),
        ignoring.ignore_label if ignoring is not None and ignoring.HasField("ignore_label") else None,
    )
    outer, _, inner = reader.extent(scores)
    if count(labels) != outer * inner:
        raise spec.error(
            f"{spec.bottom[1]} ({shape_text(labels)}) has {count(labels)} labels for the {outer * inner}"
            f" predictions in {spec.bottom[0]} ({shape_text(scores)}, classes on axis {reader.axis})"
        )
    return reader


def normalisation(p: Any, default: int) -> int:
    """loss_param's NormalizationMode, with the deprecated ``normalize`` where the mode is not given."""
    if p.HasField("normalization"):
        return int(p.normalization)
    if p.HasField("normalize"):
        return int(p.VALID if p.normalize else p.BATCH_SIZE)
    return default


def divisor(mode: int, p: Any, batch: int, full: int, kept: Tensor | None) -> Tensor | float:
    """What the summed loss is divided by; at least 1, so that a batch without labels gives 0 and no NaN."""
    if mode == p.VALID and kept is not None:
        return kept.sum().clamp(min=1)
    by_mode = {p.FULL: full, p.VALID: full, p.BATCH_SIZE: batch, p.NONE: 1}
    return float(max(1, by_mode[mode]))
