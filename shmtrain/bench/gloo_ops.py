"""The synchronous sum of the same bytes by torch.distributed's gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shmtrain.bench.job import F32, pieces
from shmtrain.bench.ways import Way

PIECE = 1 << 20  # elements


class Gloo(Way):
    """Allreduce in place: whole, or one piece after another."""

    def __init__(self, mine: F32, variant: str) -> None:
        self.weights, self.tensor = mine, torch.from_numpy(mine)
        self.parts = pieces(len(mine), PIECE if variant == "pieces-4M" else max(len(mine), 1))

    @property
    def mine(self) -> F32:
        return self.weights

    def exchange(self) -> None:
        for part in self.parts:
            dist.all_reduce(self.tensor[part])
