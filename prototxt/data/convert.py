"""Data sets to the databases and mean files that Data layers read, as the original's tools write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from zipfile import BadZipFile

import lmdb
import numpy as np
from numpy.typing import NDArray

from prototxt import schema
from prototxt.data.idx import U8, read_idx
from prototxt.data.mean import write_mean
from prototxt.data.store import Backend, backend_of, open_store
from prototxt.data.write import write_database
from prototxt.errors import DataError

SIDE, CIFAR_CHANNELS, CIFAR_CLASSES = 32, 3, 10
CIFAR_RECORD = 1 + CIFAR_CHANNELS * SIDE * SIDE  # label, then red, green and blue planes
MIXING_SEED = 0
JPEG_NAMES = ("jpeg", "offset", "label")
# the last two: an .npy is no context manager, in Python 3.11 and before
NO_NPZ = (OSError, ValueError, KeyError, EOFError, BadZipFile, TypeError, AttributeError)


@dataclass(frozen=True)
class Images:
    """images (n, channels, height, width) and labels (n,), bytes; key_digits is the width of the keys."""

    images: U8
    labels: U8
    key_digits: int

    def __len__(self) -> int:
        return len(self.labels)


# Data sets -----------------------------------------------------------------------------------------------


def read_mnist(folder: Path, part: str) -> Images:
    """One part, "train" or "t10k", of an MNIST-like set of idx files, gzipped or not."""
    images, labels = (
        read_idx(_idx_file(folder, f"{part}-images", 3), 3),
        read_idx(_idx_file(folder, f"{part}-labels", 1), 1),
    )
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} {part} images, but {len(labels)} labels")
    return Images(images[:, np.newaxis], labels, 8)


def _idx_file(folder: Path, stem: str, axes: int) -> Path:
    names = [f"{stem}{dot}idx{axes}-ubyte{end}" for dot in "-." for end in (".gz", "")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder.absolute()}")
    raise DataError(f"{folder.absolute()} holds no {names[0]}, packed or not")


def read_cifar10(source: Path, part: str) -> Images:
    """One part, "train" or "test", of CIFAR-10; the channels are red, green, blue as in the original files.

    source  the folder with the binary batches, or an .npz of JPEG images: PART_jpeg (all bytes), PART_offset
            (image i is bytes offset[i] to offset[i + 1]), PART_label; these are mixed, always alike,
            as they may lie sorted by class and no net learns from batches of one class
    """
    if source.is_file():
        return _read_jpegs(source, part)
    folder = source if (source / "test_batch.bin").exists() else source / "cifar-10-batches-bin"
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
    records = np.concatenate([_cifar_batch(folder / name, source) for name in names])
    return _cifar(source, records[:, 1:].reshape(-1, CIFAR_CHANNELS, SIDE, SIDE), records[:, 0])


def _cifar_batch(file: Path, source: Path) -> U8:
    try:
        records = np.fromfile(file, np.uint8)
    except OSError as error:
        raise DataError(f"{source.absolute()}: cannot read {file.name}: {error.strerror}") from error
    if not records.size or records.size % CIFAR_RECORD:
        raise DataError(f"{file.absolute()} has {records.size} bytes, no multiple of {CIFAR_RECORD}")
    return records.reshape(-1, CIFAR_RECORD)


def _cifar(source: Path, images: U8, labels: U8) -> Images:
    if labels.max() >= CIFAR_CLASSES:
        raise DataError(f"{source.absolute()}: label {labels.max()} is above {CIFAR_CLASSES - 1}")
    return Images(images, labels, 5)


def _read_jpegs(source: Path, part: str) -> Images:
    try:
        import cv2
    except ImportError as error:
        raise DataError(f"{source.absolute()} holds JPEGs: install opencv-python-headless") from error
    try:
        with np.load(source) as arrays:  # allow_pickle stays off
            data, offset, labels = (arrays[f"{part}_{name}"] for name in JPEG_NAMES)
    except NO_NPZ as error:
        raise DataError(f"{source.absolute()} is no .npz of CIFAR-10 JPEGs: {error}") from error
    if len(offset) != len(labels) + 1:
        raise DataError(f"{source.absolute()}: {len(labels)} {part} labels, but {len(offset)} offsets")
    images = np.empty((len(labels), CIFAR_CHANNELS, SIDE, SIDE), np.uint8)
    mixed = np.random.default_rng(MIXING_SEED).permutation(len(labels))
    for place, i in enumerate(mixed):
        image = cv2.imdecode(data[offset[i] : offset[i + 1]], cv2.IMREAD_COLOR)
        if image is None or image.shape != (SIDE, SIDE, CIFAR_CHANNELS):
            raise DataError(f"{source.absolute()}: {part} image {i} is no {SIDE}x{SIDE} JPEG")
        images[place] = image[:, :, ::-1].transpose(2, 0, 1)  # decoded as blue, green, red
    return _cifar(source, images, labels[mixed])


# Database and mean file ------------------------------------------------------------------------------------


def datum_records(data: Images) -> Iterator[tuple[bytes, bytes]]:
    """(key, Datum) of each image, raw."""
    channels, height, width = data.images.shape[1:]
    for i, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
        datum = schema.Datum(
            channels=channels, height=height, width=width, data=image.tobytes(), label=int(label)
        )
        yield b"%0*d" % (data.key_digits, i), datum.SerializeToString()


def write_once(
    folder: Path,
    records: Iterable[tuple[bytes, bytes]],
    backend: Backend = "lmdb",
    *,
    overwrite: bool = False,
) -> bool:
    """Write records, in the order of their keys, to a database in ``folder``; it appears whole or not at all.

    False when the folder already holds just these records. Raises DataError when it holds others and
    ``overwrite`` is not set, or when it cannot be written.
    """
    records = list(records)
    if folder.exists() and _same(folder, records, backend):
        return False
    if folder.exists() and not overwrite:
        raise DataError(f"{folder.absolute()} exists and holds something else; --overwrite replaces it")
    write_database(folder, records, backend, overwrite)
    return True


def _same(folder: Path, records: Sequence[tuple[bytes, bytes]], backend: Backend) -> bool:
    """Whether the folder holds just these records."""
    try:
        if backend_of(str(folder)) != backend:
            return False
        with closing(open_store(backend, str(folder))) as store:
            return all(old == new for old, new in zip_longest(store.items(), records))
    except (DataError, lmdb.Error):
        return False


def write_images_mean(file: Path, data: Images) -> NDArray[np.float32]:
    """Write the mean image as a BlobProto and return it, (channels, height, width) float32."""
    mean: NDArray[np.float32] = data.images.mean(axis=0, dtype=np.float64).astype(np.float32)
    write_mean(file, mean)
    return mean
