"""DiLoCo: many local steps, then one outer step with Nesterov's momentum on what they changed.

    tau times    theta_x = theta_x - eta g_x(theta_x)       the solver's own rule, the inner optimiser
    then         Delta   = 1/N sum_x (theta - theta_x)
                 m       = mu m + Delta
                 theta   = theta - nu (Delta + mu m)        nu 0.7, mu 0.9
                 theta_x = theta

The mean is taken through the box, as in sync; theta and m lie there. Asynchronous (--asynchronous),
nobody waits: whoever has made its tau steps takes the job's lock, does the outer step on theta with
Delayed Nesterov, which lets the momentum act once in B pushes (--outer-buffer, by default one of each
worker), and takes theta:

    D = D + g                                               g = theta_fetched - theta_x
    every B-th push    m = mu m + D/B;  theta = theta - nu (mu m + g/B);  D = 0
    else               theta = theta - nu g/B

What the update rule does not touch is averaged: with all, or by a step of 1/N. The inner rate is the
solver's, the effective batch of an outer step tau N batches. Asynchronous, mu is 0.5. The paper takes tau
500 with AdamW; 50 is the default here.

Source: Douillard et al., DiLoCo, arXiv 2311.08105, Algorithm 1; Liu et al., Asynchronous Local-SGD
Training for Language Modeling, arXiv 2401.09135, with c = 0 and the authors' code's division by B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks, Meeting
from shmtrain.exchange.seats import Seats
from shmtrain.exchange.staleness import Staleness

if TYPE_CHECKING:
    from smb import Segment


def open_exchange(meeting: Meeting) -> Exchange:
    return AsynchronousDiloco(meeting) if meeting.method.asynchronous else Diloco(meeting)


class _Inner(Hooks, ABC):
    """Counts the inner steps. A round ends after tau of them, and at the end of the training."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting, self._local = meeting, meeting.local
        self._trained = meeting.vectors.trained
        self._base: F32 = self._local.copy()  # theta as fetched
        self._steps = 0  # of this round
        self._threads = meeting.threads

    def after_update(self, step: int) -> None:
        self._steps += 1
        if self._steps == self._meeting.tau:
            self._end_round()

    def finish(self) -> None:
        if self._steps:
            self._end_round()
        self._meeting.joined()

    def vectors(self) -> dict[str, F32]:
        """What a resumed worker goes on from, live."""
        return {"base": self._base}

    def resume(self, steps: int) -> None:
        self._steps = steps % self._meeting.tau

    def _end_round(self) -> None:
        with self.stats.exchange():
            self._outer_step()
        self._steps = 0

    @abstractmethod
    def _outer_step(self) -> None:
        """Bring the round's change to the center."""

    def _outer(self, name: str) -> Segment:
        """A vector of the outer rule, in the box."""
        crowd = self._meeting.crowd
        count = max(self._trained, 1)
        return crowd.box.create(crowd.key(name), count=count, lifetime="attached", or_attach=True)


class Diloco(_Inner):
    """All make the same outer step from the same mean; the first of them writes theta and m to the box."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self._momentum_in_box = self._outer("outer-momentum")
        self._momentum: F32 = np.asarray(self._momentum_in_box.read())[: self._trained]
        self._seats = Seats(meeting.crowd, "outer", self._local.size, meeting.threads)
        self._round = self.completed = 0
        self._members = meeting.crowd.world

    @property
    def upcoming(self) -> int | None:
        return self.completed if self.completed < self._meeting.iterations else None

    def after_update(self, step: int) -> None:
        self.completed += self._members
        super().after_update(step)

    def vectors(self) -> dict[str, F32]:
        return {**super().vectors(), "momentum": self._momentum}

    def center(self, out: F32) -> None:
        self._meeting.center.read(out)

    def _outer_step(self) -> None:
        method, trained = self._meeting.method, self._trained
        change = self._base - self._local
        members = self._seats.mean(self._round, change, change)
        self._momentum *= np.float32(method.outer_momentum)
        self._momentum += change[:trained]
        np.subtract(self._base[trained:], change[trained:], out=self._base[trained:])
        step = change[:trained] + np.float32(method.outer_momentum) * self._momentum
        self._base[:trained] -= np.float32(method.outer_lr) * step
        np.copyto(self._local, self._base)
        self._round += 1
        self._members = len(members)
        self.stats.saw(0)
        if members[0] == self._meeting.crowd.rank:
            self._momentum_in_box.write(self._momentum)
            self._meeting.center.write(self._base, threads=self._threads)


class AsynchronousDiloco(_Inner):
    """The outer step under the job's lock: theta, m and D lie in the box."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        crowd = meeting.crowd
        self._momentum, self._gathered = self._outer("outer-momentum"), self._outer("outer-gathered")
        self._pushes = crowd.box.counter(crowd.key("outer-steps"))
        self._policy = Staleness.of(meeting.method.staleness, crowd)
        self._version = meeting.center.version

    def center(self, out: F32) -> None:
        self._meeting.center.read(out)

    def _outer_step(self) -> None:
        crowd, center = self._meeting.crowd, self._meeting.center
        self._policy.hold()
        with crowd.lock("outer"):
            staleness = max(center.version - self._version, 0)
            weight = self._policy.weight(staleness)
            self.stats.saw(staleness)
            if weight > 0:
                center.accumulate(self._step(weight), threads=self._threads)
            else:
                self.stats.dropped += 1
            self._version = center.version
            center.read(self._base, threads=self._threads)
        np.copyto(self._local, self._base)

    def _step(self, weight: float) -> F32:
        """What theta is owed, (n,) float32; m and D go on in the box."""
        method, trained = self._meeting.method, self._trained
        world = self._meeting.crowd.world
        buffer = method.outer_buffer or world
        owed = self._local - self._base
        owed[trained:] *= np.float32(weight / world)
        g = -np.float32(weight) * owed[:trained]
        step = g / np.float32(buffer)
        gathered = np.asarray(self._gathered.read())[:trained] + g
        if (self._pushes.add(1) + 1) % buffer == 0:
            momentum = np.asarray(self._momentum.read())[:trained]
            momentum = np.float32(method.outer_momentum) * momentum + gathered / np.float32(buffer)
            step += np.float32(method.outer_momentum) * momentum
            self._momentum.write(momentum)
            gathered[:] = 0
        self._gathered.write(gathered)
        owed[:trained] = -np.float32(method.outer_lr) * step
        return owed
