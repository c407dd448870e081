"""``shmtrain extract-features``: what a net makes of its data, blob by blob, into files that others read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from prototxt.errors import NetError
from shmtrain.commands.common import add_state, command_parser, names, reported
from smb.arguments import whole

if TYPE_CHECKING:
    from prototxt.net import Net

ENDINGS = {".h5": "hdf5", ".hdf5": "hdf5", ".npz": "npz"}


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    p = parser()
    args = p.parse_args(argv)
    args.kind = args.kind or ENDINGS.get(os.path.splitext(args.out[0])[1].lower(), "lmdb")
    alone = args.kind in ("lmdb", "leveldb")
    if len(args.out) != len(args.blobs) and (alone or len(args.out) != 1):
        one = "" if alone else ", or one for all"
        p.error(f"{len(args.blobs)} blobs, but {len(args.out)} outputs: one for each is needed{one}")
    if len(set(args.out)) < len(args.out):
        p.error(f"one output is named twice: {', '.join(args.out)}")
    return reported("extract-features", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "extract-features",
        "Run a net over its data in the TEST phase and write blobs, row by row: to an LMDB or LevelDB of "
        "float Datums with keys 0000000000, 0000000001, ... as the original's tool does, or to HDF5 or .npz "
        "files with a data set a blob.",
        "shmtrain extract-features lenet_iter_10000.caffemodel examples/mnist/lenet_train_test.prototxt"
        " ip1,label features.h5 10",
    )
    p.add_argument("weights", metavar="WEIGHTS", help=".caffemodel file, binary or HDF5")
    p.add_argument("net", metavar="NET.prototxt", help="the net file; its data layers give the input")
    p.add_argument("blobs", type=names, metavar="BLOB[,BLOB]", help="what to write")
    p.add_argument(
        "out", type=names, metavar="OUT[,OUT]", help="one for each blob; of .h5 and .npz one will do for all"
    )
    p.add_argument("batches", type=whole, metavar="N", help="batches to run")
    p.add_argument(
        "kind", nargs="?", choices=("lmdb", "leveldb", "hdf5", "npz"),
        help="of OUT (by its ending .h5, .npz; else lmdb)",
    )  # fmt: skip
    p.add_argument("--overwrite", action="store_true", help="replace outputs that exist")
    add_state(p)
    return p


def _run(args: argparse.Namespace) -> None:
    import torch

    from prototxt.features import open_writers
    from prototxt.net import Net
    from prototxt.weights import load_weights

    with Net(args.net, "TEST", stages=args.stage, level=args.level) as net:
        load_weights(net, args.weights, strict=True)
        _check(net, args.blobs)
        with ExitStack() as stack:
            writers = open_writers(stack, args.kind, args.blobs, args.out, args.overwrite)
            with torch.no_grad():
                for _ in range(args.batches):
                    net.forward()
                    for blob, writer in zip(args.blobs, writers, strict=True):
                        writer.add(net.blobs[blob].data)
            counts = [writer.finish() for writer in writers]
    outs = args.out if len(args.out) > 1 else args.out * len(args.blobs)
    for blob, out, count in zip(args.blobs, outs, counts, strict=True):
        print(f"{out}: {count} rows of {blob}")


def _check(net: Net, blobs: Sequence[str]) -> None:
    for blob in blobs:
        if blob not in net.blobs:
            raise NetError(f"{net.path}: the net has no blob {blob!r} (blobs: {', '.join(net.blobs)})")
