"""``shmtrain time net.prototxt``: milliseconds a layer, forward and backward, as ``caffe time`` prints them.

The layers are timed one by one, each between blobs in memory; a training step runs them as one graph, which
is timed too and shown last.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmtrain.commands.common import add_state, command_parser, reported
from shmtrain.heap import keep_heap
from shmtrain.log import number
from shmtrain.options import PRECISIONS
from smb.arguments import whole

if TYPE_CHECKING:
    from prototxt.net import Net


@dataclass(frozen=True)
class Timings:
    """Mean milliseconds of one iteration: by layer, in order, and of whole training steps."""

    layers: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: float


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return reported("time", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The options of ``shmtrain time``."""
    p = command_parser(
        "time",
        "Time each layer's forward and backward pass, and a training step as one graph.",
        "shmtrain time examples/mnist/lenet_train_test.prototxt --iterations 20",
    )
    p.add_argument("net", metavar="NET.prototxt", help="the net file; its data layers give the input")
    p.add_argument("--iterations", type=whole, default=50, metavar="N", help="how often (50)")
    add_state(p, "TRAIN")
    p.add_argument("--threads", type=whole, metavar="T", help="torch threads (all cores)")
    p.add_argument("--precision", choices=PRECISIONS, default="float32", help="of the one graph (float32)")
    p.add_argument("--compile", action="store_true", help="let torch's compiler join layers of the one graph")
    return p


def _run(args: argparse.Namespace) -> None:
    import torch

    from prototxt.net import Net

    keep_heap()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with Net(
        args.net, args.phase, stages=args.stage, level=args.level,
        precision=args.precision, compile=args.compile,
    ) as net:  # fmt: skip
        if net.compile_account:
            print(net.compile_account)
        print(f"Testing for {args.iterations} iterations, {torch.get_num_threads()} threads.", flush=True)
        for line in table(measure(net, args.iterations)):
            print(line)


def measure(net: Net, iterations: int) -> Timings:
    """Time ``iterations`` after one that warms up; only a TRAIN net runs backward."""
    count = len(net.layers)
    indices = range(count)
    for index in indices:
        net.forward_range(index, index)
    if net.phase == "TRAIN":
        net.backward_range(count - 1, 0)
    forward, backward = [0.0] * count, [0.0] * count
    for _ in range(iterations):
        for index in indices:
            forward[index] += _seconds(net.forward_range, index)
        for index in reversed(indices):
            backward[index] += _seconds(net.backward_range, index) if net.phase == "TRAIN" else 0.0
    milliseconds = 1e3 / iterations
    return Timings(
        layers=tuple(net.layer_names),
        forward=tuple(milliseconds * s for s in forward),
        backward=tuple(milliseconds * s for s in backward),
        step=milliseconds * _steps(net, iterations),
    )


def _seconds(run: Callable[[int, int], object], index: int) -> float:
    start = time.perf_counter()
    run(index, index)
    return time.perf_counter() - start


def _steps(net: Net, iterations: int) -> float:
    """Seconds of ``iterations`` forward and backward passes as one graph, after one that warms up."""
    import torch

    start = 0.0
    for i in range(iterations + 1):
        if i == 1:
            start = time.perf_counter()
        loss = net.run().loss
        if loss.requires_grad:
            net.clear_param_diffs()
            torch.autograd.backward(loss)
    return time.perf_counter() - start


def table(timings: Timings) -> list[str]:
    """The lines of the original's command, then the time of a whole step."""
    lines = ["Average time per layer: "]
    for name, forward, backward in zip(timings.layers, timings.forward, timings.backward, strict=True):
        lines.append(f"{name:>10}\tforward: {number(forward)} ms.")
        lines.append(f"{name:>10}\tbackward: {number(backward)} ms.")
    forward, backward = sum(timings.forward), sum(timings.backward)
    return [
        *lines,
        f"Average Forward pass: {number(forward)} ms.",
        f"Average Backward pass: {number(backward)} ms.",
        f"Average Forward-Backward: {number(forward + backward)} ms.",
        f"Average Forward-Backward as one graph: {number(timings.step)} ms.",
    ]
