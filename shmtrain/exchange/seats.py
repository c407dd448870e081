"""Means through the box: each worker writes its vector at a seat of its own, and all read the seats.

There is no collective to hang in. A table says which step each worker has written last; who waits looks
there, and at the job's rows for those that have died. What a dead worker had begun to write is not
counted, so it is never half in a mean. All sum the same seats in the same order: their results are equal
to the last bit.

A seat has two halves that are used in turns: a worker writes step t + 2 only after all have written t +
1, and so have read t.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shmtrain.crowd import LOOK, Crowd
from shmtrain.exchange.base import F32, ExchangeStats
from shmtrain.exchange.narrow import Narrow
from smb.errors import WaitTimeout

if TYPE_CHECKING:
    from smb import Segment

I64 = npt.NDArray[np.int64]
COLUMNS = 6  # of the table; a row's first two: the step written last in each half, plus 1
WORK = 4  # and the next of a row's columns: what the worker says of its work of that step, in each half


class Seats:
    """The seats ``name`` of a job, for vectors of ``count`` floats."""

    DTYPE = "float32"

    def __init__(
        self, crowd: Crowd, name: str, count: int, threads: int = 1, stats: ExchangeStats | None = None
    ) -> None:
        """``stats``: where writing, waiting and reading are timed."""
        self.crowd, self._name, self._count, self._threads = crowd, name, count, threads
        self.stats = stats or ExchangeStats()
        self._table = crowd.box.create(
            crowd.key(name),
            count=(crowd.world + 1) * COLUMNS,
            dtype="int64",
            lifetime="attached",
            or_attach=True,
        )
        self._seats: dict[int, Segment] = {crowd.rank: self._seat(crowd.rank)}
        self._other: F32 = np.empty(count if self.DTYPE == "float32" else 0, np.float32)

    def _seat(self, rank: int) -> Segment:
        """Whoever comes first makes it: it must outlive its worker until all have read it."""
        key, count = self.crowd.key(f"{self._name}/{rank}"), max(2 * self._count, 1)
        return self.crowd.box.create(key, count=count, dtype=self.DTYPE, lifetime="attached", or_attach=True)

    def mean(self, step: int, vector: F32, out: F32) -> list[int]:
        """The mean of all living workers' vectors of ``step``; who they are.

        vector, out  (count,) float32; may be the same array

        Raises WaitTimeout naming who did not come.
        """
        self.write(step, vector)
        self.put(self.crowd.rank, step % 2, step + 1)
        with self.stats.part("wait"):
            members = self._all(step)
        self.average(step, members, out)
        return members

    def _all(self, step: int) -> list[int]:
        wait = self.crowd.wait(f"step {step}")
        while True:
            version = self._table.version
            rows = self.crowd.rows  # before the table: the seat of one that has gone stays as it is
            written = self.table()[:-1, :2].max(axis=1)
            here = [rank for rank, last in enumerate(written) if last > step]
            missing = [r for r in range(self.crowd.world) if r not in here and not rows.gone(r)]
            if not missing:
                return here
            wait.check(missing, rows)
            self.sleep(version)

    # The parts -------------------------------------------------------------------------------------------

    def write(self, step: int, vector: npt.NDArray[Any]) -> None:
        with self.stats.part("wwi", sent=vector.nbytes):
            self._seats[self.crowd.rank].write(vector, offset=step % 2 * self._count, threads=self._threads)

    def average(self, step: int, members: list[int], out: F32) -> None:
        """The mean of the members' seats of ``step``, summed in the order of their ranks."""
        with self.stats.part("rgw", received=len(members) * out.nbytes):
            for place, rank in enumerate(members):
                self._read(rank, step, self._other if place else out)
                if place:
                    out += self._other
            out /= np.float32(len(members))

    def _read(self, rank: int, step: int, out: npt.NDArray[Any]) -> None:
        if rank not in self._seats:
            self._seats[rank] = self._seat(rank)
        self._seats[rank].read(out, offset=step % 2 * self._count, threads=self._threads)

    def table(self) -> I64:
        """(world + 1, COLUMNS) int64; the last row is the job's own."""
        table = np.empty((self.crowd.world + 1) * COLUMNS, np.int64)
        self._table.read(table)
        return table.reshape(-1, COLUMNS)

    def put(self, row: int, column: int, value: int) -> None:
        self._table.write(np.array([value], np.int64), offset=row * COLUMNS + column)

    @property
    def version(self) -> int:
        """Of the table."""
        return self._table.version

    def sleep(self, version: int) -> None:
        """Until the table has changed since ``version``; LOOK seconds at most: the dead change nothing."""
        with suppress(WaitTimeout):
            self._table.wait(version + 1, LOOK)


class ByteSeats(Seats):
    """Seats for vectors in fewer bytes: ``count`` is the most of one, and ``narrow`` says what they mean."""

    DTYPE = "uint8"
    narrow: Narrow

    def average(self, step: int, members: list[int], out: F32) -> None:
        other, data = np.empty_like(out), np.empty(self.narrow.nbytes, np.uint8)
        others = len(members) - (self.crowd.rank in members)  # its own it has already
        with self.stats.part("rgw", received=others * data.nbytes):
            out[:] = 0
            for rank in members:
                self._read(rank, step, data)
                self.narrow.decode(data, other)
                out += other
            out /= np.float32(len(members))
