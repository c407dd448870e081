"""Batches of an LMDB of Datum records, as Caffe's Data layer reads it. For the reader process: no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lmdb

from prototxt._native import Transform, datum_head
from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.ring import MAX_COUNT
from prototxt.errors import DataError

Sides = tuple[int, int, int]  # channels, height, width


def open_lmdb(source: str) -> lmdb.Environment:
    """The LMDB in folder ``source``, to read only and without its lock file, so a read-only mount will do.

    Raises DataError when it is missing, empty, no LMDB, or shorter than its pages need.
    """
    folder = os.path.abspath(source)
    file = os.path.join(folder, "data.mdb")
    if os.path.isfile(folder):
        raise DataError(f"{folder} is a file; an LMDB source is the folder that holds data.mdb")
    if not os.path.isdir(folder):
        raise DataError(f"no such folder: {folder}")
    if not os.path.isfile(file):
        hint = " (CURRENT is there: a LevelDB?)" if os.path.exists(os.path.join(folder, "CURRENT")) else ""
        raise DataError(f"{folder} holds no data.mdb{hint}")
    try:
        env = lmdb.open(folder, readonly=True, lock=False, create=False)
    except (lmdb.Error, OSError) as error:
        raise DataError(f"{file} cannot be read as an LMDB: {error}") from error
    need, size = (env.info()["last_pgno"] + 1) * env.stat()["psize"], os.path.getsize(file)
    if size < need:  # LMDB would die of SIGBUS at the first page beyond the end
        raise DataError(f"{file} is truncated: it has {size} bytes and needs {need}")
    if not env.stat()["entries"]:
        raise DataError(f"{folder} is an empty LMDB")
    return env


class LmdbSource:
    """This worker's records, in the order of their keys, for ever."""

    def __init__(self, config: ReaderConfig, mean_image: bytes | None) -> None:
        self._config = config
        self._env = open_lmdb(config.source)
        self._txn = self._env.begin()
        self._entries: int = self._env.stat()["entries"]
        self._stream = self._records()
        self._taken = 0  # records of finished batches
        self._records_now: list[bytes] = []
        self._top: Sides = (0, 0, 0)
        self.notes: list[str] = []
        t = config.transform
        self._transform = Transform(
            scale=t.scale,
            mirror=t.mirror,
            crop=t.crop,
            random_crop=config.train,
            mean_values=t.mean_values,
            mean_image=mean_image,
            mean_shape=t.mean_shape,
            seed=config.seed,
        )

    def advance(self) -> list[Shape]:
        """Fetch the next batch's records; the shapes of its tops, by its first record."""
        self._taken += len(self._records_now)
        if not self._taken:
            self._check_size()
        self._records_now = list(islice(self._stream, self._config.batch_size))
        sides, encoded = self._sides()
        if not encoded and not self._taken and self._forces:
            self.notes.append("force_color and force_gray are only for encoded records; these are raw")
        crop = self._config.transform.crop
        self._top = (sides[0], crop or sides[1], crop or sides[2])
        batch = len(self._records_now)
        return [(batch, *self._top), (batch,)][: len(self._config.tops)]

    def write(self, tops: list[memoryview[float]]) -> None:
        """Transform the records fetched last into the tops; raises DataError for one that does not fit."""
        out, labels = tops[0], tops[1] if len(tops) > 1 else None
        records, at = self._records_now, 0
        try:
            while (at := self._transform.records(records, at, out, labels, self._top)) < len(records):
                sides, pixels = self._decode(at)
                self._transform.image(pixels, sides, at, out, self._top)
                if labels is not None:
                    labels[at] = datum_head(records[at])[1]
                at += 1
        except ValueError as error:
            if len(error.args) != 2:
                raise
            raise self._wrong(*error.args) from error

    def _check_size(self) -> None:
        """Refuse an impossible batch before its records are fetched."""
        self._records_now = list(islice(self._stream, 1))
        (channels, height, width), _ = self._sides()
        side, batch = self._config.transform.crop, self._config.batch_size
        if (count := batch * channels * (side or height) * (side or width)) > MAX_COUNT:
            what = f"a batch of {batch} images {channels}x{side or height}x{side or width}"
            raise DataError(
                f"{os.path.abspath(self._config.source)}: {what} has {count} values, above {MAX_COUNT}"
            )
        self._stream = self._records()

    @property
    def _forces(self) -> bool:
        return self._config.transform.force_color or self._config.transform.force_gray

    def _records(self) -> Iterator[bytes]:
        first, step = self._config.share
        while True:
            first %= self._entries
            cursor = self._txn.cursor()
            for _ in islice(cursor.iternext(values=False), first, None, step):
                yield cursor.value()  # the records of other workers are passed over without a copy
            first += -(-(self._entries - first) // step) * step - self._entries

    def _sides(self) -> tuple[Sides, bool]:
        """(shape of the batch's first image, whether it is encoded)."""
        try:
            sides, _, encoded, *_ = datum_head(self._records_now[0])
        except ValueError as error:
            raise self._wrong(0, str(error)) from error
        crop = self._config.transform.crop
        if encoded:
            sides, _ = self._decode(0)
        if min(sides) <= 0:
            raise self._wrong(0, "has the impossible shape " + "x".join(map(str, sides)))
        if crop > min(sides[1:]):
            raise self._wrong(0, f"is {'x'.join(map(str, sides))}, smaller than crop_size {crop}")
        return sides, encoded

    def _decode(self, index: int) -> tuple[Sides, Any]:
        """(shape, planar pixels) of an encoded record; colours as the original has them: blue, green, red."""
        try:
            import cv2
            import numpy as np
        except ImportError as error:
            raise self._wrong(
                index, "is an encoded image; to read it install opencv-python-headless"
            ) from error
        *_, offset, size, _ = datum_head(self._records_now[index])
        t = self._config.transform
        flag = cv2.IMREAD_UNCHANGED
        if t.force_color or t.force_gray:
            flag = cv2.IMREAD_COLOR if t.force_color else cv2.IMREAD_GRAYSCALE
        data = np.frombuffer(self._records_now[index], np.uint8, size, offset)
        image = cv2.imdecode(data, flag) if size else None
        if image is None:
            raise self._wrong(index, f"is marked as encoded, but its {size} bytes are no image")
        if image.dtype != np.uint8:
            raise self._wrong(index, f"is a {image.dtype} image; only 8 bits a value are supported")
        planar = np.ascontiguousarray(image.reshape(*image.shape[:2], -1).transpose(2, 0, 1))
        return planar.shape, planar

    def _wrong(self, index: int, text: str) -> DataError:
        """Names a record of the present batch by number and key."""
        first, step = self._config.share
        number = (first + (self._taken + index) * step) % self._entries
        key = next(islice(self._txn.cursor().iternext(values=False), number, None), b"")
        return DataError(f"{os.path.abspath(self._config.source)}: record {number} (key {key!r}) {text}")
