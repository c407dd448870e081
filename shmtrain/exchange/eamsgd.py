"""EAMSGD: elastic averaging with Nesterov's momentum. Every tau steps of a worker i, x being the old x_i:

    x_i = x_i - alpha (x - x~)
    x~  = x~  + alpha (x - x~)              x~: the center
    v_i = delta v_i - eta g_i(x + delta v_i)
    x_i = x_i + v_i

In the steps between there is no move. delta is the solver's momentum and v = -h of its SGD rule (h <-
delta h + eta g; w <- w - h), so the solver file says ``type: "SGD"`` and a momentum. Weight decay, which
the paper has not, acts at x_i after the move.

Source: Zhang, Choromanska, LeCun, Deep learning with Elastic Averaging SGD, NIPS 2015, Algorithm 2
(delta = 0.99 there, alpha = 0.9 / N).
"""

from __future__ import annotations

import numpy as np

from shmtrain.exchange.base import F32, Exchange, Meeting
from shmtrain.exchange.easgd import Easgd
from shmtrain.options import ConfigError


def open_exchange(meeting: Meeting) -> Exchange:
    """Raises ConfigError where the solver's rule has no such momentum."""
    if not meeting.vectors.momentum:
        raise ConfigError(
            "eamsgd needs the solver's rule SGD and a momentum above 0: it is the paper's delta"
        )
    return Eamsgd(meeting, meeting.vectors.momentum)


class Eamsgd(Easgd):
    """Lets the gradient be computed at the point that the momentum leads to, and goes back."""

    def __init__(self, meeting: Meeting, momentum: float) -> None:
        super().__init__(meeting)
        self._trained: F32 = meeting.local[: meeting.vectors.trained]
        (self._history,) = meeting.vectors.history
        self._momentum = np.float32(momentum)
        self._here = np.empty_like(self._trained)

    def before_forward(self, step: int) -> None:
        np.copyto(self._here, self._trained)
        self._trained -= self._momentum * self._history

    def gradients_ready(self, step: int) -> None:
        np.copyto(self._trained, self._here)
        super().gradients_ready(step)
