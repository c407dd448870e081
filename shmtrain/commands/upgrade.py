"""``shmtrain upgrade``: files of earlier formats in today's, as the original's three tools write them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from shmtrain.commands.common import command_parser, reported

KINDS = {
    "net": "a net's text (the original's upgrade_net_proto_text)",
    "net-binary": "a .caffemodel (upgrade_net_proto_binary)",
    "solver": "a solver's text (upgrade_solver_proto_text)",
}


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return reported("upgrade", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "upgrade",
        "Write a net, a weight file or a solver of an earlier format in today's format.",
        "shmtrain upgrade net old.prototxt new.prototxt",
    )
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    p.add_argument("kind", choices=tuple(KINDS), help=kinds)
    p.add_argument("source", metavar="IN", help="the file to read")
    p.add_argument("target", metavar="OUT", help="the file to write; it may be the same")
    return p


def _run(args: argparse.Namespace) -> None:
    changed = {"net": _net, "net-binary": _binary, "solver": _solver}[args.kind](args.source, args.target)
    was = "upgraded" if changed else "already of the current format"
    print(f"{args.source}: {was}; written to {args.target}")


def _net(source: str, target: str) -> bool:
    from prototxt.text import net_from_text, parse_text, read_text

    text = read_text(source)
    old = parse_text(text, "NetParameter", source)
    message = net_from_text(text, source).message
    _write_text(target, message)
    return bool(old != message)


def _binary(source: str, target: str) -> bool:
    from prototxt import upgrade
    from prototxt.caffemodel import read_message, write_message
    from prototxt.errors import WeightsError

    net = read_message(source, "NetParameter")
    before = net.SerializeToString(deterministic=True)
    try:
        upgrade.upgrade_net(net)
    except ValueError as error:
        raise WeightsError(f"{source}: {error}") from error
    write_message(target, net)
    return bool(before != net.SerializeToString(deterministic=True))


def _solver(source: str, target: str) -> bool:
    """Only the old enum is an earlier format: no snapshot_prefix is filled in, that depends on the place."""
    from prototxt.errors import ParseError
    from prototxt.text import parse_text, read_text
    from prototxt.upgrade import upgrade_solver_type

    message = parse_text(read_text(source), "SolverParameter", source)
    old = bool(message.HasField("solver_type"))
    try:
        upgrade_solver_type(message)
    except ValueError as error:
        raise ParseError(f"{source}: {error}") from error
    _write_text(target, message)
    return old


def _write_text(path: str, message: Any) -> None:
    """As the original prints it: a whole number has no ``.0``."""
    from google.protobuf import text_format

    from prototxt.files import replacing_file

    text = re.sub(r"^( *\w+: -?\d+)\.0$", r"\1", text_format.MessageToString(message), flags=re.MULTILINE)
    with (
        replacing_file(path) as beside,
        open(beside, "w", encoding="utf-8", errors="surrogateescape") as file,
    ):
        file.write(text)
