"""Workers that never meet: the control that every way of sharing is measured against.

    W_x = W_x - eta G_x(W_x)

Each worker trains on its own share of the data from the weights that all start from. What is tested and
saved is the worker that leads; its weights are written to the center when it ends.
"""

from __future__ import annotations

import numpy as np

from shmtrain.exchange.base import F32, Exchange, ExchangeStats, Meeting


def open_exchange(meeting: Meeting) -> Exchange:
    return Local(meeting)


class Local:
    """Its center is the worker's own weights."""

    def __init__(self, meeting: Meeting) -> None:
        self.stats = ExchangeStats()
        self._meeting = meeting

    def before_forward(self, step: int) -> None:
        pass

    def gradients_ready(self, step: int) -> None:
        pass

    def after_update(self, step: int) -> None:
        pass

    def center(self, out: F32) -> None:
        np.copyto(out, self._meeting.local)

    def finish(self) -> None:
        self._meeting.joined()
        if self._meeting.crowd.leads:
            self._meeting.center.write(self._meeting.local)
