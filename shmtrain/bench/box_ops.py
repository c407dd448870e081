"""The box's own exchange, and the paper's sequence through the box."""

from __future__ import annotations

from shmtrain.bench.computing import Second
from shmtrain.bench.job import ALPHA, F32, floats
from shmtrain.bench.ways import Way
from smb import Box, Segment, _native


class Fused(Way):
    """One operation; ``threads`` of one worker share it."""

    def __init__(self, center: Segment, mine: F32, threads: int) -> None:
        self.center, self.weights, self.threads = center, mine, threads

    @property
    def mine(self) -> F32:
        return self.weights

    def exchange(self) -> None:
        self.center.exchange(self.weights, ALPHA, threads=self.threads)


class Paper(Way):
    """Read W_g, pull, write d into the worker's own segment, have it accumulated.

    The last two happen in a second thread, where there is something to compute meanwhile. It has a
    connection of its own, as the trainer's update thread has.
    """

    def __init__(self, box: Box, second: Box, key: str, own: str, mine: F32) -> None:
        """``key`` is the center's, ``own`` that of a segment of this worker alone, as long."""
        self.weights = mine
        self.read, self.delta = floats(len(mine)), floats(len(mine))
        self.center = box.attach(key)
        self.pushed = second.attach(key)
        self.own = second.create(own, count=len(mine), lifetime="owner", or_attach=True)
        self.second = Second()

    @property
    def mine(self) -> F32:
        return self.weights

    def exchange(self) -> None:
        self._pull()
        self._push()

    def begin(self) -> None:
        self._pull()
        self.second.start(self._push)

    def end(self) -> None:
        self.second.join()

    def _pull(self) -> None:
        self.center.read(self.read)
        _native.elastic_pull(self.weights, self.read, ALPHA, out=self.delta)

    def _push(self) -> None:
        self.own.write(self.delta)
        self.pushed.accumulate(self.own)

    def close(self) -> None:
        self.second.close()
        for segment in (self.own, self.pushed, self.center):
            segment.detach()
