"""SEASGD: each worker and the center are tied by a spring, through memory that all of them share.

Every tau iterations, before the forward pass (W_x the local weights of worker x, W_g the center):

    (5)  d   = alpha (W_x - W_g)     alpha: moving rate, 0 < alpha < 1
    (6)  W_x = W_x - d
    (7)  W_g = W_g + d               a blind add: W_g may have moved since it was read

W_x + W_g is unchanged by an exchange. Between two exchanges each worker runs the solver's own update; the
momentum history stays local and is not corrected by the elastic move.

Source: Ahn et al., ShmCaffe, ICDCS 2018, equations (5) to (7) and the two threads of a worker. The elastic
move is Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015, Algorithm 1. ShmCaffe
takes alpha = 0.2 for any number of workers; 0.9/N as in the second source keeps N alpha below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Meeting
from shmtrain.exchange.update_thread import UpdateThread

if TYPE_CHECKING:
    from smb import Segment


def open_exchange(meeting: Meeting) -> Exchange:
    """The way of exchanging that the job asks for: ``fused`` or ``paper``."""
    center, local, alpha, tau = meeting.center, meeting.local, meeting.alpha, meeting.tau
    if meeting.way == "fused":
        return Seasgd(center, local, alpha, tau, threads=meeting.threads, joined=meeting.joined)
    update = UpdateThread(meeting.open_pair)
    return PaperSeasgd(center, local, alpha, tau, update=update, joined=meeting.joined)


def elastic_pull(local: F32, center: F32, alpha: float, out: F32) -> None:
    """Move ``local`` towards ``center``: equations (5) and (6).

    local   (n,) float32, changed in place: x <- x - d, with d = alpha (x - c)
    center  (n,) float32, a snapshot c of the center; may be stale
    out     (n,) float32, receives d; x + c is unchanged once d is added to the center
    """
    with np.errstate(all="ignore"):  # values that are no numbers are the box's to refuse
        np.subtract(local, center, out=out)
        np.multiply(out, np.float32(alpha), out=out)
        np.subtract(local, out, out=local)


class _Spring:
    """When to exchange; how is the subclass's."""

    def __init__(
        self, center: Segment, local: F32, alpha: float, tau: int, joined: Callable[[], None] | None
    ) -> None:
        self.stats = ExchangeStats()
        self._center, self._local, self._alpha, self._tau = center, local, alpha, tau
        self._joined = joined
        self._pending = False

    def before_forward(self, step: int) -> None:
        if step % self._tau == 0:
            self._meet()

    def gradients_ready(self, step: int) -> None:
        pass

    def after_update(self, step: int) -> None:
        self._pending = True  # the center has not seen this update

    def center(self, out: F32) -> None:
        self._center.read(out)

    def finish(self) -> None:
        """One more exchange when updates were made since the last: a large tau loses no work at the end."""
        if self._pending:
            self._meet()
        self._settle()
        if self._joined:
            self._joined()

    def _meet(self) -> None:
        with self.stats.exchange():
            self._exchange()
        self._pending = False

    def _exchange(self) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        """Return when the center has every increment of this worker."""


class Seasgd(_Spring):
    """The three equations in one pass over memory, chunk by chunk, each chunk under its lock.

    d is computed from the W_g that it is added to, so no difference is ever stale.
    """

    def __init__(
        self,
        center: Segment,
        local: F32,
        alpha: float,
        tau: int = 1,
        *,
        threads: int = 1,
        joined: Callable[[], None] | None = None,
    ) -> None:
        """``local`` is as long as ``center``; ``joined`` is called at the end and waits for the others."""
        super().__init__(center, local, alpha, tau, joined)
        self._threads = threads

    def _exchange(self) -> None:
        self._center.exchange(self._local, self._alpha, threads=self._threads)
        self.stats.saw(self._center.staleness)


class PaperSeasgd(_Spring):
    """The paper's own sequence, with its two threads: the reference for the fused exchange.

    main thread    waits for the update thread; T1 reads W_g; T2 computes (5) and (6); T3 wakes the update
                   thread; T4, T5 forward, backward and local update
    update thread  T.A1 writes d to the worker's own segment; T.A2 asks for (7); T.A4 learns that it is done

    The read of W_g is never overlapped with the computation: a W_g read ahead is staler and hurts learning.
    """

    def __init__(
        self,
        center: Segment,
        local: F32,
        alpha: float,
        tau: int = 1,
        *,
        update: UpdateThread,
        joined: Callable[[], None] | None = None,
    ) -> None:
        """``local`` is as long as ``center``; ``update`` is closed at the end; ``joined`` as in Seasgd."""
        super().__init__(center, local, alpha, tau, joined)
        self._update = update
        self._global: F32 = np.empty_like(local)
        self._delta: F32 = np.empty_like(local)

    def _exchange(self) -> None:
        self._wait()
        version = self._center.version
        self._center.read(self._global)
        elastic_pull(self._local, self._global, self._alpha, out=self._delta)
        self._update.start(self._delta, version)

    def _wait(self) -> None:
        staleness = self._update.wait()
        if staleness is not None:
            self.stats.saw(staleness)

    def _settle(self) -> None:
        self._wait()
        self._update.close()
