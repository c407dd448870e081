"""Databases of records that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import lmdb

from prototxt.data.leveldb_write import fill_leveldb
from prototxt.data.store import Backend
from prototxt.errors import DataError

Record = tuple[bytes, bytes]
PUTS_A_COMMIT = 1000
FIRST_MAP = 64 << 20  # bytes; doubled as often as needed


def write_database(
    folder: Path, records: Iterable[Record], backend: Backend = "lmdb", overwrite: bool = False
) -> int:
    """Write records in the order of their keys, which must rise; how many they are.

    Raises DataError when the folder is there already and ``overwrite`` is not set, or cannot be written.
    """
    if folder.exists() and not overwrite:
        raise DataError(f"{folder.absolute()} exists; --overwrite replaces it")
    fill: Callable[[Path, Iterable[Record]], int] = fill_lmdb if backend == "lmdb" else fill_leveldb
    with replacing(folder.absolute()) as new:
        return fill(new, records)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``folder`` when all went well."""
    new = folder.with_name(f"{folder.name}.new-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield new
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    except lmdb.Error as error:  # it calls a full disk an input/output error
        free = shutil.disk_usage(folder.parent).free >> 10
        raise DataError(f"cannot write {folder}: {error} ({free} KiB are free there)") from error
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def fill_lmdb(folder: Path, records: Iterable[Record]) -> int:
    """Write the records to the LMDB in ``folder``, new or behind those it has; how many.

    Raises DataError when keys do not rise.
    """
    count, stream = 0, iter(records)
    with lmdb.open(str(folder), map_size=FIRST_MAP, lock=False) as env:
        while part := list(islice(stream, PUTS_A_COMMIT)):
            while not _put(env, part):
                env.set_mapsize(2 * env.info()["map_size"])
            count += len(part)
    return count


def _put(env: lmdb.Environment, records: list[Record]) -> bool:
    """False when they do not fit into the map."""
    try:
        with env.begin(write=True) as txn:
            for key, value in records:
                if not txn.put(key, value, append=True, overwrite=False):
                    raise DataError(f"key {key!r} is there twice")
    except lmdb.MapFullError:
        return False
    except lmdb.KeyExistsError as error:
        raise DataError(f"key {records[0][0]!r} or one after it comes out of order") from error
    return True
