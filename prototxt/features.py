"""Writers of blobs, row by row: databases of float Datums, HDF5, .npz. What fails leaves nothing."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np

from prototxt import schema
from prototxt.blob import Array
from prototxt.data.leveldb_write import NewLevelDb
from prototxt.data.write import fill_lmdb, replacing
from prototxt.errors import DataError
from prototxt.files import replacing_file

RECORDS = 1000  # put into an LMDB at once
AXES = 4  # that a Datum can tell apart: rows, channels, height, width


class Writer(Protocol):
    """Takes the batches of one blob; the first axis is that of rows, a scalar is one row."""

    def add(self, batch: Array) -> None: ...
    def finish(self) -> int:
        """Write what is still held; how many rows there were."""


def open_writers(
    stack: ExitStack, kind: str, blobs: Sequence[str], outs: Sequence[str], overwrite: bool
) -> list[Writer]:
    """A writer for each blob, into ``outs``: one each, or one for all (hdf5, npz).

    The outputs appear when ``stack`` ends well. Raises DataError or OSError where one exists, or cannot be
    written.
    """
    for out in outs:
        if os.path.exists(out) and not overwrite:
            raise DataError(f"{os.path.abspath(out)} exists; --overwrite replaces it")
    if kind in ("lmdb", "leveldb"):
        folders = [stack.enter_context(replacing(Path(out).absolute())) for out in outs]
        if kind == "lmdb":
            return [DatumFeatures(_Lmdb(folder)) for folder in folders]
        return [DatumFeatures(stack.enter_context(closing(NewLevelDb(folder)))) for folder in folders]
    opened = [stack.enter_context((_hdf5 if kind == "hdf5" else _npz)(out)) for out in outs]
    files = opened if len(outs) > 1 else opened * len(blobs)
    return [writer_of(blob) for writer_of, blob in zip(files, blobs, strict=True)]


class _Database(Protocol):
    def add(self, key: bytes, value: bytes) -> None: ...
    def finish(self) -> int: ...


class _Lmdb:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._held: list[tuple[bytes, bytes]] = []

    def add(self, key: bytes, value: bytes) -> None:
        self._held.append((key, value))
        self._count += 1
        if len(self._held) >= RECORDS:
            self._put()

    def _put(self) -> None:
        fill_lmdb(self._folder, self._held)
        self._held = []

    def finish(self) -> int:
        self._put()
        return self._count


class DatumFeatures:
    """Into a new database: Datums with float_data, keys of ten digits that count the rows."""

    def __init__(self, database: _Database) -> None:
        self._database = database
        self._count = 0

    def add(self, batch: Array) -> None:
        if batch.ndim > AXES:
            raise DataError(
                f"a blob of shape {batch.shape} has more than {AXES} axes, which no Datum can hold: "
                "write hdf5 or npz"
            )
        channels, height, width = (*batch.shape[1:], 1, 1, 1)[: AXES - 1]
        for row in batch.reshape(batch.shape[0] if batch.ndim else 1, -1):
            datum = schema.Datum(channels=channels, height=height, width=width, float_data=row.tolist())
            self._database.add(b"%010d" % self._count, datum.SerializeToString())
            self._count += 1

    def finish(self) -> int:
        return self._database.finish()


@contextmanager
def _hdf5(path: str) -> Iterator[Callable[[str], Writer]]:
    """One HDF5 file with a float32 data set a blob."""
    with replacing_file(path) as beside:
        with _told(path):
            file = h5py.File(beside, "w")
        try:
            yield lambda blob: _DataSet(file, path, blob)
        finally:
            with _told(path):
                file.close()


@contextmanager
def _told(path: str) -> Iterator[None]:
    """h5py raises each of these for a full disk."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"cannot write {os.path.abspath(path)}: {error}") from error


class _DataSet:
    def __init__(self, file: Any, path: str, blob: str) -> None:
        self._file, self._path, self._blob = file, path, blob
        self._set: Any = None
        self._count = 0

    def add(self, batch: Array) -> None:
        rows = batch if batch.ndim else batch[np.newaxis]
        with _told(self._path):
            if self._set is None:
                shape = (None, *rows.shape[1:])
                self._set = self._file.create_dataset(self._blob, data=rows, maxshape=shape, chunks=True)
            else:
                self._set.resize(self._count + len(rows), axis=0)
                self._set[self._count :] = rows
        self._count += len(rows)

    def finish(self) -> int:
        return self._count


@contextmanager
def _npz(path: str) -> Iterator[Callable[[str], Writer]]:
    """One .npz file with a float32 array a blob; all of it is held in memory until the end."""
    arrays: dict[str, _Rows] = {}
    with replacing_file(path) as beside:
        yield lambda blob: arrays.setdefault(blob, _Rows())
        with zipfile.ZipFile(beside, "w") as file:  # numpy.savez takes no array that is called "file"
            for blob, rows in arrays.items():
                with file.open(f"{blob}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.concatenate(rows.parts), allow_pickle=False)


class _Rows:
    def __init__(self) -> None:
        self.parts: list[Array] = []

    def add(self, batch: Array) -> None:
        self.parts.append(batch.copy() if batch.ndim else batch[np.newaxis].copy())

    def finish(self) -> int:
        return sum(map(len, self.parts))
