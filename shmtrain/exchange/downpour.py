"""Downpour SGD: workers fetch the center's weights, and push what they have learned. Of worker x:

    every n_fetch steps   W_x = W_g
    each step             G = G + G_x(W_x);  W_x = W_x - eta G_x(W_x)
    every n_push steps    push G;  G = 0

and at the center, by ``--server``:

    sgd      W_g = W_g - eta G
    adagrad  H = H + G^2;  W_g = W_g - gamma G / (sqrt(H) + 1e-8)      H lies in the box, beside the center,
                                                                       and the box makes the step in one pass

With ``sgd`` the worker pushes what its own rule made of G (the change of W_x): eta is the worker's rate
of that step, and a momentum or a weight decay of the solver acts as in Paine et al. With ``adagrad`` it
pushes the mean gradients, and clipping, weight decay and the learning-rate policy act on W_x between two
fetches alone; gamma is --server-rate, times lr_mult. Two pushes at once are made one after the other in each
chunk of H.

What the update rule does not touch (frozen weights, BatchNorm's accumulators) is pushed as change by both.

Source: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 and Algorithm 7.1 of its
appendix (n_fetch = n_push = 1 there); Paine et al., GPU Asynchronous SGD, 2013 (pushes the change).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks, Meeting
from shmtrain.exchange.staleness import Staleness

if TYPE_CHECKING:
    from smb import Segment

TINY = 1e-8  # keeps a parameter without gradient from 0/0


def open_exchange(meeting: Meeting) -> Exchange:
    return Adagrad(meeting) if meeting.method.server == "adagrad" else Downpour(meeting)


class Downpour(Hooks):
    """The center adds what it is given: server ``sgd``."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting = meeting
        self._center: Segment = meeting.center
        self._local: F32 = meeting.local
        self._base = self._local.copy()  # the weights that the change is counted from
        self._owed = np.zeros_like(self._local)
        self._policy = Staleness.of(meeting.method.staleness, meeting.crowd)
        self._version = self._center.version  # of the weights that are worked on, own pushes included
        self._steps = 0  # since the last push

    def before_forward(self, step: int) -> None:
        if step % self._meeting.method.n_fetch:
            return
        self._policy.hold()
        with self.stats.exchange():
            self._take_change()
            self._version = self._center.version
            with self.stats.part("rgw", received=self._local.nbytes):
                self._center.read(self._local, threads=self._meeting.threads)
            np.copyto(self._base, self._local)

    def after_update(self, step: int) -> None:
        self._steps += 1
        if self._steps == self._meeting.method.n_push:
            with self.stats.exchange():
                self._push()

    def center(self, out: F32) -> None:
        self._center.read(out)

    def finish(self) -> None:
        """Push what is left."""
        if self._steps:
            self._push()
        self._meeting.joined()

    def kept(self) -> dict[str, F32]:
        """See algorithm_state."""
        return {"changes not pushed": self._owed}

    def vectors(self) -> dict[str, F32]:
        """What a resumed worker goes on from, live."""
        return {"base": self._base, "owed": self._owed}

    def resume(self, steps: int) -> None:
        self._steps = steps % self._meeting.method.n_push

    def _take_change(self) -> None:
        with self.stats.part("ulw"), np.errstate(all="ignore"):  # what is no number is the box's to refuse
            self._owed += self._local - self._base
            np.copyto(self._base, self._local)

    def _push(self) -> None:
        self._take_change()
        staleness = max(self._center.version - self._version, 0)
        weight = self._policy.weight(staleness)
        self.stats.saw(staleness)
        if weight > 0:
            self._add(weight)
            self._version += 1
        else:
            self.stats.dropped += 1
        self._owed[:] = 0
        self._steps = 0

    def _add(self, weight: float) -> None:
        with self.stats.part("ugw", sent=self._owed.nbytes):
            self._center.accumulate(self._owed, weight, threads=self._meeting.threads)


class Adagrad(Downpour):
    """The center's step has a rate of its own for every parameter."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        crowd, self._trained = meeting.crowd, meeting.vectors.trained
        self._squares = crowd.box.create(
            crowd.key("squares"), count=max(self._trained, 1), lifetime="attached", or_attach=True
        )
        self._pushed = crowd.box.create(
            crowd.key(f"gradient/{crowd.rank}"), count=max(self._trained, 1), lifetime="owner"
        )
        self._sum = np.zeros(self._trained, np.float32)
        self._runs = _runs(meeting.method.server_rate, meeting.vectors.multipliers, self._trained)

    def gradients_ready(self, step: int) -> None:
        self._sum += self._meeting.vectors.gradient[: self._trained] / np.float32(
            self._meeting.vectors.passes
        )

    def _add(self, weight: float) -> None:
        rest = self._owed[self._trained :]
        with self.stats.part("ugw", sent=self._owed.nbytes):
            self._pushed.write(self._sum)
            for start, stop, rate in self._runs:
                self._center.adagrad(
                    self._squares, self._pushed, rate, scale=weight, epsilon=TINY, offset=start,
                    count=stop - start, counts=stop == self._trained and not rest.size,
                    threads=self._meeting.threads,
                )  # fmt: skip
            if rest.size:  # counts for all of the push
                self._center.accumulate(rest, offset=self._trained, threads=self._meeting.threads)

    def kept(self) -> dict[str, F32]:
        return {**super().kept(), "gradients not pushed": self._sum}

    def common(self) -> dict[str, F32 | Segment]:
        return {"squares": self._squares}

    def vectors(self) -> dict[str, F32]:
        return {**super().vectors(), "sum": self._sum}

    def _push(self) -> None:
        super()._push()
        self._sum[:] = 0


def _runs(rate: float, multipliers: F32 | None, count: int) -> list[tuple[int, int, float]]:
    """(start, stop, rate) of runs of parameters with one lr_mult."""
    if multipliers is None or not count:
        return [(0, count, rate)]
    borders = [0, *(np.flatnonzero(np.diff(multipliers)) + 1).tolist(), count]
    return [(start, stop, rate * float(multipliers[start])) for start, stop in pairwise(borders)]
