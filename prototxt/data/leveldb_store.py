"""A LevelDB, to read only: no lock is taken and nothing is written, so many may read it, from any mount.

Layout: https://github.com/google/leveldb/blob/main/doc/ - impl.md, log_format.md, table_format.md. CURRENT
names a manifest, a log of edits that adds up to the live tables of each level; what is younger lies in logs.
A key ends in eight bytes: its sequence number and whether it is a value or a deletion; the youngest counts.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from prototxt._native import crc32c, leveldb_entries, snappy_unpack
from prototxt.errors import DataError

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES, TRAILER_BYTES = 48, 5  # of a table; of each of its blocks: type, checksum
LOG_BLOCK, LOG_HEAD = 32768, 7
MAX_BLOCK = 1 << 30
COMPARATOR = b"leveldb.BytewiseComparator"
VALUE, DELETION = 1, 0
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # parts of a log's record

Entry = tuple[bytes, int, int, bytes]  # key, minus the sequence number, kind, value: sorts youngest first


class Broken(ValueError):
    """Bytes that are not what they should be."""


@dataclass(frozen=True)
class Table:
    number: int
    size: int
    smallest: bytes
    largest: bytes


def varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Broken("a number runs past its end")


def counted(data: bytes, at: int) -> tuple[bytes, int]:
    """(bytes that their length stands before, where they end)."""
    size, at = varint(data, at)
    if size > len(data) - at:
        raise Broken("a string runs past its end")
    return data[at : at + size], at + size


def masked(crc: int) -> int:
    """A checksum as it is stored."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log; it ends where its writer was stopped, in the middle of a record or not."""
    at, parts = 0, bytearray()
    while at + LOG_HEAD <= len(data):
        left = LOG_BLOCK - at % LOG_BLOCK
        if left < LOG_HEAD:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body = data[at + LOG_HEAD : at + LOG_HEAD + size]
        if kind == 0 and size == 0:  # room that was set aside and never written
            return
        if at + LOG_HEAD + size > len(data):
            return
        if masked(crc32c(data[at + 6 : at + 7] + body)) != int.from_bytes(data[at : at + 4], "little"):
            raise Broken(f"the record at byte {at} has a wrong checksum")
        at += LOG_HEAD + size
        if kind in (FULL, FIRST):
            parts.clear()
        parts += body
        if kind in (FULL, LAST):
            yield bytes(parts)


class Manifest:
    """The tables of each level, and from which log on records are not in any table yet."""

    def __init__(self, data: bytes) -> None:
        self.levels: dict[int, dict[int, Table]] = {}
        self.log = self.previous = 0
        for record in log_records(data):
            self._apply(record)

    def _apply(self, edit: bytes) -> None:
        at = 0
        while at < len(edit):
            tag, at = varint(edit, at)
            if tag == 1:
                comparator, at = counted(edit, at)
                if comparator != COMPARATOR:
                    raise Broken(f"its keys are sorted by {comparator.decode(errors='replace')}")
            elif tag in (2, 3, 4, 9):
                value, at = varint(edit, at)
                self.log = value if tag == 2 else self.log
                self.previous = value if tag == 9 else self.previous
            elif tag == 5:
                _, at = varint(edit, at)
                _, at = counted(edit, at)
            elif tag == 6:
                level, at = varint(edit, at)
                number, at = varint(edit, at)
                self.levels.get(level, {}).pop(number, None)
            elif tag == 7:
                at = self._add(edit, at)
            else:
                raise Broken(f"unknown tag {tag}")

    def _add(self, edit: bytes, at: int) -> int:
        level, at = varint(edit, at)
        number, at = varint(edit, at)
        size, at = varint(edit, at)
        smallest, at = counted(edit, at)
        largest, at = counted(edit, at)
        self.levels.setdefault(level, {})[number] = Table(number, size, smallest[:-8], largest[:-8])
        return at

    def runs(self) -> list[list[Table]]:
        """Sequences of tables whose keys rise from one to the next: a level's, and each of level 0's own."""
        runs = [[table] for table in self.levels.get(0, {}).values()]
        for level in sorted(self.levels.keys() - {0}):
            runs.append(sorted(self.levels[level].values(), key=lambda table: table.smallest))
        return [run for run in runs if run]


def batch_entries(record: bytes) -> Iterator[Entry]:
    """What one record of a log puts and deletes."""
    if len(record) < 12:
        raise Broken("a batch of writes is too short")
    sequence, at = int.from_bytes(record[:8], "little"), 12
    while at < len(record):
        kind = record[at]
        key, at = counted(record, at + 1)
        value = b""
        if kind == VALUE:
            value, at = counted(record, at)
        elif kind != DELETION:
            raise Broken(f"unknown kind of write {kind}")
        yield key, -sequence, kind, value
        sequence += 1


