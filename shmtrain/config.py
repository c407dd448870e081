"""What one training run does: the solver file and the command line, checked and frozen. Loads no torch.

``TrainConfig.load(path, options)`` is the only way in; everything that can be said about a wrong solver file
before a net is built is said here, as a ConfigError with one message. The tree is plain data: it is sent to
the worker processes as it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from prototxt import schema
from prototxt.text import parse_solver
from shmtrain.checks import SolverChecks
from shmtrain.options import ConfigError, Options, check_options
from shmtrain.settings import (
    LearningRate,
    NetSource,
    Rule,
    Run,
    Schedule,
    Sharing,
    Snapshots,
    Start,
    TestRun,
)  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """One training run. ``text`` is the solver file's parsed message as text, for the log."""

    path: str
    text: str
    rule: Rule
    rate: LearningRate
    schedule: Schedule
    train: NetSource
    tests: tuple[TestRun, ...]
    snapshots: Snapshots
    start: Start
    sharing: Sharing
    run: Run
    message_bytes: bytes = field(repr=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str], options: Options | None = None) -> TrainConfig:
        """Read and check a solver file together with the command line's options.

        Net files are parsed once, so that a misspelt field is found before a worker starts.
        Raises ConfigError, prototxt.ParseError and OSError.
        """
        name = os.fspath(path)
        if not os.path.exists(name):
            raise ConfigError(f"solver file {os.path.abspath(name)} does not exist")
        return cls.from_message(parse_solver(name), name, options)

    @classmethod
    def from_message(cls, message: Any, path: str, options: Options | None = None) -> TrainConfig:
        """The same from a parsed SolverParameter; ``path`` names it in messages and the snapshots."""
        options = options or Options()
        check_options(options)
        checker = SolverChecks(message, path, options)
        train = checker.train_net()
        config = cls(
            path=path,
            text=str(message),
            rule=checker.rule(),
            rate=checker.rate(),
            schedule=checker.schedule(),
            train=train,
            tests=checker.test_nets(),
            snapshots=checker.snapshots(),
            start=checker.start(),
            sharing=checker.sharing(),
            run=checker.run(),
            message_bytes=message.SerializeToString(),
        )
        return config

    def message(self) -> Any:
        """The SolverParameter that this was made from; a fresh copy."""
        message = schema.SolverParameter()
        message.ParseFromString(self.message_bytes)
        return message

    def with_base_lr(self, rate: float) -> TrainConfig:
        """The same with another base learning rate, as pycaffe's ``solver.param.base_lr = x``."""
        return replace(self, rate=replace(self.rate, base=rate))
