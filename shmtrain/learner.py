"""One worker's net, flat vectors and update rule: everything that a step changes and a snapshot keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prototxt.layers.read_ahead import ReadAhead
from prototxt.net import Net
from prototxt.whole import Outcome
from shmtrain import snapshot
from shmtrain.config import TrainConfig
from shmtrain.counting import Portion
from shmtrain.data_wait import DataWait
from shmtrain.debug import layered_pass, watched_pass
from shmtrain.log import Log
from shmtrain.method import METHODS
from shmtrain.options import ConfigError
from shmtrain.params import F32, Params
from shmtrain.role import Role
from shmtrain.settings import NetSource
from shmtrain.snapshot import Names, State, WorkerState
from shmtrain.solver import RateState, Updater, learning_rate


def open_net(
    source: NetSource, config: TrainConfig, role: Role, reading: Mapping[str, Any] | None = None
) -> Net:
    """Build a net of the configuration for this worker; its readers take this worker's share of the data.

    A test net is read whole by whoever tests, and not compiled: that pays for the many steps of a training.
    ``reading`` is for the data layers.
    """
    alone = source.phase == "TEST"
    options = dict(reading or {})
    if config.sharing.global_batch:
        options["batch_parts"] = config.sharing.workers  # also of those that join
    return Net(
        source.source(),
        source.phase,
        stages=source.stages,
        level=source.level,
        seed=config.run.random_seed,
        rank=0 if alone else role.rank,
        world=1 if alone else role.world,
        options=options,
        precision=config.run.precision,
        compile=config.run.compile and not alone,
    )


@dataclass
class _Hook:
    """Tells of one parameter's gradient in the last of the passes of an iteration."""

    start: int
    stop: int
    passes: int
    call: Callable[[int, int], None]
    made: int = 0

    def __call__(self, parameter: Tensor) -> None:
        self.made += 1
        if self.made % self.passes == 0:
            self.call(self.start, self.stop)


def _nothing(stem: str, leads: bool) -> None:
    """Beside a snapshot of one worker alone."""


