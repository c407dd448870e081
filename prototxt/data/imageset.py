"""A list of images to a database of Datum records, as the original's convert_imageset makes it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prototxt import schema
from prototxt.data.apart import run_apart
from prototxt.data.decode import U8, Decoder, Undecodable, load_cv2
from prototxt.data.image_source import read_image
from prototxt.data.lists import Line, read_list
from prototxt.data.store import Backend
from prototxt.data.write import Record, write_database
from prototxt.errors import DataError

SHOWN = 1000  # records between two lines of progress


@dataclass(frozen=True)
class Conversion:
    """What convert_imageset is told; root is put before each name as it is.

    height, width  0: as they are;  encode_type: "png", "jpg", ...; "" by the file's name
    """

    root: str
    listed: str
    folder: str
    gray: bool = False
    shuffle: bool = False
    seed: int | None = None
    backend: Backend = "lmdb"
    height: int = 0
    width: int = 0
    check_size: bool = False
    encoded: bool = False
    encode_type: str = ""
    overwrite: bool = False


def convert_imageset(conversion: Conversion) -> tuple[int, int]:
    """(records written, images that could not be read), in a process of its own. Raises DataError."""
    count, left_out = run_apart(__name__, "convert", conversion.listed, values=asdict(conversion))
    return count, left_out


def convert(values: dict[str, Any]) -> tuple[int, int]:
    """The work, for the process of its own."""
    conversion = Conversion(**values)
    records = _Records(conversion)
    folder = Path(conversion.folder)
    count = write_database(folder, iter(records), conversion.backend, conversion.overwrite)
    if not count:
        raise DataError(f"none of the images in {os.path.abspath(conversion.listed)} could be read")
    return count, records.left_out


class _Records:
    """(key, Datum) of each line; an image that cannot be read is named on stderr and left out."""

    def __init__(self, conversion: Conversion) -> None:
        self._told = conversion
        self._lines = read_list(conversion.listed)
        if conversion.shuffle:
            random.Random(conversion.seed).shuffle(self._lines)
        try:
            self._decoder = Decoder()
        except Undecodable as error:
            raise DataError(f"{conversion.listed}: needs opencv-python-headless") from error
        self._shape: tuple[int, ...] | None = None
        self.left_out = 0

    def __iter__(self) -> Iterator[Record]:
        for number, (name, label) in enumerate(self._lines):
            try:
                datum = self._datum((name, label))
            except _Unreadable as error:
                self.left_out += 1
                print(f"left out: {error}", file=sys.stderr)
                continue
            yield f"{number:08d}_{name}".encode(errors="surrogateescape"), datum.SerializeToString()
            if (number + 1) % SHOWN == 0:
                print(f"{number + 1} of {len(self._lines)} images", file=sys.stderr)

    def _datum(self, line: Line) -> Any:
        told, (name, label) = self._told, line
        path = told.root + name
        try:
            image = read_image(self._decoder, path, not told.gray, (told.height, told.width))
        except DataError as error:
            raise _Unreadable(str(error)) from error
        if told.check_size and self._shape not in (None, image.shape):
            raise DataError(f"{path} is {_text(image.shape)}, those before it {_text(self._shape or ())}")
        self._shape = image.shape
        if told.encoded or told.encode_type:
            return schema.Datum(data=self._encoded(path, image), label=label, encoded=True)
        height, width, channels = image.shape
        planes = image.transpose(2, 0, 1).tobytes()
        return schema.Datum(
            channels=channels, height=height, width=width, data=planes, label=label, encoded=False
        )

    def _encoded(self, path: str, image: U8) -> bytes:
        """The file's own bytes where they are what is wanted, else the image encoded anew."""
        told = self._told
        extension = os.path.splitext(path)[1][1:].lower()
        wanted = told.encode_type.lower() or extension
        same = wanted == extension or (wanted, extension) == ("jpg", "jpeg")
        if same and not told.gray and not told.height and not told.width:
            return Path(path).read_bytes()
        cv2 = load_cv2()
        try:
            good, data = cv2.imencode(f".{wanted}", image)
        except cv2.error as error:
            raise DataError(f"{path}: no encoder for {wanted!r}; set --encode-type to png or jpg") from error
        if not good:
            raise DataError(f"{path} cannot be encoded as {wanted}")
        return bytes(data.tobytes())


class _Unreadable(Exception):
    """An image that is left out."""


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
