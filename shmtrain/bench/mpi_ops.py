"""The elastic exchange and the sum by MPI, as fast as we can make them.

All ranks compute with the box's own kernels (smb._native), in place, on 4 KiB pages, and leave out the box's
check for NaN. Rank 0 holds the center; every other rank is a worker with weights of its own. Each op is
there in variants; the best is what counts:

    server     send/recv with a server rank
               fused: the worker sends x, the server moves both in one pass and sends x back
               (the receive is posted before)
               pull: the worker receives the center, keeps its own side, sends d, the server accumulates
               threaded: as pull, d is sent by a second thread while the worker computes
               piped, piped-256K: as fused in pieces (of 1 MiB), non-blocking both ways, several under way
    rma        Get, pull, Accumulate on a window of rank 0, under lock_all, so that rank 0 has no part in it
               held: the whole vector; threaded: the same, accumulated by a second thread; pieces...: piece by
               piece, so that a piece is still in the cache when it is added
    allreduce  the sum of all ranks' weights, in place, out of place, and in place piece by piece
    window     the user's own loop over MPI_Win_allocate_shared memory, no locks: updates get lost when
               several workers move at once
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from shmtrain.bench.computing import Second
from shmtrain.bench.job import ALPHA, F32, floats, pieces
from shmtrain.bench.ways import Way
from smb import _native

READY, DATA, BACK, ACK = range(4)
AHEAD = 3  # pieces under way
PIECES = {"piped": 1 << 18, "piped-256K": 1 << 16}  # elements
SPINS = 300  # looks at the messages before one sleeps, where processors are short
NAP = 50e-6


class Buffers:
    """One rank's weights and room for another vector, shared by all ops of a size."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.mine, self.other = floats(count), floats(count)


def patiently(arrived: Callable[[], bool]) -> None:
    """Look often at first, then sleep between two looks: for waits with more processes than processors."""
    for _ in range(SPINS):
        if arrived():
            return
    while not arrived():
        time.sleep(NAP)


class MpiWay(Way):
    """A worker's way with a rank's buffers."""

    variants: tuple[str, ...]
    buffers: Buffers

    @property
    def mine(self) -> F32:
        return self.buffers.mine


class Server(MpiWay):
    """Exchange by send and recv: a worker's side."""

    variants = ("fused", "pull", "piped", "piped-256K")

    def __init__(self, comm: Any, buffers: Buffers, variant: str, patient: bool = False) -> None:
        self.comm, self.buffers, self.variant, self.patient = comm, buffers, variant, patient
        self.token = np.zeros(1, np.int32)
        self.second: Second | None = Second() if variant == "threaded" else None
        self._sent: Any = None
        if variant == "pull":
            self.poll = self._look

    def exchange(self) -> None:
        if self.variant == "fused":
            self._fused()
        elif self.variant in PIECES:
            self._piped(PIECES[self.variant])
        else:
            self.begin()
            self.end()

    def begin(self) -> None:
        if self.variant not in ("pull", "threaded"):
            self.exchange()
            return
        buffers = self.buffers
        arrival = self.comm.Irecv(buffers.other, 0, BACK)
        self.comm.Send(self.token, 0, READY)
        self._await(arrival)
        _native.elastic_pull(buffers.mine, buffers.other, ALPHA, out=buffers.other)
        if self.second:
            self.second.start(self._push)
        else:
            self._sent = self.comm.Isend(buffers.other, 0, DATA)

    def end(self) -> None:
        if self.second:
            self.second.join()
        elif self._sent is not None:
            self._await(self._sent)
            self._sent = None
            self.comm.Recv(self.token, 0, ACK)

    def _push(self) -> None:
        self.comm.Send(self.buffers.other, 0, DATA)
        self.comm.Recv(self.token, 0, ACK)

    def _await(self, request: Any) -> None:
        if self.patient:
            patiently(request.Test)
        else:
            request.Wait()

    def _look(self) -> None:
        if self._sent is not None:
            self._sent.Test()

    def _fused(self) -> None:
        # A receive into other can be posted before x leaves; the two buffers then change places.
        buffers = self.buffers
        back = self.comm.Irecv(buffers.other, 0, BACK)
        self._await(self.comm.Isend(buffers.mine, 0, DATA))
        self._await(back)
        buffers.mine, buffers.other = buffers.other, buffers.mine

    def _piped(self, elements: int) -> None:
        # The answers come into the other buffer, so that their receives can be posted before.
        buffers, parts = self.buffers, pieces(self.buffers.count, elements)
        self.comm.Send(self.token, 0, READY)
        answers = [self.comm.Irecv(buffers.other[part], 0, BACK) for part in parts[:AHEAD]]
        sends = [self.comm.Isend(buffers.mine[part], 0, DATA) for part in parts[:AHEAD]]
        for i in range(len(parts)):
            answers[i].Wait()
            if (then := i + AHEAD) < len(parts):
                answers.append(self.comm.Irecv(buffers.other[parts[then]], 0, BACK))
                sends.append(self.comm.Isend(buffers.mine[parts[then]], 0, DATA))
        MPI.Request.Waitall(sends)
        buffers.mine, buffers.other = buffers.other, buffers.mine

    def close(self) -> None:
        if self.second:
            self.second.close()


