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
        phase: int | Path | None = None,
        level: int = 0,
        stages: Sequence[str] | int | None = None,
        weights: Path | None = None,
    ) -> None:
        if isinstance(phase, (str, os.PathLike)):  # (file, weights, phase): the third is called level here
            phase, weights, level = level, phase, 0
        if phase not in (TRAIN, TEST):
            raise ValueError(f"phase {phase!r} is neither caffe.TRAIN nor caffe.TEST")
        if isinstance(stages, int):
            raise TypeError("stages must be a list of names")
        super().__init__(
            network_file,
            "TEST" if phase == TEST else "TRAIN",
            stages=tuple(stages or ()),
            level=level,
            weights=weights,
            seed=next_seed(),
        )
