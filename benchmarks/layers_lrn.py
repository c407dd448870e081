"""The native LRN against nn.LocalResponseNorm, forward and backward, on the shapes of AlexNet and GoogLeNet.

Rounds of both in turn, after a warm-up; prints the median of each, its ratio, and the bytes a second that the
native one moves (forward: x in, y out; backward: x and dy in, dx out) beside those of a plain copy. Only the
ratios count, and on a busy machine not even those.

    python benchmarks/layers_lrn.py [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from prototxt.layers.lrn import LocalResponse, Normalisation

SHAPES = [(16, 96, 55, 55), (16, 256, 27, 27), (16, 64, 56, 56), (16, 192, 56, 56), (100, 32, 16, 16)]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def passes(module: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[float, float]:
    """Seconds of one forward and of one backward pass."""
    made: list[Tensor] = []
    forward = seconds(lambda: made.append(module(x)))
    return forward, seconds(lambda: torch.autograd.grad(made[0], x, dy))


def compare(shape: tuple[int, ...], rounds: int) -> str:
    x, dy = torch.randn(shape).requires_grad_(), torch.randn(shape)
    rivals: dict[str, Callable[[Tensor], Tensor]] = {
        "native": LocalResponse(Normalisation(5, 1e-4, 0.75, 1.0, False)),
        "torch": nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    target = torch.empty_like(dy)
    copies = []
    for turn in range(rounds + 2):
        for name, module in rivals.items():
            times[name].append(passes(module, x, dy))
        copies.append(seconds(lambda: target.copy_(dy)))
        if turn == 1:  # the warm-up
            copies.clear()
            for one in times.values():
                one.clear()
    middle = {name: [median(column) for column in zip(*one, strict=True)] for name, one in times.items()}
    size = 4 * x.numel()
    (forward, backward), (slow_forward, slow_backward) = middle["native"], middle["torch"]
    return (
        f"{'x'.join(map(str, shape)):>15}  {forward * 1e3:7.2f} {backward * 1e3:7.2f}"
        f"  {slow_forward * 1e3:8.2f} {slow_backward * 1e3:8.2f}  {slow_forward / forward:5.1f}"
        f" {slow_backward / backward:5.1f}  {2 * size / forward / 1e9:5.1f} {3 * size / backward / 1e9:5.1f}"
        f"  {2 * size / median(copies) / 1e9:5.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.threads} threads, median of {args.rounds} rounds, milliseconds; GB/s moved")
    print("          shape   native f/b         torch f/b       ratio f/b   GB/s f/b     copy")
    for shape in SHAPES:
        print(compare(shape, args.rounds), flush=True)


if __name__ == "__main__":
    main()
