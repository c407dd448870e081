"""EASGD, asynchronous: each worker and the center are tied by a spring. Every tau steps of worker i:

    x      = x_i                            the weights before the move
    x_i    = x_i - alpha (x - x~)
    x~     = x~  + alpha (x - x~)           x~: the center
    x_i    = x_i - eta g_i(x)               g_i: the gradient at the weights before the move

In the steps between, x_i = x_i - eta g_i(x_i). SEASGD takes the gradient after the move; that is their only
difference here, as the box makes the two halves of a move one operation. eta g is the solver's own update:
with a momentum each worker has its own.

alpha = beta / N with beta = 0.9 by default, N the workers that take part. For rates alpha and eta on a
quadratic the paper proves stability for 0 <= alpha <= (4 - 2 eta)/(4 - eta) (round robin).

Source: Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015, Algorithm 1.
"""

from __future__ import annotations

from shmtrain.exchange.base import Exchange, Meeting
from shmtrain.exchange.elastic import Move, Spring


def open_exchange(meeting: Meeting) -> Exchange:
    return Easgd(meeting)


class Easgd(Spring):
    """Moves when the gradient is there, before it is applied."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting.center, meeting.local, meeting.tau, meeting.joined)
        self._move = Move.of(meeting, self.stats)

    def gradients_ready(self, step: int) -> None:
        self._meet_when_due(step)

    def _exchange(self) -> None:
        self._move(self._local)
