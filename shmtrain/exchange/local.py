"""Workers that never meet: the control that every way of sharing is measured against.

    W_x = W_x - eta G_x(W_x)

Each worker trains on its own share of the data from the weights that all start from. What is tested and
saved is the worker that leads; its weights are written to the center when it ends.
"""

from __future__ import annotations

from shmtrain.exchange.base import Exchange, Meeting
from shmtrain.exchange.none import NoExchange


def open_exchange(meeting: Meeting) -> Exchange:
    return Local(meeting)


class Local(NoExchange):
    """Its center is the worker's own weights."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting.local)
        self._meeting = meeting

    def finish(self) -> None:
        self._meeting.joined()
        if self._meeting.crowd.leads:
            self._meeting.center.write(self._meeting.local)
