"""Everything a worker tells while it trains: the log, the metrics and the progress bar, opened together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shmtrain.config import TrainConfig
from shmtrain.log import Log, tell
from shmtrain.metrics import Metrics, ranked
from shmtrain.progress import Bar

ON_CPU = "The solver file says solver_mode: GPU: training on the CPU, this version computes on nothing else"


@dataclass
class Reports:
    """The log takes the original's lines, the metrics the numbers, the bar what a person watches."""

    log: Log
    metrics: Metrics
    bar: Bar | None = None

    @classmethod
    def silent(cls) -> Reports:
        """For a solver that a script drives: nothing is written."""
        return cls(Log(), Metrics())

    @classmethod
    def open(cls, config: TrainConfig, rank: int, progress: bool = True) -> Reports:
        """This worker's files; the first worker also shows the log on stderr, unless a bar goes there."""
        shown = rank == 0 and not (progress and sys.stderr.isatty())
        log = Log([sys.stderr] if shown else [], ranked(config.run.log, rank))
        if config.run.gpu_asked and rank == 0:
            log.warning(ON_CPU)
            if not shown:
                tell(f"shmtrain: {ON_CPU}")
        board = config.run.tensorboard
        board = os.path.join(board, f"worker{rank}") if board is not None and rank > 0 else board
        return cls(log, Metrics(ranked(config.run.metrics, rank), board))

    def show_bar(self, total: int, start: int, images: int) -> None:
        """Begin the progress bar of the job's iterations where stderr is a terminal."""
        if sys.stderr.isatty():
            self.bar = Bar(total, start, images)

    def close(self) -> None:
        """Closing twice is fine."""
        if self.bar is not None:
            self.bar.close()
        self.metrics.close()
        self.log.close()

    def __enter__(self) -> Reports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def begin_files(config: TrainConfig, ranks: Iterable[int]) -> None:
    """Make the folder of the log; a new training, one that goes on from no snapshot, begins its files anew.

    Called once for each worker, before it opens them: it appends.
    """
    going_on = config.start.resume or config.start.snapshot is not None
    ranks = tuple(ranks)
    for path in (config.run.log, config.run.metrics):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        for rank in () if going_on else ranks:
            Path(ranked(path, rank)).unlink(missing_ok=True)
