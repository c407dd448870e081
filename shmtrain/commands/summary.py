"""``shmtrain summary``: a net's layers with shapes, parameters and multiply-adds, and their totals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from shmtrain.commands.common import add_inputs, add_state, command_parser, reported

if TYPE_CHECKING:
    from prototxt.figures import Figures, LayerFigures

HEAD = ("layer", "type", "tops", "parameters", "multiply-adds")


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return reported("summary", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "summary",
        "List a net's layers with the shapes of their tops, their parameters and the multiply-adds of one "
        "forward pass (products with weights: convolutions, inner products, recurrent layers).",
        "shmtrain summary examples/mnist/lenet_deploy.prototxt",
    )
    p.add_argument("net", metavar="NET.prototxt", help="the net file")
    add_inputs(p)
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    add_state(p, "TEST")
    return p


def _run(args: argparse.Namespace) -> None:
    from prototxt.figures import figures
    from prototxt.net import Net
    from prototxt.sources import with_inputs
    from prototxt.text import load_net

    source = with_inputs(load_net(args.net), dict(args.input))
    with Net(source, args.phase, stages=args.stage, level=args.level) as net:
        found = figures(net)
        name = net.name
    if args.json:
        print(json.dumps({"name": name, **as_object(found)}))
        return
    print(f"{name or args.net} ({args.phase})")
    for line in table(found):
        print(line)


def as_object(found: Figures) -> dict[str, object]:
    """The figures and their totals, for JSON."""
    totals = ("parameters", "shared", "multiply_adds")
    return {**asdict(found), **{total: getattr(found, total) for total in totals}}


def table(found: Figures) -> list[str]:
    """A line a layer, then the totals."""
    rows = [HEAD, *(_row(layer) for layer in found.layers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.rjust(width) if i > 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    parts = [f"{found.trained:,} trained"]
    parts += [f"{found.frozen:,} frozen (lr_mult 0)"] if found.frozen else []
    parts += [f"{found.statistics:,} statistics"] if found.statistics else []
    shared = f"; {found.shared:,} more are shared with an earlier layer" if found.shared else ""
    each = f" ({found.multiply_adds // found.batch:,} a row)" if found.batch > 1 else ""
    rule = "-" * max(map(len, lines))
    return [
        lines[0],
        rule,
        *lines[1:],
        rule,
        f"parameters: {found.parameters:,} ({', '.join(parts)}){shared}",
        f"multiply-adds: {found.multiply_adds:,} for a batch of {found.batch}{each}",
        f"memory: {4 * found.parameters / 2**20:.1f} MiB of parameters, "
        f"{4 * _numbers(found) / 2**20:.1f} MiB of blobs",
    ]


def _row(layer: LayerFigures) -> tuple[str, ...]:
    shapes = ", ".join(" x ".join(map(str, shape)) or "scalar" for shape in layer.tops)
    count = f"{layer.parameters:,}" if layer.parameters else ""
    if layer.shared:
        count += " shared" if layer.shared == layer.parameters else f" ({layer.shared:,} shared)"
    return layer.name, layer.type, shapes, count, f"{layer.multiply_adds:,}" if layer.multiply_adds else ""


def _numbers(found: Figures) -> int:
    """What all tops hold, float32 each; in-place ones counted as often as they are written."""
    from math import prod

    return sum(prod(shape) for layer in found.layers for shape in layer.tops)
