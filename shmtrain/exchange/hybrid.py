"""HSGD, ShmCaffe-H: synchronous inside a group, asynchronous between groups. S4xA2 is two groups of four.

Inside a group (--group-size workers, neighbours by rank; or those of one machine), at every step:

    G   = 1/S sum_x G_x(W)                by torch.distributed's gloo
    W   = W - eta G                       by the solver's rule, at every worker of the group alike

Every tau steps, before the forward pass, the group's root exchanges with the center and sends what it has
then:

    d   = alpha (W - W_g);  W = W - d;  W_g = W_g + d;  W to all of the group

alpha = beta / (number of groups) by default. A group's step counts S iterations of the job; the root claims
them for its group from the job's counter. A root that dies is followed by the next rank of its group.

Source: Ahn et al., ShmCaffe, ICDCS 2018 (HSGD).
"""

from __future__ import annotations

import torch

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Meeting
from shmtrain.exchange.buckets import Buckets
from shmtrain.exchange.elastic import Move, carried
from shmtrain.exchange.replicas import Replicas

BASE = 1 << 20  # two numbers below it carry an iteration: float32 holds whole numbers to 2^24


def open_exchange(meeting: Meeting) -> Exchange:
    return Hybrid(meeting)


def group_of(rank: int, size: int, world: int) -> range:
    """The ranks of a worker's group; the last group may be smaller."""
    first = rank // size * size
    return range(first, min(first + size, world))


class Hybrid:
    """Two collectives a step, at places 2t and 2t + 1: the root's weights, and the gradients."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting, crowd = meeting, meeting.crowd
        ranks = meeting.group or group_of(crowd.rank, meeting.method.group_size, crowd.world)
        self._replicas = Replicas(crowd, meeting.vectors, f"group {ranks[0]}".replace(" ", "-"), ranks)
        self._buckets = Buckets(meeting.vectors, meeting.method.bucket_mib, self.stats)
        self._local = torch.from_numpy(meeting.local)
        self._move = Move.of(meeting, self.stats)
        self._tickets = crowd.box.counter(crowd.key("claimed-by-groups"))
        self._moved = self._claimed = -1  # the places that the root has done its part for
        self._next: int | None = None
        self._joins = 0
        self._pending = False
        self._replicas.begin(self._claim)

    @property
    def upcoming(self) -> int | None:
        return self._replicas.upcoming

    @property
    def completed(self) -> int:
        return self._meeting.crowd.rows.total

    def before_forward(self, step: int) -> None:
        replicas = self._replicas
        if replicas.place % 2:
            return  # caught up with others that are past it
        if replicas.place // 2 % self._meeting.tau:
            replicas.skip()
            self._begin()
            return
        with self.stats.exchange():
            if not replicas.agree(self._exchange):
                replicas.catch_up()
        self._pending = False
        self._begin()

    def _begin(self) -> None:
        """Before backward, where the next place is that of the gradients."""
        if self._replicas.place % 2:
            self._buckets.begin(self._replicas.group)

    def _exchange(self) -> None:
        group, local = self._replicas.group, self._meeting.local
        if group.is_root and self._moved != self._replicas.place:
            self._move(local)
            self._moved = self._replicas.place
        with self.stats.part("collective", sent=(len(group.members) - 1) * local.nbytes * group.is_root):
            group.broadcast(self._local)

    def gradients_ready(self, step: int) -> None:
        if self._replicas.place % 2:
            with self.stats.exchange():
                self._replicas.agree(self._average)

    def _average(self) -> None:
        group = self._replicas.group
        if group.is_root and self._claimed != self._replicas.place:
            self._next = self._claim()
            self._claimed = self._replicas.place
        coming = 0 if self._next is None or not group.is_root else self._next + 1
        joins = self._replicas.let_in()
        _, (high, low, self._joins) = self._buckets.average(group, (*divmod(coming, BASE), joins))
        coming = high * BASE + low
        self._next = coming - 1 if coming else None

    def _claim(self) -> int | None:
        """The root takes as many of the job's iterations as its group has members."""
        first = self._tickets.add(len(self._replicas.group.members))
        return first if first < self._meeting.iterations else None

    def after_update(self, step: int) -> None:
        if not self._replicas.catch_up():
            self._replicas.upcoming = self._next
            self._pending = True
            if self._joins:
                self._replicas.regroup()

    def center(self, out: F32) -> None:
        self._meeting.center.read(out)

    def finish(self) -> None:
        """The root brings what its group has learned since the last exchange."""
        stopped = self.upcoming is not None
        if stopped:
            self.close()
        if self._pending and self._replicas.group.is_root:
            self._move(self._meeting.local)
        self.stats.wired = carried(self._meeting.center)
        self._meeting.joined()

    def close(self) -> None:
        self._replicas.group.close()
