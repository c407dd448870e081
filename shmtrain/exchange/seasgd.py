"""SEASGD: each worker and the center are tied by a spring, through memory that all of them share.

Every tau iterations, before the forward pass (W_x the local weights of worker x, W_g the center):

    (5)  d   = alpha (W_x - W_g)     alpha: moving rate, 0 < alpha < 1
    (6)  W_x = W_x - d
    (7)  W_g = W_g + d               a blind add: W_g may have moved since it was read

W_x + W_g is unchanged by an exchange. Between two exchanges each worker runs the solver's own update; the
momentum history stays local and is not corrected by the elastic move.

Source: Ahn et al., ShmCaffe, ICDCS 2018, equations (5) to (7) and the two threads of a worker. The elastic
move is Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015, Algorithm 1. ShmCaffe
takes alpha = 0.2 for any number of workers; 0.9/N as in the second source keeps N alpha below 1, which
matters where d was made from an older center. By default alpha is 0.9/N, and at least 0.2 where (5) to (7)
are one operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from shmtrain.exchange.base import F32, Alpha, Exchange, Meeting
from shmtrain.exchange.elastic import Move, Spring, elastic_pull
from shmtrain.exchange.staleness import Staleness
from shmtrain.exchange.update_thread import UpdateThread, WholeExchange

if TYPE_CHECKING:
    from smb import Segment

__all__ = ["PaperSeasgd", "Seasgd", "elastic_pull", "open_exchange"]


def open_exchange(meeting: Meeting) -> Exchange:
    """The way of exchanging that the job asks for, one of method.WAYS."""
    center, local, alpha, tau = meeting.center, meeting.local, meeting.alpha, meeting.tau
    policy = Staleness.of(meeting.method.staleness, meeting.crowd)
    if meeting.way == "fused":
        return Seasgd(
            center, local, alpha, tau, threads=meeting.threads, joined=meeting.joined, policy=policy,
            wire=meeting.method.wire,
        )  # fmt: skip
    if meeting.way == "overlapped":
        whole = WholeExchange(meeting.open_pair, meeting.threads)
        return OverlappedSeasgd(center, local, alpha, tau, update=whole, joined=meeting.joined)
    ahead = meeting.way == "read-ahead"
    update = UpdateThread(meeting.open_pair, ahead=np.empty_like(local) if ahead else None)
    return PaperSeasgd(center, local, alpha, tau, update=update, joined=meeting.joined)


class Seasgd(Spring):
    """The three equations in one pass over memory, chunk by chunk, each chunk under its lock.

    d is computed from the W_g that it is added to, so no difference is ever stale.
    """

    def __init__(
        self,
        center: Segment,
        local: F32,
        alpha: float | Alpha,
        tau: int = 1,
        *,
        threads: int = 1,
        joined: Callable[[], None] | None = None,
        policy: Staleness | None = None,
        wire: str = "float32",
    ) -> None:
        """``local`` is as long as ``center``; ``joined`` is called at the end and waits for the others."""
        super().__init__(center, local, tau, joined)
        self._move = Move(center, alpha, self.stats, threads=threads, policy=policy, wire=wire)

    def before_forward(self, step: int) -> None:
        self._meet_when_due(step)

    def _exchange(self) -> None:
        self._move(self._local)


class PaperSeasgd(Spring):
    """The paper's own sequence, with its two threads: the reference for the fused exchange.

    main thread    waits for the update thread; T1 reads W_g; T2 computes (5) and (6); T3 wakes the update
                   thread; T4, T5 forward, backward and local update
    update thread  T.A1 writes d to the worker's own segment; T.A2 asks for (7); T.A4 learns that it is done

    The read of W_g is not overlapped with the computation: a W_g read ahead is staler and hurts learning.
    With ``--exchange read-ahead`` it is: the update thread reads W_g once it has added d, and T1 finds it.
    """

    def __init__(
        self,
        center: Segment,
        local: F32,
        alpha: float | Alpha,
        tau: int = 1,
        *,
        update: UpdateThread,
        joined: Callable[[], None] | None = None,
    ) -> None:
        """``local`` is as long as ``center``; ``update`` is closed at the end; ``joined`` as in Seasgd."""
        super().__init__(center, local, tau, joined)
        self._alpha: Alpha = alpha if callable(alpha) else lambda: alpha
        self._update = update
        update.stats = self.stats
        self._global: F32 = np.empty_like(local)
        self._delta: F32 = np.empty_like(local)

    def before_forward(self, step: int) -> None:
        self._meet_when_due(step)

    def _exchange(self) -> None:
        self._wait()
        with self.stats.part("rgw"):
            version = self._read()
        with self.stats.part("ulw"):
            elastic_pull(self._local, self._global, self._alpha(), out=self._delta)
        self._update.start(self._delta, version)

    def _read(self) -> int:
        """W_g and its version; from memory when it was read ahead."""
        found = self._update.found(self._global)
        if found is None:
            found = self._center.version
            self._center.read(self._global)
            self.stats.received += self._global.nbytes
        return found

    def _wait(self) -> None:
        with self.stats.part("wait"):
            staleness = self._update.wait()
        if staleness is not None:
            self.stats.saw(staleness)

    def _settle(self) -> None:
        self._wait()
        self._update.close()


class OverlappedSeasgd(Spring):
    """The whole exchange in a second thread, while the main one computes:

    d(t)      = alpha (W_x(t) - W_g)        W_x(t): a copy of the weights at the exchange
    W_g       = W_g + d(t)
    W_x(t+1)  = W_x(t) - eta G_x(W_x(t)) - d(t)

    d reaches W_x before the next forward pass: the gradient is that of the weights before the move, as in
    EASGD, and nothing but that waits. With tau above 1 it reaches W_x when the next exchange is due.
    """

    def __init__(
        self,
        center: Segment,
        local: F32,
        alpha: float | Alpha,
        tau: int = 1,
        *,
        update: WholeExchange,
        joined: Callable[[], None] | None = None,
    ) -> None:
        """As PaperSeasgd's."""
        super().__init__(center, local, tau, joined)
        self._alpha: Alpha = alpha if callable(alpha) else lambda: alpha
        self._update = update
        update.stats = self.stats

    def before_forward(self, step: int) -> None:
        self._meet_when_due(step)

    def _exchange(self) -> None:
        self._take()
        with self.stats.part("ulw"):
            self._update.start(self._local, self._alpha())

    def _take(self) -> None:
        staleness = self._update.take(self._local)
        if staleness is not None:
            self.stats.saw(staleness)

    def _settle(self) -> None:
        self._take()
        self._update.close()
