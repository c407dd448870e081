"""What stands for a training step between two exchanges, and a thread that may exchange meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from shmtrain.bench.errors import BenchError
from shmtrain.bench.job import Job, floats
from smb import _native

SLICE = 0.001  # seconds between two looks at messages, where there is something to look at
LIMIT = 120.0  # seconds that a second thread may take for one exchange
ELEMENTS = 1 << 14  # of the busy loop's two vectors: they stay in the second cache, and the GIL is not held
Poll = Callable[[], object]


class Busy:
    """A loop over 128 KiB that lie in the processor's own cache: it takes time and no memory bandwidth."""

    def __init__(self) -> None:
        self.x, self.y = floats(ELEMENTS, 1.0), floats(ELEMENTS, 1.0)

    def __call__(self, calls: float, poll: Poll | None = None) -> None:
        every = 200 if poll else 0  # about a millisecond
        for number in range(int(calls)):
            _native.dot(self.x, self.y)
            if poll and number % every == 0:
                poll()

    def rate(self, seconds: float = 0.3) -> float:
        """Calls a second of this processor, with nothing else on it."""
        calls, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            self(100)
            calls += 100
        return calls / elapsed


def wait(seconds: float, poll: Poll | None = None) -> None:
    """The processor is free, as while a GPU computes."""
    end = time.perf_counter() + seconds
    while poll and (left := end - time.perf_counter()) > 0:
        poll()
        time.sleep(min(SLICE, left))
    if (left := end - time.perf_counter()) > 0:
        time.sleep(left)


def computing(job: Job, poll: Poll | None = None) -> Callable[[], None]:
    """One step's computing; ``poll`` is called about every millisecond."""
    if job.computing == "busy":
        busy = Busy()
        return lambda: busy(job.amount, poll)
    if job.computing == "wait":
        return lambda: wait(job.amount, poll)
    return lambda: None


class Second:
    """A second thread that does one thing at a time."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="second", daemon=True).start()

    def start(self, work: Callable[[], object]) -> None:
        self._given.put(work)

    def join(self) -> None:
        """Wait for what was started last. Raises its error, and BenchError when it takes too long."""
        try:
            error = self._done.get(timeout=LIMIT)
        except queue.Empty:
            raise BenchError(f"an exchange in a second thread took longer than {LIMIT:g} s") from None
        if error is not None:
            raise error

    def close(self) -> None:
        self._given.put(None)

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
