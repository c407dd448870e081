"""The process-wide settings that the original's Python face has: mode, device, random seed, log."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from shmtrain.log import Log

LEVELS = 4  # glog's severities: 0 info, 1 warning, 2 error, 3 fatal


@dataclass
class _Settings:
    """seed   of the next net, None for one from the clock; each net built takes one further
    log       where ``log`` writes, None for stderr
    level     the lowest severity that is written
    on_cpu    scripts that ask for a GPU get the CPU
    solvers   what set_solver_count and set_solver_rank said; nothing here depends on it
    """

    seed: int | None = None
    log: Log | None = None
    level: int = 0
    on_cpu: bool = False
    solvers: tuple[int, int] = (1, 0)


_settings = _Settings()


def set_mode_cpu() -> None:
    """Compute on the CPU: the only mode, so nothing changes."""


def set_mode_gpu() -> None:
    """Raises RuntimeError: this build computes on the CPU alone; nothing happens after gpu_calls_mean_cpu."""
    _no_gpu("set_mode_gpu")


def set_device(device: int) -> None:
    """Raises RuntimeError, as set_mode_gpu does."""
    _no_gpu(f"set_device({device})")


def gpu_calls_mean_cpu() -> None:
    """From now on set_mode_gpu and set_device do nothing, for scripts that call them in any case."""
    _settings.on_cpu = True


def _no_gpu(call: str) -> None:
    if not _settings.on_cpu:
        raise RuntimeError(
            f"{call}: nets run on the CPU only; use set_mode_cpu, or run the script by "
            "python -m shmtrain.pycaffe --cpu"
        )


def set_random_seed(seed: int) -> None:
    """Seed the fillers and layers of the nets built from now on."""
    _settings.seed = seed


def next_seed() -> int | None:
    """The seed for one more net; None where none was set."""
    seed = _settings.seed
    if seed is not None:
        _settings.seed = seed + 1
    return seed


def layer_type_list() -> list[str]:
    """The layer types that nets can have, alphabetical."""
    from prototxt.registry import layer_types

    return layer_types()


# The log -------------------------------------------------------------------------------------------------


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Settle what ``log`` writes.

    level   the lowest severity that is written: 0 info, 1 warning, 2 error, 3 fatal; ``log`` writes info
    stderr  False: nothing is written, as there is no log file here to take it
    """
    if not 0 <= level < LEVELS:
        raise ValueError(f"log level {level} is out of range: 0 to {LEVELS - 1}")
    _settings.level = level
    _settings.log = Log([sys.stderr] if stderr else [])


def log(text: str) -> None:
    """One line of severity info in the original's format, to stderr."""
    if _settings.level == 0:
        (_settings.log or Log([sys.stderr])).info(text)


# Several solvers -----------------------------------------------------------------------------------------


def solver_count() -> int:
    return _settings.solvers[0]


def set_solver_count(count: int) -> None:
    """Noted for ``solver_count``; workers that share weights are started by ``shmtrain --workers``."""
    _settings.solvers = count, _settings.solvers[1]


def solver_rank() -> int:
    return _settings.solvers[1]


def set_solver_rank(rank: int) -> None:
    """Noted for ``solver_rank``."""
    _settings.solvers = _settings.solvers[0], rank


def set_multiprocess(multiprocess: bool) -> None:
    """Taken and ignored: every solver here is a process's own."""


def has_nccl() -> bool:
    """False: solvers that share weights are workers of ``shmtrain SOLVER --workers N``."""
    return False


class NCCL:
    """There is none; the name is here so that scripts can ask ``has_nccl`` first."""

    def __init__(self, solver: object, uid: object) -> None:
        raise RuntimeError(
            "caffe.NCCL is not there (has_nccl() says so): train on several workers with "
            "shmtrain SOLVER --workers N"
        )


class Timer:
    """Wall-clock milliseconds between start and stop; ``ms`` of one that runs is up to now."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._stop: float | None = None

    def start(self) -> None:
        self._start, self._stop = time.perf_counter(), None

    def stop(self) -> None:
        """Stop; without a start, or stopped before, nothing changes."""
        if self._start is not None and self._stop is None:
            self._stop = time.perf_counter()

    @property
    def ms(self) -> float:
        """0 for a timer that was never started."""
        if self._start is None:
            return 0.0
        return ((time.perf_counter() if self._stop is None else self._stop) - self._start) * 1e3
