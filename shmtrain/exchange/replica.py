"""One of several workers whose weights are the same: what it averages with them, and what it hands over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shmtrain.exchange.base import F32, Vectors


@dataclass
class Replica:
    """What a worker takes over from another one: its vectors, and where it stands."""

    vectors: Vectors
    step: int = 0
    done: int = 0

    @property
    def arrays(self) -> list[F32]:
        return [self.vectors.weights, *self.vectors.history]

    @property
    def count(self) -> int:
        return self.vectors.updates.count if self.vectors.updates else 0

    @count.setter
    def count(self, count: int) -> None:
        if self.vectors.updates:
            self.vectors.updates.count = count


def joined_vector(vectors: Vectors) -> F32:
    """Room for what synchronous workers average: the gradient's trained part, BatchNorm's accumulators."""
    return np.empty(vectors.trained + vectors.weights.size - vectors.statistics, np.float32)


def pack(vectors: Vectors, out: F32) -> None:
    """Gradient and accumulators into ``out`` of ``joined_vector``."""
    out[: vectors.trained] = vectors.gradient[: vectors.trained]
    out[vectors.trained :] = vectors.weights[vectors.statistics :]


def unpack(vectors: Vectors, mean: F32) -> None:
    """The other way round."""
    vectors.gradient[: vectors.trained] = mean[: vectors.trained]
    vectors.weights[vectors.statistics :] = mean[vectors.trained :]
