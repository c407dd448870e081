"""What is simulated: a machine, a computation, a way of sharing weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

GB = 1e9
LEAST = 1e-6  # a smaller spread is none
WAYS = (
    "seasgd", "paper", "overlapped", "hybrid", "downpour", "diloco", "diloco-async", "sync", "allreduce",
    "mpi-star", "mpi-easgd", "local",
)  # fmt: skip


class SettingError(ValueError):
    """A value that nothing can be simulated with; the message names it and its limits."""


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise SettingError(f"{name} {value:g}: must be above 0")


@dataclass(frozen=True)
class Machine:
    """Rates are GB (1e9 bytes) of vector a second; those of memory hold for one thread.

    link        of one box, both directions together; None: the workers share the box's memory
    nic         of one host of workers, both directions together
    per_host    workers on one host
    inside      of the sums and broadcasts inside a host
    boxes       over which a vector is striped; links and memories work side by side
    latency     seconds of a message
    exchange    the fused move: one pass over the worker's weights and the center
    copy        a read or a write in shared memory
    accumulate  adding an increment to the center
    apply       the worker's own half, W_x -= d
    parallel    so many threads' worth of memory rates one box's memory has
    serial      the box takes one increment at a time, as the paper's does
    cores       processors of the host that all workers share, on which whatever they do takes turns
                (shared memory only); computing times are then those of as many workers; None: enough
    """

    link: float | None = 6.7
    nic: float = 6.7
    per_host: int = 1
    inside: float = 10.0
    boxes: int = 1
    latency: float = 5e-6
    exchange: float = 6.0
    copy: float = 7.0
    accumulate: float = 7.0
    apply: float = 6.0
    parallel: float = 4.0
    serial: bool = False
    cores: int | None = None

    def __post_init__(self) -> None:
        positive = (
            "nic",
            "inside",
            "exchange",
            "copy",
            "accumulate",
            "apply",
            "parallel",
            "per_host",
            "boxes",
        )
        for name in positive:
            _positive(name, getattr(self, name))
        for name in ("link", "cores"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if not 0 <= self.latency < 60:
            raise SettingError(f"latency {self.latency:g}: 0 to 60 seconds")


@dataclass(frozen=True)
class Computing:
    """Seconds of one iteration's computing: forward, backward and the local update.

    mean, spread  of a gamma distribution, spread as a part of the mean; 0: always the mean
    measured      seconds to draw from instead, with replacement
    slow          the first worker takes so many times longer
    """

    mean: float = 0.1
    spread: float = 0.05
    measured: tuple[float, ...] = ()
    slow: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "slow", *(["measured"] if self.measured else [])):
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else [values]:
                _positive(name, value)
        if not 0 <= self.spread < 10:
            raise SettingError(f"spread {self.spread:g}: 0 to 10 of the mean")

    def draws(self, worker: int, count: int, seed: int) -> npt.NDArray[np.float64]:
        """(count,) seconds of a worker's iterations: the same for the same seed, worker and count."""
        random = np.random.default_rng([seed, worker])
        if self.measured:
            found = random.choice(np.asarray(self.measured, np.float64), count)
        elif self.spread > LEAST:
            shape = self.spread**-2.0
            found = random.gamma(shape, self.mean / shape, count)
        else:
            found = np.full(count, self.mean)
        return found * (self.slow if worker == 0 else 1.0)


@dataclass(frozen=True)
class Setting:
    """One simulation.

    bytes       of the vector
    tau         iterations between two exchanges
    group       workers of a synchronous group, and how its root exchanges, "seasgd" or "paper" (hybrid)
    backups     workers that a synchronous step does not wait for (sync)
    hidden      part of an allreduce that the backward pass hides, where time allows (allreduce, hybrid)
    iterations  of each worker; the first fifth is not counted
    """

    way: str
    workers: int
    bytes: float
    machine: Machine = Machine()
    computing: Computing = Computing()
    tau: int = 1
    group: int = 4
    root: str = "seasgd"
    backups: int = 0
    hidden: float = 0.0
    iterations: int = 50
    seed: int = 1

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise SettingError(f"way {self.way!r}: one of {', '.join(WAYS)}")
        if not 1 <= self.workers <= 65536:
            raise SettingError(f"{self.workers} workers: 1 to 65536")
        for name in ("bytes", "tau", "group"):
            _positive(name, getattr(self, name))
        if self.iterations < 5 * self.tau:
            raise SettingError(f"{self.iterations} iterations: at least 5 times tau, {5 * self.tau}")
        if not 0 <= self.backups < self.workers:
            raise SettingError(f"{self.backups} backup workers of {self.workers}: fewer than all")
        if self.root not in ("seasgd", "paper"):
            raise SettingError(f"root {self.root!r}: seasgd or paper")
        if not 0 <= self.hidden <= 1:
            raise SettingError(f"hidden {self.hidden:g}: 0 to 1")
        if self.machine.link is not None and self.machine.cores:
            raise SettingError(f"{self.machine.cores} cores: of one shared memory (link 0), not of a network")
        if self.machine.link is None and self.machine.boxes > 1:
            raise SettingError(f"{self.machine.boxes} boxes in one shared memory: it has one")

    @property
    def first(self) -> int:
        """The first iteration that counts."""
        return self.iterations // 5

    def with_(self, **values: object) -> Setting:
        """The same but for these fields, of this or of its machine or computing."""
        machine, computing = dict[str, object](), dict[str, object]()
        for part, names in ((machine, Machine), (computing, Computing)):
            known = {field.name for field in fields(names)}
            part.update({name: values.pop(name) for name in list(values) if name in known})
        changed = replace(self, machine=replace(self.machine, **machine))  # type: ignore[arg-type]
        changed = replace(changed, computing=replace(self.computing, **computing))  # type: ignore[arg-type]
        return replace(changed, **values)  # type: ignore[arg-type]
