"""The mean image of a database of Datum records, as the original's compute_image_mean makes it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prototxt import schema
from prototxt._native import datum_head
from prototxt.data.apart import run_apart
from prototxt.data.decode import Decoder
from prototxt.data.store import backend_of, open_store
from prototxt.errors import DataError
from prototxt.files import replacing_file


def image_mean(source: str, out: str | None) -> tuple[int, list[float]]:
    """(records, mean of each channel) of a database, in a process of its own; the image goes to ``out``.

    Sums are of float64, so that no number of images is too large. Raises DataError.
    """
    count, means = run_apart(__name__, "compute", source, source=source, out=out)
    return count, means


def compute(source: str, out: str | None) -> tuple[int, list[float]]:
    """The work, for the process of its own."""
    total: NDArray[np.float64] | None = None
    count = 0
    pixels = _Pixels()
    with closing(open_store(backend_of(source), source)) as store:
        for key, value in store.items():
            try:
                image = pixels.of(value)
                if total is not None and image.shape != total.shape:
                    raise ValueError(f"is {_text(image.shape)}, those before it {_text(total.shape)}")
            except ValueError as error:
                raise DataError(f"{store.folder}: record {count} (key {key!r}) {error}") from error
            if total is None:
                total = np.zeros(image.shape)
            total += image
            count += 1
    assert total is not None  # no store is empty
    mean = (total / count).astype(np.float32)
    if out is not None:
        write_mean(Path(out), mean)
    return count, [float(value) for value in mean.mean(axis=(1, 2), dtype=np.float64)]


class _Pixels:
    """(channels, height, width) of a record; OpenCV is loaded when the first encoded one is met."""

    def __init__(self) -> None:
        self._decoder: Decoder | None = None

    def of(self, value: bytes) -> NDArray[Any]:
        """Raises ValueError with what is wrong with the record."""
        sides, _, encoded, offset, size, floats = datum_head(value)
        if encoded:
            self._decoder = self._decoder or Decoder()
            data = memoryview(value)[offset : offset + size]
            return self._decoder.decode(data, "unchanged").transpose(2, 0, 1)
        if min(sides) <= 0 or (size or floats) != sides[0] * sides[1] * sides[2]:
            raise ValueError(f"holds {size or floats} values, but its shape is {_text(sides)}")
        if size:
            return np.frombuffer(value, np.uint8, size, offset).reshape(sides)
        datum = schema.Datum()
        datum.ParseFromString(value)
        return np.array(datum.float_data, np.float32).reshape(sides)


def write_mean(file: Path, mean: NDArray[np.float32]) -> None:
    """Write a (channels, height, width) image as a BlobProto; the file appears whole or not at all."""
    channels, height, width = mean.shape
    blob = schema.BlobProto(num=1, channels=channels, height=height, width=width)
    blob.data.extend(mean.ravel().tolist())
    try:
        with replacing_file(file) as beside:
            Path(beside).write_bytes(blob.SerializeToString())
    except OSError as error:
        raise DataError(f"cannot write {file.absolute()}: {error.strerror}") from error


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
