"""All learnable parameters of a net in one flat float32 vector, and their gradients in another.

The vector has three regions: trained parameters, frozen ones (lr_mult 0), BatchNorm's accumulators; inside a
region the order and the layout of a parameter are the original's. Elastic and plain averaging may touch the
whole vector (the accumulators are linear in what they sum); the update rule, weight decay and clipping
touch the first region only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from prototxt.net import Net
    from prototxt.registry import Learnable

F32 = npt.NDArray[np.float32]
LAYOUT_VERSION = 1  # of the vector's order; part of the fingerprint


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the vector. ``position`` is its place in the original's order."""

    layer: str
    index: int
    position: int
    shape: tuple[int, ...]
    start: int
    stop: int
    lr_mult: float
    decay_mult: float

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Run:
    """Neighbouring trained parameters with equal multipliers: one call of the update rule."""

    slice: slice
    lr_mult: float
    decay_mult: float
    weights: Tensor
    gradient: Tensor


class Params:
    """The flat vectors of one net; from here on the net's parameters are views of them.

    vector     (n,) float32, weights          trained_vector    (trained,), the first region of it
    gradient   (n,) float32, accumulated      trained_gradient  likewise; zero outside the first region
    array      the vector as numpy, same memory
    slots      one for each parameter, in the vector's order
    n, trained, frozen_stop  lengths: all, the first region, the first two
    """

    def __init__(self, net: Net) -> None:
        ordered = _in_regions(net.learnable)
        counts = [learnable.param.numel() for _, learnable in ordered]
        self.n = sum(counts)
        self.vector = torch.empty(self.n, dtype=torch.float32)
        self.gradient = torch.zeros(self.n, dtype=torch.float32)
        self.slots = tuple(_slots(ordered, counts))
        self.trained = sum(c for (_, p), c in zip(ordered, counts, strict=True) if _region(p) == 0)
        self.frozen_stop = sum(c for (_, p), c in zip(ordered, counts, strict=True) if _region(p) < 2)
        self.trained_vector = self.vector[: self.trained]
        self.trained_gradient = self.gradient[: self.trained]
        self.array: F32 = self.vector.numpy()
        for slot, (_, learnable) in zip(self.slots, ordered, strict=True):
            weights, gradient = self.views(slot)
            weights.copy_(learnable.param.detach())
            net.set_param(slot.layer, slot.index, weights, gradient)
        self.runs = tuple(self._merge_runs())

    def views(self, slot: Slot) -> tuple[Tensor, Tensor]:
        """A parameter's weights and gradient, in its own shape."""
        return self.vector[slot.slice].view(slot.shape), self.gradient[slot.slice].view(slot.shape)

    def clear_gradient(self) -> None:
        self.gradient.zero_()

    def gradient_norm(self) -> float:
        """L2 norm of all accumulated gradients."""
        return float(torch.linalg.vector_norm(self.gradient))

    def in_file_order(self) -> list[Slot]:
        """The slots as a state file lists them: the original's order of learnable parameters."""
        return sorted(self.slots, key=lambda slot: slot.position)

    @contextmanager
    def holding(self, weights: F32) -> Iterator[None]:
        """Let the net hold ``weights``, (n,), for a while: the center when it is saved by this worker."""
        own = self.vector.clone()
        self.vector.copy_(torch.from_numpy(weights))
        try:
            yield
        finally:
            self.vector.copy_(own)

    def fingerprint(self) -> bytes:
        """What another worker's vector must agree on: version, layers, shapes, order, regions.

        Short text with a digest, so that two of them can be shown side by side when they differ.
        """
        lines = "\n".join(f"{s.layer}/{s.index} {s.shape} {s.start}" for s in self.slots)
        digest = hashlib.sha256(f"{lines}\n{self.trained} {self.frozen_stop}".encode()).hexdigest()
        return (
            f"shmtrain {LAYOUT_VERSION}: {len(self.slots)} parameters, {self.n} floats,"
            f" {self.trained} trained, sha256 {digest}"
        ).encode()

    def _merge_runs(self) -> Iterator[Run]:
        bounds: list[tuple[int, int, float, float]] = []
        for slot in self.slots:
            if slot.start >= self.trained:
                break
            if bounds and bounds[-1][2:] == (slot.lr_mult, slot.decay_mult):
                bounds[-1] = (bounds[-1][0], slot.stop, *bounds[-1][2:])
            else:
                bounds.append((slot.start, slot.stop, slot.lr_mult, slot.decay_mult))
        for start, stop, lr_mult, decay_mult in bounds:
            part = slice(start, stop)
            yield Run(part, lr_mult, decay_mult, self.vector[part], self.gradient[part])


def _region(learnable: Learnable) -> int:
    if learnable.statistics:
        return 2
    return 1 if learnable.lr_mult == 0 else 0


def _in_regions(learnables: Iterable[Learnable]) -> list[tuple[int, Learnable]]:
    """(place in the original's order, parameter), sorted by region; stable inside a region."""
    return sorted(enumerate(learnables), key=lambda pair: _region(pair[1]))


def _slots(ordered: Sequence[tuple[int, Learnable]], counts: Sequence[int]) -> Iterator[Slot]:
    start = 0
    for (position, p), count in zip(ordered, counts, strict=True):
        shape = tuple(p.param.shape)
        yield Slot(p.layer, p.index, position, shape, start, start + count, p.lr_mult, p.decay_mult)
        start += count
