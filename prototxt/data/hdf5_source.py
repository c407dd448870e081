"""Rows of HDF5 files named in a list, as Caffe's HDF5Data reads them. For the reader process: no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.note import Note
from prototxt.data.ring import MAX_COUNT
from prototxt.errors import DataError, first_line
from prototxt.room import unpacked_limit

# Files up to this size (as float32) are held in memory, larger ones read as they are used.
WHOLE_BYTES = 256 << 20

Rows = NDArray[np.int64]
# What h5py raises for a file that is damaged inside: whatever its C library met, and what numpy made of it.
DAMAGED = (OSError, KeyError, ValueError, RuntimeError, TypeError, OverflowError, MemoryError)


def listed_files(source: str) -> list[str]:
    """The paths in the list file, one a line (or several, where none holds a blank)."""
    path = os.path.abspath(source)
    try:
        with open(path) as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list of HDF5 files {path}: {error}") from error
    names = [name for line in lines for name in ([line] if os.path.exists(line) else line.split())]
    if not names:
        raise DataError(f"{path} lists no HDF5 file")
    return names


class Hdf5File:
    """The data sets of one file that the tops are named after; all have as many rows."""

    def __init__(self, path: str, tops: tuple[str, ...]) -> None:
        self.path = os.path.abspath(path)
        with self._reading():
            self._limit = unpacked_limit(os.path.getsize(path))
            self._file = h5py.File(path, "r", locking=False)
            self._sets = [self._open(name) for name in tops]
            self.rows: int = self._sets[0].shape[0]
            self._check_rows(tops)
            if sum(4 * prod(data.shape) for data in self._sets) <= min(WHOLE_BYTES, self._limit):
                self._sets = [data[()].astype(np.float32, copy=False) for data in self._sets]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What h5py says of a damaged file becomes a DataError."""
        try:
            yield
        except DataError:
            raise
        except DAMAGED as error:
            raise DataError(f"cannot read the HDF5 file {self.path}: {first_line(error)}") from error

    def _open(self, name: str) -> Any:
        data = self._file.get(name)
        if not isinstance(data, h5py.Dataset):
            raise DataError(
                f"{self.path} has no data set {name!r} (it has: {', '.join(self._file) or 'none'})"
            )
        if data.dtype.kind not in "fiu":
            raise DataError(
                f"{self.path}: data set {name!r} is of type {data.dtype}; float or integer is needed"
            )
        if not data.shape:
            raise DataError(f"{self.path}: data set {name!r} is a single value; at least one axis is needed")
        if 0 in data.shape:
            raise DataError(f"{self.path}: data set {name!r} is empty, shape {data.shape}")
        for what, shape in (("a row", data.shape[1:]), ("a chunk", data.chunks or ())):
            if (size := prod(shape) * data.dtype.itemsize) > self._limit:
                raise DataError(
                    f"{self.path}: {what} of data set {name!r} takes {size} bytes, too many for the file"
                )
        return data

    def _check_rows(self, tops: tuple[str, ...]) -> None:
        for name, data in zip(tops, self._sets, strict=True):
            if data.shape[0] != self.rows:
                raise DataError(
                    f"{self.path}: data set {name!r} has {data.shape[0]} rows, {tops[0]!r} has {self.rows}"
                )

    @property
    def shapes(self) -> list[Shape]:
        """Of one row, for each top."""
        return [tuple(data.shape[1:]) for data in self._sets]

    def read(self, rows: Rows, tops: list[NDArray[np.float32]]) -> None:
        """Copy these rows, in this order, into the tops. Raises DataError when the file is broken there."""
        for data, top in zip(self._sets, tops, strict=True):
            with self._reading():
                _copy(data, rows, top)

    def close(self) -> None:
        self._file.close()


def _copy(data: Any, rows: Rows, top: NDArray[np.float32]) -> None:
    if isinstance(data, np.ndarray):
        np.take(data, rows, axis=0, out=top)
    elif len(rows) > 1 and (np.diff(rows) == 1).all():
        data.read_direct(top, np.s_[rows[0] : rows[-1] + 1])
    else:
        for i, row in enumerate(rows):
            top[i] = data[row]


class Hdf5Source:
    """This worker's rows of all files, one file after the other, for ever."""

    def __init__(self, config: ReaderConfig, note: Note | None = None) -> None:
        self._config, self._note = config, note or Note()
        self._names = listed_files(config.source)
        self._random = np.random.Generator(np.random.PCG64(config.shuffle_seed))
        self._order = self._permutation(len(self._names))
        self._at = 0  # which file of the order
        self._file = self._open()
        self._rows = self._permutation(self._file.rows)
        self._row, self._step = config.share  # the next row in this file, which may lie beyond its end
        self._first = self._file.shapes
        self._passed = 0  # rows of the sequence that lie behind
        self.notes: list[str] = []

    def _open(self) -> Hdf5File:
        name = self._names[self._order[self._at]]
        self._note.reading(os.path.abspath(name))
        return Hdf5File(name, self._config.tops)

    def seek(self, record: int) -> None:
        self._row += record - self._passed
        self._passed = record

    def advance(self) -> list[Shape]:
        shapes = [(self._config.batch_size, *row) for row in self._first]
        for name, shape in zip(self._config.tops, shapes, strict=True):
            if prod(shape) > MAX_COUNT:
                raise DataError(
                    f"{self._file.path}: a batch of {name!r} has {prod(shape)} values, above {MAX_COUNT}"
                )
        return shapes

    def write(self, tops: list[memoryview[float]]) -> None:
        shapes = self.advance()
        arrays = [np.asarray(top).reshape(shape) for top, shape in zip(tops, shapes, strict=True)]
        done = 0
        for rows in self._runs(self._config.batch_size):
            self._file.read(rows, [array[done : done + len(rows)] for array in arrays])
            done += len(rows)
        self._passed += done

    def close(self) -> None:
        self._file.close()

    def _runs(self, want: int) -> Iterator[Rows]:
        """Row numbers of the present file, file after file, until ``want`` rows are given."""
        while want:
            while self._row >= self._file.rows:
                self._row -= self._file.rows
                self._next_file()
            end = min(self._file.rows, self._row + want * self._step)
            rows = self._rows[self._row : end : self._step]
            self._row += len(rows) * self._step
            want -= len(rows)
            yield rows

    def _next_file(self) -> None:
        if len(self._names) > 1:
            self._at += 1
            if self._at == len(self._names):
                self._at, self._order = 0, self._permutation(len(self._names))
            self._file.close()
            self._file = self._open()
            if self._file.shapes != self._first:
                got, first = self._file.shapes, self._first
                raise DataError(
                    f"{self._file.path}: its rows have shapes {got}, those of the first file {first}"
                )
        if self._config.shuffle or len(self._names) > 1:
            self._rows = self._permutation(self._file.rows)

    def _permutation(self, count: int) -> Rows:
        """The order to read in: as stored, or shuffled alike on all workers."""
        return self._random.permutation(count) if self._config.shuffle else np.arange(count)
