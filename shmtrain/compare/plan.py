"""What is to be run: ways of sharing, numbers of workers, seeds; and what the folder remembers of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prototxt.files import replacing_file
from prototxt.text import parse_solver
from shmtrain import cli
from shmtrain.config import TrainConfig
from shmtrain.method import METHODS
from shmtrain.options import ConfigError, choice
from shmtrain.settings import Sharing

ALONE = "alone"  # the way of one worker, which has nobody to share with
MEMORY = "comparison.json"
SOLVER = "solver.prototxt"
RUNS = "runs"
PREFIX = "run"  # of the files in a run's folder
OWN = ("--workers", "--algorithm", "--seed", "--max-iter", "--log-dir", "--snapshot", "--resume", "--job")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
MOST = (1 << 31) - 1  # of the solver's numbers
DISPLAYS = 20  # lines of the training loss that a run gives at least


@dataclass(frozen=True)
class Way:
    """A way of sharing under the name that the report calls it; ``options`` are its own."""

    name: str
    algorithm: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One run."""

    way: Way
    workers: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.way.name}-w{self.workers}-s{self.seed}"

    @property
    def label(self) -> str:
        crowd = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return f"{crowd if self.workers == 1 else f'{self.way.name}, {crowd}'}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs, each with the arguments of ``shmtrain`` but for the folder of its log.

    common  options that every run gets
    mpirun  starts the processes of a way that meets by MPI
    """

    folder: Path
    solver: str
    ways: tuple[Way, ...]
    workers: tuple[int, ...]
    seeds: tuple[int, ...]
    common: tuple[str, ...] = ()
    mpirun: tuple[str, ...] = ("mpirun",)
    configs: dict[str, TrainConfig] = field(default_factory=dict, compare=False)

    def cases(self) -> Iterator[Case]:
        """Seed by seed, so that an interrupted comparison has something of everything."""
        for seed in self.seeds:
            for workers in sorted(self.workers):
                for way in self.ways if workers > 1 else (Way(ALONE, "seasgd"),):
                    yield Case(way, workers, seed)

    def arguments(self, case: Case) -> list[str]:
        """Besides the number of workers."""
        told = ["--seed", str(case.seed), *self.common]
        return told if case.workers == 1 else ["--algorithm", case.way.algorithm, *told, *case.way.options]

    def command(self, case: Case) -> list[str]:
        """The words that start a run, up to where its log goes."""
        entry = METHODS[case.way.algorithm]
        run = [sys.executable, "-m", "shmtrain.cli", str(self.folder / SOLVER), *self.arguments(case)]
        if entry.box:
            return [*run, "--workers", str(case.workers)]
        return [*self.mpirun, "-n", str(case.workers + entry.server), *run]

    def check(self) -> None:
        """Read every run's configuration, so that a wrong option is told before the first run."""
        for case in self.cases():
            words = [str(self.folder / SOLVER), *self.arguments(case)]
            try:
                options = cli.options_of(cli.parser().parse_args(words), case.workers)
                self.configs[case.name] = TrainConfig.load(words[0], options)
            except ConfigError as error:
                raise ConfigError(f"{case.label}: {error}") from None

    def sharing(self, case: Case) -> Sharing:
        return self.configs[case.name].sharing


# The command line's words --------------------------------------------------------------------------------


def ways(algorithms: Sequence[str], variants: Sequence[str]) -> tuple[Way, ...]:
    """``seasgd`` of --algorithms, and ``NAME=ALGORITHM OPTIONS`` of --variant. Raises ConfigError."""
    found = [Way(choice("--algorithms", name, METHODS), name) for name in algorithms]
    for text in variants:
        name, equals, rest = text.partition("=")
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise ConfigError(f"--variant {text!r}: {error}") from error
        if not equals or not words or not NAME.fullmatch(name) or name == ALONE:
            raise ConfigError(
                f"--variant {text!r}: must be NAME=ALGORITHM OPTIONS, the name of letters and digits"
            )
        found.append(Way(name, choice(f"--variant {name}:", words[0], METHODS), tuple(words[1:])))
    names = [way.name for way in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(twice)}: named twice")
    for way in found:
        refuse_own(way.options, f"--variant {way.name}")
    return tuple(found)


def refuse_own(options: Sequence[str], where: str) -> None:
    """Refuse options that differ from run to run by this command's own doing."""
    for word in options:
        if word.partition("=")[0] in OWN:
            raise ConfigError(f"{where}: {word} is chosen by compare itself")


