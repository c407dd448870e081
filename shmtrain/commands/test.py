"""``shmtrain test``: a net with its weights over so many batches, logged as ``caffe test`` logs it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shmtrain.commands.common import add_state, command_parser, double_dashed, reported
from smb.arguments import whole

if TYPE_CHECKING:
    from prototxt.net import Net
    from shmtrain.log import Log


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(double_dashed(argv))
    return reported("test", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "test",
        "Run a net with its weights in the TEST phase; log each batch's outputs and their means.",
        "shmtrain test --model examples/mnist/lenet_train_test.prototxt"
        " --weights lenet_iter_10000.caffemodel --iterations 100",
    )
    p.add_argument("--model", required=True, metavar="NET.prototxt", help="its data layers give the input")
    p.add_argument(
        "--weights", required=True, metavar="F[,F]", help=".caffemodel files, binary or HDF5, matched by name"
    )
    p.add_argument("--iterations", type=whole, default=50, metavar="N", help="batches (50)")
    p.add_argument("--threads", type=whole, metavar="T", help="torch threads (all cores)")
    p.add_argument("--compile", action="store_true", help="let torch's compiler join layers")
    p.add_argument("--log-dir", metavar="DIR", help="write the log there too, as test.log")
    add_state(p)
    return p


def _run(args: argparse.Namespace) -> None:
    import torch

    from prototxt.net import Net
    from prototxt.weights import load_weights
    from shmtrain.log import Log

    if args.threads:
        torch.set_num_threads(args.threads)
    path = f"{args.log_dir}/test.log" if args.log_dir else None
    with Log([sys.stderr], path) as log, notes_in(log):
        log.info("Use CPU.")
        with Net(args.model, "TEST", stages=args.stage, level=args.level, compile=args.compile) as net:
            if net.compile_account:
                log.info(net.compile_account)
            for name in net.outputs:
                log.info(f"This network produces output {name}")
            log.info("Network initialization done.")
            for file in args.weights.split(","):
                load_weights(net, file, strict=True)
            log.info(f"Running for {args.iterations} iterations.")
            score(net, args.iterations, log)


@contextmanager
def notes_in(log: Log) -> Iterator[None]:
    """What the net says of its files and layers goes into the log, too."""
    handler = _Notes(log)
    notes = logging.getLogger("prototxt")
    level, propagates = notes.level, notes.propagate
    notes.addHandler(handler)
    notes.setLevel(logging.INFO)
    notes.propagate = False
    try:
        yield
    finally:
        notes.removeHandler(handler)
        notes.setLevel(level)
        notes.propagate = propagates


class _Notes(logging.Handler):
    """Hands records on to the log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        (self._log.info if record.levelno < logging.WARNING else self._log.warning)(text)


def score(net: Net, iterations: int, log: Log) -> dict[str, list[float]]:
    """Run ``iterations`` batches and log them; the means of every output's values, by name."""
    import numpy as np
    import torch

    from shmtrain.log import number

    loss = 0.0
    values: list[float] = []
    sums = np.zeros(0, np.float32)
    owners: list[str] = []  # the output that each value is of
    with torch.no_grad():
        for batch in range(iterations):
            outcome = net.run()
            loss += float(outcome.loss)
            flat = [(name, outcome.outputs[name].reshape(-1).numpy()) for name in net.outputs]
            owners = [name for name, of_one in flat for _ in of_one]
            values = [float(value) for _, of_one in flat for value in of_one]
            sums = np.asarray(values, np.float32) + (sums if batch else np.float32(0))
            for name, value in zip(owners, values, strict=True):
                log.info(f"Batch {batch}, {name} = {number(value)}")
    log.info(f"Loss: {number(loss / iterations)}")
    means: dict[str, list[float]] = {}
    for name, total in zip(owners, sums, strict=True):
        mean = float(total) / iterations
        means.setdefault(name, []).append(mean)
        weight = net.blob_loss_weights[name]
        part = f" (* {number(weight)} = {number(weight * mean)} loss)" if weight else ""
        log.info(f"{name} = {number(mean)}{part}")
    return means
