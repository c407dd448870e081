"""``shmtrain data``: makes the LMDBs that the examples train on, and says what an LMDB holds. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prototxt.errors import DataError

DIGITS = "examples/mnist/digits"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shmtrain data", allow_abbrev=False)
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    mnist = commands.add_parser("mnist", help="mnist_train_lmdb and mnist_test_lmdb from idx files")
    mnist.add_argument(
        "--from", dest="source", type=Path, default=Path(DIGITS), metavar="FOLDER",
        help=f"with train-images-idx3-ubyte.gz and so on (default: the 10,000 digits in {DIGITS})",
    )  # fmt: skip
    mnist.add_argument("--out", type=Path, default=Path("examples/mnist"), metavar="FOLDER")
    cifar = commands.add_parser("cifar10", help="cifar10_train_lmdb, cifar10_test_lmdb and mean.binaryproto")
    cifar.add_argument(
        "--from", dest="source", type=Path, required=True, metavar="PATH",
        help="the folder with data_batch_1.bin and so on, or an .npz of JPEGs",
    )  # fmt: skip
    cifar.add_argument("--out", type=Path, default=Path("examples/cifar10"), metavar="FOLDER")
    for command in (mnist, cifar):
        command.add_argument(
            "--overwrite", action="store_true", help="replace LMDBs that hold something else"
        )
    show = commands.add_parser("ls", help="count, shape and labels of an LMDB")
    show.add_argument("database", nargs="+", metavar="FOLDER")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the chosen command; 0, or 1 with one line on stderr."""
    args = _parser().parse_args(argv)
    try:
        {"mnist": _mnist, "cifar10": _cifar10, "ls": _ls}[args.data_command](args)
    except DataError as error:
        print(f"shmtrain data {args.data_command}: {error}", file=sys.stderr)
        return 1
    return 0


def _mnist(args: argparse.Namespace) -> None:
    from prototxt.data.convert import datum_records, read_mnist, write_lmdb

    if args.source == Path(DIGITS) and not args.source.is_dir():
        raise DataError(
            f"no folder {args.source.absolute()}: run this from the top of the source checkout, "
            "or name a folder of idx files with --from"
        )
    parts = [("train", read_mnist(args.source, "train")), ("test", read_mnist(args.source, "t10k"))]
    for name, data in parts:
        folder = args.out / f"mnist_{name}_lmdb"
        _say(folder, len(data), write_lmdb(folder, datum_records(data), overwrite=args.overwrite))


def _cifar10(args: argparse.Namespace) -> None:
    from prototxt.data.convert import datum_records, read_cifar10, write_lmdb, write_mean

    for name in ("train", "test"):
        data = read_cifar10(args.source, name)
        folder = args.out / f"cifar10_{name}_lmdb"
        _say(folder, len(data), write_lmdb(folder, datum_records(data), overwrite=args.overwrite))
        if name == "train":
            mean = write_mean(args.out / "mean.binaryproto", data)
            means = ", ".join(f"{value:.3f}" for value in mean.mean(axis=(1, 2)))
            print(f"{args.out / 'mean.binaryproto'}: means of red, green, blue {means}")


def _say(folder: Path, count: int, written: bool) -> None:
    print(f"{folder}: {count} records{'' if written else ' (there already)'}")


def _ls(args: argparse.Namespace) -> None:
    from prototxt.data.summary import summarize

    for database in args.database:
        found = summarize(database)
        print(f"{database}: {found.records} records, keys {found.first_key} to {found.last_key}")
        for shape, count in found.shapes.items():
            print(f"  {shape}: {count}")
        print("  labels: " + ", ".join(f"{label}: {count}" for label, count in found.labels.items()))
