"""The six update rules and the learning-rate policies agree with their formulas and the original's logs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prototxt.text import parse_solver
from shmtrain.config import TrainConfig
from shmtrain.log import number
from shmtrain.params import Run
from shmtrain.settings import LearningRate, Rule
from shmtrain.solver import POLICY, RULES, RateState, Updater, learning_rate

F64 = npt.NDArray[np.float64]
N, STEPS = 40, 6


def rule(kind: str, **changes: object) -> Rule:
    numbers: dict[str, object] = {
        "type": kind, "momentum": 0.9, "momentum2": 0.99, "rms_decay": 0.95, "delta": 1e-3,
        "weight_decay": 0.0, "regularization": "L2", "clip_gradients": -1.0, "iter_size": 1,
    }  # fmt: skip
    return Rule(**{**numbers, **changes})  # type: ignore[arg-type]


@dataclass
class FlatParams:
    """Vectors with two runs of different multipliers, without a net."""

    vector: torch.Tensor
    gradient: torch.Tensor
    cut: int = 15
    lr_mults: tuple[float, float] = (1.0, 2.0)
    decay_mults: tuple[float, float] = (1.0, 0.0)

    def __post_init__(self) -> None:
        self.n = self.trained = self.vector.numel()
        self.trained_vector, self.trained_gradient = self.vector, self.gradient
        parts = (slice(0, self.cut), slice(self.cut, self.n))
        self.runs = tuple(
            Run(part, lr, decay, self.vector[part], self.gradient[part])
            for part, lr, decay in zip(parts, self.lr_mults, self.decay_mults, strict=True)
        )

    def gradient_norm(self) -> float:
        return float(torch.linalg.vector_norm(self.gradient))

    def spread(self, values: tuple[float, float]) -> F64:
        return np.where(np.arange(self.n) < self.cut, *values)


def flat(seed: int = 3) -> FlatParams:
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(rng.normal(size=N).astype(np.float32))
    return FlatParams(weights, torch.zeros(N))


# The formulas in double precision, on whole arrays; state is a dict that each keeps what it wants in.
Formula = Callable[[F64, dict[str, F64], F64, int], F64]


def sgd(g: F64, s: dict[str, F64], lr: F64, t: int) -> F64:
    s["h"] = 0.9 * s.get("h", 0 * g) + lr * g
    return s["h"]


def nesterov(g: F64, s: dict[str, F64], lr: F64, t: int) -> F64:
    old = s.get("h", 0 * g)
    s["h"] = 0.9 * old + lr * g
    return 1.9 * s["h"] - 0.9 * old


def adagrad(g: F64, s: dict[str, F64], lr: F64, t: int) -> F64:
    s["h"] = s.get("h", 0 * g) + g**2
    return lr * g / (np.sqrt(s["h"]) + 1e-3)


def rmsprop(g: F64, s: dict[str, F64], lr: F64, t: int) -> F64:
    s["h"] = 0.95 * s.get("h", 0 * g) + 0.05 * g**2
    return lr * g / (np.sqrt(s["h"]) + 1e-3)


def adadelta(g: F64, s: dict[str, F64], lr: F64, t: int) -> F64:
    s["h"] = 0.9 * s.get("h", 0 * g) + 0.1 * g**2
    k = s.get("k", 0 * g)
    u = g * np.sqrt((k + 1e-3) / (s["h"] + 1e-3))
    s["k"] = 0.9 * k + 0.1 * u**2
    return lr * u


def adam(g: F64, s: dict[str, F64], lr: F64, t: int) -> F64:
    s["m"] = 0.9 * s.get("m", 0 * g) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0 * g) + 0.01 * g**2
    correction = np.sqrt(1 - 0.99**t) / (1 - 0.9**t)
    return np.asarray(lr * correction * s["m"] / (np.sqrt(s["v"]) + 1e-3))


FORMULAS: dict[str, Formula] = {
    "SGD": sgd, "Nesterov": nesterov, "AdaGrad": adagrad, "RMSProp": rmsprop,
    "AdaDelta": adadelta, "Adam": adam,
}  # fmt: skip


def test_all_six_rules_are_registered() -> None:
    assert set(RULES) == set(FORMULAS)


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("regularization", ["L1", "L2"])
def test_a_rule_follows_its_formula_over_runs_of_multipliers(kind: str, regularization: str) -> None:
    params = flat()
    updater = Updater(rule(kind, weight_decay=0.02, regularization=regularization, iter_size=2), params)  # type: ignore[arg-type]
    rng = np.random.default_rng(8)
    weights = params.vector.numpy().astype(np.float64)
    state: dict[str, F64] = {}
    for step in range(STEPS):
        g = rng.normal(size=N).astype(np.float32)
        params.gradient.copy_(torch.from_numpy(g))
        updater.apply(0.05)
        penalty = np.sign(weights) if regularization == "L1" else weights
        regular = g.astype(np.float64) / 2 + 0.02 * params.spread(params.decay_mults) * penalty
        update = FORMULAS[kind](regular, state, 0.05 * params.spread(params.lr_mults), step + 1)
        weights = weights - update
        np.testing.assert_allclose(params.vector.numpy(), weights, rtol=2e-5, atol=2e-6)
    updater.publish_update()
    np.testing.assert_allclose(params.gradient.numpy(), update, rtol=2e-4, atol=2e-6)
    assert updater.count == STEPS


@pytest.mark.parametrize(("norm", "scaled"), [(2.0, True), (0.4, False)])
def test_clipping_scales_the_raw_gradient_to_the_limit(norm: float, scaled: bool) -> None:
    params = flat()
    params.gradient.normal_()
    params.gradient.mul_(norm / params.gradient_norm())
    before = params.gradient.clone()
    Updater(rule("SGD", clip_gradients=0.5, iter_size=4), params).clip()  # type: ignore[arg-type]
    expected = before * (0.5 / norm) if scaled else before
    torch.testing.assert_close(params.gradient, expected)


def test_a_negative_clip_leaves_gradients_alone_and_zero_clips_everything() -> None:
    params = flat()
    params.gradient.fill_(3.0)
    Updater(rule("SGD"), params).clip()  # type: ignore[arg-type]
    assert float(params.gradient.sum()) == 3.0 * N
    Updater(rule("SGD", clip_gradients=0.0), params).clip()  # type: ignore[arg-type]
    assert float(params.gradient.abs().sum()) == 0.0


def rate(policy: str, **numbers: object) -> LearningRate:
    values: dict[str, object] = {
        "base": 0.05,
        "gamma": 0.5,
        "power": 0.75,
        "stepsize": 6,
        "stepvalues": (),
        "max_iter": 20,
    }
    return LearningRate(policy, **{**values, **numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(POLICY))
def test_a_policy_prints_the_rates_that_the_original_logged(
    policy: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / "golden" / "cli"
    monkeypatch.chdir(folder)
    message = parse_solver(f"lr_{policy}.solver.prototxt")
    message.snapshot_prefix = str(tmp_path / "unused")
    config = TrainConfig.from_message(message, "lr.solver.prototxt")
    wanted = re.findall(r"Iteration (\d+), lr = (\S+)", (folder / f"lr_{policy}.txt").read_text())
    state = RateState()
    got = [(i, number(learning_rate(config.rate, int(i), state))) for i, _ in wanted]
    assert len(wanted) == 20
    assert got == wanted


def test_multistep_goes_one_step_further_a_call_when_it_is_resumed_late() -> None:
    state, multistep = RateState(), rate("multistep", gamma=0.1, base=1.0, stepvalues=(10, 20, 30))
    assert [number(learning_rate(multistep, i, state)) for i in (100, 101, 102, 103)] == [
        "0.1",
        "0.01",
        "0.001",
        "0.001",
    ]


@pytest.mark.parametrize(
    ("given", "iteration", "wanted"),
    [
        (rate("step", base=0.01, gamma=0.1, stepsize=500), 600, "0.001"),
        (rate("inv", base=0.01, gamma=1e-4, power=0.75), 1000, "0.00931012"),
        (rate("poly", base=0.1, power=0.5, max_iter=100), 50, "0.0707107"),
        (rate("poly", base=0.1, power=0.5, max_iter=100), 103, "0"),
        (rate("fixed", base=0.01), 600, "0.01"),
        (rate("exp", base=1.0, gamma=1.5), 100_000, "inf"),
    ],
)
def test_known_rates(given: LearningRate, iteration: int, wanted: str) -> None:
    assert number(learning_rate(given, iteration, RateState())) == wanted
