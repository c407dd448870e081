"""The ways in which workers meet. One algorithm is one module with ``open_exchange(meeting)``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shmtrain.method import METHODS

if TYPE_CHECKING:
    from shmtrain.exchange.base import Exchange, Meeting
    from shmtrain.exchange.mpi_ranks import RankMeeting


def open_exchange(algorithm: str, meeting: Meeting | RankMeeting) -> Exchange:
    """Join the others by ``algorithm``, one of METHODS; those without a box take a RankMeeting."""
    module = import_module(f"shmtrain.exchange.{METHODS[algorithm].module}")
    exchange: Exchange = module.open_exchange(meeting)
    return exchange
