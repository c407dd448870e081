"""An LMDB, to read only. A broken one may kill the process: for a reader process, or a child of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lmdb

from prototxt.errors import DataError

RECORD_BYTES = 8  # the least that a record takes


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
    entries = env.stat()["entries"]
    if not entries:
        raise DataError(f"{folder} is an empty LMDB")
    if entries > size // RECORD_BYTES:
        raise DataError(f"{file} claims {entries} records, more than its {size} bytes can hold")
    return env


class LmdbStore:
    """The records of an LMDB; many processes may read one at once."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self._env = open_lmdb(folder)
        self.entries: int = self._env.stat()["entries"]
        if not self.key(0):
            raise DataError(f"{self.folder} claims {self.entries} records and holds none: is it damaged?")

    def values(self, first: int, step: int) -> Iterator[bytes]:
        """Records of others are passed over without a copy."""
        with self._reading() as txn:
            cursor = txn.cursor()
            if step == 1 and not first:  # a call less a record
                yield from cursor.iternext(keys=False)
                return
            for _ in islice(cursor.iternext(values=False), first, None, step):
                yield cursor.value()

    def getters(self, first: int) -> Iterator[Callable[[], bytes]]:
        with self._reading() as txn:
            cursor = txn.cursor()
            for _ in islice(cursor.iternext(values=False), first, None):
                yield cursor.value

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        with self._reading() as txn:
            yield from txn.cursor()

    def key(self, number: int) -> bytes:
        with self._reading() as txn:
            return next(islice(txn.cursor().iternext(values=False), number, None), b"")

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """A look at the records; a damaged page that LMDB notices is a DataError."""
        try:
            with self._env.begin() as txn:
                yield txn
        except lmdb.Error as error:
            raise DataError(f"{self.folder}/data.mdb is damaged: {error}") from error

    def close(self) -> None:
        self._env.close()
