"""``shmtrain data``: makes the databases that nets train on, and says what one holds. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from prototxt.errors import DataError
from shmtrain.commands.common import command_parser, reported

DIGITS = "examples/mnist/digits"
BACKENDS = ("lmdb", "leveldb")


def parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "data", "Make the databases that nets train on; say what one holds.", "shmtrain data mnist"
    )
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_imageset(commands.add_parser("convert-imageset", help="a database from a list of images"))
    mean = commands.add_parser(
        "image-mean", help="the mean image of a database, and the mean of each channel"
    )
    mean.add_argument("database", metavar="FOLDER", help="an LMDB or a LevelDB")
    mean.add_argument("out", nargs="?", metavar="FILE", help="mean.binaryproto; none: only print")
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
        _add_backend(command)
        command.add_argument(
            "--overwrite", action="store_true", help="replace databases that hold something else"
        )
    show = commands.add_parser("ls", help="count, shape and labels of an LMDB or a LevelDB")
    show.add_argument("database", nargs="+", metavar="FOLDER")
    return parser


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=BACKENDS, default="lmdb", help="what is written (default: lmdb)")


def _add_imageset(parser: argparse.ArgumentParser) -> None:
    """The original's options; its names with underscores are taken too."""
    parser.add_argument("root", metavar="ROOT/", help="what is put before each name in the list")
    parser.add_argument("listed", metavar="LIST", help="a text file: path and label a line")
    parser.add_argument("folder", metavar="FOLDER", help="the database to write")
    _add_backend(parser)
    add, number = parser.add_argument, {"type": int, "default": 0, "metavar": "N"}
    add("--gray", action="store_true", help="one channel")
    add("--shuffle", action="store_true", help="in an order by chance, not the list's")
    add("--seed", type=int, metavar="N", help="of that order (default: another each time)")
    add("--resize-width", "--resize_width", help="resize to this width", **number)  # type: ignore[arg-type]
    add("--resize-height", "--resize_height", help="and this height", **number)  # type: ignore[arg-type]
    add("--check-size", "--check_size", action="store_true", help="refuse images of several sizes")
    add("--encoded", action="store_true", help="keep the images encoded, as in their files")
    add("--encode-type", "--encode_type", default="", metavar="EXT", help="encode them as png, jpg, ...")
    add("--overwrite", action="store_true", help="replace what lies in FOLDER")


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    commands = {
        "convert-imageset": _imageset,
        "image-mean": _mean,
        "mnist": _mnist,
        "cifar10": _cifar10,
        "ls": _ls,
    }
    return reported(f"data {args.data_command}", lambda: commands[args.data_command](args))


def _imageset(args: argparse.Namespace) -> None:
    from prototxt.data.imageset import Conversion, convert_imageset

    width, height = max(0, args.resize_width), max(0, args.resize_height)
    if bool(width) != bool(height):
        raise DataError("--resize-width and --resize-height go together")
    root = args.root if args.root.endswith("/") or not os.path.isdir(args.root) else f"{args.root}/"
    count, left_out = convert_imageset(
        Conversion(
            root, args.listed, args.folder, args.gray, args.shuffle, args.seed, args.backend, height, width,
            args.check_size, args.encoded, args.encode_type, args.overwrite,
        )
    )  # fmt: skip
    unread = f", {left_out} images could not be read" if left_out else ""
    print(f"{args.folder}: {count} records{unread}")


def _mean(args: argparse.Namespace) -> None:
    from prototxt.data.mean import image_mean

    count, means = image_mean(args.database, args.out)
    print(f"{args.database}: {count} records")
    for channel, mean in enumerate(means):
        print(f"mean_value channel [{channel}]: {mean:g}")


def _mnist(args: argparse.Namespace) -> None:
    from prototxt.data.convert import datum_records, read_mnist, write_once

    if args.source == Path(DIGITS) and not args.source.is_dir():
        raise DataError(
            f"no folder {args.source.absolute()}: run this from the top of the source checkout, "
            "or name a folder of idx files with --from"
        )
    parts = [("train", read_mnist(args.source, "train")), ("test", read_mnist(args.source, "t10k"))]
    for name, data in parts:
        folder = args.out / f"mnist_{name}_{args.backend}"
        written = write_once(folder, datum_records(data), args.backend, overwrite=args.overwrite)
        _say(folder, len(data), written)


def _cifar10(args: argparse.Namespace) -> None:
    from prototxt.data.convert import datum_records, read_cifar10, write_images_mean, write_once

    for name in ("train", "test"):
        data = read_cifar10(args.source, name)
        folder = args.out / f"cifar10_{name}_{args.backend}"
        written = write_once(folder, datum_records(data), args.backend, overwrite=args.overwrite)
        _say(folder, len(data), written)
        if name == "train":
            mean = write_images_mean(args.out / "mean.binaryproto", data)
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
