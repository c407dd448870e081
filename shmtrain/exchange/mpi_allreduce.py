"""MPICaffe: synchronous SGD by MPI_Allreduce, the baseline that ShmCaffe's authors made of Caffe.

    G   = 1/N sum_x G_x(W)                by MPI_Allreduce, in place in the gradient itself
    W   = W - eta G                       by the solver's rule, at every rank alike

MPICH is faster by MPI_Iallreduce, asked for until it is done, and gives the processor away between two
questions. Open MPI is twice as fast by the call that blocks, which it is where each rank has a processor;
where ranks are crowded it is MPI_Iallreduce too, so that who only waits leaves the processor to others.

The rate is that of N workers (--lr-rule), the effective batch N times a worker's own; a step counts N
iterations of the job.

Source: Ahn et al., ShmCaffe, ICDCS 2018, section IV (MPICaffe).
"""

from __future__ import annotations

from mpi4py import MPI

from shmtrain.exchange.base import Exchange
from shmtrain.exchange.mpi_ranks import InStep, RankMeeting


def open_exchange(meeting: RankMeeting) -> Exchange:
    return MpiAllreduce(meeting)


class MpiAllreduce(InStep):
    """Its center is every rank's own weights."""

    def __init__(self, meeting: RankMeeting) -> None:
        super().__init__(meeting)
        self._blocks = not self.ranks.crowded and self.ranks.library().startswith("Open MPI")

    @property
    def sent(self) -> int:
        """What each rank sends in the best algorithms for large vectors."""
        return 2 * (self.ranks.size - 1) * self.nbytes // self.ranks.size

    def sum(self) -> None:
        comm = self.ranks.comm
        if self._blocks:
            for part in self.parts:
                comm.Allreduce(MPI.IN_PLACE, part)
        else:
            self.ranks.wait([comm.Iallreduce(MPI.IN_PLACE, part) for part in self.parts], "the mean gradient")
