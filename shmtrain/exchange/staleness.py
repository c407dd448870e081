"""What becomes of an increment that others have overtaken: s updates of the center since it was read.

none           it is added as it is
inverse        scaled by 1/(1+s): Zhang, Gupta, Lian, Liu, Staleness-aware Async-SGD, IJCAI 2016
exponential:R  scaled by exp(-R s): Chan, Lane, Distributed Training of Deep Neural Networks ..., 2014
drop:S         not added at all when s > S
bounded:S      added as it is, but nobody runs more than S steps ahead of the slowest: stale synchronous
               parallel, Ho et al., NIPS 2013

s counts every update by others, so N workers in turn see N - 1.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmtrain.method import parse_staleness

if TYPE_CHECKING:
    from shmtrain.crowd import Crowd

POLL = 0.002


@dataclass(frozen=True)
class Staleness:
    """One worker's policy; ``crowd`` is needed by ``bounded`` alone."""

    kind: str = "none"
    number: float = 0.0
    crowd: Crowd | None = None

    @classmethod
    def of(cls, text: str, crowd: Crowd) -> Staleness:
        return cls(*parse_staleness(text), crowd)

    def weight(self, staleness: int) -> float:
        """What an increment of this staleness is multiplied with, 0 to 1."""
        if self.kind == "inverse":
            return 1.0 / (1.0 + staleness)
        if self.kind == "exponential":
            return math.exp(-self.number * staleness)
        if self.kind == "drop":
            return 0.0 if staleness > self.number else 1.0
        return 1.0

    def hold(self) -> None:
        """Before a step: with ``bounded`` wait until the slowest is near enough. Raises WaitTimeout."""
        if self.kind != "bounded" or self.crowd is None:
            return
        wait = self.crowd.wait("more steps than --staleness allows")
        while slow := self._too_slow(self.crowd):
            wait.check(slow, self.crowd.rows)
            time.sleep(POLL)

    def _too_slow(self, crowd: Crowd) -> list[int]:
        rows = crowd.rows
        least = rows.done(crowd.rank) + rows.credit(crowd.rank) - self.number
        return [r for r in rows.working if rows.done(r) + rows.credit(r) < least]
