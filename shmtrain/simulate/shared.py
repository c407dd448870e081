"""What several workers use at once, and a clock: the only file that names simpy.

A link or a memory is shared evenly: n transfers at once go at min(cap, capacity / n) each. This is computed
by virtual time: V grows at that rate, and a transfer of b bytes that begins at V ends at V + b, whoever
comes and goes meanwhile; so that an event costs the logarithm of n.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from itertools import count
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]
Event = simpy.Event
EPSILON = 1e-13


class World:
    """The clock, and what lasts."""

    def __init__(self) -> None:
        self._env = simpy.Environment()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return float(self._env.now)

    def start(self, process: Process) -> Event:
        """Run a process from now on; the event of its end."""
        return self._env.process(process)

    def pause(self, seconds: float) -> Event:
        return self._env.timeout(seconds)

    def both(self, *events: Event) -> Event:
        """All of them, none of which has happened yet. Lighter than simpy's own condition."""
        if len(events) == 1:
            return events[0]
        done, left = self._env.event(), len(events)

        def one(_: Event) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.succeed()

        for event in events:
            event.callbacks.append(one)
        return done

    def shared(self, capacity: float, cap: float = float("inf")) -> Shared:
        return Shared(self._env, capacity, cap)

    def queue(self) -> simpy.Resource:
        """What one may have at a time; the others wait in the order in which they came."""
        return simpy.Resource(self._env, 1)

    def run(self) -> None:
        """Until nothing happens any more."""
        self._env.run()


class Shared:
    """A rate that all who use it share evenly.

    capacity  amount a second of all together
    cap       of one at most
    """

    def __init__(self, env: simpy.Environment, capacity: float, cap: float) -> None:
        self._env, self._capacity, self._cap = env, capacity, cap
        self._virtual, self._since = 0.0, 0.0
        self._ends: list[tuple[float, int, simpy.Event]] = []
        self._order = count()
        self._looking = float("inf")  # when it is looked next whether a transfer is done

    def use(self, amount: float) -> Event:
        """An event at the end of this transfer."""
        self._advance()
        done = self._env.event()
        heapq.heappush(self._ends, (self._virtual + amount, next(self._order), done))
        self._plan()
        return done

    def _rate(self) -> float:
        return min(self._cap, self._capacity / len(self._ends))

    def _advance(self) -> None:
        now = float(self._env.now)
        if self._ends:
            self._virtual += (now - self._since) * self._rate()
        self._since = now

    def _plan(self) -> None:
        """Look again when the next transfer would end if nobody else came; it may then not be done yet."""
        left = max(0.0, self._ends[0][0] - self._virtual) / self._rate()
        if self._looking <= self._env.now + left:
            return  # whoever came since then only made the ends later
        self._looking = self._env.now + left
        self._env.timeout(left, self._looking).callbacks.append(self._look)

    def _look(self, planned: simpy.Event) -> None:
        if planned.value != self._looking:
            return  # an earlier look took its place
        self._looking = float("inf")
        self._advance()
        # Rounding must not leave an end a hair away: the clock could not be put on by so little.
        hair = EPSILON * self._virtual + self._rate() * EPSILON * self._env.now if self._ends else 0.0
        while self._ends and self._ends[0][0] <= self._virtual + hair:
            heapq.heappop(self._ends)[2].succeed()
        if self._ends:
            self._plan()
