"""The seam between the training loop and the ways in which workers meet.

The loop knows no algorithm, an algorithm no transport. One algorithm is one file of this folder, named as
in its paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shmtrain.crowd import Crowd
    from shmtrain.method import Method
    from smb import Segment

F32 = npt.NDArray[np.float32]

# What an exchange consists of; the first four are the paper's T_rgw, T_ulw, T_wwi, T_ugw.
PARTS = {
    "rgw": "reading the global weights, or what other workers have written",
    "ulw": "moving the local weights",
    "wwi": "writing this worker's part",
    "ugw": "updating the global weights",
    "exchange": "all of these in one pass",
    "collective": "sums and broadcasts among workers, waiting for them included",
    "wait": "waiting for other workers or the update thread",
}


@dataclass
class ExchangeStats:
    """What meeting the others has cost this worker so far; read by the log, the metrics and the progress bar.

    seconds    time that the training loop stood still for exchanges, in all; what an update thread did
               meanwhile is not in it
    count      exchanges begun
    parts      seconds by part, see PARTS
    hidden     likewise, what a second thread did beside the computation; not in ``seconds``
    sent       bytes written to the box or sent to another worker
    received   bytes read from the box; those from another worker are counted where they were sent
    staleness  updates of the center by others between this worker's last two exchanges
    stale_sum  the sum of staleness over all exchanges, for the mean
    histogram  how often each staleness was seen
    dropped    increments that came too late and moved nothing
    wired      what a wire has carried, and the error that its type cost, in words
    """

    seconds: float = 0.0
    count: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    staleness: int = 0
    stale_sum: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    wired: str = ""

    def saw(self, staleness: int) -> None:
        self.staleness = staleness
        self.stale_sum += staleness
        self.histogram[staleness] += 1

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count if self.count else 0.0

    @property
    def mean_staleness(self) -> float:
        return self.stale_sum / self.count if self.count else 0.0

    def summary(self) -> str:
        """What the exchanges came to, in words."""
        stale = f"mean staleness {self.mean_staleness:.3g}, largest {max(self.histogram, default=0)}"
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return f"{self.count} exchanges of {1e3 * self.mean_seconds:.3g} ms, {stale}{dropped}{self.wired}"

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Time one exchange of the training loop."""
        with self.standing():
            try:
                yield
            finally:
                self.count += 1

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Time what an exchange does in another call of its iteration."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - start

    @contextmanager
    def part(self, name: str, *, sent: int = 0, received: int = 0, hidden: bool = False) -> Iterator[None]:
        """Time one of PARTS and count its bytes; ``hidden`` in a second thread.

        Bytes of one kind must not be counted by both threads at once.
        """
        start = perf_counter()
        try:
            yield
        finally:
            parts = self.hidden if hidden else self.parts
            parts[name] = parts.get(name, 0.0) + perf_counter() - start
            self.sent += sent
            self.received += received


class Hooks:
    """The three calls of an iteration, for ways that have nothing to do in some of them."""

    def before_forward(self, step: int) -> None:
        """Nothing."""

    def gradients_ready(self, step: int) -> None:
        """Nothing."""

    def after_update(self, step: int) -> None:
        """Nothing."""


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


@runtime_checkable
class Lockstep(Exchange, Protocol):
    """An exchange whose workers make the same steps, so that it knows the job's iterations itself.

    upcoming   the iteration, from 0 in this run, that the next step computes first; None: no more
    completed  iterations of this run that the job has done
    """

    @property
    def upcoming(self) -> int | None: ...

    @property
    def completed(self) -> int: ...


class Updates(Protocol):
    """Counts the updates that a worker's rule has made (Adam's t)."""

    count: int


@dataclass(frozen=True)
class Vectors:
    """One worker's flat vectors and its solver's state; an exchange may change all of it during its calls.

    weights      (n,) float32
    gradient     (n,) float32, summed over the ``passes`` batches of one iteration; 0 outside the trained part
    trained      weights [0, trained) are trained
    statistics   weights [statistics, n) are what BatchNorm accumulates; those between are frozen
    history      the update rule's vectors, (trained,) float32 each
    momentum     of an SGD rule whose history is momentum h <- m h + rate g, w <- w - h; None for other rules
    multipliers  (trained,) float32, what a parameter's rate is multiplied with; None: 1 for all
    updates      the rule's counter, where it has one
    when_ready   takes what is called with (start, stop) as soon as backward has made the gradient of weights
                 start .. stop-1, over all passes; None where nobody can say that
    """

    weights: F32
    gradient: F32
    trained: int
    statistics: int
    history: tuple[F32, ...] = ()
    momentum: float | None = None
    multipliers: F32 | None = None
    passes: int = 1
    updates: Updates | None = None
    when_ready: Callable[[Callable[[int, int], None]], None] | None = None


Alpha = Callable[[], float]


@dataclass(frozen=True)
class Meeting:
    """What an algorithm is opened with: this worker's place and what it shares with the others.

    center     the job's center, attached; as long as the weights
    vectors    this worker's own
    alpha      gives the moving rate of now, 0 < alpha < 1
    tau        update interval: exchange every tau of the worker's own steps
    way        how seasgd exchanges, one of method.WAYS
    method     the options of the algorithm
    crowd      the workers of the job
    threads    threads of one native call
    iterations of the job that are to be done in this run
    base_rate  the solver's base_lr
    open_pair  opens another connection, for another thread: (segment of this worker alone, the center)
    joined     waits for the end of the others; called last in ``finish``
    leaving    whether this worker ends before the job does: it waits for nobody
    group      the ranks of this worker's own group, where groups are machines
    """

    center: Segment
    vectors: Vectors
    alpha: Alpha
    tau: int
    way: str
    method: Method
    crowd: Crowd
    threads: int
    iterations: int
    base_rate: float
    open_pair: Callable[[], tuple[Segment, Segment]]
    joined: Callable[[], None]
    leaving: Callable[[], bool] = lambda: False
    group: tuple[int, ...] | None = None

    @property
    def local(self) -> F32:
        return self.vectors.weights
