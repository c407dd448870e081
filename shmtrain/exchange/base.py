"""The seam between the training loop and the ways in which workers meet.

The loop knows no algorithm, an algorithm no transport. One algorithm is one file of this folder, named as
in its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from smb import Segment

F32 = npt.NDArray[np.float32]


@dataclass
class ExchangeStats:
    """What meeting the others has cost this worker so far; read by the log, the metrics and the progress bar.

    seconds    time that the training loop stood still for exchanges, in all; what an update thread did
               meanwhile is not in it
    count      exchanges begun
    staleness  updates of the center by others between this worker's last two exchanges
    stale_sum  the sum of staleness over all exchanges, for the mean
    """

    seconds: float = 0.0
    count: int = 0
    staleness: int = 0
    stale_sum: int = 0

    def saw(self, staleness: int) -> None:
        self.staleness = staleness
        self.stale_sum += staleness

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count if self.count else 0.0

    @property
    def mean_staleness(self) -> float:
        return self.stale_sum / self.count if self.count else 0.0

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Time one exchange of the training loop."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - start
            self.count += 1


class Exchange(Protocol):
    """One worker's part in an algorithm. All calls come from the thread of the training loop.

    The order in one iteration: before_forward, forward and backward (iter_size times), gradients_ready,
    the local update, after_update. ``step`` counts this worker's own iterations of this run, from 0.
    An exchange may change the worker's flat weight vector in place during any of the three calls, and never
    between them. Errors of the box (smb.SmbError) pass through: after TransportError the center can only be
    rescued, after NonFinite this worker has diverged and must end.
    """

    @property
    def stats(self) -> ExchangeStats: ...

    def before_forward(self, step: int) -> None: ...

    def gradients_ready(self, step: int) -> None: ...

    def after_update(self, step: int) -> None: ...

    def center(self, out: F32) -> None:
        """Copy the weights that are tested and saved into ``out``, (n,) float32.

        It may mix two updates at chunk borders.
        """

    def finish(self) -> None:
        """End this worker's part; called once, after its last iteration and before the final snapshot.

        When it returns, every update of this worker is in the center, and in the worker that leads (tests and
        saves) those of all others too.
        """


@dataclass(frozen=True)
class Meeting:
    """What an algorithm is opened with: this worker's place and what it shares with the others.

    center     the job's center, attached
    local      (n,) float32, this worker's flat weight vector; the exchange changes it in place
    alpha      moving rate, 0 < alpha < 1
    tau        update interval: exchange every tau of the worker's own steps
    way        how the exchange is done: ``fused`` or ``paper``
    threads    threads of one native call
    open_pair  opens another connection, for another thread: (segment of this worker alone, the center)
    joined     waits for the end of the others; called last in ``finish``
    """

    center: Segment
    local: F32
    alpha: float
    tau: int
    way: str
    threads: int
    open_pair: Callable[[], tuple[Segment, Segment]]
    joined: Callable[[], None]
