"""What clients did to segments: counted by the daemon, or by themselves where they map the memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

NOT_KNOWN = -1


@dataclass
class Figures:
    """Operations, and their bytes into and out of segments."""

    operations: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, other: Figures) -> None:
        self.operations += other.operations
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out

    @classmethod
    def sum(cls, all_of_them: Iterable[Figures]) -> Figures:
        total = cls()
        for one in all_of_them:
            total.add(one)
        return total

    def sendable(self) -> tuple[int, int, int]:
        """Within 64 bits, whatever a client wrote into its line."""
        most = 2**64 - 1
        return min(self.operations, most), min(self.bytes_in, most), min(self.bytes_out, most)


class Counting(Protocol):
    """A segment's mapping, as far as it counts."""

    def tallies(self) -> dict[int, tuple[int, int, int, int]]: ...


def told(mapping: Counting | None, session: int) -> tuple[Figures, int] | None:
    """A session's own figures and staleness (or NOT_KNOWN) in one segment; None where it does not count."""
    line = mapping.tallies().get(session) if mapping else None
    return (Figures(*line[:3]), line[3]) if line else None


class Totals:
    """The figures of sessions that are over, so that a daemon's sums never go back. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past = Figures()
        self.sessions = 0
        self.requests = 0
        self.born = time.monotonic()

    def bury(self, figures: Figures, requests: int) -> None:
        with self._lock:
            self._past.add(figures)
            self.sessions += 1
            self.requests += requests

    def past(self) -> Figures:
        with self._lock:
            return Figures.sum([self._past])
