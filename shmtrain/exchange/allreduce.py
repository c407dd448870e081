"""Synchronous SGD by allreduce: what most systems do, and what the box is compared with.

    G   = 1/N sum_x G_x(W)                by torch.distributed's gloo, in buckets
    W   = W - eta G                       by the solver's rule, at every worker alike

What BatchNorm accumulates is averaged likewise. Buckets are summed while backward fills the next ones. When a
worker dies the others form a new group and repeat the step without it.

The rate is that of N workers (--lr-rule), the effective batch N times a worker's own; a step counts N
iterations of the job.

Source: Goyal et al., Accurate, Large Minibatch SGD, 2017 (linear rule, warm-up); Li et al., PyTorch
Distributed, VLDB 2020 (buckets).
"""

from __future__ import annotations

import numpy as np

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks, Meeting
from shmtrain.exchange.buckets import Buckets
from shmtrain.exchange.replicas import Replicas


def open_exchange(meeting: Meeting) -> Exchange:
    return Allreduce(meeting)


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

    def before_forward(self, step: int) -> None:
        self._buckets.begin(self._replicas.group)

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
