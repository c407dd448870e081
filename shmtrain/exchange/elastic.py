"""The elastic move of a worker and the center: what seasgd, easgd, eamsgd and hybrid have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from shmtrain.exchange.base import F32, Alpha, ExchangeStats, Hooks, Meeting
from shmtrain.exchange.staleness import Staleness

if TYPE_CHECKING:
    from smb import Segment


def elastic_pull(local: F32, center: F32, alpha: float, out: F32) -> None:
    """Move ``local`` towards ``center``: x <- x - d.

    local   (n,) float32, changed in place: x <- x - d, with d = alpha (x - c)
    center  (n,) float32, a snapshot c of the center; may be stale
    out     (n,) float32, receives d; x + c is unchanged once d is added to the center
    """
    with np.errstate(all="ignore"):  # values that are no numbers are the box's to refuse
        np.subtract(local, center, out=out)
        np.multiply(out, np.float32(alpha), out=out)
        np.subtract(local, out, out=local)


def carried(center: Segment) -> str:
    """What the wire has carried so far, in words; nothing where the memory is mapped."""
    told = center.wire_stats
    if told is None:
        return ""
    text = f", {told.bytes_sent / 2**20:.1f} MiB sent and {told.bytes_received / 2**20:.1f} received"
    if told.squared_sum:
        text += f", quantising error {(told.squared_error / told.squared_sum) ** 0.5:.2g} of the increments"
    return text


class Move:
    """d = alpha (x - c); x <- x - d; c <- c + d, chunk by chunk, each chunk under its lock.

    d is computed from the c that it is added to, so no difference is ever stale. A policy against staleness
    makes alpha smaller; where it makes it 0, x still moves, and the center keeps what it has.
    """

    def __init__(
        self,
        center: Segment,
        alpha: float | Alpha,
        stats: ExchangeStats,
        *,
        threads: int = 1,
        policy: Staleness | None = None,
        wire: str = "float32",
    ) -> None:
        self._center, self._stats, self._threads = center, stats, threads
        self._wire = wire
        self._alpha: Alpha = alpha if callable(alpha) else lambda: alpha
        self._policy = policy or Staleness()
        self._seen = center.version
        self._carried = (0, 0)  # bytes sent and received so far

    @classmethod
    def of(cls, meeting: Meeting, stats: ExchangeStats) -> Move:
        policy = Staleness.of(meeting.method.staleness, meeting.crowd)
        wire = meeting.method.wire
        return cls(meeting.center, meeting.alpha, stats, threads=meeting.threads, policy=policy, wire=wire)

    def __call__(self, local: F32) -> None:
        """Move ``local``, (n,) float32, and the center."""
        self._policy.hold()
        weight = self._policy.weight(max(self._center.version - self._seen, 0))
        if weight > 0:
            alpha = self._alpha() * weight
            with self._stats.part("exchange"):
                self._seen = self._center.exchange(local, alpha, threads=self._threads, wire=self._wire)
            self._count(local.nbytes)
            self._stats.saw(self._center.staleness)
        else:
            self._follow(local)

    def _count(self, nbytes: int) -> None:
        """What the exchange has moved: the vector both ways, or what a narrow wire type made of it."""
        sent, received = self._carried
        if self._wire != "float32" and (told := self._center.wire_stats) is not None:
            self._carried = (told.bytes_sent, told.bytes_received)
        else:
            self._carried = (sent + nbytes, received + nbytes)
        self._stats.sent += self._carried[0] - sent
        self._stats.received += self._carried[1] - received

    def _follow(self, local: F32) -> None:
        version = self._center.version
        self._stats.dropped += 1
        self._stats.saw(version - self._seen)
        self._seen = version
        with self._stats.part("rgw", received=local.nbytes):
            read = np.asarray(self._center.read())
        with self._stats.part("ulw"):
            elastic_pull(local, read, self._alpha(), np.empty_like(local))


class Spring(Hooks, ABC):
    """When a worker meets the center: every tau steps, and once more at its end. How is the subclass's."""

    def __init__(
        self, center: Segment, local: F32, tau: int, joined: Callable[[], None] | None = None
    ) -> None:
        self.stats = ExchangeStats()
        self._center, self._local, self._tau = center, local, tau
        self._joined = joined
        self._pending = False

    def after_update(self, step: int) -> None:
        self._pending = True  # the center has not seen this update

    def center(self, out: F32) -> None:
        self._center.read(out)

    def finish(self) -> None:
        """One more exchange when updates were made since the last: a large tau loses no work at the end."""
        if self._pending:
            self._meet()
        self._settle()
        self.stats.wired = carried(self._center)
        if self._joined:
            self._joined()

    def _meet_when_due(self, step: int) -> None:
        if step % self._tau == 0:
            self._meet()

    def _meet(self) -> None:
        with self.stats.exchange():
            self._exchange()
        self._pending = False

    @abstractmethod
    def _exchange(self) -> None:
        """One meeting with the center."""

    def _settle(self) -> None:
        """Return when the center has every increment of this worker."""
