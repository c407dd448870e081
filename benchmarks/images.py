"""Images a second of forward and backward against the same nets written by hand in plain torch, in one run.

    python benchmarks/images.py [NET ..] [--batch B] [--rounds N] [--threads T] [--precision bf16] [--compile]

The nets are those of examples; their data is one batch in memory on both sides. The hand-written ones are
modules in eager torch, in the usual order of memory and with channels last; the faster one counts. Rounds of
all of them in turn, in an order drawn by chance, after a warm-up.

Prints one JSON object a net: median milliseconds of each, ours against the best, the ratio of the medians and
the spread of the rounds' ratios. The bar: at least 0.98; on AlexNet and GoogLeNet, whose normalisation is
slow in plain torch, 1.3. --compile measures our net with compile=True, too: its images a second over those of
our net without, in the same rounds, and the seconds of its first pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from prototxt.net import Net
from prototxt.speed import PRECISIONS
from prototxt.text import parse_net

ROOT = Path(__file__).resolve().parent.parent
CLASSES = 1000


@dataclass(frozen=True)
class Case:
    """A net's file, its images' shape, batch, and the module that gives its scores (the main ones last)."""

    file: str
    image: tuple[int, int, int]
    batch: int
    module: Callable[[], nn.Module]
    weights: tuple[float, ...] = (1.0,)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2, 2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2, 2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(inplace=True), nn.Linear(500, 10),
    )  # fmt: skip


class Within(nn.Module):
    """Normalisation within each channel, over 3 x 3."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 5e-5 * functional.avg_pool2d(x * x, 3, 1, 1)).pow(-0.75)


def cifar10_full() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(inplace=True), Within(),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(inplace=True), nn.AvgPool2d(3, 2, ceil_mode=True), Within(),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(inplace=True), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def alexnet() -> nn.Module:
    relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True)
    norm = nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, 4), relu, norm, pool,
        nn.Conv2d(96, 256, 5, padding=2, groups=2), relu, norm, pool,
        nn.Conv2d(256, 384, 3, padding=1), relu, nn.Conv2d(384, 384, 3, padding=1, groups=2), relu,
        nn.Conv2d(384, 256, 3, padding=1, groups=2), relu, pool, nn.Flatten(), nn.Linear(9216, 4096), relu,
        nn.Dropout(0.5), nn.Linear(4096, 4096), relu, nn.Dropout(0.5), nn.Linear(4096, CLASSES),
    )  # fmt: skip


def _rectified(*sizes: int, **more: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(*sizes, **more), nn.ReLU(inplace=True))


