"""How long a training's steps wait for their data."""

from __future__ import annotations

import statistics
import time
from collections import deque

from prototxt.layers.read_ahead import ReadAhead
from prototxt.net import Net
from shmtrain.log import Log

LAST = 10_000  # steps that the figures are of


class DataWait:
    """The waits of the last steps of one net; nothing is kept for a net without a reader."""

    def __init__(self, net: Net) -> None:
        self._layers = [node.module for node in net.layers if isinstance(node.module, ReadAhead)]
        self._waits: deque[float] = deque(maxlen=LAST)
        self._steps: deque[float] = deque(maxlen=LAST)
        self._waited = self._total()
        self._since = 0.0

    def _total(self) -> float:
        return sum(layer.waited for layer in self._layers)

    def begin(self) -> None:
        """A step begins; what was done since the last one is none of it."""
        self._waited, self._since = self._total(), time.perf_counter()

    def end(self) -> None:
        """The step is made."""
        if self._layers:
            self._waits.append(self._total() - self._waited)
            self._steps.append(time.perf_counter() - self._since)

    def figures(self) -> dict[str, float]:
        """Seconds: the waits' median and 99th percentile, the step's median; empty without a wait."""
        if not self._waits:
            return {}
        waits = sorted(self._waits)
        return {
            "data_wait_p50": waits[len(waits) // 2],
            "data_wait_p99": waits[min(len(waits) - 1, len(waits) * 99 // 100)],
            "step_p50": statistics.median(self._steps),
        }

    def tell(self, log: Log) -> dict[str, float]:
        """The figures, said in the log."""
        figures = self.figures()
        if figures:
            p50, p99, step = figures.values()
            log.info(
                f"Wait for data: p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us a step,"
                f" {100 * p99 / step:.2f}% of the median step of {step * 1e3:.2f} ms"
            )
        return figures
