"""DiLoCo: many local steps, then one outer step with Nesterov's momentum on what they changed.

    tau times    theta_x = theta_x - eta g_x(theta_x)       the solver's own rule, the inner optimiser
    then         Delta   = 1/N sum_x Q(theta - theta_x)     Q: --wire, with error feedback
                 m       = mu m + Delta
                 theta   = theta - nu (Delta + mu m)        nu 0.9, mu 0.6
                 theta_x = theta

The mean is taken through the box, as in sync: each writes Q(theta - theta_x) where the others read it, and
all make the same outer step. ``--dynamic`` gives a worker of speed v the H = floor(tau v / v_max) steps that
the fastest needs tau for, so that nobody waits (v: steps a second without the exchanges).

Streaming (--fragments P): the trained weights are cut into P parts of equal size, and every tau/P steps one
of them in turn is exchanged. With --overlap k its mean is taken k steps after the change was written, while
the worker goes on; it is then mixed in:

    theta_x = a theta_x + (1 - a) theta                     a 0.5 with an overlap, else 0

Asynchronous (--asynchronous), nobody waits: whoever has made its tau steps takes the job's lock, has the box
do the outer step on theta with Delayed Nesterov, which lets the momentum act once in B pushes
(--outer-buffer, by default one of each worker), and takes theta. m and D lie in the box, and are combined
there: what moves is Q(g) and theta.

    D = D + Q(g)                                            g = theta_fetched - theta_x
    every B-th push    m = mu m + D/B;  theta = theta - nu (mu m + Q(g)/B);  D = 0
    else               theta = theta - nu Q(g)/B

What the update rule does not touch is averaged as it is: with all, or by a step of 1/N. The inner rate is
the solver's times N^0.25, the effective batch of an outer step tau N batches. Asynchronous, nu is 0.7 and mu
0.5. The paper takes tau 500 with AdamW, nu 0.7 and mu 0.9, over hundreds of rounds; after ten or twenty, as
a job of Caffe's has them, 0.9 and 0.6 are farther. tau 100 is the default here, and int8.

Source: Douillard et al., DiLoCo, arXiv 2311.08105, Algorithm 1; Douillard et al., Streaming DiLoCo, arXiv
2501.18512 (fragments, overlap, merge; 4 bits there); Liu et al., Asynchronous Local-SGD Training for
Language Modeling, arXiv 2401.09135, with c = 0 and the authors' code's division by B (dynamic local steps,
Delayed Nesterov).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shmtrain.exchange.backups import ALL, NOTHING, FirstComers
from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks, Meeting
from shmtrain.exchange.narrow import Feedback, Narrow
from shmtrain.exchange.replica import Replica
from shmtrain.exchange.seats import ByteSeats
from shmtrain.exchange.staleness import Staleness
from shmtrain.group import Column
from smb.errors import NonFinite

if TYPE_CHECKING:
    from smb import Segment

MERGE = 0.5  # a with an overlap: Streaming DiLoCo, section 3


def open_exchange(meeting: Meeting) -> Exchange:
    return AsynchronousDiloco(meeting) if meeting.method.asynchronous else Diloco(meeting)


class _Pace:
    """How fast this worker is: microseconds of an inner step, the exchanges left out, in the job's table."""

    def __init__(self, meeting: Meeting, stats: ExchangeStats) -> None:
        self._crowd, self._stats = meeting.crowd, stats
        self._tau, self._dynamic = meeting.tau, meeting.method.dynamic
        self._begin()

    def _begin(self) -> None:
        self._since, self._stood = time.perf_counter(), self._stats.seconds

    def lap(self, steps: int) -> None:
        """After so many steps."""
        if steps and self._dynamic:
            seconds = time.perf_counter() - self._since - (self._stats.seconds - self._stood)
            pace = max(int(1e6 * seconds / steps), 1)
            self._crowd.progress.put(self._crowd.rank, Column.PACE, pace)
        self._begin()

    @property
    def steps(self) -> int:
        """Of a round: tau, or fewer for a slower one."""
        if not self._dynamic:
            return self._tau
        own, paces = self._paces()
        return max(self._tau * min(paces, default=0) // own, 1) if own else self._tau

    def workers(self, members: int) -> float:
        """How many as fast as this one the ``members`` are together."""
        own, paces = self._paces() if self._dynamic else (0, [])
        return sum(own / pace for pace in paces) if own and len(paces) == members else float(members)

    def _paces(self) -> tuple[int, list[int]]:
        """This worker's, and those known of all that have not gone."""
        rows = self._crowd.rows
        paces = [rows.pace(rank) for rank in range(self._crowd.world) if not rows.gone(rank)]
        return rows.pace(self._crowd.rank), [pace for pace in paces if pace]


class _Inner(Hooks, ABC):
    """Counts the inner steps and keeps theta as it was fetched."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting, self._local = meeting, meeting.local
        self._trained = meeting.vectors.trained
        self._base: F32 = self._local.copy()
        self._steps = 0  # since the last change was brought
        self._threads = meeting.threads
        self._feedback = Feedback(self._trained)
        self._pace = _Pace(meeting, self.stats)

    def center(self, out: F32) -> None:
        self._meeting.center.read(out)

    def _change(self, part: slice) -> F32:
        """theta - theta_x of a part. Raises NonFinite when that is no number: the others keep clear of it."""
        with np.errstate(all="ignore"):
            change = self._base[part] - self._local[part]
        if not np.isfinite(change).all():
            at = part.start + int(np.flatnonzero(~np.isfinite(change))[0])
            rank = self._meeting.crowd.rank
            raise NonFinite(f"the change of worker {rank} is NaN or Inf at element {at} of its weights")
        return change

    def kept(self) -> dict[str, F32]:
        """See algorithm_state."""
        return {"quantising error": self._feedback.owed}

    @abstractmethod
    def vectors(self) -> dict[str, F32]:
        """What a resumed worker goes on from, live."""

    def resume(self, steps: int) -> None:
        self._steps = steps % self._meeting.tau


@dataclass
class _Theta(Replica):
    """What the workers have in common, and hand to one that joins them. ``step`` counts rounds."""

    theta: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    momentum: F32 = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def arrays(self) -> list[F32]:
        return [self.theta, self.momentum]

    @property
    def count(self) -> int:
        """The inner rule's updates are the worker's own."""
        return 0

    @count.setter
    def count(self, count: int) -> None:
        """Nothing."""


class Diloco(_Inner):
    """All make the same outer step from the same mean; the first of them writes theta to the box."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        crowd, method = meeting.crowd, meeting.method
        self._parts = _parts(self._trained, self._local.size, method.fragments)
        self._narrow = [Narrow(method.wire, *self._sizes(part)) for part in self._parts]
        self._outer = _Theta(meeting.vectors, theta=self._base, momentum=np.zeros(self._trained, np.float32))
        most = max(narrow.nbytes for narrow in self._narrow)
        self._seats = ByteSeats(crowd, "outer", most, meeting.threads, self.stats)
        self._first = FirstComers(self._seats, self._outer, ALL)
        self._merge = np.float32(MERGE if method.overlap else 0.0)
        self._under_way = 0  # steps of the change that has been brought and whose mean is still to be taken
        self._members = float(meeting.crowd.rows.active)  # workers as fast as this one
        if crowd.joining:
            self._join()

    def _join(self) -> None:
        """theta and momentum at the end of a round, which ends without anything of this worker's."""
        self._first.join()
        np.copyto(self._local, self._base)
        nothing = np.zeros(self._narrow[self._turn].nbytes, np.uint8)
        if self._first.offer(nothing, NOTHING):
            self._land()

    @property
    def _turn(self) -> int:
        return self._outer.step % len(self._parts)

    def _sizes(self, part: slice) -> tuple[int, int]:
        """Of a part: how many are trained, how many travel as they are."""
        trained = min(part.stop, self._trained) - part.start
        return trained, part.stop - part.start - trained

    # The job's iterations --------------------------------------------------------------------------------

    @property
    def completed(self) -> int:
        """Exact when a round has ended, in between as the workers' speeds let expect."""
        return int(self._outer.done) + int((self._under_way + self._steps) * self._members)

    @property
    def upcoming(self) -> int | None:
        completed = self.completed
        return completed if completed < self._meeting.iterations else None

    # A round ---------------------------------------------------------------------------------------------

    def after_update(self, step: int) -> None:
        self._steps += 1
        overlap = self._meeting.method.overlap
        if self._under_way and self._steps >= min(overlap, self._due):
            self._land()
        if self._steps >= self._due:
            self._bring()
            if not overlap and self._under_way:
                self._land()

    @property
    def _due(self) -> int:
        """After how many steps the next part is brought: tau/P."""
        fragments, turn, steps = len(self._parts), self._turn, self._pace.steps
        return max((turn + 1) * steps // fragments - turn * steps // fragments, 1)

    def _bring(self) -> None:
        """Write the change of the part whose turn it is; who is too late for it takes theta instead."""
        turn = self._turn
        part, narrow = self._parts[turn], self._narrow[turn]
        self._pace.lap(self._steps)
        with self.stats.exchange():
            data = self._feedback.encode(narrow, self._change(part), slice(part.start, self._stop(part)))
            if self._first.offer(data, self._steps):
                self._under_way, self._steps = max(self._steps, 1), 0
            else:
                self.stats.dropped += 1
                self._first.take()
                self._take()

    def _stop(self, part: slice) -> int:
        return int(min(part.stop, self._trained))

    def _take(self) -> None:
        """theta is another's: go on from it."""
        np.copyto(self._local, self._base)
        self._under_way = self._steps = 0
        self._members = float(self._meeting.crowd.rows.active)

    def _land(self) -> None:
        """Take the mean of the part that was brought, and make the outer step with it."""
        turn = self._turn
        part = self._parts[turn]
        self._seats.narrow = self._narrow[turn]
        mean = np.empty(part.stop - part.start, np.float32)
        with self.stats.standing():
            members = self._first.collect(mean)
            self._outer.done += sum(self._first.work(members))
            with self.stats.part("ulw"):
                self._step(part, mean)
            self._outer.step += 1
            self._under_way, self._members = 0, self._pace.workers(len(members))
            self.stats.saw(0)
            if members[0] == self._meeting.crowd.rank:
                with self.stats.part("ugw", sent=mean.nbytes):
                    self._meeting.center.write(self._base[part], offset=part.start, threads=self._threads)

    def _step(self, part: slice, mean: F32) -> None:
        """The outer rule on one part, (n,) of its mean change."""
        method, stop = self._meeting.method, self._stop(part)
        mu, rate = np.float32(method.outer_momentum), np.float32(method.outer_lr)
        momentum = self._outer.momentum[part.start : stop]
        change = mean[: momentum.size]
        momentum *= mu
        momentum += change
        self._base[part.start : stop] -= rate * (change + mu * momentum)
        self._base[stop : part.stop] -= mean[momentum.size :]
        local = self._local[part]
        local *= self._merge
        local += (1 - self._merge) * self._base[part]

    def finish(self) -> None:
        """A round that is not full, of each part; who leaves the others does not wait for its mean."""
        if self._under_way:
            self._land()
        fragments = len(self._parts)
        if self._steps or (fragments > 1 and self._outer.step):
            for _ in range(1 if self._meeting.leaving() else fragments):
                self._bring()
                if self._under_way and not self._meeting.leaving():
                    self._land()
        self.stats.wired = self._feedback.told()
        self._meeting.joined()

    # What is kept ----------------------------------------------------------------------------------------

    def common(self) -> dict[str, F32 | Segment]:
        return {"outer momentum": self._outer.momentum}

    def vectors(self) -> dict[str, F32]:
        return {"base": self._base, "momentum": self._outer.momentum, "owed": self._feedback.owed}


def _parts(trained: int, n: int, fragments: int) -> list[slice]:
    """The vector in so many parts of equal size; what is not trained belongs to the last."""
    edges = [trained * i // fragments for i in range(fragments)] + [n]
    return [slice(start, stop) for start, stop in pairwise(edges)]


class AsynchronousDiloco(_Inner):
    """The outer step under the job's lock: theta, m and D lie in the box, as does what this worker adds."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        crowd = meeting.crowd
        self._momentum, self._gathered = self._vector("outer-momentum"), self._vector("outer-gathered")
        self._pushed = self._vector(f"outer-push/{crowd.rank}")
        self._pushes = crowd.box.counter(crowd.key("outer-steps"))
        self._policy = Staleness.of(meeting.method.staleness, crowd)
        self._narrow = Narrow(meeting.method.wire, self._trained)
        self._seen = self._pushes.value
        meeting.center.read(self._base)
        np.copyto(self._local, self._base)

    def _vector(self, name: str) -> Segment:
        crowd = self._meeting.crowd
        count = max(self._trained, 1)
        return crowd.box.create(crowd.key(name), count=count, lifetime="attached", or_attach=True)

    def after_update(self, step: int) -> None:
        self._steps += 1
        if self._steps >= self._pace.steps:
            self._end_round()

    def finish(self) -> None:
        if self._steps:
            self._end_round()
        self.stats.wired = self._feedback.told()
        self._meeting.joined()

    def common(self) -> dict[str, F32 | Segment]:
        return {"outer momentum": self._momentum, "gathered changes": self._gathered}

    def vectors(self) -> dict[str, F32]:
        return {"base": self._base, "owed": self._feedback.owed}

    def _end_round(self) -> None:
        self._pace.lap(self._steps)
        with self.stats.exchange():
            self._outer_step()
        self._steps = 0

    def _outer_step(self) -> None:
        crowd, center = self._meeting.crowd, self._meeting.center
        tail = self._write_change()
        with ExitStack() as held:
            with self.stats.part("wait"):
                self._policy.hold()
                held.enter_context(crowd.lock("outer"))
            staleness = max(self._pushes.value - self._seen, 0)
            weight = self._policy.weight(staleness)
            self.stats.saw(staleness)
            if weight > 0:
                with self.stats.part("ugw", sent=tail.nbytes):
                    self._combine(weight, tail)
            else:
                self.stats.dropped += 1
            self._seen = self._pushes.value
            with self.stats.part("rgw", received=self._base.nbytes):
                center.read(self._base, threads=self._threads)
        np.copyto(self._local, self._base)

    def _write_change(self) -> F32:
        """Q(g) to this worker's own segment; what no rule touches is returned, as change."""
        change = self._change(slice(0, self._local.size))
        g, tail = change[: self._trained], change[self._trained :]
        data = self._feedback.encode(self._narrow, g, slice(0, self._trained))
        wire = self._meeting.method.wire
        with self.stats.part("wwi", sent=data.nbytes):
            if wire != "float32" and self._pushed.transport in {"tcp", "rdma"}:
                self._pushed.fill(0.0)
                self._pushed.accumulate(g, threads=self._threads, wire=wire)
            elif g.size:
                self._pushed.write(g, threads=self._threads)
        return tail

    def _combine(self, weight: float, tail: F32) -> None:
        """The outer step, where theta, m and D lie."""
        method, center = self._meeting.method, self._meeting.center
        world = self._meeting.crowd.rows.active
        buffer, mu = method.outer_buffer or world, method.outer_momentum
        if self._trained:
            self._gathered.axpy(weight, self._pushed)
            center.axpy(-method.outer_lr * weight / buffer, self._pushed)
            if (self._pushes.add(1) + 1) % buffer == 0:
                self._momentum.scale(mu)
                self._momentum.axpy(1.0 / buffer, self._gathered)
                center.axpy(-method.outer_lr * mu, self._momentum)
                self._gathered.fill(0.0)
        if tail.size:
            center.accumulate(tail, -weight / world, offset=self._trained)
