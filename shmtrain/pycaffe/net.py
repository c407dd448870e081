"""``Net`` with the original's constructors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from prototxt.net import Net as TorchNet
from shmtrain.pycaffe.settings import next_seed

TRAIN, TEST = 0, 1

Path = str | os.PathLike[str]


class Net(TorchNet):
    """``Net(file, phase, level=0, stages=None, weights=None)``; deprecated: ``Net(file, weights, phase)``."""

    def __init__(
        self,
        network_file: Any,
        phase: int | Path,
        level: int | Path = 0,
        stages: Sequence[str] | None = None,
        weights: Path | None = None,
    ) -> None:
        if isinstance(phase, (str, os.PathLike)):  # (file, weights, phase): the third is called level here
            weights, number, level = phase, level, 0
        else:
            number = phase
        if number not in (TRAIN, TEST):
            raise ValueError(f"phase {number!r} is neither caffe.TRAIN nor caffe.TEST")
        if not isinstance(level, int):
            raise TypeError(f"level {level!r} is no number")
        super().__init__(
            network_file,
            "TEST" if number == TEST else "TRAIN",
            stages=tuple(stages or ()),
            level=level,
            weights=weights,
            seed=next_seed(),
        )
