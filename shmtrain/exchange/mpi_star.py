"""Caffe-MPI's star: rank 0 gathers the gradients by send and receive, averages them and hands the mean out.

    rank x > 0   sends G_x
    rank 0       sums them in the order of the ranks and sends the sum to each
    all          G = 1/N sum_x G_x(W);  W = W - eta G, by the solver's rule

Rank 0 trains too. Its receives are posted before its own forward pass, so that a gradient that comes early
is taken while it still computes, as far as the library does that; vectors travel in pieces, and the mean of a
piece goes out while the next one comes in. Other ranks receive into the gradient itself.

The rate is that of N workers (--lr-rule), the effective batch N times a worker's own; a step counts N
iterations of the job.

Source: Inspur Caffe-MPI 1.0 (MPI_Send and MPI_Recv, a star), as described by Ahn et al., ShmCaffe, ICDCS
2018, section IV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shmtrain.exchange.base import F32, Exchange
from shmtrain.exchange.mpi_ranks import InStep, RankMeeting

PIECE = 1 << 18  # floats: 1 MiB
GATHER, SPREAD = 1, 2


def open_exchange(meeting: RankMeeting) -> Exchange:
    return MpiStar(meeting)


class MpiStar(InStep):
    """Its center is every rank's own weights."""

    def __init__(self, meeting: RankMeeting) -> None:
        super().__init__(meeting)
        self._pieces = [piece for part in self.parts for piece in _pieces(part)]
        others = self.ranks.size - 1 if self.ranks.rank == 0 else 0
        self._rooms = [[np.empty_like(piece) for piece in self._pieces] for _ in range(others)]
        self._coming: list[list[Any]] = []
        self._expect()

    @property
    def sent(self) -> int:
        return self.nbytes * (self.ranks.size - 1 if self.ranks.rank == 0 else 1)

    def _expect(self) -> None:
        """Post rank 0's receives of the next step."""
        comm = self.ranks.comm
        self._coming = [
            [comm.Irecv(room, rank, GATHER) for room in rooms] for rank, rooms in enumerate(self._rooms, 1)
        ]

    def sum(self) -> None:
        if self.ranks.rank == 0:
            self._gather_and_spread()
            self._expect()
        else:
            self._bring()

    def _gather_and_spread(self) -> None:
        comm, going = self.ranks.comm, []
        for place, piece in enumerate(self._pieces):
            for rank, (coming, rooms) in enumerate(zip(self._coming, self._rooms, strict=True), 1):
                self.ranks.wait([coming[place]], f"the gradient of rank {rank}")
                np.add(piece, rooms[place], out=piece)
            going += [comm.Isend(piece, rank, SPREAD) for rank in range(1, self.ranks.size)]
        self.ranks.wait(going, "the ranks that take the mean gradient")

    def _bring(self) -> None:
        """Each piece of the sum is received where the gradient was, once that has gone."""
        comm = self.ranks.comm
        going = [comm.Isend(piece, 0, GATHER) for piece in self._pieces]
        coming = []
        for sent, piece in zip(going, self._pieces, strict=True):
            self.ranks.wait([sent], "rank 0, which takes the gradient")
            coming.append(comm.Irecv(piece, 0, SPREAD))
        self.ranks.wait(coming, "the mean gradient from rank 0")

    def close(self) -> None:
        """Take back the receives that nothing will come for."""
        for request in (r for coming in self._coming for r in coming):
            request.Cancel()
            request.Wait()
        self._coming = []


def _pieces(part: F32) -> Iterator[F32]:
    for at in range(0, part.size, PIECE):
        yield part[at : at + PIECE]
