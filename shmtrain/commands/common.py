"""What the commands share: options of a net's state, and how a failure is told. No torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence

from prototxt.errors import PrototxtError

OK, FAILED = 0, 1


def command_parser(command: str, description: str, example: str) -> argparse.ArgumentParser:
    """A parser for ``shmtrain COMMAND`` whose help ends with an example."""
    return argparse.ArgumentParser(
        prog=f"shmtrain {command}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_state(p: argparse.ArgumentParser, phase: str | None = None) -> None:
    """The options of a net's state; ``--phase`` where there is a usual one."""
    if phase is not None:
        p.add_argument("--phase", choices=("TRAIN", "TEST"), default=phase, help=f"of the net ({phase})")
    p.add_argument("--level", type=int, default=0, metavar="N", help="of the net's state (0)")
    p.add_argument("--stage", type=names, default=(), metavar="S[,S]", help="stages of the net's state")


def add_inputs(p: argparse.ArgumentParser) -> None:
    """The option that builds a net without its data."""
    p.add_argument(
        "--input",
        type=shaped,
        action="append",
        default=[],
        metavar="BLOB=SHAPE",
        help="take this blob as an input instead of its data layer's, which need not have its data: "
        "data=64x1x28x28 (several times for several blobs)",
    )


def shaped(text: str) -> tuple[str, tuple[int, ...]]:
    """The type of a blob's name and shape."""
    name, _, sizes = text.rpartition("=")
    if not name or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no blob and shape such as data=64x1x28x28")
    return name, tuple(int(size) for size in sizes.split("x"))


def names(text: str) -> tuple[str, ...]:
    """The type of several names between commas."""
    return tuple(part for part in text.split(",") if part)


def double_dashed(argv: Sequence[str]) -> list[str]:
    """The original's flags may begin with one dash: ``-model net.prototxt`` is ``--model net.prototxt``."""
    return [f"-{word}" if re.match(r"-[a-z]{2}", word) else word for word in argv]


def reported(command: str, work: Callable[[], None]) -> int:
    """Run ``work``; what is wrong with the user's files is one line on stderr and exit code 1."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads: do not complain at exit either
        return FAILED
    except (PrototxtError, OSError) as error:
        print(f"shmtrain {command}: {error}", file=sys.stderr)
        return FAILED
    return OK