# The folder ----------------------------------------------------------------------------------------------


def solver_text(path: str, folder: Path, max_iter: int | None, test_interval: int | None) -> str:
    """The solver file as every run gets it: tested at the end, without snapshots."""
    if not os.path.exists(path):
        raise ConfigError(f"solver file {os.path.abspath(path)} does not exist")
    message = parse_solver(path)
    for name, value in (("max_iter", max_iter), ("test_interval", test_interval)):
        if value is not None and not 0 <= value <= MOST:
            raise ConfigError(f"{name} {value} must be from 0 to {MOST}")
        if value is not None:
            setattr(message, name, value)
    if message.max_iter < 1:
        raise ConfigError(f"{path}: max_iter {message.max_iter} must be at least 1")
    if message.test_interval:
        message.test_interval = ending(message.max_iter, message.test_interval)
    most = max(message.max_iter // DISPLAYS, 1)
    message.display = min(message.display or most, most)
    message.snapshot = 0
    message.snapshot_after_train = False
    message.snapshot_prefix = str(folder / PREFIX)
    return str(message)


def ending(max_iter: int, interval: int) -> int:
    """An interval near ``interval`` that divides max_iter, so that the last test is of the last iteration."""
    near = range(min(interval, max_iter), min(interval, max_iter) // 2, -1)
    return next((i for i in near if max_iter % i == 0), max_iter)


def recall(plan: Plan, solver: str) -> dict[str, Any]:
    """What the folder's runs are runs of, with this plan's ways; another comparison's folder is refused.

    More ways, workers and seeds may be added to it.
    """
    path = plan.folder / MEMORY
    memory: dict[str, Any] = {
        "solver": _anywhere(solver),
        "nets": _nets(solver),
        "options": list(plan.common),
        "ways": {},
    }
    if path.exists():
        before = remembered(path)
        before["solver"] = _anywhere(before["solver"])
        changed = [name for name in ("solver", "nets", "options") if before[name] != memory[name]]
        if changed:
            raise ConfigError(
                f"{plan.folder} holds another comparison: its {' and '.join(changed)} differ;"
                " choose another --out"
            )
        memory["ways"] = before["ways"]
    for way in plan.ways:
        told = [way.algorithm, *way.options]
        if memory["ways"].setdefault(way.name, told) != told:
            raise ConfigError(
                f"{plan.folder} knows {way.name} as {shlex.join(memory['ways'][way.name])}, not as"
                f" {shlex.join(told)}; choose another name"
            )
    return memory


def remembered(path: Path) -> dict[str, Any]:
    """What is in MEMORY. Raises ConfigError where that is no comparison's."""
    try:
        memory = json.loads(path.read_text())
        if {"solver", "nets", "options", "ways"} <= memory.keys():
            return dict(memory)
    except (ValueError, AttributeError):
        pass
    raise ConfigError(f"{path} is damaged, or not a comparison's; choose another --out")


def _anywhere(solver: str) -> str:
    """A solver's text without the folder that its runs lie in: that may be called by another path."""
    return re.sub(r"^snapshot_prefix: .*\n", "", solver, flags=re.MULTILINE)


def _nets(solver: str) -> dict[str, str]:
    """The net files that a solver names, with a checksum."""
    names = re.findall(r'^(?:net|train_net|test_net): "(.*)"$', solver, re.MULTILINE)
    found = {name: Path(name) for name in names if os.path.isfile(name)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replacing_file(path) as beside:
        Path(beside).write_text(text)


def standing(sharing: Sharing) -> float:
    """The share of a job's workers that stand still while the leading one tests the center."""
    workers, method = sharing.workers, sharing.method
    if sharing.algorithm == "hybrid":
        return min(method.group_size, workers) / workers
    together = METHODS[sharing.algorithm].lockstep and not method.asynchronous and not method.backup_workers
    return 1.0 if together else 1.0 / workers


def describe(sharing: Sharing) -> dict[str, Any]:
    """What the report says of a run's way."""
    shared = sharing.workers > 1
    return {
        "algorithm": sharing.algorithm if shared else ALONE,
        "figures": sharing.figures() if shared else [],
        "rate": sharing.lr_rule.describe(1 if sharing.global_batch else sharing.workers),
        "standing": standing(sharing),
    }
