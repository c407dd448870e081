"""What holds Datum records: a folder with an LMDB or a LevelDB, seen as keys and values in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from prototxt.errors import DataError

Backend = Literal["lmdb", "leveldb"]


class Store(Protocol):
    """Records in the order of their keys, to read only. Several iterators may be under way, in any threads.

    folder   where it lies, absolute
    entries  how many records; None as long as nobody has gone through a store that does not know
    """

    folder: str

    @property
    def entries(self) -> int | None: ...
    def values(self, first: int, step: int) -> Iterator[bytes]:
        """Once through: record ``first`` and every ``step``-th from there; DataError for a broken one."""

    def getters(self, first: int) -> Iterator[Callable[[], bytes]]:
        """Once through from record ``first`` on: what gives each value, until the next is asked for."""

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value."""

    def key(self, number: int) -> bytes:
        """The key of a record, b"" when there are not so many. For messages: it may take long."""

    def close(self) -> None: ...


def backend_of(folder: str) -> Backend:
    """What lies in a folder, by its files. Raises DataError when it is neither."""
    path = os.path.abspath(folder)
    if os.path.exists(os.path.join(path, "data.mdb")):
        return "lmdb"
    if os.path.exists(os.path.join(path, "CURRENT")):
        return "leveldb"
    if os.path.isfile(path):
        raise DataError(f"{path} is a file; a database is the folder that holds data.mdb or CURRENT")
    if not os.path.isdir(path):
        raise DataError(f"no such folder: {path}")
    raise DataError(f"{path} holds neither data.mdb (an LMDB) nor CURRENT (a LevelDB)")


class Stores:
    """The stores of one process, each opened once: LMDB allows no second time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Store] = {}

    def open(self, backend: Backend, folder: str) -> Store:
        """Raises DataError when it is missing, empty, or something else."""
        key = (backend, os.path.abspath(folder))
        with self._lock:
            if key not in self._open:
                self._open[key] = open_store(backend, folder)
            return self._open[key]


def open_store(backend: Backend, folder: str) -> Store:
    """Raises DataError when it is missing, empty, or something else."""
    if backend == "lmdb":
        from prototxt.data.lmdb_store import LmdbStore

        return LmdbStore(folder)
    from prototxt.data.leveldb_store import LevelDbStore

    return LevelDbStore(folder)
