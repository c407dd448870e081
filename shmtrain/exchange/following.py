"""Counting where all workers make the same steps: the exchange knows which iterations a step computes."""

from __future__ import annotations

from shmtrain.exchange.base import Lockstep
from shmtrain.exchange.termination import Place, RankCounting


class Following(RankCounting):
    """A step of N workers counts N iterations of the job; the last one counts what is left of max_iter."""

    def __init__(self, place: Place, exchange: Lockstep) -> None:
        super().__init__(place)
        self._exchange = exchange

    def claim(self) -> int | None:
        self._train()
        upcoming = None if self._leaving else self._exchange.upcoming
        if upcoming is None:
            return None
        self._claim(1)
        return self._start + upcoming

    @property
    def completed(self) -> int:
        return min(self._start + self._exchange.completed, self._max_iter)
