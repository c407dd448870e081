"""The vectors of a group's workers averaged in buckets, each of which is summed as soon as it is full.

Backward fills the gradient from the last layer to the first: buckets are begun in that order, at all workers
alike, while the layers before are still computed. What has not been begun when the gradients are ready is
begun then: where nobody says which parts are ready, all of it.

Source: Li et al., PyTorch Distributed, VLDB 2020, section 3.2 (buckets in reverse, begun from hooks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmtrain.exchange.base import F32, ExchangeStats, Vectors
from shmtrain.exchange.gloo import Group
from shmtrain.exchange.replica import joined_vector

MIB = 1 << 20
NUMBERS = 4  # that travel with the vectors: 1 of each member, and three more


class Buckets:
    """Gradient and BatchNorm's accumulators, and a few numbers."""

    def __init__(self, vectors: Vectors, mib: float, stats: ExchangeStats) -> None:
        self._vectors, self._stats = vectors, stats
        size = joined_vector(vectors).size
        self._buffer: Tensor = torch.zeros(size + NUMBERS)
        self._array: F32 = self._buffer.numpy()
        per_bucket = max(int(mib * MIB / 4), 1)
        trained = _cut(0, vectors.trained, per_bucket)[::-1]
        self._bounds = [*trained, *_cut(vectors.trained, size, per_bucket)]
        gap = vectors.statistics - vectors.trained  # frozen weights, which are in no bucket
        self._gap, self._trained = gap, vectors.trained
        self._missing = [0] * len(trained)  # floats of each that backward has not made yet
        self._works: list[Any] = []
        self._next = 0  # of the buckets, in their order
        self._begun: tuple[Group, int] | None = None  # the group, and its generation, that this step is for
        if vectors.when_ready is not None:
            vectors.when_ready(self._ready)

    def begin(self, group: Group) -> None:
        """Before backward: from now on what is ready goes to the others."""
        self._begun = group, group.generation
        self._works, self._next = [], 0
        self._missing = [stop - start for start, stop in self._bounds[: len(self._missing)]]

    def average(self, group: Group, numbers: Sequence[float]) -> tuple[int, list[int]]:
        """Means over the members into the vectors; how many they are, and their sums of whole numbers.

        numbers  three of this member, below 2^20 so that float32 holds their sum: only one member's are not 0
        """
        members = len(group.members)
        ring = 2 * (members - 1) * self._array.nbytes // members  # what gloo's ring has each member send
        with self._stats.part("collective", sent=ring):
            return self._sum(group, numbers)

    def _sum(self, group: Group, numbers: Sequence[float]) -> tuple[int, list[int]]:
        if self._begun != (group, group.generation):  # nothing was begun, or with others
            self.begin(group)
        try:
            tail = self._buffer[-NUMBERS:]
            tail[:] = torch.tensor([1.0, *numbers])
            while self._next < len(self._bounds):
                self._go(group)
            self._works += group.allreduce([tail])
            group.wait(self._works, "gradients")
        finally:
            self._begun, self._works = None, []
        count, *sums = (round(float(value)) for value in tail)
        self._spread(np.float32(count))
        return count, sums

    def _ready(self, start: int, stop: int) -> None:
        """Backward has made the gradient of weights start .. stop-1."""
        if self._begun is None:
            return
        group, generation = self._begun
        for i in range(self._next, len(self._missing)):
            low, high = self._bounds[i]
            self._missing[i] -= max(min(stop, high) - max(start, low), 0)
        while self._next < len(self._missing) and not self._missing[self._next]:
            if group.generation != generation or not self._try(group):
                self._begun = None  # it is noticed, and mended, when the gradients are ready
                return

    def _try(self, group: Group) -> bool:
        try:
            self._go(group)
        except RuntimeError:
            return False
        return True

    def _go(self, group: Group) -> None:
        """Begin the next bucket."""
        start, stop = self._bounds[self._next]
        middle = min(max(self._trained, start), stop)
        self._array[start:middle] = self._vectors.gradient[start:middle]
        self._array[middle:stop] = self._vectors.weights[middle + self._gap : stop + self._gap]
        self._works += group.allreduce([self._buffer[start:stop]])
        self._next += 1

    def _spread(self, count: np.float32) -> None:
        np.divide(self._array[: self._trained], count, out=self._vectors.gradient[: self._trained])
        statistics = self._vectors.weights[self._vectors.statistics :]
        np.divide(self._array[self._trained : -NUMBERS], count, out=statistics)


def _cut(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]
