"""``shmtrain classify``: the most probable classes of images, as the original's cpp_classification prints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prototxt.errors import DataError, NetError
from shmtrain.commands.common import command_parser, reported
from smb.arguments import whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prototxt.net import Net

    F32 = NDArray[np.float32]


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return reported("classify", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "classify",
        "Print the most probable classes of images. An image is resized to the net's input, blue before "
        "green before red, or grey, values from 0 to 255; then the mean is subtracted and the scale "
        "multiplied.",
        "shmtrain classify deploy.prototxt net.caffemodel cat.jpg --mean mean.binaryproto --labels words.txt",
    )
    p.add_argument("net", metavar="DEPLOY.prototxt", help="a net with one Input and one output")
    p.add_argument("weights", metavar="WEIGHTS", help=".caffemodel file, binary or HDF5")
    p.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    p.add_argument(
        "--mean",
        metavar="FILE|V[,V]",
        help="a mean image (.binaryproto, .npy), whose mean of each channel is subtracted, or these values",
    )
    p.add_argument("--scale", type=float, default=1.0, metavar="S", help="multiply after that (1)")
    p.add_argument("--labels", metavar="FILE", help="the classes' names, one a line (their numbers)")
    p.add_argument("--top", type=whole, default=5, metavar="K", help="classes to print (5)")
    p.add_argument("--output", metavar="BLOB", help="of several outputs, the one with the probabilities")
    return p


def _run(args: argparse.Namespace) -> None:
    import numpy as np

    from prototxt.data.decode import Decoder, Undecodable
    from prototxt.data.image_source import read_image
    from prototxt.net import Net
    from prototxt.weights import load_weights

    with Net(args.net, "TEST") as net:
        load_weights(net, args.weights, strict=True)
        channels, height, width = _input(net)
        output = _output(net, args.output)
        labels = None if args.labels is None else _labels(args.labels)
        mean = _mean(args.mean, channels)
        try:
            decoder = Decoder()
        except Undecodable as error:
            raise DataError(f"{args.images[0]} {error}") from error
        for path in args.images:
            pixels = read_image(decoder, path, channels == 3, (height, width)).transpose(2, 0, 1)
            net.forward(**{net.inputs[0]: ((pixels - mean) * np.float32(args.scale))[None]})
            scores = net.blobs[output].data.reshape(-1)
            if labels is not None and len(labels) != len(scores):
                raise DataError(
                    f"{args.labels}: {len(labels)} labels, but the net's output {output!r} has {len(scores)}"
                )
            print(f"---------- Prediction for {path} ----------")
            for index in ranked(scores, args.top):
                print(f'{scores[index]:.4f} - "{index if labels is None else labels[index]}"')


def ranked(scores: F32, count: int) -> list[int]:
    """The indices of the ``count`` largest, the largest first; of equal ones the first, NaN last."""
    import numpy as np

    order = np.argsort(-scores, kind="stable")
    return [int(index) for index in order[:count]]


def _input(net: Net) -> tuple[int, int, int]:
    """(channels, height, width) of the net's only input, which is then reshaped to one image."""
    if len(net.inputs) != 1:
        found = ", ".join(net.inputs) or "none"
        raise NetError(
            f"{net.path}: classify needs a deploy net, with one Input layer of one blob (inputs: {found})"
        )
    blob = net.blobs[net.inputs[0]]
    if len(blob.shape) != 4 or blob.shape[1] not in (1, 3):
        raise NetError(
            f"{net.path}: the input {net.inputs[0]!r} has shape {tuple(blob.shape)}; images need "
            "(n, 3 or 1 channels, height, width)"
        )
    _, channels, height, width = blob.shape
    blob.reshape(1, channels, height, width)
    net.reshape()
    return channels, height, width


def _output(net: Net, wanted: str | None) -> str:
    if wanted is not None and wanted not in net.blobs:
        raise NetError(f"{net.path}: the net has no blob {wanted!r} (outputs: {', '.join(net.outputs)})")
    if wanted is None and len(net.outputs) != 1:
        raise NetError(
            f"{net.path}: the net has several outputs; choose by --output: {', '.join(net.outputs)}"
        )
    return net.outputs[0] if wanted is None else wanted


def _labels(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


def _mean(text: str | None, channels: int) -> Any:
    """(channels, 1, 1) float32 of a file's image or of the values given; 0 without either."""
    import numpy as np

    if text is None:
        return np.float32(0)
    values = _numbers(text)
    if values is None or os.path.exists(text):
        image = _mean_image(text)
        if image.ndim not in (1, 3) or image.shape[0] != channels:
            raise DataError(f"{text}: a mean of shape {image.shape} for an input of {channels} channels")
        values = [float(value) for value in image.reshape(channels, -1).mean(1, dtype=np.float64)]
    if len(values) == 1:
        values *= channels
    if len(values) != channels:
        raise DataError(f"--mean {text}: {len(values)} values for an input of {channels} channels")
    return np.asarray(values, np.float32).reshape(channels, 1, 1)


def _numbers(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def _mean_image(path: str) -> F32:
    import numpy as np

    from prototxt.caffemodel import blob_array, read_message

    if not path.endswith(".npy"):
        image = blob_array(read_message(path, "BlobProto"))
        return image[0] if image.ndim == 4 and image.shape[0] == 1 else image
    try:
        with open(path, "rb") as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False), np.float32)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: no .npy file of numbers: {error}") from error