class Center:
    """Rank 0 of the server op: it serves the workers, whoever comes first."""

    def __init__(self, comm: Any, buffers: Buffers, variant: str, patient: bool = False) -> None:
        self.comm, self.buffers, self.variant, self.patient = comm, buffers, variant, patient
        self.token = np.zeros(1, np.int32)

    def serve(self, exchanges: int) -> None:
        if self.variant == "fused":
            self._fused(exchanges)
        elif self.variant in PIECES:
            self._piped(exchanges, PIECES[self.variant])
        else:
            self._pulled(exchanges)

    def _next(self, tag: int) -> tuple[int, int]:
        """Source and tag of the next message; a server with a processor of its own spins for it."""
        status = MPI.Status()
        if self.patient:
            patiently(lambda: self.comm.Iprobe(MPI.ANY_SOURCE, tag, status))
        else:
            self.comm.Probe(MPI.ANY_SOURCE, tag, status)
        return status.source, status.tag

    def _fused(self, exchanges: int) -> None:
        buffers = self.buffers
        for _ in range(exchanges):
            worker, _ = self._next(DATA)
            self.comm.Recv(buffers.other, worker, DATA)
            _native.exchange(buffers.other, buffers.mine, ALPHA, check=False)
            self.comm.Send(buffers.other, worker, BACK)

    def _pulled(self, exchanges: int) -> None:
        """Two messages of each exchange, of all workers in any order."""
        buffers = self.buffers
        for _ in range(2 * exchanges):
            worker, tag = self._next(MPI.ANY_TAG)
            if tag == READY:
                self.comm.Recv(self.token, worker, READY)
                self.comm.Send(buffers.mine, worker, BACK)
            else:
                self.comm.Recv(buffers.other, worker, DATA)
                _native.accumulate(buffers.mine, buffers.other)
                self.comm.Send(self.token, worker, ACK)

    def _piped(self, exchanges: int, elements: int) -> None:
        buffers, parts = self.buffers, pieces(self.buffers.count, elements)
        for _ in range(exchanges):
            worker, _ = self._next(READY)
            self.comm.Recv(self.token, worker, READY)
            arrivals = [self.comm.Irecv(buffers.other[p], worker, DATA) for p in parts[:AHEAD]]
            answers = []
            for i, part in enumerate(parts):
                arrivals[i].Wait()
                if (then := i + AHEAD) < len(parts):
                    arrivals.append(self.comm.Irecv(buffers.other[parts[then]], worker, DATA))
                _native.exchange(buffers.other[part], buffers.mine[part], ALPHA, check=False)
                answers.append(self.comm.Isend(buffers.other[part], worker, BACK))
            MPI.Request.Waitall(answers)


class Rma(MpiWay):
    """Exchange by one-sided Get and Accumulate on rank 0's window."""

    variants = ("held", "pieces-64K", "pieces-256K", "pieces-1M")

    def __init__(self, window: Any, buffers: Buffers, variant: str) -> None:
        self.window, self.buffers, self.variant = window, buffers, variant
        self.second: Second | None = Second() if variant == "threaded" else None

    def exchange(self) -> None:
        if self.variant.startswith("pieces-"):
            self._pieces(PIECES_OF[self.variant])
        else:
            self.begin()
            self.end()

    def begin(self) -> None:
        if self.variant.startswith("pieces-"):
            self.exchange()
            return
        self.window.Lock_all(MPI.MODE_NOCHECK)
        other = self.buffers.other
        self.window.Get(other, 0)
        self.window.Flush(0)
        _native.elastic_pull(self.buffers.mine, other, ALPHA, out=other)
        if self.second:
            self.second.start(self._push)
        else:
            self.window.Accumulate(other, 0, op=MPI.SUM)

    def end(self) -> None:
        if self.second:
            self.second.join()
        if not self.variant.startswith("pieces-"):
            self.window.Unlock_all()

    def _push(self) -> None:
        self.window.Accumulate(self.buffers.other, 0, op=MPI.SUM)
        self.window.Flush(0)

    def _pieces(self, elements: int) -> None:
        buffers = self.buffers
        self.window.Lock_all(MPI.MODE_NOCHECK)
        for part in pieces(buffers.count, elements):
            # One small buffer for all pieces: it stays in the cache.
            room = buffers.other[: part.stop - part.start]
            target = (part.start, room.size, MPI.FLOAT)
            self.window.Get(room, 0, target)
            self.window.Flush(0)
            _native.elastic_pull(buffers.mine[part], room, ALPHA, out=room)
            self.window.Accumulate(room, 0, target, op=MPI.SUM)
            self.window.Flush(0)
        self.window.Unlock_all()

    def close(self) -> None:
        if self.second:
            self.second.close()


PIECES_OF = {"pieces-64K": 1 << 14, "pieces-256K": 1 << 16, "pieces-1M": 1 << 18}  # elements


class Allreduce(MpiWay):
    """The synchronous sum of the same bytes."""

    variants = ("in place", "out of place", "pieces-256K", "pieces-4M")

    def __init__(self, comm: Any, buffers: Buffers, variant: str) -> None:
        self.comm, self.buffers, self.variant = comm, buffers, variant

    def exchange(self) -> None:
        buffers = self.buffers
        if self.variant == "in place":
            self.comm.Allreduce(MPI.IN_PLACE, buffers.mine)
        elif self.variant == "out of place":
            self.comm.Allreduce(buffers.mine, buffers.other)
            buffers.mine, buffers.other = buffers.other, buffers.mine
        else:
            for part in pieces(buffers.count, 1 << 16 if self.variant == "pieces-256K" else 1 << 20):
                self.comm.Allreduce(MPI.IN_PLACE, buffers.mine[part])


class Window(MpiWay):
    """A loop of one's own over a shared window: the honest limit on one host. No locks."""

    variants = ("fused",)

    def __init__(self, center: F32, buffers: Buffers) -> None:
        self.center, self.buffers = center, buffers

    def exchange(self) -> None:
        _native.exchange(self.buffers.mine, self.center, ALPHA, check=False)
