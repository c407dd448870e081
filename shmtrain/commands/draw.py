"""``shmtrain draw``: a net as a picture, a box a layer with its shapes and parameter counts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmtrain.commands.common import add_inputs, add_state, command_parser, reported

if TYPE_CHECKING:
    from prototxt.draw import Drawn
    from prototxt.text import NetSource


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    p = parser()
    args = p.parse_args(argv)
    if args.as_written and args.input:
        p.error("--as-written builds nothing: it takes no --input")
    return reported("draw", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "draw",
        "Draw a net: a box a layer, with its type, settings, shapes and parameter counts.",
        "shmtrain draw examples/mnist/lenet_deploy.prototxt lenet.svg",
    )
    p.add_argument("net", metavar="NET.prototxt", help="the net file")
    p.add_argument(
        "picture", metavar="PICTURE", help="its ending says the format: .svg, or .png, .pdf (matplotlib)"
    )
    p.add_argument(
        "--direction", choices=("TB", "BT", "LR", "RL"), default="TB", help="where the net runs to (TB)"
    )
    p.add_argument(
        "--as-written", action="store_true", help="draw the file without building the net: no shapes"
    )
    add_inputs(p)
    add_state(p, "TEST")
    return p


def _run(args: argparse.Namespace) -> None:
    from prototxt.draw import save
    from prototxt.text import load_net

    drawn = _layers(load_net(args.net), args)
    save(drawn, args.picture, args.direction)
    print(f"{args.picture}: {len(drawn)} layers")


def _layers(source: NetSource, args: argparse.Namespace) -> list[Drawn]:
    from prototxt import schema
    from prototxt.draw import of_message, of_net
    from prototxt.net import Net
    from prototxt.rules import filter_layers, set_state
    from prototxt.sources import with_inputs

    if args.as_written:
        set_state(source.message, schema.Phase.Value(args.phase), args.stage, args.level)
        kept, _ = filter_layers(source)
        return of_message(schema.NetParameter(layer=[entry.message for entry in kept]))
    replaced = with_inputs(source, dict(args.input))
    with Net(replaced, args.phase, stages=args.stage, level=args.level) as net:
        return of_net(net)
