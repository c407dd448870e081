"""A group whose workers keep equal weights by collectives, and come together again when one of them dies.

Every collective has a number, its place. A worker that fails in one forms the group anew with those that
live, and they compare places: one may have finished what others failed in. The others take the weights,
the history and the place of the one that is farthest, and leave out what it has done already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shmtrain.exchange.base import Vectors
from shmtrain.exchange.gloo import Group, Lost
from shmtrain.exchange.replica import Replica

if TYPE_CHECKING:
    from shmtrain.crowd import Crowd

NOTHING = -1  # for no iteration to come
NOT_BEGUN = -1  # the place of a worker whose group has not formed yet


class Replicas:
    """One worker's part in its group. ``place`` is that of the next collective.

    upcoming, completed  as in base.Lockstep; whoever is behind takes them over
    """

    def __init__(self, crowd: Crowd, vectors: Vectors, name: str, ranks: Sequence[int]) -> None:
        self.group = Group(crowd, name, ranks)
        self.replica = Replica(vectors)
        self.replica.step = NOT_BEGUN
        self.upcoming: int | None = None
        self._first: Callable[[], int | None] = lambda: None
        self._behind = False
        self._state: Tensor = torch.empty(sum(a.size for a in self.replica.arrays))

    @property
    def place(self) -> int:
        return self.replica.step

    def begin(self, first: Callable[[], int | None]) -> None:
        """Form the group; the root says by ``first`` which iteration comes first.

        Who joins others takes over their weights, history and place.
        """
        self._first = first
        if self.group.crowd.joining and not self.group.knock():
            self.replica.done = self.group.crowd.rows.total
        self._come_together()
        self.catch_up()

    def let_in(self) -> bool:
        """Before a collective: whether somebody joins after it. The root tells all by the collective."""
        return self.group.is_root and self.group.let_in()

    def regroup(self) -> None:
        """At the border of a step, by all: with those that were let in."""
        self._come_together()

    def agree(self, collective: Callable[[], None]) -> bool:
        """Do one collective with all that live; False when this worker was behind and shall catch up."""
        while True:
            try:
                collective()
            except Lost:
                self._come_together()
                if self._behind:
                    return False
            else:
                self.replica.step += 1
                return True

    def skip(self) -> None:
        """Go on to the next place without a collective."""
        self.replica.step += 1

    def catch_up(self) -> bool:
        """Write what was taken over into this worker's vectors; False when there is nothing."""
        behind, self._behind = self._behind, False
        if behind:
            offset = 0
            for array in self.replica.arrays:
                array[:] = self._state[offset : offset + array.size].numpy()
                offset += array.size
        return behind

    def _come_together(self) -> None:
        while True:
            try:
                self.group.form()
                rows = self.group.gather(self._row())
                if max(place for place, *_ in rows) == NOT_BEGUN:
                    if self.group.is_root:
                        self.upcoming, self.replica.step = self._first(), 0
                    rows = self.group.gather(self._row())
                places = [place for place, *_ in rows]
                farthest = places.index(max(places))
                if min(places) < max(places):
                    self._hand_over(farthest, rows[farthest])
            except Lost:
                continue
            return

    def _row(self) -> list[int]:
        replica = self.replica
        return [replica.step, replica.done, replica.count, _coded(self.upcoming)]

    def _hand_over(self, farthest: int, row: list[int]) -> None:
        """The state of the member number ``farthest`` to those that are behind it."""
        mine = self.replica.step
        if self.group.index == farthest and not self._behind:
            torch.cat([torch.from_numpy(array) for array in self.replica.arrays], out=self._state)
        self.group.broadcast(self._state, farthest)
        if mine < row[0]:
            self.replica.step, self.replica.done, self.replica.count, upcoming = row
            self.upcoming = _decoded(upcoming)
            self._behind = True


def _coded(upcoming: int | None) -> int:
    return NOTHING if upcoming is None else upcoming


def _decoded(number: int) -> int | None:
    return None if number < 0 else number
