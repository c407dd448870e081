"""EASGD with a server rank: what asynchronous elastic averaging costs by MPI's send and receive.

Rank 0 holds the center x~ and does nothing else; every other rank is a worker x_i. Every tau steps, before
the forward pass, a worker sends x_i and takes back what the server makes of both in one pass:

    d   = alpha (x_i - x~);  x_i = x_i - d;  x~ = x~ + d

alpha = beta / N with beta = 0.9 by default, N the workers. The server answers whoever comes first. A worker
sends straight from its weights and receives straight into them, its receives for the answer posted before it
asks; the server's receives for the next question of each worker are always posted. The server naps while
nobody asks and ranks are crowded, so that it takes no processor from a worker.

Iterations are claimed from the server, a few at a time, as other asynchronous ways claim them from the box.

Source: Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015, Algorithm 1; with a
server rank as MPI programs have it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Hooks
from shmtrain.exchange.mpi_ranks import RankMeeting, Ranks
from shmtrain.exchange.termination import quota
from smb import _native
from smb.errors import NonFinite, WaitTimeout

I64 = npt.NDArray[np.int64]
QUESTION, ANSWER, WEIGHTS, CENTER = 1, 2, 3, 4  # tags
SERVER = 0
LOOK = 0.02  # seconds between two questions of the leading worker whether all have finished


class Ask(IntEnum):
    """What a worker wants. A question is (Ask, iterations done in all, an amount), an answer (a, b, total).

    GIVE    brings the first weights, alone; READ takes the center, alone
    MEET    brings weights, which come back moved; a: version of the center, b: 1 + index of a NaN or Inf
    CLAIM   an amount of the job's iterations; a: the first of them, which may be past the last
    FINISH  makes no more steps; a: 1 when all have said so
    BYE     asks for nothing more
    """

    GIVE = 0
    READ = 1
    MEET = 2
    CLAIM = 3
    FINISH = 4
    BYE = 5


def open_exchange(meeting: RankMeeting) -> Exchange:
    """For rank 1 and above."""
    return MpiEasgd(meeting)


def serve(ranks: Ranks, alpha: float) -> int:
    """Rank 0's whole part, until every worker has said BYE; how many exchanges it has made."""
    return _Server(ranks, alpha).run()


@dataclass
class _Seen:
    """What the server knows of a worker, and what it expects from it next."""

    question: I64
    request: MPI.Request
    done: int = 0
    finished: bool = False
    gone: bool = False


class _Server:
    """Answers one question at a time, in the order in which they were found."""

    def __init__(self, ranks: Ranks, alpha: float) -> None:
        self._ranks, self._alpha = ranks, alpha
        self._center: F32 = np.empty(0, np.float32)
        self._room: F32 = np.empty(0, np.float32)
        self._version = self._claimed = 0
        self._workers = {rank: self._expected(rank) for rank in range(1, ranks.size)}
        self._asking: deque[int] = deque()
        self._early: list[int] = []  # who asks for a center that is not there yet

    def _expected(self, rank: int) -> _Seen:
        question = np.zeros(3, np.int64)
        return _Seen(question, self._ranks.comm.Irecv(question, rank, QUESTION))

    def run(self) -> int:
        while living := [rank for rank, worker in self._workers.items() if not worker.gone]:
            if not self._asking:
                self._ranks.until(lambda: self._found(living), f"questions of the ranks {living}")
            rank = self._asking.popleft()
            worker = self._workers[rank]
            if worker.question[0] == Ask.READ and not self._center.size:
                self._early.append(rank)
                continue
            worker.done = int(worker.question[1])
            self._serve(rank, worker, Ask(int(worker.question[0])), int(worker.question[2]))
            if not worker.gone:
                worker.request = self._ranks.comm.Irecv(worker.question, rank, QUESTION)
        return self._version

    def _found(self, living: list[int]) -> bool:
        places = MPI.Request.Testsome([self._workers[rank].request for rank in living])
        self._asking.extend(living[place] for place in places or ())
        return bool(self._asking)

    def _serve(self, rank: int, worker: _Seen, ask: Ask, amount: int) -> None:
        if ask is Ask.GIVE:
            self._center, self._room = np.empty(amount, np.float32), np.empty(amount, np.float32)
            self._take(rank, self._center)
            self._tell(rank)
            self._asking.extend(self._early)
        elif ask is Ask.READ:
            if amount != self._center.size:
                raise ValueError(f"rank {rank} has {amount} parameters, the center {self._center.size}")
            self._send(rank, self._center)
        elif ask is Ask.MEET:
            self._take(rank, self._room)
            bad = _native.exchange(self._room, self._center, self._alpha)
            self._version += bad < 0
            self._tell(rank, self._version, 1 + bad)
            self._send(rank, self._room)
        elif ask is Ask.CLAIM:
            self._claimed += amount
            self._tell(rank, self._claimed - amount)
        elif ask is Ask.FINISH:
            worker.finished = True
            self._tell(rank, all(w.finished for w in self._workers.values()))
        else:
            worker.gone = True

    def _tell(self, rank: int, a: int = 0, b: int = 0) -> None:
        answer = np.array([a, b, sum(w.done for w in self._workers.values())], np.int64)
        self._ranks.wait([self._ranks.comm.Isend(answer, rank, ANSWER)], f"rank {rank}, which asked")

    def _take(self, rank: int, room: F32) -> None:
        self._ranks.wait([self._ranks.comm.Irecv(room, rank, WEIGHTS)], f"the weights of rank {rank}")

    def _send(self, rank: int, array: F32) -> None:
        self._ranks.wait([self._ranks.comm.Isend(array, rank, CENTER)], f"rank {rank}, which takes weights")


