"""Writes a LevelDB of records whose keys rise: tables of the lowest level, which nobody ever compacts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from prototxt._native import crc32c
from prototxt.data.leveldb_store import (
    COMPARATOR,
    FIRST,
    FOOTER_BYTES,
    FULL,
    LAST,
    LOG_BLOCK,
    LOG_HEAD,
    MAGIC,
    MIDDLE,
    VALUE,
    masked,
)
from prototxt.errors import DataError

BLOCK_BYTES = 4096  # as LevelDB's own default
TABLE_BYTES = 32 << 20
LEVEL = 6  # of 0 to 6
FIRST_TABLE = 5


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def counted(data: bytes) -> bytes:
    return varint(len(data)) + data


class _Block:
    """Entries that share no prefix, so each may be where a search begins."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._starts: list[int] = []
        self.size = 0

    def add(self, key: bytes, value: bytes) -> None:
        entry = b"\0" + varint(len(key)) + varint(len(value)) + key + value
        self._starts.append(self.size)
        self._parts.append(entry)
        self.size += len(entry)

    def finish(self) -> bytes:
        starts = self._starts or [0]
        return b"".join([*self._parts, *(n.to_bytes(4, "little") for n in [*starts, len(starts)])])


class _Table:
    """One table file being written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  (closed in finish)
        self._block, self._index = _Block(), _Block()
        self._at = 0
        self.smallest = self.largest = b""

    def add(self, key: bytes, value: bytes) -> None:
        self.smallest, self.largest = self.smallest or key, key
        self._block.add(key, value)
        if self._block.size >= BLOCK_BYTES:
            self._flush()

    @property
    def size(self) -> int:
        return self._at + self._block.size

    def _flush(self) -> None:
        if self._block.size:
            self._index.add(self.largest, self._put(self._block.finish()))
            self._block = _Block()

    def _put(self, block: bytes) -> bytes:
        """The block, uncompressed; its handle."""
        body = block + b"\0"
        self._file.write(body + masked(crc32c(body)).to_bytes(4, "little"))
        handle = varint(self._at) + varint(len(block))
        self._at += len(body) + 4
        return handle

    def finish(self) -> int:
        """Write what is left; the file's size."""
        self._flush()
        handles = self._put(_Block().finish()) + self._put(self._index.finish())
        self._file.write(handles.ljust(FOOTER_BYTES - 8, b"\0") + MAGIC.to_bytes(8, "little"))
        self._at += FOOTER_BYTES
        self.close()
        return self._at

    def close(self) -> None:
        self._file.close()


class NewLevelDb:
    """A LevelDB in the making in ``folder``, which must be new; it is one once finish() is done."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._count, self._last, self._edits = 0, b"", b""
        self._number = FIRST_TABLE
        self._table: _Table | None = None

    def add(self, key: bytes, value: bytes) -> None:
        """One more record. Raises DataError when its key does not rise."""
        if self._count and key <= self._last:
            raise DataError(f"key {key!r} comes after {self._last!r}; keys must rise")
        self._count, self._last = self._count + 1, key
        self._table = self._table or _Table(self._folder / f"{self._number:06d}.ldb")
        self._table.add(key + (self._count << 8 | VALUE).to_bytes(8, "little"), value)
        if self._table.size >= TABLE_BYTES:
            self._end_table(self._table)

    def finish(self) -> int:
        """Write what is left and name the tables; how many records there are."""
        if self._table is not None:
            self._end_table(self._table)
        _write_manifest(self._folder, self._edits, self._number, self._count)
        return self._count

    def close(self) -> None:
        """Let go of what is unfinished."""
        if self._table is not None:
            self._table.close()

    def _end_table(self, table: _Table) -> None:
        self._edits += _new_file(self._number, table)
        self._table, self._number = None, self._number + 1


def fill_leveldb(folder: Path, records: Iterable[tuple[bytes, bytes]]) -> int:
    """Write the records to a new LevelDB in ``folder``; how many. Raises DataError when keys do not rise."""
    with closing(NewLevelDb(folder)) as new:
        for key, value in records:
            new.add(key, value)
        return new.finish()


def _new_file(number: int, table: _Table) -> bytes:
    size = table.finish()
    head = b"\x07" + varint(LEVEL) + varint(number) + varint(size)
    return head + counted(table.smallest) + counted(table.largest)


def _write_manifest(folder: Path, edits: bytes, next_number: int, sequence: int) -> None:
    name = f"MANIFEST-{next_number:06d}"
    head = b"\x01" + counted(COMPARATOR) + b"\x02\x00\x09\x00"
    body = head + b"\x03" + varint(next_number + 1) + b"\x04" + varint(sequence) + edits
    (folder / name).write_bytes(_log(body))
    (folder / "CURRENT").write_text(name + "\n")


def _log(record: bytes) -> bytes:
    """A log of this one record, in as many parts as its blocks need; each part but the last fills one."""
    out = bytearray()
    room = LOG_BLOCK - LOG_HEAD
    for at in range(0, len(record), room):
        part = record[at : at + room]
        first, last = at == 0, at + room >= len(record)
        kind = FULL if first and last else FIRST if first else LAST if last else MIDDLE
        body = bytes([kind]) + part
        out += masked(crc32c(body)).to_bytes(4, "little") + len(part).to_bytes(2, "little") + body
    return bytes(out)
