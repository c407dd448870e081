"""How much of a daemon its clients may use, and how often one event may be logged. No I/O but the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """What all clients of one daemon may take together, beside memory, and one of them alone.

    clients      sessions at a time
    connections  of one client that came over TCP; it has one for each of its threads
    segments     that exist at a time
    rate         requests a second of one connection, 0: any number. Who asks faster is slowed, not refused
    streams      bytes for what clients over TCP have under way: elements, replies kept for them, shadows of
                 their weights (wire types). 0: half of what is available when the daemon starts
    """

    clients: int = 4096
    connections: int = 1024
    segments: int = 100_000
    rate: float = 0.0
    streams: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("rate", "streams") else 1
            if not least <= value < float("inf"):
                raise ValueError(f"limit of {field.name}: {value} is too small or no number")


class Bucket:
    """Lets ``rate`` events a second pass on average, a second's worth at once. Not for several threads."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._room = max(rate, 1.0)
        self._full, self._last = self._room, clock()

    def delay(self) -> float:
        """Count one event; the seconds after which it may happen."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._room = min(self._full, self._room + (now - self._last) * self._rate) - 1.0
        self._last = now
        return max(0.0, -self._room / self._rate)


class Alarm:
    """Warnings that a stranger can cause: a few of each kind in a while are logged, the others counted."""

    BURST = 10
    WHILE = 10.0  # seconds

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> since when, how many since

    def __call__(self, kind: str, message: str) -> None:
        """``kind`` comes from our own code: as many as there are, so many are remembered."""
        now = self._clock()
        with self._lock:
            since, count = self._kinds.get(kind, (now, 0))
            untold = 0
            if now - since > self.WHILE:
                untold = max(0, count - self.BURST)
                since, count = now, 0
            self._kinds[kind] = (since, count + 1)
        if count < self.BURST:
            more = f" (and {untold} more like it before)" if untold else ""
            self._log.warning("%s%s", message, more)
