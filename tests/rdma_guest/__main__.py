"""Runs a bash command in the soft-RoCE guest; without a command it only builds the guest."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.rdma_guest.boot import boot
from tests.rdma_guest.image import image


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma_guest", description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder that is /run/hostout in the guest")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which the guest is ended")
    parser.add_argument("command", nargs="?", help="for bash")
    arguments = parser.parse_args()
    made = image()
    if arguments.command is None:
        print(made.kernel.parent)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        outcome = boot(made, arguments.command, (arguments.out or Path(folder)).resolve(), arguments.seconds)
    print(outcome.said, end="")
    return 98 if outcome.status is None else outcome.status


if __name__ == "__main__":
    sys.exit(main())
