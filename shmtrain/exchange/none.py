"""No exchange: one worker without a box trains exactly as the original does."""

from __future__ import annotations

import numpy as np

from shmtrain.exchange.base import F32, ExchangeStats, Hooks


class NoExchange(Hooks):
    """Its center is the worker's own flat weight vector."""

    def __init__(self, local: F32) -> None:
        self._local = local
        self.stats = ExchangeStats()

    def center(self, out: F32) -> None:
        np.copyto(out, self._local)

    def finish(self) -> None:
        pass
