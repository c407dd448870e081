"""A way of exchanging as the steps around a computation, whatever library moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from shmtrain.bench.computing import Poll, Second, computing
from shmtrain.bench.job import F32, NOTHING, PUSH, WHOLE, Job, floats
from smb import _native


class Way(ABC):
    """One worker's exchange of its weights by one library.

    poll  moves a message on when it is called now and then; None: nothing to do
    """

    poll: Poll | None = None

    @property
    @abstractmethod
    def mine(self) -> F32:
        """The weights, (count,) float32; may be another array after an exchange."""

    @abstractmethod
    def exchange(self) -> None:
        """All of it; afterwards ``mine`` has moved."""

    def begin(self) -> None:
        """The half of an exchange that must come before the computation; all, where it has no halves."""
        self.exchange()

    def end(self) -> None:  # noqa: B027  (most have no halves)
        """Wait for what ``begin`` left under way."""

    def close(self) -> None:  # noqa: B027  (most have nothing to end)
        """End its threads."""


class Late:
    """An exchange of a copy in a second thread; what the copy moved by reaches the weights after computing.

    The computation only reads the weights, so the copy is taken meanwhile, too: what stays uncovered, when
    the rest is done in time, is one pass over the weights.
    """

    def __init__(self, way: Way) -> None:
        """``way`` exchanges the copy: only the second thread calls it."""
        self.way, self.second = way, Second()
        self.weights = floats(len(way.mine))
        self.weights[:] = way.mine

    def begin(self) -> None:
        self.second.start(self._carry)

    def _carry(self) -> None:
        _native.copy(self.way.mine, self.weights)
        self.way.exchange()
        _native.axpy(-1.0, self.weights, self.way.mine)

    def end(self) -> None:
        self.second.join()
        _native.axpy(1.0, self.way.mine, self.weights)

    def close(self) -> None:
        self.second.close()


def steps(way: Way | None, job: Job) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a job does, all its ``repeat`` steps, and what ends it. Without a way it only computes."""
    close: Callable[[], None] = _nothing
    before, compute, after = [], computing(job), []
    if way is None or job.overlap == NOTHING:
        pass
    elif job.overlap == WHOLE:
        late = Late(way)
        before, after, close = [late.begin], [late.end], late.close
    elif job.overlap == PUSH:
        compute = computing(job, way.poll)
        before, after = [way.begin], [way.end]
    else:
        before = [way.exchange]
    return lambda: _repeat(job.repeat, *before, compute, *after), close


def _nothing() -> None:
    """Nothing has to be ended."""


def _repeat(times: int, *calls: Callable[[], None]) -> None:
    for _ in range(times):
        for call in calls:
            call()
