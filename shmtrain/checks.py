"""What can be said about a wrong solver file before a net is built. Loads no torch.

Each fault is a ConfigError with one message: the file, the field, what was given and what is allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototxt.text import parse_net
from shmtrain.lr_rule import LrRule, parse_lr_rule
from shmtrain.method import METHODS, check_interval, check_told, method, moving_rate
from shmtrain.options import ConfigError, Options, choice
from shmtrain.settings import (
    LearningRate,
    NetSource,
    Phase,
    Rule,
    Run,
    Schedule,
    Sharing,
    Snapshots,
    Start,
    TestRun,
)  # fmt: skip

SOLVER_TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")
POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")
TRAIN_FIELDS = ("net", "net_param", "train_net", "train_net_param")


@dataclass(frozen=True)
class SolverChecks:
    """The checks of one solver message; each method gives one branch of the tree."""

    message: Any
    path: str
    options: Options

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.path}: {text}")

    def need(self, condition: bool, text: str) -> None:
        if not condition:
            raise self.error(text)

    def chosen(self, what: str, value: str, allowed: Iterable[str]) -> str:
        try:
            return choice(what, value, allowed)
        except ConfigError as e:
            raise self.error(str(e)) from None

    def finite(self, *names: str) -> None:
        for name in names:
            value = getattr(self.message, name)
            self.need(math.isfinite(value), f"{name} {value:g} is not a finite number")

    # The rule and the rate -------------------------------------------------------------------------------

    def rule(self) -> Rule:
        m = self.message
        kind = self.chosen("solver type", m.type, SOLVER_TYPES)
        self.finite("momentum", "momentum2", "rms_decay", "delta", "weight_decay", "clip_gradients")
        if kind in ("AdaGrad", "RMSProp"):
            self.need(m.momentum == 0, f"momentum {m.momentum:g} cannot be used with {kind}: remove it")
        if kind == "RMSProp":
            self.need(0 <= m.rms_decay < 1, f"rms_decay {m.rms_decay:g} must lie in [0, 1)")
        if kind == "Adam":
            self.need(0 <= m.momentum < 1, f"momentum {m.momentum:g} must lie in [0, 1) with Adam")
            self.need(0 <= m.momentum2 < 1, f"momentum2 {m.momentum2:g} must lie in [0, 1) with Adam")
        self.need(m.iter_size >= 1, f"iter_size {m.iter_size} must be at least 1")
        return Rule(
            type=kind,
            momentum=m.momentum,
            momentum2=m.momentum2,
            rms_decay=m.rms_decay,
            delta=m.delta,
            weight_decay=m.weight_decay,
            regularization=self.chosen("regularization_type", m.regularization_type, ("L1", "L2")),
            clip_gradients=m.clip_gradients,
            iter_size=m.iter_size,
        )

    def rate(self) -> LearningRate:
        m = self.message
        self.need(m.HasField("lr_policy"), f"lr_policy is missing (allowed: {', '.join(POLICIES)})")
        policy = self.chosen("lr_policy", m.lr_policy, POLICIES)
        self.need(m.HasField("base_lr"), "base_lr is missing")
        self.finite("base_lr", "gamma", "power")
        if policy in ("step", "exp", "inv", "multistep", "sigmoid"):
            self.need(m.gamma >= 0, f"gamma {m.gamma:g} must be at least 0 for lr_policy {policy!r}")
        if policy in ("step", "sigmoid"):
            self.need(m.stepsize > 0, f"stepsize {m.stepsize} must be above 0 for lr_policy {policy!r}")
        max_iter = self.max_iter()
        if policy == "poly":
            self.need(max_iter > 0, "max_iter must be above 0 for lr_policy 'poly'")
        return LearningRate(policy, m.base_lr, m.gamma, m.power, m.stepsize, tuple(m.stepvalue), max_iter)

    def max_iter(self) -> int:
        m = self.message
        self.need(m.max_iter >= 0, f"max_iter {m.max_iter} is below 0")
        return int(m.max_iter) if self.options.max_iter is None else self.options.max_iter

    def schedule(self) -> Schedule:
        m = self.message
        for name in ("display", "test_interval", "snapshot"):
            self.need(getattr(m, name) >= 0, f"{name} {getattr(m, name)} is below 0")
        self.need(m.average_loss >= 1, f"average_loss {m.average_loss} must be at least 1")
        return Schedule(
            max_iter=self.max_iter(),
            display=m.display,
            average_loss=m.average_loss,
            test_interval=m.test_interval,
            test_initialization=m.test_initialization,
            test_compute_loss=m.test_compute_loss,
        )

    # The nets --------------------------------------------------------------------------------------------

    def train_net(self) -> NetSource:
        m = self.message
        given = [name for name in TRAIN_FIELDS if m.HasField(name)]
        names = ", ".join(TRAIN_FIELDS)
        self.need(bool(given), f"a train net must be specified by one of these fields: {names}")
        self.need(
            len(given) == 1,
            f"{' and '.join(given)} are both given; only one of {names} may specify the train net",
        )
        (name,) = given
        state = _merged("TRAIN", m.train_state, self.options)
        if name.endswith("param"):
            return self.inline(f"train net specified in {name}", getattr(m, name), state)
        return self.from_file(f"training net from {name} file", getattr(m, name), state)

    def test_nets(self) -> tuple[TestRun, ...]:
        m = self.message
        own = len(m.test_net_param) + len(m.test_net)
        generic = m.HasField("net") or m.HasField("net_param")
        counts = tuple(m.test_iter)
        self.need(
            len(counts) >= own if generic else len(counts) == own,
            f"test_iter must be given once for each test net: {len(counts)} for {own} test nets",
        )
        self.need(
            len(m.test_state) in (0, len(counts)),
            "test_state must be absent or given once for each test net:"
            f" {len(m.test_state)} for {len(counts)}",
        )
        self.need(not counts or m.test_interval > 0, "test_interval must be above 0 when there are test nets")
        self.need(all(c > 0 for c in counts), f"test_iter {min(counts, default=1)} must be at least 1")
        return tuple(TestRun(self.test_net(i, own), count) for i, count in enumerate(counts))

    def test_net(self, index: int, own: int) -> NetSource:
        """The ``index``-th test net: test_net_param, then test_net, then net_param or net for the rest."""
        m = self.message
        state = _merged("TEST", m.test_state[index] if m.test_state else None, None)
        inline = len(m.test_net_param)
        if index < inline:
            return self.inline("test_net_param", m.test_net_param[index], state)
        if index < own:
            return self.from_file("test_net file", m.test_net[index - inline], state)
        if m.HasField("net_param"):
            return self.inline("net_param", m.net_param, state)
        return self.from_file("net file", m.net, state)

    def inline(self, label: str, net: Any, state: _State) -> NetSource:
        phase, level, stages = state.over(net)
        return NetSource(label, None, net.SerializeToString(), phase, level, stages)

    def from_file(self, label: str, name: str, state: _State) -> NetSource:
        """A net file, found from the working directory as the original does, and parsed once."""
        tried = os.path.abspath(name)
        if not os.path.isfile(tried):
            beside = Path(self.path).resolve().parent / os.path.basename(name)
            hint = f"; {beside} exists: run from its folder or write the path so" if beside.is_file() else ""
            raise self.error(f"{label} {name!r} not found: {tried} (relative to the working directory){hint}")
        net = parse_net(name)
        self.need(bool(net.layer), f"{label} {name!r} holds no layers")
        phase, level, stages = state.over(net)
        return NetSource(f"{label}: {name}", name, None, phase, level, stages)

    # Snapshots, start, sharing ---------------------------------------------------------------------------

    def snapshots(self) -> Snapshots:
        m = self.message
        stem = os.path.splitext(os.path.basename(self.path))[0]
        prefix = m.snapshot_prefix if m.HasField("snapshot_prefix") else os.path.splitext(self.path)[0]
        if os.path.isdir(prefix):
            prefix = os.path.join(prefix, stem)
        wanted = m.snapshot or m.snapshot_after_train
        folder = os.path.dirname(prefix) or "."
        self.need(
            not wanted or (os.path.isdir(folder) and os.access(folder, os.W_OK)),
            f"cannot write to snapshot prefix {prefix!r}: make sure that the folder {os.path.abspath(folder)}"
            " exists and is writable",
        )
        hdf5 = m.snapshot_format == 0
        return Snapshots(m.snapshot, prefix, m.snapshot_diff, m.snapshot_after_train, hdf5)

    def start(self) -> Start:
        """The weights: the command line's, else the solver file's; none when a snapshot is resumed."""
        o = self.options
        resumed = o.snapshot is not None or o.resume
        given = o.weights if o.weights or resumed else tuple(self.message.weights)
        files = tuple(part.strip() for entry in given for part in entry.split(",") if part.strip())
        needed = (*files, o.snapshot) if o.snapshot else files
        missing = [name for name in needed if not os.path.isfile(name)]
        if missing:
            kind = "snapshot" if o.snapshot else "weights"
            raise self.error(f"{kind} file {os.path.abspath(missing[0])} does not exist")
        return Start(files, o.snapshot, o.resume)

    def sharing(self) -> Sharing:
        """alpha and tau from the command line, else the solver file's own fields, else the way's defaults."""
        o, m = self.options, self.message
        alpha, tau = o.alpha, o.tau
        if alpha is None and m.HasField("moving_rate"):
            alpha = m.moving_rate
        if tau is None and m.HasField("update_interval"):
            tau = m.update_interval
        exchange = o.exchange or "fused"
        way = method(o.algorithm, o.workers, alpha is not None, o.method, exchange, batch=o.batch)
        check_told(o, way)
        if alpha is None:
            alpha = moving_rate(o.algorithm, o.workers, way)
        if tau is None:
            tau = METHODS[o.algorithm].tau
        source = "--alpha" if o.alpha is not None else "moving_rate"
        self.need(0 < alpha < 1, f"{source} {alpha:g} is out of range: alpha must lie between 0 and 1")
        source = "--tau" if o.tau is not None else "update_interval"
        self.need(tau >= 1, f"{source} {tau} is out of range: tau must be at least 1")
        check_interval(way, tau)
        return Sharing(
            workers=o.workers,
            algorithm=o.algorithm,
            exchange=exchange,
            alpha=float(alpha),
            tau=int(tau),
            termination=o.termination,
            lr_rule=self.lr_rule(),
            method=way,
            smb=o.smb,
            job=o.job,
            join=o.join,
            box_grace=o.box_grace,
            by_machine=o.by_machine and o.algorithm == "hybrid" and o.method.group_size is None,
            share_data=o.share_data,
            cursor=self.cursor(),
            global_batch=o.batch == "global",
        )

    def cursor(self) -> bool:
        o = self.options
        claimed = METHODS[o.algorithm].claims_freely and o.termination == "counter"
        self.need(
            o.data == "split" or claimed,
            f"--data {o.data} needs workers that claim their iterations one by one: --termination counter and"
            " an algorithm that is not in lock-step",
        )
        return o.data == "cursor"

    def lr_rule(self) -> LrRule:
        rule = self.options.lr_rule or METHODS[self.options.algorithm].rule
        try:
            return parse_lr_rule(rule, self.options.warmup)
        except ValueError as e:
            raise ConfigError(str(e)) from None

    def run(self) -> Run:
        o, m = self.options, self.message
        seed = o.seed if o.seed is not None else (m.random_seed if m.random_seed >= 0 else None)
        prefix = self.snapshots().prefix
        base = prefix if o.log_dir is None else os.path.join(o.log_dir, os.path.basename(prefix))
        return Run(
            random_seed=seed,
            debug_info=m.debug_info,
            gpu_asked=m.HasField("solver_mode") and m.solver_mode == m.GPU,
            sigint_effect=o.sigint_effect,
            sighup_effect=o.sighup_effect,
            threads=o.threads,
            precision=o.precision,
            compile=o.compile,
            log=f"{base}.log",
            metrics=f"{base}.jsonl",
            tensorboard=o.tensorboard,
        )


@dataclass(frozen=True)
class _State:
    """A NetState to lay over a net's own: later wins, stages are appended."""

    phase: Phase
    given: Any | None
    level: int | None
    stages: tuple[str, ...]

    def over(self, net: Any) -> tuple[Phase, int, tuple[str, ...]]:
        """phase, level and stages after the default, the net's own state, the solver's and the options'."""
        phase, level, stages = self.phase, 0, []
        for state in (net.state if net.HasField("state") else None, self.given):
            if state is None:
                continue
            if state.HasField("phase"):
                phase = "TEST" if state.phase == 1 else "TRAIN"
            if state.HasField("level"):
                level = state.level
            stages += list(state.stage)
        return phase, level if self.level is None else self.level, (*stages, *self.stages)


def _merged(phase: Phase, given: Any | None, options: Options | None) -> _State:
    level = options.level if options and options.level else None
    return _State(phase, given, level, options.stages if options else ())
