"""The numbers of a training run for programs: JSON lines, and TensorBoard events when asked for."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from shmtrain.log import tell
from shmtrain.options import ConfigError


def ranked(path: str, rank: int) -> str:
    """``path`` for the first worker, ``name.workerR.ext`` for the others."""
    if rank == 0:
        return path
    stem, extension = os.path.splitext(path)
    return f"{stem}.worker{rank}{extension}"


class Metrics:
    """One JSON object a line: ``time`` (seconds since 1970), ``kind``, ``iteration`` and the values.

    kind is "start", "train", "test", "snapshot" or "end". ``seconds`` of "train" and "test" counts from the
    first step, ``testing_seconds`` are those of them that tests took; ``mean_loss`` is of all steps since the
    last "train". A value that is no finite number is null, as JSON has none. A file that cannot be
    written any more ends the metrics, not the training.
    """

    def __init__(self, path: str | None = None, tensorboard: str | None = None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed in close)
        self._events = _event_writer(tensorboard) if tensorboard is not None else None

    def write(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Add one line, and its numbers as events ``kind/name``."""
        if self._file is not None:
            record = {"time": time.time(), "kind": kind, "iteration": iteration, **values}
            try:
                self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
                self._file.flush()
            except OSError as e:
                tell(f"the metrics stop here: {self._file.name}: {e}")
                self._drop()
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._events.add_scalar(f"{kind}/{name}", value, iteration)

    def _drop(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what a full disk did not take
                self._file.close()
            self._file = None

    def close(self) -> None:
        """Write what is buffered; closing twice is fine."""
        self._drop()
        if self._events is not None:
            self._events.close()
            self._events = None


def _plain(value: Any) -> Any:
    """``value`` with every number that JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _event_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise ConfigError(f"--tensorboard {folder}: the package tensorboard is not installed") from e
    return SummaryWriter(folder)
