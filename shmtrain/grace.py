"""What a worker does while the memory box is away: it trains on by its own weights, and comes back.

The box itself tries to reach the next daemon (``smb.connect(reconnect=S)``) and says Away meanwhile; after S
seconds it says TransportError, and the job ends as it does when a box dies for good. Whatever was dropped in
the daemon's restart (smb.Restarted) is made again where making it twice does no harm, and said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import smb
from shmtrain.group import COLUMNS, I64, Column, Progress, Rows

if TYPE_CHECKING:
    from shmtrain.exchange.base import F32, Exchange, ExchangeStats
    from smb import Box, Counter, Segment

POLL = 0.1
DROPPED = (smb.Away, smb.Restarted)


class Grace:
    """Whether the box is away, told once when it goes and once when it is back.

    box   raises Away at once from ``begin`` on, instead of waiting
    tell  takes a line for the log
    """

    def __init__(self, box: Box, who: str, tell: Callable[[str], None]) -> None:
        self._box, self._who, self._tell = box, who, tell
        self._away = False

    def begin(self) -> None:
        """From now on train on by oneself: nothing waits for the box."""
        self._box.patient = False

    def end(self) -> None:
        """From now on wait for the box again: what is left must not be missed."""
        self._box.patient = True

    def missed(self, error: smb.SmbError) -> None:
        """An operation was not made."""
        if isinstance(error, smb.Restarted):
            self._tell(f"{self._who}: {error}")
        elif not self._away:
            self._away = True
            self._tell(f"{self._who}: {error}; training on without the others")

    def made(self) -> None:
        """An operation was made."""
        if self._away:
            self._away = False
            self._tell(f"{self._who}: the memory box is back")


class Missing:
    """An exchange of workers that need not meet at every step: what cannot be made is left out.

    ``finish`` and ``center`` wait for the box: the last exchange, a test and a snapshot are of the center.
    """

    def __init__(self, exchange: Exchange, grace: Grace) -> None:
        self._exchange, self._grace = exchange, grace

    @property
    def stats(self) -> ExchangeStats:
        return self._exchange.stats

    def _make(self, act: Callable[[int], None], step: int) -> None:
        before = self.stats.count
        try:
            act(step)
        except DROPPED as error:
            self._grace.missed(error)
        else:
            if self.stats.count > before:  # not only a step between two exchanges
                self._grace.made()

    def before_forward(self, step: int) -> None:
        self._make(self._exchange.before_forward, step)

    def gradients_ready(self, step: int) -> None:
        self._make(self._exchange.gradients_ready, step)

    def after_update(self, step: int) -> None:
        self._make(self._exchange.after_update, step)

    def center(self, out: F32) -> None:
        self._insist(lambda: self._exchange.center(out))

    def finish(self) -> None:
        self._grace.end()
        self._insist(self._exchange.finish)

    def _insist(self, act: Callable[[], None]) -> None:
        while True:
            try:
                return act()
            except DROPPED as error:
                self._grace.missed(error)
                time.sleep(POLL)


class LastingProgress(Progress):
    """The job's table while the box may be away: reads give the last that was seen, writes are made later."""

    def __init__(self, segment: Segment, workers: int) -> None:
        super().__init__(segment, workers)
        self._seen = np.zeros((workers, COLUMNS), np.int64)
        self._mine: dict[tuple[int, Column], int] = {}  # all that was written here
        self._late: dict[tuple[int, Column], int] = {}

    def rows(self) -> Rows:
        try:
            self._write_late()
            self._seen = super().rows().table
        except DROPPED:
            self._late = dict(self._mine)  # the next daemon may have an older table
        return Rows(self._with_late(self._seen.copy()))

    def put(self, rank: int, column: Column, value: int) -> None:
        self._mine[rank, column] = self._late[rank, column] = value
        try:
            self._write_late()
        except DROPPED:
            self._late = dict(self._mine)

    def _write_late(self) -> None:
        for (rank, column), value in list(self._late.items()):
            super().put(rank, column, value)
            if self._late.get((rank, column)) == value:
                del self._late[rank, column]

    def _with_late(self, table: I64) -> I64:
        for (rank, column), value in list(self._late.items()):
            table[rank, column] = value
        return table


class LastingTickets:
    """The job's counter while the box may be away: a worker then claims on credit and settles afterwards."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._credit = self._next = 0

    def add(self, amount: int = 1) -> int:
        """Claim so many; the first. Away from the box: the ones after those claimed last, as a guess."""
        try:
            first = self._counter.add(self._credit + amount) + self._credit
        except DROPPED:
            first, self._credit = self._next, self._credit + amount
        else:
            self._credit = 0
        self._next = first + amount
        return first
