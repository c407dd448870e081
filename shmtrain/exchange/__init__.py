"""The ways in which workers meet. One algorithm is one module with ``open_exchange(meeting)``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmtrain.exchange.base import Exchange, Meeting

# Names only: the command line's help must not load numpy.
ALGORITHMS = {"seasgd": "shmtrain.exchange.seasgd"}
WAYS = ("fused", "paper")


def open_exchange(algorithm: str, meeting: Meeting) -> Exchange:
    """Join the others by ``algorithm``, one of ALGORITHMS."""
    exchange: Exchange = import_module(ALGORITHMS[algorithm]).open_exchange(meeting)
    return exchange
