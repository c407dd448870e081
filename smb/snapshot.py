"""A box in a file: what it looks like, how one is written so that none is ever half, how it is read back.

A folder holds the last two snapshots, ``box-NUMBER.snapshot``. One file is

    head         "SMBSNAP1", length of the description (u64), its crc32 (u32), 4 zero bytes; little endian
    description  JSON: segments, counters, sessions, as the records below have them
    chunks       of each segment in turn: the chunk's bytes (256 KiB, the last one shorter), their crc32 (u32)
    tail         "SMBWHOLE" and the file's length (u64)

Each chunk is as it was between two operations on it; a segment may mix two updates at chunk borders. The
version in the description was read first: every update that it counts is in the chunks, wholly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from smb import records
from smb.errors import RequestError, SmbError
from smb.layout import check_key
from smb.segment import CHUNK_BYTES, Mapping

MAGIC, WHOLE = b"SMBSNAP1", b"SMBWHOLE"
HEAD = struct.Struct("<8sQII")
TAIL = struct.Struct("<8sQ")
CRC = struct.Struct("<I")
NAME = re.compile(r"box-(\d{10})\.snapshot")
PARTIAL = ".partial"
KEEP = 2  # the newest, and one that was whole before it
MAX_DESCRIPTION = 1 << 30

Record = TypeVar("Record")


class SnapshotError(SmbError):
    """A snapshot could not be written, or is damaged."""


# What a snapshot says ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentRecord:
    """One segment. ``number`` tells the memory from another's under the same key; owner is a session's."""

    number: int
    key: str
    count: int
    dtype: str
    lifetime: str
    meta: str  # hexadecimal
    version: int
    age: float
    owner: int

    @property
    def nbytes(self) -> int:
        return self.count * records.DTYPES[self.dtype]

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // CHUNK_BYTES)

    def chunk_bytes(self, chunk: int) -> int:
        return min(CHUNK_BYTES, self.nbytes - chunk * CHUNK_BYTES)

    @property
    def stored(self) -> int:
        """Bytes of the file that its chunks take."""
        return self.nbytes + self.chunks * CRC.size

    def wanted(self) -> records.Create:
        """The request that would make it."""
        meta = bytes.fromhex(self.meta)
        return records.Create(self.key, self.count, self.dtype, self.lifetime, meta, False, True, 0.0)


@dataclass(frozen=True)
class CounterRecord:
    key: str
    value: int
    updates: int  # how often it was changed: of two values the one with more is the newer


@dataclass(frozen=True)
class SessionRecord:
    """A client. ``proof`` is a digest of its secret; ``start`` tells its process from a later one's."""

    number: int
    proof: str
    pid: int
    start: int
    name: str


@dataclass(frozen=True)
class Description:
    """Everything but the values. ``numbers`` is the last number that the daemon had given out."""

    taken: float
    numbers: int
    segments: tuple[SegmentRecord, ...]
    counters: tuple[CounterRecord, ...]
    sessions: tuple[SessionRecord, ...]

    @property
    def stored(self) -> int:
        return sum(segment.stored for segment in self.segments)


def proof(secret: int) -> str:
    """What a snapshot keeps of a session's secret."""
    return hashlib.sha256(str(secret).encode()).hexdigest()


