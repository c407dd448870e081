"""The ranks of an MPI job as the MPI ways see them: how they wait, and how those that go in step agree.

MPI libraries wait by asking without pause, which takes a processor from whoever it is that they wait for when
there are more ranks than processors. Here every wait asks, gives up the processor between two questions, and
sleeps a little where ranks are crowded. It has a limit, after which an error says what did not come.

mpi4py is loaded with this module. One thread calls MPI: the library is told so and takes no locks.
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mpi4py
import numpy as np

from shmtrain.exchange.base import F32, ExchangeStats, Hooks, Vectors
from smb.errors import WaitTimeout

mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402  # what stands above is read when this is loaded

SPINS = 200  # questions before the first nap of a crowded rank: about 50 us
NAP = 50e-6  # seconds
LONG_NAP = 0.01
HOST_BYTES = 64
Requests = Sequence[Any]


class Ranks:
    """This process among those of its MPI job.

    limit    seconds after which a wait for others ends with WaitTimeout
    crowded  whether this host has more ranks than processors
    """

    def __init__(self, comm: Any, limit: float) -> None:
        self.comm, self.limit = comm, limit
        self.rank, self.size = int(comm.rank), int(comm.size)
        here = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.crowded = here.size > (os.cpu_count() or 1)
        here.Free()

    @classmethod
    def world(cls, limit: float) -> Ranks:
        return cls(MPI.COMM_WORLD, limit)

    @staticmethod
    def library() -> str:
        """The MPI library, in its own words."""
        return str(MPI.Get_library_version()).replace("\t", " ").splitlines()[0].split(", package")[0].strip()

    def wait(self, requests: Requests, what: str) -> None:
        """Until all requests are done. Raises WaitTimeout after the limit, naming ``what``."""
        self.until(lambda: bool(MPI.Request.Testall(requests)), what)

    def until(self, done: Any, what: str) -> None:
        """Until ``done()`` is true."""
        asked, since = 0, 0.0
        while not done():
            asked += 1
            if self.crowded and asked > SPINS:
                time.sleep(NAP)
            else:
                os.sched_yield()
            if asked % 256 == 1:
                since = since or time.monotonic()
                if time.monotonic() - since > self.limit:
                    raise WaitTimeout(f"{what}: nothing within {self.limit:g} s")

    def goodbye(self) -> None:
        """Wait for the others to end, asleep: the library's own end would keep a processor busy meanwhile."""
        request, since = self.comm.Ibarrier(), time.monotonic()
        while not request.Test() and time.monotonic() - since < self.limit:
            time.sleep(LONG_NAP)

    def same(self, what: str, *numbers: int) -> None:
        """Raise ValueError unless all ranks give the same whole numbers."""
        mine = np.array(numbers, np.int64)
        lowest, highest = mine.copy(), mine.copy()
        requests = [
            self.comm.Iallreduce(MPI.IN_PLACE, lowest, MPI.MIN),
            self.comm.Iallreduce(MPI.IN_PLACE, highest, MPI.MAX),
        ]
        self.wait(requests, what)
        if not np.array_equal(lowest, highest):
            raise ValueError(f"the ranks differ in {what}: from {lowest.tolist()} to {highest.tolist()}")

    def hosts(self) -> list[str]:
        """Each rank's host name, for the log."""
        mine = np.zeros(HOST_BYTES, np.uint8)
        name = np.frombuffer(socket.gethostname().encode()[:HOST_BYTES], np.uint8)
        mine[: name.size] = name
        every = np.zeros((self.size, HOST_BYTES), np.uint8)
        self.wait([self.comm.Iallgather(mine, every)], "the names of the hosts")
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in every]

    def broadcast(self, array: Any, what: str) -> None:
        """Rank 0's array for all."""
        self.wait([self.comm.Ibcast(array, 0)], what)

    def abort(self) -> None:
        """End all ranks with status 1; does not return."""
        self.comm.Abort(1)


@dataclass(frozen=True)
class RankMeeting:
    """What an MPI way is opened with.

    iterations  of the job that are to be done in this run
    alpha       moving rate; tau: steps between two exchanges
    """

    ranks: Ranks
    vectors: Vectors
    iterations: int
    alpha: float = 0.0
    tau: int = 1


class InStep(Hooks, ABC):
    """Ranks that make every step together: the seam's part that is the same however they form the mean.

    G = 1/N sum_x G_x(W); what BatchNorm accumulates is averaged likewise. Before each mean a few bytes tell
    who takes part for the last time: a rank that was asked to stop brings no gradient, and all end with that
    step. That is also where a rank waits for a slower one; in the mean itself all are there.
    """

    def __init__(self, meeting: RankMeeting) -> None:
        self.stats = ExchangeStats()
        self.ranks, self._vectors = meeting.ranks, meeting.vectors
        self._iterations = meeting.iterations
        v = meeting.vectors
        self.parts: list[F32] = [p for p in (v.gradient[: v.trained], v.weights[v.statistics :]) if p.size]
        self.nbytes = sum(part.nbytes for part in self.parts)
        self._leaving = np.zeros(1, np.int32)
        self.completed, self._count = 0, 0
        self.upcoming: int | None = 0 if meeting.iterations else None
        self.ranks.same(
            "parameters and iterations", v.weights.size, v.trained, v.statistics, meeting.iterations
        )
        self.ranks.broadcast(v.weights, "the first weights")

    @abstractmethod
    def sum(self) -> None:
        """Make each of ``parts`` the sum of all ranks', in place."""

    @property
    @abstractmethod
    def sent(self) -> int:
        """Bytes that this rank sends in one ``sum``."""

    def gradients_ready(self, step: int) -> None:
        with self.stats.exchange():
            self._mean(leaving=False)

    def _mean(self, leaving: bool) -> None:
        with self.stats.part("wait"):
            self._leaving[0] = leaving
            what = f"step {self.stats.count}: the other ranks"
            self.ranks.wait([self.ranks.comm.Iallreduce(MPI.IN_PLACE, self._leaving, MPI.SUM)], what)
        left = int(self._leaving[0])
        self._count = self.ranks.size - left
        if self._count and self.ranks.size > 1:
            with self.stats.part("collective", sent=self.sent):
                if leaving:
                    for part in self.parts:
                        part.fill(0)
                self.sum()
                for part in self.parts:
                    np.multiply(part, np.float32(1 / self._count), out=part)
        if left:
            self._iterations = 0

    def after_update(self, step: int) -> None:
        self.stats.saw(0)
        self.completed += self._count
        self.upcoming = self.completed if self.completed < self._iterations else None

    def center(self, out: F32) -> None:
        np.copyto(out, self._vectors.weights)

    def finish(self) -> None:
        """Who stops early says so in one more step, which the others make and stop after."""
        if self.upcoming is not None:
            self._mean(leaving=True)
            self.upcoming = None

    def close(self) -> None:
        """Twice is fine."""
