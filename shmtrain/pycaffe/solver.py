"""The solver that scripts drive: ``solver.step(100)``, ``solver.net.params``, ``solver.snapshot()``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from prototxt.python_modules import name_folders, script_folders
from prototxt.text import parse_solver
from shmtrain.config import TrainConfig
from shmtrain.counting import LocalCounting
from shmtrain.exchange.none import NoExchange
from shmtrain.learner import Learner
from shmtrain.pycaffe.net import Net
from shmtrain.pycaffe.settings import next_seed
from shmtrain.reports import Reports
from shmtrain.role import Alone
from shmtrain.signals import Signals
from shmtrain.trainer import Trainer


class Solver:
    """One worker's training as the original's Python solver: built from a solver file or a parsed message.

    net, test_nets  the nets; a test net has the training net's weights after its first test
    iter            updates made
    param           the solver's message, of which base_lr may be set between steps
    type            which rule makes the updates; None where the file says
    After ``step`` each parameter's diff holds the update that was subtracted, as in the original.
    Close it, or use it as a context manager, to end the readers of its nets.
    """

    type: ClassVar[str | None] = None  # what a subclass insists on

    def __init__(self, source: str | os.PathLike[str] | Any) -> None:
        name_folders(script_folders)  # Python layers lie where the script's own modules do
        from_file = isinstance(source, (str, os.PathLike))
        message: Any = parse_solver(source) if from_file else source
        if self.type is not None:
            message.type = self.type
        config = TrainConfig.from_message(message, os.fspath(source) if from_file else "solver.prototxt")
        if config.run.random_seed is None:
            config = replace(config, run=replace(config.run, random_seed=next_seed()))
        self.param = config.message()
        reports, role = Reports.silent(), Alone()
        self._learner = Learner.open(config, role, reports.log)
        self._counting = LocalCounting(0, sys.maxsize)
        exchange = NoExchange(self._learner.params.array)
        self._trainer = Trainer(self._learner, exchange, self._counting, role, reports)
        self._trainer.strict = True
        self._trainer.signals = Signals("none", "none")
        self.net = Net.around(self._learner.net)
        self.test_nets = [Net.around(net) for net in self._trainer.tester().nets]

    @property
    def iter(self) -> int:
        return self._counting.completed

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        self._take_param()
        return self._learner.rate(self.iter)

    def step(self, iterations: int) -> None:
        """Make ``iterations`` steps, with the tests and snapshots that are due on the way."""
        self._take_param()
        self._trainer.step(iterations)

    def solve(self, resume_file: str | None = None) -> None:
        """Train to max_iter, snapshot, and run the last test, as ``caffe train``."""
        if resume_file is not None:
            self.restore(resume_file)
        self.step(self._learner.config.schedule.max_iter - self.iter)
        self._trainer.finish()

    def snapshot(self) -> None:
        """Write .caffemodel and .solverstate of now. Raises SnapshotError."""
        self._trainer.snapshot(self.iter)

    def restore(self, path: str) -> None:
        """Go on from a .solverstate. Raises SnapshotError."""
        self._learner.restore(path)
        self._counting.completed = self._learner.iteration
        self._trainer.go_on_from(self._learner.iteration)

    def apply_update(self) -> None:
        """One update from the parameter diffs as they are; iter goes up by one."""
        self._take_param()
        self._trainer.apply_update()

    def share_weights(self, net: Net) -> None:
        """Let ``net`` have this solver's weights, layer by layer by name: both are changed by every step."""
        net.share_with(self.net)

    def add_callback(self, on_start: Callable[[], None], on_gradients_ready: Callable[[], None]) -> None:
        """Call ``on_start`` before each forward pass and the other before each update."""
        self._trainer.callbacks.append((on_start, on_gradients_ready))

    def close(self) -> None:
        """End the readers of the nets; closing twice is fine."""
        self._trainer.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_param(self) -> None:
        if self.param.base_lr != self._learner.config.rate.base:
            self._learner.config = self._learner.config.with_base_lr(self.param.base_lr)


class SGDSolver(Solver):
    type = "SGD"


class NesterovSolver(Solver):
    type = "Nesterov"


class AdaGradSolver(Solver):
    type = "AdaGrad"


class RMSPropSolver(Solver):
    type = "RMSProp"


class AdaDeltaSolver(Solver):
    type = "AdaDelta"


class AdamSolver(Solver):
    type = "Adam"


SOLVERS: dict[str, type[Solver]] = {
    "SGD": SGDSolver,
    "Nesterov": NesterovSolver,
    "AdaGrad": AdaGradSolver,
    "RMSProp": RMSPropSolver,
    "AdaDelta": AdaDeltaSolver,
    "Adam": AdamSolver,
}


def get_solver(path: str | os.PathLike[str]) -> Solver:
    """The solver that the file's ``type`` names; ConfigError for a type that is none."""
    return SOLVERS.get(parse_solver(path).type, Solver)(path)
