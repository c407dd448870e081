"""Update rules and learning-rate policies of the original's solvers, over runs of the flat float32 vectors.

A rule is one decorated function. It turns a gradient into the update that is subtracted from the weights:

    @update_rule("SGD", histories=1)
    def sgd(g, history, step): ...  -> the update

    g        (n,) float32 gradient of one run, regularised; may be overwritten
    history  the rule's own vectors of the same run, changed in place
    step     the numbers of this step: local rate, rule's constants, scratch

All runs of one step see the same step number. Scalars are rounded to float32 where the original holds floats,
so that a rate or a decay is the same number here and there. Formulas: BVLC Caffe 1.0, solver by solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shmtrain.log import Log, number
from shmtrain.params import Params
from shmtrain.settings import LearningRate, Rule

f32 = np.float32


@dataclass
class Step:
    """The numbers of one step.

    rate      the run's local rate: policy's rate times lr_mult
    count     updates made before this one (Adam's t is count + 1)
    scratch   (n,) float32, free for the rule, undefined on entry
    """

    rule: Rule
    rate: float
    count: int
    scratch: Tensor


UpdateRule = Callable[[Tensor, tuple[Tensor, ...], Step], Tensor]


@dataclass(frozen=True)
class Registered:
    """A rule, and how many history vectors it keeps."""

    apply: UpdateRule
    histories: int


RULES: dict[str, Registered] = {}


def update_rule(name: str, *, histories: int) -> Callable[[UpdateRule], UpdateRule]:
    """Register a function as the update rule ``name``."""

    def register(function: UpdateRule) -> UpdateRule:
        RULES[name] = Registered(function, histories)
        return function

    return register


@update_rule("SGD", histories=1)
def sgd(g: Tensor, history: tuple[Tensor, ...], step: Step) -> Tensor:
    """h <- m h + rate g; the update is h: the rate lies inside the momentum."""
    (h,) = history
    return h.mul_(step.rule.momentum).add_(g, alpha=step.rate)


@update_rule("Nesterov", histories=1)
def nesterov(g: Tensor, history: tuple[Tensor, ...], step: Step) -> Tensor:
    """h' = m h + rate g; (1 + m) h' - m h, which is m h' + rate g."""
    (h,) = history
    h.mul_(step.rule.momentum).add_(g, alpha=step.rate)
    return g.mul_(step.rate).add_(h, alpha=step.rule.momentum)


@update_rule("AdaGrad", histories=1)
def adagrad(g: Tensor, history: tuple[Tensor, ...], step: Step) -> Tensor:
    """h <- h + g^2; rate g / (sqrt(h) + delta)."""
    (h,) = history
    h.addcmul_(g, g)
    return _over_root(g, h, step)


@update_rule("RMSProp", histories=1)
def rmsprop(g: Tensor, history: tuple[Tensor, ...], step: Step) -> Tensor:
    """h <- d h + (1 - d) g^2; rate g / (sqrt(h) + delta)."""
    (h,) = history
    decay = f32(step.rule.rms_decay)
    h.mul_(float(decay)).addcmul_(g, g, value=float(f32(1) - decay))
    return _over_root(g, h, step)


@update_rule("AdaDelta", histories=2)
def adadelta(g: Tensor, history: tuple[Tensor, ...], step: Step) -> Tensor:
    """h <- m h + (1 - m) g^2; u = g sqrt((k + delta) / (h + delta)); k <- m k + (1 - m) u^2; rate u."""
    h, k = history
    m, delta = step.rule.momentum, step.rule.delta
    rest = float(f32(1) - f32(m))
    h.mul_(m).addcmul_(g, g, value=rest)
    g.mul_(torch.add(k, delta, out=step.scratch).sqrt_())
    g.div_(torch.add(h, delta, out=step.scratch).sqrt_())
    k.mul_(m).addcmul_(g, g, value=rest)
    return g.mul_(step.rate)


@update_rule("Adam", histories=2)
def adam(g: Tensor, history: tuple[Tensor, ...], step: Step) -> Tensor:
    """rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + delta): delta is not corrected for bias."""
    m, v = history
    b1, b2 = f32(step.rule.momentum), f32(step.rule.momentum2)
    t = step.count + 1
    correction = f32(math.sqrt(1.0 - float(b2) ** t) / (1.0 - float(b1) ** t))
    m.mul_(float(b1)).add_(g, alpha=float(f32(1) - b1))
    v.mul_(float(b2)).addcmul_(g, g, value=float(f32(1) - b2))
    torch.sqrt(v, out=step.scratch).add_(step.rule.delta)
    return torch.div(m, step.scratch, out=g).mul_(float(f32(step.rate) * correction))


def _over_root(g: Tensor, h: Tensor, step: Step) -> Tensor:
    torch.sqrt(h, out=step.scratch).add_(step.rule.delta)
    return g.div_(step.scratch).mul_(step.rate)


# Learning rates ------------------------------------------------------------------------------------------


@dataclass
class RateState:
    """What a policy remembers: how many steps down step and multistep have gone."""

    current_step: int = 0


Policy = Callable[[LearningRate, int, RateState], float]
POLICY: dict[str, Policy] = {}


def lr_policy(name: str) -> Callable[[Policy], Policy]:
    """Register a function as the learning-rate policy ``name``."""

    def register(function: Policy) -> Policy:
        POLICY[name] = function
        return function

    return register


def learning_rate(rate: LearningRate, iteration: int, state: RateState) -> float:
    """The rate of the job's ``iteration``: float32 numbers in, powers in double, the result a float32."""
    return float(f32(POLICY[rate.policy](rate, iteration, state)))


@lr_policy("fixed")
def _fixed(rate: LearningRate, iteration: int, state: RateState) -> float:
    return rate.base


@lr_policy("step")
def _step(rate: LearningRate, iteration: int, state: RateState) -> float:
    state.current_step = iteration // rate.stepsize
    return rate.base * _power(rate.gamma, state.current_step)


@lr_policy("exp")
def _exp(rate: LearningRate, iteration: int, state: RateState) -> float:
    return rate.base * _power(rate.gamma, iteration)


@lr_policy("inv")
def _inv(rate: LearningRate, iteration: int, state: RateState) -> float:
    # the original's base of the power is a float; only the power itself is taken in double
    base = f32(1) + f32(rate.gamma) * f32(iteration)
    return rate.base * _power(float(base), -rate.power)


@lr_policy("multistep")
def _multistep(rate: LearningRate, iteration: int, state: RateState) -> float:
    if state.current_step < len(rate.stepvalues) and iteration >= rate.stepvalues[state.current_step]:
        state.current_step += 1
    return rate.base * _power(rate.gamma, state.current_step)


@lr_policy("poly")
def _poly(rate: LearningRate, iteration: int, state: RateState) -> float:
    left = f32(1) - f32(iteration) / f32(rate.max_iter)
    # workers that share max_iter may pass it by a few iterations; a negative base has no real power
    return rate.base * _power(max(float(left), 0.0), rate.power)


@lr_policy("sigmoid")
def _sigmoid(rate: LearningRate, iteration: int, state: RateState) -> float:
    exponent = -f32(rate.gamma) * (f32(iteration) - f32(rate.stepsize))
    return rate.base / (1.0 + float(np.exp(np.float64(exponent))))


def _power(base: float, exponent: float) -> float:
    """base^exponent in double; infinity where it overflows, as C's pow."""
    try:
        return math.pow(base, exponent)
    except (OverflowError, ValueError):
        return math.inf


# One update ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """All runs of one pair of multipliers; the lists go together."""

    lr_mult: float
    decay_mult: float
    weights: list[Tensor]
    gradients: list[Tensor]
    histories: list[tuple[Tensor, ...]]
    scratch: list[Tensor]


@dataclass
class Updater:
    """Turns the accumulated gradients of Params into new weights, by one rule; holds its history.

    history   vectors of the trained region, (trained,) float32 each; frozen parameters and BatchNorm's
              accumulators have none
    count     updates made by this worker, resumed runs included
    """

    rule: Rule
    params: Params
    count: int = 0
    history: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        registered = RULES[self.rule.type]
        vector = self.params.trained_vector
        self._apply = registered.apply
        self.history = tuple(torch.zeros_like(vector) for _ in range(registered.histories))
        scratch = torch.empty_like(vector)
        groups: dict[tuple[float, float], _Group] = {}
        for run in self.params.runs:
            mults = (run.lr_mult, run.decay_mult)
            group = groups.setdefault(mults, _Group(*mults, [], [], [], []))
            group.weights.append(run.weights)
            group.gradients.append(run.gradient)
            group.histories.append(tuple(h[run.slice] for h in self.history))
            group.scratch.append(scratch[run.slice])
        self._groups = list(groups.values())
        self._updates: list[tuple[Tensor, Tensor]] = []  # of the last step: gradient, update
        one_pass = self.rule.type == "SGD" and self.rule.momentum != 0 and self.rule.regularization == "L2"
        self._move = self._sgd_in_one_pass if one_pass else self._move_each

    def clip(self, log: Log | None = None) -> None:
        """Scale the raw accumulated gradients to the L2 norm ``clip_gradients`` where theirs is larger."""
        limit = self.rule.clip_gradients
        if limit < 0:
            return
        norm = self.params.gradient_norm()
        if norm > limit:
            scale = float(f32(limit) / f32(norm))
            if log is not None:
                log.info(
                    f"Gradient clipping: scaling down gradients (L2 norm {number(norm)} > {number(limit)}) "
                    f"by scale factor {number(scale)}"
                )
            self.params.gradient.mul_(scale)

    def apply(self, rate: float) -> None:
        """One update of all trained parameters at the policy's ``rate``; gradients are used up."""
        rule = self.rule
        if rule.iter_size > 1:
            self.params.trained_gradient.mul_(float(f32(1) / f32(rule.iter_size)))
        self._updates.clear()
        for group in self._groups:
            decay = float(f32(rule.weight_decay) * f32(group.decay_mult))
            self._move(group, float(f32(rate) * f32(group.lr_mult)), decay)
        self.count += 1

    def _move_each(self, group: _Group, rate: float, decay: float) -> None:
        runs = zip(group.weights, group.gradients, group.histories, group.scratch, strict=True)
        for weights, gradient, history, scratch in runs:
            if decay and self.rule.regularization == "L2":
                gradient.add_(weights, alpha=decay)
            elif decay:
                gradient.add_(torch.sign(weights, out=scratch), alpha=decay)
            update = self._apply(gradient, history, Step(self.rule, rate, self.count, scratch))
            weights.sub_(update)
            self._updates.append((gradient, update))

    def _sgd_in_one_pass(self, group: _Group, rate: float, decay: float) -> None:
        """The rule ``sgd``, decay and subtraction in one pass over memory instead of four.

        torch's own fused SGD takes b <- m b + (1 - dampening) (g + decay w); w <- w - lr b: with lr 1 and a
        dampening of 1 - rate the rate lies inside the momentum, as it must.
        """
        torch._fused_sgd_(
            group.weights, group.gradients, [h for (h,) in group.histories], weight_decay=decay,
            momentum=self.rule.momentum, lr=1.0, dampening=1.0 - rate, nesterov=False, maximize=False,
            is_first_step=False,
        )  # fmt: skip
        self._updates += [(g, h) for g, (h,) in zip(group.gradients, group.histories, strict=True)]

    def publish_update(self) -> None:
        """Leave the last update where the gradients are, as the original's parameter diffs hold it."""
        for gradient, update in self._updates:
            if update is not gradient:
                gradient.copy_(update)