def process_start(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(") ")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _record(kind: type[Record], values: Any) -> Record:
    """``kind`` out of JSON's values, each of its field's type; ValueError otherwise."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != {f.name for f in fields}:
        raise ValueError(f"a {kind.__name__} with other fields")
    for f in fields:
        allowed = {"int": (int,), "str": (str,), "float": (int, float)}[str(f.type)]
        if not isinstance(values[f.name], allowed) or isinstance(values[f.name], bool):
            raise ValueError(f"{kind.__name__}.{f.name} is {values[f.name]!r}")
    return kind(**values)


def _segment(values: Any) -> SegmentRecord:
    record = _record(SegmentRecord, values)
    check_key(record.key)
    if record.dtype not in records.DTYPES or record.lifetime not in records.LIFETIMES:
        raise ValueError(f"segment {record.key!r} of dtype {record.dtype!r}, lifetime {record.lifetime!r}")
    if not 1 <= record.count <= 1 << 48 or not 0 <= record.version < 1 << 64:
        raise ValueError(f"segment {record.key!r} of {record.count} elements, version {record.version}")
    bytes.fromhex(record.meta)
    return record


def _parse(text: bytes) -> Description:
    whole = json.loads(text)
    if not isinstance(whole, dict) or whole.get("format") != 1:
        raise ValueError("no snapshot of format 1")
    counters = tuple(_record(CounterRecord, one) for one in whole["counters"])
    sessions = tuple(_record(SessionRecord, one) for one in whole["sessions"])
    segments = tuple(map(_segment, whole["segments"]))
    return Description(float(whole["taken"]), int(whole["numbers"]), segments, counters, sessions)


# Writing -------------------------------------------------------------------------------------------------

Copy = Callable[[SegmentRecord, np.ndarray[Any, Any], int], None]
"""Fills an array of the segment's dtype with its elements from an index on, whole chunks as they are now."""


def write(folder: Path, description: Description, copy: Copy) -> Path:
    """Write a snapshot; its file, which is whole and on the disk when this returns.

    Until then the older ones stay as they are; of these one is kept. Raises SnapshotError, which names the
    file; nothing of the attempt then stays.
    """
    target = folder / f"box-{max([n for n, _ in _numbered(folder)], default=0) + 1:010d}.snapshot"
    partial = target.with_suffix(PARTIAL)
    try:
        _discard_partial(folder)
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                _write_all(file, description, copy)
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(folder)
        for _, old in _numbered(folder)[KEEP:]:
            old.unlink()
    except OSError as error:
        raise SnapshotError(f"cannot write snapshot {target}: {error.strerror or error}") from error
    return target


def _write_all(file: BinaryIO, description: Description, copy: Copy) -> None:
    text = json.dumps({"format": 1, **asdict(description)}).encode()
    file.write(HEAD.pack(MAGIC, len(text), zlib.crc32(text), 0))
    file.write(text)
    for index, segment in enumerate(description.segments):
        buffer = np.empty(min(segment.nbytes, CHUNK_BYTES) // records.DTYPES[segment.dtype], segment.dtype)
        for chunk in range(segment.chunks):
            part = buffer[: segment.chunk_bytes(chunk) // buffer.itemsize]
            copy(segment, part, chunk * len(buffer))
            data = part.view(np.uint8).data
            file.write(data)
            file.write(CRC.pack(_checksum(data, index, chunk)))
    file.write(TAIL.pack(WHOLE, file.tell() + TAIL.size))


def _checksum(data: Any, segment: int, chunk: int) -> int:
    """Of a chunk at its place, so that two which changed places are noticed."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<QQ", segment, chunk)))


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _discard_partial(folder: Path) -> None:
    """What a daemon left that died while it wrote."""
    for path in folder.glob(f"box-*{PARTIAL}"):
        path.unlink(missing_ok=True)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The whole snapshots of a folder with their numbers, newest first."""
    found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def prepare(folder: Path) -> Path:
    """The folder for snapshots, made when it is missing, for this user alone. Raises RequestError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise RequestError(f"{folder} is no folder that snapshots could be written to")
    except OSError as error:
        raise RequestError(f"cannot keep snapshots in {folder}: {error.strerror or error}") from error
    return folder.absolute()


# Reading -------------------------------------------------------------------------------------------------


class Snapshot:
    """One file. Made by ``open``; ``verify`` before anything is loaded."""

    def __init__(self, path: Path, description: Description, begin: int) -> None:
        self.path, self.description = path, description
        self._places: dict[str, tuple[int, int, SegmentRecord]] = {}  # key -> index, offset in the file
        for index, segment in enumerate(description.segments):
            self._places[segment.key] = (index, begin, segment)
            begin += segment.stored
        self._end = begin + TAIL.size

    @classmethod
    def open(cls, path: Path) -> Snapshot:
        """Read and check the description. Raises SnapshotError."""
        try:
            with path.open("rb") as file:
                head = file.read(HEAD.size)
                if len(head) < HEAD.size:
                    raise SnapshotError(f"snapshot {path} is cut off in its head")
                magic, length, checksum, _ = HEAD.unpack(head)
                if magic != MAGIC or length > MAX_DESCRIPTION:
                    raise SnapshotError(f"{path} is no snapshot: it starts with {head[:8]!r}")
                text = file.read(length)
        except OSError as error:
            raise SnapshotError(f"cannot read snapshot {path}: {error.strerror or error}") from error
        if len(text) < length or zlib.crc32(text) != checksum:
            raise SnapshotError(f"snapshot {path} is damaged in its description")
        try:
            return cls(path, _parse(text), HEAD.size + length)
        except (ValueError, KeyError, TypeError, RequestError) as error:
            raise SnapshotError(f"snapshot {path}: the description makes no sense: {error}") from error

    def verify(self) -> None:
        """Read everything and compare the checksums. Raises SnapshotError, which names the chunk."""
        for segment in self.description.segments:
            for _ in self._chunks(segment.key):
                pass
        try:
            with self.path.open("rb") as file:
                file.seek(self._end - TAIL.size)
                tail = file.read(TAIL.size + 1)
        except OSError as error:
            raise SnapshotError(f"cannot read snapshot {self.path}: {error.strerror or error}") from error
        if tail != TAIL.pack(WHOLE, self._end):
            raise SnapshotError(f"snapshot {self.path} is damaged: it does not end as a whole one does")

    def load(self, key: str, huge_pages: bool = False) -> Mapping:
        """A segment's memory with its values and version. Raises SnapshotError, OutOfMemory."""
        segment = self._places[key][2]
        threads = 2 if segment.nbytes >= 32 << 20 else 1
        mapping = Mapping.create(
            segment.count, segment.dtype, prefault_threads=threads, huge_pages=huge_pages
        )
        try:
            for chunk, data in self._chunks(key):
                _put(mapping.payload_fd, data, chunk * CHUNK_BYTES)
            mapping.start_version(segment.version)
        except BaseException:
            mapping.close()
            raise
        return mapping

    def _chunks(self, key: str) -> Iterator[tuple[int, memoryview]]:
        """The chunks of a segment, each proved by its checksum."""
        index, begin, segment = self._places[key]
        buffer = bytearray(min(CHUNK_BYTES, segment.nbytes) + CRC.size)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                for chunk in range(segment.chunks):
                    size = segment.chunk_bytes(chunk)
                    with memoryview(buffer)[: size + CRC.size] as part:
                        self._fill(file, part, key, chunk)
                        if CRC.unpack(part[size:]) != (_checksum(part[:size], index, chunk),):
                            raise SnapshotError(self._damaged(key, chunk, "its checksum is another"))
                        yield chunk, part[:size]
        except OSError as error:
            raise SnapshotError(f"cannot read snapshot {self.path}: {error.strerror or error}") from error

    def _fill(self, file: Any, part: memoryview, key: str, chunk: int) -> None:
        got = 0
        while got < len(part):
            more = file.readinto(part[got:])
            if not more:
                raise SnapshotError(self._damaged(key, chunk, "the file ends in it"))
            got += more

    def _damaged(self, key: str, chunk: int, how: str) -> str:
        return f"snapshot {self.path} is damaged: chunk {chunk} of segment {key!r}: {how}"


def _put(number: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(number, data, at)
        data, at = data[done:], at + done


def newest(folder: Path, warn: Callable[[str], None]) -> Snapshot | None:
    """The newest snapshot of the folder that is whole; None without any.

    ``warn`` is told of each damaged one, which is left as it is. Raises SnapshotError when all are damaged.
    """
    try:
        paths = [path for _, path in _numbered(folder)]
    except OSError as error:
        raise SnapshotError(f"cannot look for snapshots in {folder}: {error.strerror or error}") from error
    for path in paths:
        try:
            snapshot = Snapshot.open(path)
            snapshot.verify()
        except SnapshotError as error:
            warn(f"{error}; looking for an older one")
            continue
        if path != paths[0]:
            age = time.time() - snapshot.description.taken
            warn(f"using the older snapshot {path}, {age:.0f} s old: what came after it is lost")
        return snapshot
    if paths:
        raise SnapshotError(f"no snapshot in {folder} is whole ({len(paths)} are damaged)")
    return None