@dataclass
class Learner:
    """The state of one worker's training.

    iteration  the job's iteration that the state was restored at, 0 for a new training
    last       outcome of the last forward pass
    restored   the snapshot that the state is from
    portion    what a step of this worker is of an iteration
    beside     saves what else belongs to a snapshot, under its stem; told whether this worker leads
    """

    config: TrainConfig
    net: Net
    role: Role
    log: Log
    iteration: int = 0
    params: Params = field(init=False)
    updater: Updater = field(init=False)
    data_wait: DataWait = field(init=False)
    rates: RateState = field(init=False, default_factory=RateState)
    last: Outcome | None = field(init=False, default=None)
    restored: Names | None = field(init=False, default=None)
    portion: Portion = field(init=False)
    beside: Callable[[str, bool], None] = field(init=False, default_factory=lambda: _nothing)

    def __post_init__(self) -> None:
        self.params = Params(self.net)
        self.updater = Updater(self.config.rule, self.params)
        self.data_wait = DataWait(self.net)
        self.portion = self._portion()

    @classmethod
    def open(
        cls, config: TrainConfig, role: Role, log: Log, reading: Mapping[str, Any] | None = None
    ) -> Learner:
        """Build the training net and load what the configuration says to start from.

        What goes on from a snapshot goes on in the data too, behind the batches that this worker has had.
        """
        log.info(f"Initializing solver from parameters: \n{config.text.rstrip()}")
        log.info(f"Creating {config.train.label}")
        learner = cls(config, open_net(config.train, config, role, reading), role, log)
        if learner.net.compile_account:
            log.info(learner.net.compile_account)
        for weights in config.start.weights:
            log.info(f"Finetuning from {weights}")
            learner.net.copy_from(weights)
        path = config.start.snapshot
        if config.start.resume:
            path = snapshot.newest_whole(config.snapshots.prefix, log.warning)
            if path is None:
                log.info(f"No snapshot of {config.snapshots.prefix} to resume from: starting anew")
        if path is not None:
            log.info(f"Resuming from {path}")
            learner.restore(path)
            learner.skip_data(learner.updater.count * config.rule.iter_size)
        return learner

    def skip_data(self, batches: int) -> None:
        """Let the data layers go on behind so many batches of this worker."""
        for node in self.net.layers:
            if batches and isinstance(node.module, ReadAhead):
                node.module.go_on_from(batches)

    # One step --------------------------------------------------------------------------------------------

    def compute(self, watch: bool = False) -> float:
        """Gradients of one iteration, accumulated over iter_size batches; returns the mean loss.

        watch  log what every layer makes, for debug_info; slow
        """
        size = self.config.rule.iter_size
        self.data_wait.begin()
        self.params.clear_gradient()
        loss = 0.0
        for _ in range(size):
            self.last = outcome = self._pass(watch)
            if outcome.loss.requires_grad:
                torch.autograd.backward(outcome.loss)
            loss += float(outcome.loss.detach())
        return loss / size

    def _pass(self, watch: bool) -> Outcome:
        """By layers, gradients included, where somebody looks on; else as one graph."""
        if watch:
            return watched_pass(self.net, self.log)
        return layered_pass(self.net) if self.net.layerwise.observed else self.net.run()

    def when_ready(self, call: Callable[[int, int], None]) -> None:
        """Let ``call(start, stop)`` be called when a parameter's gradient is made, in the last pass."""
        parameters = {(one.layer, one.index): one.param for one in self.net.learnable}
        for slot in self.params.slots:
            if slot.stop <= self.params.trained:
                hook = _Hook(slot.start, slot.stop, self.config.rule.iter_size, call)
                parameters[slot.layer, slot.index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self) -> float:
        """The loss of one more batch, without a gradient."""
        with torch.no_grad():
            self.last = self.net.run()
        return float(self.last.loss.detach())

    def batch_size(self) -> int:
        """Items in one batch: the first axis of the first top of the first layer."""
        for node in self.net.layers:
            for top in node.tops:
                shape = self.net.blobs[top].shape
                return int(shape[0]) if len(shape) else 1
        return 1

    @property
    def steps_left(self) -> int:
        """Steps of all workers from the iteration that the state was restored at to the end."""
        steps = self.portion.steps
        return max(steps(self.config.schedule.max_iter) - steps(self.iteration), 0)

    def _portion(self) -> Portion:
        """By the layers that read batches from files; the whole where the workers share none out."""
        if not self.config.sharing.global_batch:
            batch = max(self.batch_size(), 1)  # an empty one is a step all the same
            return Portion(batch, batch)
        modules = (node.module for node in self.net.layers)
        found = {Portion(m.images[1], m.images[0]) for m in modules if isinstance(m, ReadAhead)}
        if len(found) == 1:
            return found.pop()
        batches = ", ".join(str(whole) for whole in sorted(portion.whole for portion in found))
        have = f"batches of {batches} images" if found else "no layer that reads batches from files"
        raise ConfigError(f"--batch global needs one batch to share out; the training net has {have}")

    def rate(self, iteration: int) -> float:
        """The learning rate of the job's ``iteration``, the rule for several workers included."""
        before = self.rates.current_step
        rate = learning_rate(self.config.rate, iteration, self.rates)
        if self.config.rate.policy == "multistep" and self.rates.current_step != before:
            self.log.info(f"MultiStep Status: Iteration {iteration}, step = {self.rates.current_step}")
        batches = self.portion.batches(self.role.world)
        factor = self.config.sharing.lr_rule.factor(batches, iteration) * self._part
        return rate if factor == 1.0 else rate * factor

    def rate_rule(self) -> str:
        """What several workers make of the solver's rate, for the log."""
        rule = self.config.sharing.lr_rule.describe(self.portion.batches(self.role.world))
        part, whole = self.portion.images, self.portion.whole
        return rule if self._part == 1 else f"{rule}, and {part}/{whole} of it for a step of {part} images"

    @property
    def _part(self) -> float:
        """Of the rate, where the center takes each worker's step of a part of the batch whole."""
        sharing = self.config.sharing
        adds = sharing.shared and METHODS[sharing.algorithm].adds
        return self.portion.images / self.portion.whole if adds else 1.0

    def update(self, rate: float) -> None:
        """Clip, normalise, regularise and apply the accumulated gradients."""
        self.updater.clip(self.log)
        self.updater.apply(rate)
        self.data_wait.end()

    # Snapshots -------------------------------------------------------------------------------------------

    def save(self, iteration: int, weights: F32 | None = None) -> str:
        """Write the job's snapshot at ``iteration``; the state file's name.

        weights  (n,) the center; None for this worker's own weights
        """
        names = Names(self.config.snapshots.prefix, iteration, self.config.snapshots.hdf5)
        kind = "HDF5" if names.hdf5 else "binary proto"
        self.log.info(f"Snapshotting to {kind} file {names.model}")
        if weights is None:
            self._save_model(names.model)
        else:
            with self.params.holding(weights):
                self._save_model(names.model)
        self.log.info(f"Snapshotting solver state to {kind} file {names.state}")
        arrays = snapshot.history_arrays(self.params, self.updater.history)
        state = State(iteration, self.rates.current_step, names.model, arrays)
        if self.role.world > 1:
            self.save_own(iteration)
        self.beside(names.stem, True)
        snapshot.write_state(names.state, state, names.hdf5)
        return names.state

    def _save_model(self, path: str) -> None:
        save = self.net.save_hdf5 if self.config.snapshots.hdf5 else self.net.save
        snapshot.write_atomically(path, lambda to: save(to, self.config.snapshots.diff))

    def save_own(self, iteration: int) -> None:
        """Write this worker's own state beside the job's snapshot."""
        names = Names(self.config.snapshots.prefix, iteration)
        path = names.worker(self.role.rank)
        history = tuple(vector.numpy() for vector in self.updater.history)
        snapshot.write_worker(path, self.params, WorkerState(self.updater.count, history))
        if not self.role.leads:
            self.beside(names.stem, False)

    def restore(self, path: str) -> None:
        """Go on from a .solverstate: weights, iteration, current_step and this worker's history.

        What a job of another size did not save for this worker starts at zero, and the log says so.
        Raises SnapshotError; the net may then hold the snapshot's weights.
        """
        state = snapshot.read_state(path)
        model = snapshot.find_model(state, path)
        histories = len(self.updater.history)
        flat: list[Tensor] = [torch.zeros_like(vector) for vector in self.updater.history]
        snapshot.load_history(self.params, flat, state.history, path)
        self.net.copy_from(model)
        own = self._own_state(path, histories)
        if own is not None:
            flat = [torch.from_numpy(vector) for vector in own.history]
        elif self.role.rank > 0:
            self.log.info(f"No history of worker {self.role.rank} beside {path}: it starts at zero")
            flat = [torch.zeros_like(vector) for vector in flat]
        self.log.info(f"{self.config.rule.type}Solver: restoring history")
        for mine, theirs in zip(self.updater.history, flat, strict=True):
            mine.copy_(theirs)
        self.iteration, self.rates.current_step = state.iteration, state.current_step
        self.restored = Names.of_state(path)
        self.updater.count = self._count(state, own)

    def _own_state(self, path: str, histories: int) -> WorkerState | None:
        names = Names.of_state(path)
        if self.role.world == 1 or names is None:
            return None
        return snapshot.read_worker(names.worker(self.role.rank), self.params, histories)

    def _count(self, state: State, own: WorkerState | None) -> int:
        """Adam's t: the worker's own steps; alone, the iterations of the job."""
        if own is not None:
            return own.count
        return self.portion.steps(state.iteration) // self.role.world

    def close(self) -> None:
        """End the net's readers; closing twice is fine."""
        self.net.close()
