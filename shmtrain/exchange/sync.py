"""Synchronous SGD through the box: one step of N workers is one step on N batches.

    G   = 1/N sum_x G_x(W)                the mean of the workers' gradients at the same weights
    W   = W - eta G                       by the solver's rule, at every worker alike

Each writes its gradient where the others read it, and waits for them with a limit: nobody hangs when one
dies, its part is left out. What BatchNorm accumulates is averaged likewise. With ``--backup-workers b``
the first N - b of N gradients make the step; who is later drops its own and takes up weights and history
as they are.

The rate is that of N workers (--lr-rule), the effective batch N - b times a worker's own; a step counts N
- b iterations of the job.

Source: Ahn et al., ShmCaffe patent US11487698 (synchronous mode); Chen, Pan, Monga, Bengio, Jozefowicz,
Revisiting Distributed Synchronous SGD, 2016 (backup workers).
"""

from __future__ import annotations

import numpy as np

from shmtrain.exchange.backups import ALL, FirstComers
from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks, Meeting
from shmtrain.exchange.replica import Replica, joined_vector, pack, unpack
from shmtrain.exchange.seats import Seats


def open_exchange(meeting: Meeting) -> Exchange:
    return Sync(meeting)


class Sync(Hooks):
    """Its center is every worker's own weights; the first of a step's members writes them to the box."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting, self._vectors = meeting, meeting.vectors
        self._mean = joined_vector(self._vectors)
        self._seats = Seats(meeting.crowd, "gradient", self._mean.size, meeting.threads, self.stats)
        self._replica = Replica(self._vectors)
        backups = meeting.method.backup_workers
        crowd = meeting.crowd
        need = (crowd.workers or crowd.world) - backups if backups else ALL
        self._first = FirstComers(self._seats, self._replica, need) if backups or crowd.elastic else None
        self._members: list[int] | None = None
        if self._first is not None and crowd.joining:
            self._first.join()

    @property
    def upcoming(self) -> int | None:
        return self._replica.done if self._replica.done < self._meeting.iterations else None

    @property
    def completed(self) -> int:
        return self._replica.done

    def gradients_ready(self, step: int) -> None:
        pack(self._vectors, self._mean)
        with self.stats.exchange():
            if self._first is None:
                self._members = self._seats.mean(self._replica.step, self._mean, self._mean)
            else:
                self._members = self._first.mean(self._mean, self._mean)
        if self._members is not None:
            unpack(self._vectors, self._mean)
            self.stats.saw(0)

    def after_update(self, step: int) -> None:
        if self._members is None:
            self.stats.dropped += 1
            assert self._first is not None
            self._first.take()
            return
        self._replica.step += 1
        self._replica.done += len(self._members)
        if self._members[0] == self._meeting.crowd.rank:
            with self.stats.standing(), self.stats.part("ugw", sent=self._meeting.local.nbytes):
                self._meeting.center.write(self._meeting.local, threads=self._meeting.threads)

    def center(self, out: F32) -> None:
        np.copyto(out, self._meeting.local)

    def finish(self) -> None:
        if self._first is not None:
            self._first.leave()
        self._meeting.joined()
