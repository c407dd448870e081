"""One training iteration of shmtrain against the same net in a bare torch loop, in one run.

    python benchmarks/step.py --mnist FOLDER --cifar10 FOLDER [--threads T] [--blocks 15] [--steps 60]

Ours is the whole loop on one worker: LMDB reading by the reader process, the solver, its counts and log. The
bare loop has its batches in memory as tensors and torch.optim.SGD(foreach=True). Both have the same layers,
batch and threads; blocks of steps alternate, in an order drawn by chance. The folders hold the LMDBs that
``shmtrain data mnist|cifar10 --out FOLDER`` makes.

Prints one JSON object a net: median milliseconds of both, the ratio of the medians and the spread of blocks.
The bar: a ratio of at most 1.03, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from prototxt import schema
from prototxt.text import parse_net
from shmtrain.config import TrainConfig
from shmtrain.counting import LocalCounting
from shmtrain.exchange.none import NoExchange
from shmtrain.learner import Learner
from shmtrain.log import Log
from shmtrain.metrics import Metrics
from shmtrain.reports import Reports
from shmtrain.role import Alone
from shmtrain.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = 20  # batches that the bare loop goes round


@dataclass(frozen=True)
class Case:
    """One net: its file, the numbers of its solver, and the hand-written module of the same layers."""

    name: str
    net: str
    base_lr: float
    weight_decay: float
    module: Callable[[], nn.Module]


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2, 2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2, 2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def cifar10_quick() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True), nn.Flatten(),
        nn.Linear(1024, 64), nn.Linear(64, 10),
    )  # fmt: skip


CASES = {
    "mnist": Case("LeNet, batch 64", "examples/mnist/lenet_train_test.prototxt", 0.01, 0.0005, lenet),
    "cifar10": Case(
        "cifar10 quick, batch 100", "examples/cifar10/quick_train_test.prototxt", 0.001, 0.004, cifar10_quick
    ),
}


def config_for(case: Case, data: Path, folder: Path) -> TrainConfig:
    """The example's net with its data from ``data``, and a solver without tests or snapshots."""
    net = parse_net(ROOT / case.net)
    for layer in net.layer:
        if layer.type == "Data":
            layer.data_param.source = str(data / Path(layer.data_param.source).name)
            if layer.transform_param.mean_file:
                layer.transform_param.mean_file = str(data / Path(layer.transform_param.mean_file).name)
    solver = schema.SolverParameter(
        base_lr=case.base_lr, momentum=0.9, weight_decay=case.weight_decay, lr_policy="inv", gamma=1e-4,
        power=0.75, display=100, max_iter=10**9, random_seed=1, snapshot_after_train=False,
        snapshot_prefix=str(folder / "bench"),
    )  # fmt: skip
    solver.net_param.CopyFrom(net)
    return TrainConfig.from_message(solver, str(folder / "solver.prototxt"))


def our_trainer(config: TrainConfig) -> Trainer:
    reports = Reports(Log([], config.run.log), Metrics(config.run.metrics))
    learner = Learner.open(config, Alone(), reports.log)
    counting = LocalCounting(0, config.schedule.max_iter)
    return Trainer(learner, NoExchange(learner.params.array), counting, Alone(), reports)


class BareLoop:
    """What a person writes by hand."""

    def __init__(self, case: Case, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._module = case.module()
        self._batches, self._at = batches, 0
        self._optimizer = torch.optim.SGD(
            self._module.parameters(),
            lr=case.base_lr,
            momentum=0.9,
            weight_decay=case.weight_decay,
            foreach=True,
        )

    def step(self, count: int) -> None:
        for _ in range(count):
            images, labels = self._batches[self._at % len(self._batches)]
            self._at += 1
            self._optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(self._module(images), labels))
            self._optimizer.step()


def batches_of(trainer: Trainer) -> list[tuple[Tensor, Tensor]]:
    """Real batches, read by our own reader, copied."""
    net, batches = trainer.learner.net, []
    for _ in range(PRELOADED):
        net.run()
        images, labels = (torch.from_numpy(net.blobs[name].data.copy()) for name in ("data", "label"))
        batches.append((images, labels.long()))
    return batches


def milliseconds(step: Callable[[int], None], steps: int) -> float:
    start = time.perf_counter()
    step(steps)
    return 1e3 * (time.perf_counter() - start) / steps


def run(case: Case, data: Path, blocks: int, steps: int) -> dict[str, object]:
    """Measure one net; the first block of each side warms up and doesn't count."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = our_trainer(config_for(case, data, Path(folder)))
        try:
            sides = {"ours": trainer.step, "bare": BareLoop(case, batches_of(trainer)).step}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for block in range(blocks + 1):
                for name in random.sample(list(sides), len(sides)):
                    took = milliseconds(sides[name], steps)
                    if block:
                        times[name].append(took)
        finally:
            trainer.close()
            trainer.reports.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "net": case.name,
        "threads": torch.get_num_threads(),
        "ours_ms": round(medians["ours"], 3),
        "bare_ms": round(medians["bare"], 3),
        "ratio": round(medians["ours"] / medians["bare"], 4),
        "block_ratios": [round(a / b, 3) for a, b in zip(times["ours"], times["bare"], strict=True)],
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    for name in CASES:
        p.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"LMDBs of `shmtrain data {name}`")
    p.add_argument("--threads", type=int, help="torch threads (all cores)")
    p.add_argument("--blocks", type=int, default=15)
    p.add_argument("--steps", type=int, default=60)
    args = p.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = [(case, folder) for name, case in CASES.items() if (folder := getattr(args, name)) is not None]
    if not chosen:
        p.error("name a folder of LMDBs with --mnist or --cifar10")
    for case, folder in chosen:
        print(json.dumps(run(case, folder, args.blocks, args.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
