"""A simulation's figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shmtrain.simulate.setting import Setting
from shmtrain.simulate.shared import World
from shmtrain.simulate.ways import Site, Trace, start


@dataclass(frozen=True)
class Result:
    """What a run came to, of the iterations that count.

    iteration     mean seconds of one worker's iteration
    computing     mean seconds of it that are computing
    throughput    iterations a second of all workers (of a synchronous step: those that count)
    share         part of an iteration that is not computing
    staleness     mean, and the largest, of updates by others between a worker's read and its own update
    """

    setting: Setting
    iteration: float
    computing: float
    throughput: float
    share: float
    staleness: float
    stalest: int

    @property
    def efficiency(self) -> float:
        """Throughput for that of as many workers that only compute."""
        return self.throughput * self.computing / self.setting.workers


def simulate(setting: Setting) -> Result:
    """Run one setting. Deterministic: the seed decides."""
    world = World()
    site = Site(world, setting)
    traces = start(site)
    world.run()
    return _figures(setting, traces)


def _figures(setting: Setting, traces: list[Trace]) -> Result:
    first = setting.first
    spans = [(trace.ends[-1] - trace.ends[first - 1]) / (len(trace.ends) - first) for trace in traces]
    iteration = float(np.mean(spans))
    computing = float(np.mean([np.mean(trace.computed[first:]) for trace in traces]))
    each = _workers_of_a_trace(setting, len(traces))
    stale = np.array([value for trace in traces for value in trace.staleness[first // setting.tau :]])
    return Result(
        setting,
        iteration,
        computing,
        sum(count / span for count, span in zip(each, spans, strict=True)),
        max(0.0, 1 - computing / iteration),
        float(stale.mean()) if stale.size else 0.0,
        int(stale.max()) if stale.size else 0,
    )


def _workers_of_a_trace(setting: Setting, traces: int) -> Iterable[int]:
    if setting.way == "hybrid":
        full = [setting.group] * traces
        full[-1] = setting.workers - setting.group * (traces - 1)
        return full
    if traces == 1:
        return [setting.workers - (setting.backups if setting.way == "sync" else 0)]
    return [1] * traces
