"""``shmtrain completion``: the script by which a shell completes ``shmtrain``'s commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from shmtrain.commands.common import reported
from smb.completion import add_shells, script


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return reported("completion", lambda: print(_script(args.shell), end=""))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = argparse.ArgumentParser(
        prog="shmtrain completion",
        description="Print the script that lets a shell complete commands, options and files at TAB.",
        allow_abbrev=False,
    )
    add_shells(p, "shmtrain")
    return p


def _script(shell: str) -> str:
    from shmtrain import cli

    parsers = {name: import_module(module).parser() for name, (module, _) in cli.COMMANDS.items()}
    for name, (_, does) in cli.COMMANDS.items():
        parsers[name].description = does  # the short one of the overview
    return script(shell, "shmtrain", cli.parser(), **parsers)