class Inception(nn.Module):
    def __init__(self, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, r3, three, r5, five, after = widths
        self.branches = nn.ModuleList([
            _rectified(inputs, one, 1),
            nn.Sequential(_rectified(inputs, r3, 1), _rectified(r3, three, 3, padding=1)),
            nn.Sequential(_rectified(inputs, r5, 1), _rectified(r5, five, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), _rectified(inputs, after, 1)),
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _head(inputs: int) -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(5, 3), _rectified(inputs, 128, 1), nn.Flatten(), nn.Linear(2048, 1024),
        nn.ReLU(inplace=True), nn.Dropout(0.7), nn.Linear(1024, CLASSES),
    )  # fmt: skip


class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pool, norm = nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)
        self.first = nn.Sequential(
            _rectified(3, 64, 7, 2, 3), pool, norm,
            _rectified(64, 64, 1), _rectified(64, 192, 3, padding=1), norm, pool,
            Inception(192, (64, 96, 128, 16, 32, 32)), Inception(256, (128, 128, 192, 32, 96, 64)),
            pool, Inception(480, (192, 96, 208, 16, 48, 64)),
        )  # fmt: skip
        self.second = nn.Sequential(
            Inception(512, (160, 112, 224, 24, 64, 64)), Inception(512, (128, 128, 256, 24, 64, 64)),
            Inception(512, (112, 144, 288, 32, 64, 64)),
        )  # fmt: skip
        self.third = nn.Sequential(
            Inception(528, (256, 160, 320, 32, 128, 128)), pool,
            Inception(832, (256, 160, 320, 32, 128, 128)),
            Inception(832, (384, 192, 384, 48, 128, 128)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.4), nn.Linear(1024, CLASSES),
        )  # fmt: skip
        self.head1, self.head2 = _head(512), _head(528)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x)
        y = self.second(x)
        return self.head1(x), self.head2(y), self.third(y)


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.short = nn.Identity() if inputs == 4 * width else nn.Sequential(
            nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += self.short(x)
        return y.relu_()


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]  # fmt: skip
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for index in range(count):
            layers.append(Block(inputs, width, 2 if index == 0 and stage else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


CASES = {
    "lenet": Case("examples/mnist/lenet_train_test", (1, 28, 28), 64, lenet),
    "cifar10_full": Case("examples/models/cifar10_full/train_val", (3, 32, 32), 100, cifar10_full),
    "alexnet": Case("examples/models/alexnet/train_val", (3, 227, 227), 16, alexnet),
    "googlenet": Case("examples/models/googlenet/train_val", (3, 224, 224), 16, GoogLeNet, (0.3, 0.3, 1.0)),
    "resnet50": Case("examples/models/resnet50/train_val", (3, 224, 224), 8, resnet50),
}


def our_step(
    case: Case, batch: int, precision: str, compiled: bool = False
) -> tuple[Callable[[], object], int]:
    """One pass of our net, its data made once; and how many parameters it trains."""
    message = parse_net(ROOT / f"{case.file}.prototxt")
    layers = [layer for layer in message.layer if layer.type != "Data"]
    del message.layer[:]
    for name, dims in (("data", (batch, *case.image)), ("label", (batch,))):
        feed = message.layer.add(name=name, type="Input", top=[name])
        feed.input_param.shape.add(dim=dims)
    message.layer.extend(layers)
    net = Net(message, "TRAIN", seed=1, compile=compiled)
    if compiled:
        print(net.compile_account, file=sys.stderr)
    net.blobs["data"].data[...] = torch.randn(batch, *case.image).numpy()
    net.blobs["label"].data[...] = torch.randint(0, 10, (batch,)).numpy()

    def step() -> None:
        net.clear_param_diffs()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = net.run().loss
        torch.autograd.backward(loss)

    return step, sum(one.param.numel() for one in net.learnable if not one.statistics)


def bare_step(case: Case, batch: int, precision: str, last: bool) -> tuple[Callable[[], object], int]:
    """One pass of the module; ``last``: channels last."""
    order = torch.channels_last if last else torch.contiguous_format
    module = case.module().to(memory_format=order)  # type: ignore[call-overload]
    images = torch.randn(batch, *case.image).to(memory_format=order)
    labels = torch.randint(0, 10, (batch,))
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            made = module(images)
            heads = made if isinstance(made, tuple) else (made,)
            losses = [functional.cross_entropy(scores, labels) for scores in heads]
        torch.autograd.backward(sum(w * loss for w, loss in zip(case.weights, losses, strict=True)))  # type: ignore[arg-type]

    return step, sum(parameter.numel() for parameter in parameters)


def milliseconds(step: Callable[[], object], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return 1e3 * (time.perf_counter() - start) / steps


def run(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Measure one net; the first round of each side warms up and doesn't count."""
    case = CASES[name]
    batch = args.batch or case.batch
    sides = {
        "ours": our_step(case, batch, args.precision),
        "torch": bare_step(case, batch, args.precision, last=False),
        "torch_channels_last": bare_step(case, batch, args.precision, last=True),
    }
    first = 0.0
    if args.compile:
        sides["compiled"] = our_step(case, batch, args.precision, compiled=True)
        first = milliseconds(sides["compiled"][0], 1) / 1e3
    counts = {count for _, count in sides.values()}
    assert len(counts) == 1, f"not the same net: {counts} parameters"
    steps = max(1, round(args.milliseconds / milliseconds(sides["ours"][0], 2)))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(args.rounds + 1):
        for side in random.sample(list(sides), len(sides)):
            took = milliseconds(sides[side][0], steps)
            if number:
                times[side].append(took)
    medians = {side: statistics.median(values) for side, values in times.items()}
    best = min((side for side in sides if side.startswith("torch")), key=medians.__getitem__)
    ratios = [theirs / ours for theirs, ours in zip(times[best], times["ours"], strict=True)]
    return {
        "net": name,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "precision": args.precision,
        "milliseconds": {side: round(value, 2) for side, value in medians.items()},
        "images_per_second": round(1e3 * batch / medians["ours"], 1),
        "best": best,
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "load": round(os.getloadavg()[0], 2),
        **(_compiled(times, first) if args.compile else {}),
    }


def _compiled(times: dict[str, list[float]], first: float) -> dict[str, object]:
    gains = [plain / compiled for plain, compiled in zip(times["ours"], times["compiled"], strict=True)]
    return {
        "compiled_over_ours": round(statistics.median(gains), 3),
        "compiled_rounds": [round(gain, 3) for gain in gains],
        "first_pass_seconds": round(first, 1),
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    p.add_argument("nets", nargs="*", metavar="NET", help=f"of {', '.join(CASES)} (all)")
    p.add_argument("--batch", type=int, help="images in a batch (the net's usual one here)")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--milliseconds", type=float, default=300, help="about how long a round of a side takes")
    p.add_argument("--threads", type=int, help="torch threads (all cores)")
    p.add_argument("--precision", choices=PRECISIONS, default="float32")
    p.add_argument("--compile", action="store_true", help="measure our net compiled, too")
    args = p.parse_args()
    if unknown := [name for name in args.nets if name not in CASES]:
        p.error(f"no net {unknown[0]!r} here (nets: {', '.join(CASES)})")
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in args.nets or CASES:
        print(json.dumps(run(name, args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
