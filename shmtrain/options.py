"""What the command line of a training may say, and what is wrong with it whatever the solver file says."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from prototxt.compiler import cpp_compiler
from prototxt.errors import NetError
from shmtrain.lr_rule import DEFAULT_WARMUP

SIGNAL_EFFECTS = ("stop", "snapshot", "none")
PRECISIONS = ("float32", "bf16")
DATA = ("split", "cursor")
BATCH = ("each", "global")
MAX_WORKERS = 1024  # processes on one host
MAX_THREADS = 1024  # OpenMP ends the process when it cannot start as many as it is told
INT32 = (-(2**31), 2**31 - 1)  # max_iter and level in the schema
SEEDS = (-(2**63), 2**64 - 1)  # what torch takes


class ConfigError(ValueError):
    """The solver file or an option is wrong; nothing has been started."""


@dataclass(frozen=True)
class MethodOptions:
    """What the command line says about one way of sharing; None leaves the default. See method.Method."""

    beta: float | None = None
    warm_start: int | None = None
    staleness: str | None = None
    n_fetch: int | None = None
    n_push: int | None = None
    server: str | None = None
    server_rate: float | None = None
    backup_workers: int | None = None
    group_size: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    asynchronous: bool | None = None
    outer_buffer: int | None = None
    fragments: int | None = None
    overlap: int | None = None
    dynamic: bool | None = None
    bucket_mib: float | None = None
    wire: str | None = None
    wait_limit: float | None = None


@dataclass(frozen=True)
class Options:
    """What the command line says; None leaves the choice to the solver file or the default.

    weights   .caffemodel files to start from, in order; they replace the solver file's own
    snapshot  a .solverstate to go on from; resume finds the newest whole one by itself
    stages    added to the training net's state, as ``caffe train -stage`` does
    by_machine  hybrid: the workers of a machine are a group; where a launcher has spread them
    """

    workers: int = 1
    algorithm: str = "seasgd"
    exchange: str | None = None
    method: MethodOptions = MethodOptions()
    alpha: float | None = None
    tau: int | None = None
    termination: str = "counter"
    lr_rule: str | None = None
    warmup: int = DEFAULT_WARMUP
    smb: str | None = None
    job: str | None = None
    join: bool = False
    box_grace: float = 60.0
    by_machine: bool = False
    share_data: bool = False
    data: str = "split"
    batch: str = "each"
    weights: tuple[str, ...] = ()
    snapshot: str | None = None
    resume: bool = False
    level: int = 0
    stages: tuple[str, ...] = ()
    sigint_effect: str = "stop"
    sighup_effect: str = "snapshot"
    threads: int | None = None
    seed: int | None = None
    max_iter: int | None = None
    log_dir: str | None = None
    tensorboard: str | None = None
    precision: str = "float32"
    compile: bool = False

    def told(self) -> list[str]:
        """Which options that not every algorithm has were given, besides those of ``method``."""
        told = [name for name in ("alpha", "tau", "exchange") if getattr(self, name) is not None]
        return [*told, "termination"] if self.termination != "counter" else told


def choice(what: str, value: str, allowed: Iterable[str]) -> str:
    """``value`` when it is allowed; else ConfigError with the list and the nearest name."""
    names = tuple(allowed)
    if value in names:
        return value
    near = difflib.get_close_matches(value.lower(), [n.lower() for n in names], 1)
    hint = next((f"; did you mean {n!r}?" for n in names if near and n.lower() == near[0]), "")
    raise ConfigError(f"{what} {value!r} is unknown (allowed: {', '.join(names)}){hint}")


def check_options(options: Options) -> None:
    """What is wrong with the command line whatever the solver file says."""
    _check_texts(options)
    _check_numbers(options)
    if sum((bool(options.snapshot), bool(options.weights), options.resume)) > 1:
        raise ConfigError(
            "give a snapshot to resume training from or weights to fine-tune, not both"
            " (--snapshot, --resume and --weights exclude one another)"
        )
    if options.snapshot and ".caffemodel" in os.path.basename(options.snapshot):
        state = options.snapshot.replace(".caffemodel", ".solverstate")
        raise ConfigError(
            f"--snapshot {options.snapshot}: this is a weights file, use --weights; the state is {state}"
        )
    if not 0 <= options.box_grace < float("inf"):
        raise ConfigError(f"--box-grace {options.box_grace}: is no number of seconds")
    choice("--precision", options.precision, PRECISIONS)
    choice("--data", options.data, DATA)
    choice("--batch", options.batch, BATCH)
    if options.compile:
        try:
            cpp_compiler()
        except NetError as error:
            raise ConfigError(f"--compile: {error}") from error
    for flag, effect in (("sigint", options.sigint_effect), ("sighup", options.sighup_effect)):
        choice(f"--{flag}-effect", effect, SIGNAL_EFFECTS)


def _check_texts(options: Options) -> None:
    """An empty one is a shell variable that was not set: what it should have said must not be passed over."""
    texts = {"weights": ",".join(options.weights) if options.weights else None} | {
        flag: getattr(options, flag.replace("-", "_"))
        for flag in ("snapshot", "smb", "job", "lr-rule", "log-dir", "tensorboard")
    }
    for flag, text in texts.items():
        if text is not None and not text.strip(", "):
            raise ConfigError(f"--{flag} {text!r}: is empty")


def _check_numbers(options: Options) -> None:
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: at least one worker is needed")
    limits = {
        "workers": (1, MAX_WORKERS),
        "threads": (1, MAX_THREADS),
        "max-iter": (1, INT32[1]),
        "level": INT32,
        "seed": SEEDS,
    }
    for flag, (lowest, highest) in limits.items():
        number = getattr(options, flag.replace("-", "_"))
        if number is not None and number < lowest and lowest == 1:
            raise ConfigError(f"--{flag} {number}: must be at least 1")
        if number is not None and not lowest <= number <= highest:
            raise ConfigError(f"--{flag} {number}: must lie in {lowest}..{highest}")