class TableFile:
    """One table, read block by block."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._fd).st_size

    def entries(self) -> Iterator[Entry]:
        """In the order of their keys, the youngest of each key first."""
        for _, handle in leveldb_entries(self._block(self._index())):
            for key, value in leveldb_entries(self._block(handle)):
                if len(key) < 8:
                    raise Broken("a key is too short")
                tail = int.from_bytes(key[-8:], "little")
                yield key[:-8], -(tail >> 8), tail & 0xFF, value

    def _index(self) -> bytes:
        footer = os.pread(self._fd, FOOTER_BYTES, max(0, self._size - FOOTER_BYTES))
        if len(footer) < FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != MAGIC:
            raise Broken("is no table, or truncated")
        _, at = varint(footer, 0)
        _, at = varint(footer, at)
        return footer[at:]

    def _block(self, handle: bytes) -> bytes:
        offset, at = varint(handle, 0)
        size, _ = varint(handle, at)
        if offset + size + TRAILER_BYTES > self._size:
            raise Broken("a block runs past the end of the file: is it truncated?")
        data = os.pread(self._fd, size + TRAILER_BYTES, offset)
        if len(data) != size + TRAILER_BYTES:
            raise Broken("became shorter while it was read")
        if masked(crc32c(data[: size + 1])) != int.from_bytes(data[size + 1 :], "little"):
            raise Broken(f"the block at byte {offset} has a wrong checksum")
        if data[size] == 0:
            return data[:size]
        if data[size] != 1:
            raise Broken(f"unknown compression {data[size]}")
        return snappy_unpack(data[:size], MAX_BLOCK)

    def close(self) -> None:
        os.close(self._fd)


class LevelDbStore:
    """The records of a LevelDB."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self.entries: int | None = None
        current = self._read("CURRENT", missing=self._missing())
        manifest = self._manifest(current.decode(errors="replace").strip())
        self._runs = manifest.runs()
        self._young = self._logs(manifest)
        if next(self.items(), None) is None:
            raise DataError(f"{self.folder} is an empty LevelDB")

    def _missing(self) -> str:
        if not os.path.isdir(self.folder):
            return f"no such folder: {self.folder}"
        lmdb = os.path.exists(os.path.join(self.folder, "data.mdb"))
        hint = " (data.mdb is there: an LMDB? then set backend: LMDB)" if lmdb else ""
        return f"{self.folder} holds no CURRENT, so it is no LevelDB{hint}"

    def _read(self, name: str, missing: str | None = None) -> bytes:
        path = os.path.join(self.folder, name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError as error:
            raise DataError(missing or f"{path} is missing") from error
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from error

    def _manifest(self, name: str) -> Manifest:
        if os.path.basename(name) != name or not name.startswith("MANIFEST-"):
            raise DataError(f"{self.folder}/CURRENT names no manifest, but {name[:80]!r}")
        data = self._read(name)
        try:
            return Manifest(data)
        except ValueError as error:
            raise DataError(f"{self.folder}/{name}: {error}") from error

    def _logs(self, manifest: Manifest) -> list[Entry]:
        """What is not in a table yet, sorted."""
        numbers = {
            int(name[:-4]): name for name in os.listdir(self.folder)
            if name.endswith(".log") and name[:-4].isdigit()
        }  # fmt: skip
        young: list[Entry] = []
        for number in sorted(numbers):
            if number >= manifest.log or number == manifest.previous:
                data = self._read(numbers[number])
                try:
                    young.extend(entry for record in log_records(data) for entry in batch_entries(record))
                except Broken as error:
                    raise DataError(f"{self.folder}/{numbers[number]}: {error}") from error
        return sorted(young)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value, merged from all tables and logs."""
        parts = [self._run(run) for run in self._runs]
        if self._young:
            parts.append(iter(self._young))
        last, count = None, 0
        for key, _, kind, value in heapq.merge(*parts) if len(parts) > 1 else parts[0] if parts else ():
            if key == last:
                continue
            if last is not None and key < last:  # else a damaged index may name one block for ever
                raise DataError(f"{self.folder}: key {key[:80]!r} comes after {last[:80]!r}: it is damaged")
            last = key
            if kind == VALUE:
                count += 1
                yield key, value
        self.entries = count

    def _run(self, tables: list[Table]) -> Iterator[Entry]:
        for table in tables:
            path = self._path(table.number)
            try:
                file = TableFile(path)
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
            try:
                yield from file.entries()
            except ValueError as error:
                raise DataError(f"{path}: {error}") from error
            finally:
                file.close()

    def _path(self, number: int) -> str:
        old = os.path.join(self.folder, f"{number:06d}.sst")
        return old if os.path.exists(old) else os.path.join(self.folder, f"{number:06d}.ldb")

    def values(self, first: int, step: int) -> Iterator[bytes]:
        """Once through: record ``first`` and every ``step``-th from there."""
        for number, (_, value) in enumerate(self.items()):
            if number >= first and not (number - first) % step:
                yield value

    def getters(self, first: int) -> Iterator[Callable[[], bytes]]:
        """Once through from record ``first`` on: what gives each value."""
        for value in self.values(first, 1):
            yield lambda value=value: value  # type: ignore[misc]

    def key(self, number: int) -> bytes:
        """The key of a record; b"" when there are not so many."""
        return next(islice(self.items(), number, None), (b"", b""))[0]

    def close(self) -> None:
        """No file stays open."""
