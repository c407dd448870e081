"""Synchronous SGD by allreduce: what most systems do, and what the box is compared with.

    G   = 1/N sum_x G_x(W)                by torch.distributed's gloo, in buckets
    W   = W - eta G                       by the solver's rule, at every worker alike

What BatchNorm accumulates is averaged likewise. Buckets are summed while the next ones are filled. When a
worker dies the others form a new group and repeat the step without it.

The rate is that of N workers (--lr-rule), the effective batch N times a worker's own; a step counts N
iterations of the job.

Source: Goyal et al., Accurate, Large Minibatch SGD, 2017 (linear rule, warm-up); Li et al., PyTorch
Distributed, VLDB 2020 (buckets).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks, Meeting, Vectors
from shmtrain.exchange.gloo import Group
from shmtrain.exchange.replica import joined_vector
from shmtrain.exchange.replicas import Replicas

MIB = 1 << 20


def open_exchange(meeting: Meeting) -> Exchange:
    return Allreduce(meeting)


class Buckets:
    """The vectors of a group's workers averaged: gradient and BatchNorm's accumulators, and a few numbers."""

    def __init__(self, vectors: Vectors, mib: float, stats: ExchangeStats) -> None:
        self._vectors, self._stats = vectors, stats
        self._numbers = 4
        size = joined_vector(vectors).size
        self._buffer: Tensor = torch.zeros(size + self._numbers)
        self._array: F32 = self._buffer.numpy()
        per_bucket = max(int(mib * MIB / 4), 1)
        self._bounds = [(at, min(at + per_bucket, size)) for at in range(0, size, per_bucket)]
        gap = vectors.statistics - vectors.trained  # frozen weights, which are in no bucket
        self._gap, self._trained = gap, vectors.trained

    def average(self, group: Group, numbers: Sequence[float]) -> tuple[int, list[int]]:
        """Means over the members into the vectors; how many they are, and their sums of whole numbers.

        numbers  three of this member, below 2^20 so that float32 holds their sum: only one member's are not 0
        """
        members = len(group.members)
        ring = 2 * (members - 1) * self._array.nbytes // members  # what gloo's ring has each member send
        with self._stats.part("collective", sent=ring):
            return self._sum(group, numbers)

    def _sum(self, group: Group, numbers: Sequence[float]) -> tuple[int, list[int]]:
        tail = self._buffer[-self._numbers :]
        tail[:] = torch.tensor([1.0, *numbers])
        works = []
        for start, stop in self._bounds:
            self._fill(start, stop)
            works += group.allreduce([self._buffer[start:stop]])
        works += group.allreduce([tail])
        group.wait(works, "gradients")
        count, *sums = (round(float(value)) for value in tail)
        self._spread(np.float32(count))
        return count, sums

    def _fill(self, start: int, stop: int) -> None:
        middle = min(max(self._trained, start), stop)
        self._array[start:middle] = self._vectors.gradient[start:middle]
        self._array[middle:stop] = self._vectors.weights[middle + self._gap : stop + self._gap]

    def _spread(self, count: np.float32) -> None:
        np.divide(self._array[: self._trained], count, out=self._vectors.gradient[: self._trained])
        statistics = self._vectors.weights[self._vectors.statistics :]
        np.divide(self._array[self._trained : -self._numbers], count, out=statistics)


class Allreduce(Hooks):
    """Its center is every worker's own weights; the root writes them to the box."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting, crowd = meeting, meeting.crowd
        self._replicas = Replicas(crowd, meeting.vectors, "all", range(crowd.world))
        self._buckets = Buckets(meeting.vectors, meeting.method.bucket_mib, self.stats)
        self._count = self._joins = 0
        self._replicas.begin(self._upcoming)

    @property
    def upcoming(self) -> int | None:
        return self._replicas.upcoming

    @property
    def completed(self) -> int:
        return self._replicas.replica.done

    def gradients_ready(self, step: int) -> None:
        with self.stats.exchange():
            self._replicas.agree(self._average)

    def _average(self) -> None:
        joins = self._replicas.let_in()
        self._count, (*_, self._joins) = self._buckets.average(self._replicas.group, (0, 0, joins))

    def after_update(self, step: int) -> None:
        replicas = self._replicas
        if replicas.catch_up():
            return
        self.stats.saw(0)
        replicas.replica.done += self._count
        replicas.upcoming = self._upcoming()
        if replicas.group.is_root:
            with self.stats.standing(), self.stats.part("ugw", sent=self._meeting.local.nbytes):
                self._meeting.center.write(self._meeting.local, threads=self._meeting.threads)

        if self._joins:
            replicas.regroup()

    def _upcoming(self) -> int | None:
        done = self._replicas.replica.done
        return done if done < self._meeting.iterations else None

    def center(self, out: F32) -> None:
        np.copyto(out, self._meeting.local)

    def finish(self) -> None:
        """Who stops early leaves at once, so that the others need not wait for it."""
        if self.upcoming is not None:
            self.close()
        self._meeting.joined()

    def close(self) -> None:
        self._replicas.group.close()