class MpiEasgd(Hooks):
    """A worker. Its ``upcoming`` claims, when nothing that it has claimed is left."""

    def __init__(self, meeting: RankMeeting) -> None:
        self.stats = ExchangeStats()
        self._ranks, self._local, self._tau = meeting.ranks, meeting.vectors.weights, meeting.tau
        self._iterations = meeting.iterations
        self._question, self._answer = np.zeros(3, np.int64), np.zeros(3, np.int64)
        self._quota = quota(meeting.iterations, self._ranks.size - 1)
        self._next = self._end = self._steps = self._told = self._total = 0
        self._seen: int | None = None
        self._pending = False
        self._begin()

    def _begin(self) -> None:
        """The first worker's weights are everybody's."""
        if self._ranks.rank == 1:
            self._ask(Ask.GIVE, self._local.size, self._local)
        else:
            self._read(self._local)

    # Counting --------------------------------------------------------------------------------------------

    @property
    def upcoming(self) -> int | None:
        if self._next == self._end:
            first = self._ask(Ask.CLAIM, self._quota)
            self._next, self._end = first, max(first, min(first + self._quota, self._iterations))
        return self._next if self._next < self._end else None

    @property
    def completed(self) -> int:
        """The job's iterations as the server told them last, and this worker's since."""
        return self._total + self._steps - self._told

    def after_update(self, step: int) -> None:
        self._next += 1
        self._steps += 1
        self._pending = True

    # Meeting ---------------------------------------------------------------------------------------------

    def before_forward(self, step: int) -> None:
        if step % self._tau == 0:
            self._meet()

    def _meet(self) -> None:
        nbytes = self._local.nbytes
        with self.stats.exchange(), self.stats.part("exchange", sent=nbytes, received=nbytes):
            version = self._ask(Ask.MEET, 0, self._local)
            self._take(self._local)
        self._pending = False
        if bad := int(self._answer[1]):
            raise NonFinite(f"element {bad - 1} of the weights of rank {self._ranks.rank} is NaN or Inf")
        self.stats.saw(0 if self._seen is None else version - self._seen - 1)
        self._seen = version

    def _ask(self, ask: Ask, amount: int = 0, weights: F32 | None = None) -> int:
        """Ask, and send weights with it; the answer's first number."""
        comm = self._ranks.comm
        coming = comm.Irecv(self._answer, SERVER, ANSWER)
        self._question[:] = ask, self._steps, amount
        going = [comm.Isend(self._question, SERVER, QUESTION)]
        if weights is not None:
            going.append(comm.Isend(weights, SERVER, WEIGHTS))
        told = self._steps
        self._ranks.wait([*going, coming], f"the server, rank {SERVER}, asked to {ask.name}")
        self._told, self._total = told, int(self._answer[2])
        return int(self._answer[0])

    def _take(self, out: F32) -> None:
        self._ranks.wait(
            [self._ranks.comm.Irecv(out, SERVER, CENTER)], f"weights from the server, rank {SERVER}"
        )

    def _read(self, out: F32) -> None:
        self._question[:] = Ask.READ, self._steps, out.size
        going = self._ranks.comm.Isend(self._question, SERVER, QUESTION)
        self._ranks.wait([going], f"the server, rank {SERVER}, asked to {Ask.READ.name}")
        self._take(out)

    def center(self, out: F32) -> None:
        self._read(out)

    # The end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """One more exchange when updates were made since the last; who leads waits for the others."""
        if self._pending:
            self._meet()
        since, seen = time.monotonic(), -1
        while not self._ask(Ask.FINISH) and self._ranks.rank == 1:
            if self._total != seen:
                since, seen = time.monotonic(), self._total
            if time.monotonic() - since > self._ranks.limit:
                raise WaitTimeout(f"the end of the others: no step within {self._ranks.limit:g} s")
            time.sleep(LOOK)

    def close(self) -> None:
        """Tell the server that nothing more will be asked; twice is fine."""
        if self._quota:
            self._quota = 0
            self._question[:] = Ask.BYE, self._steps, 0
            going = self._ranks.comm.Isend(self._question, SERVER, QUESTION)
            self._ranks.wait([going], f"the server, rank {SERVER}, asked to {Ask.BYE.name}")
