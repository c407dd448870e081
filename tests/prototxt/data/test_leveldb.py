"""LevelDB: read as it lies, logs and deletions included, by many at once and from any mount; and written."""

from __future__ import annotations

import os
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prototxt._native import crc32c, leveldb_entries, snappy_unpack
from prototxt.data import leveldb_write
from prototxt.data.leveldb_store import LevelDbStore, log_records, masked
from prototxt.data.leveldb_write import counted, fill_leveldb, varint
from prototxt.data.write import write_database
from prototxt.errors import DataError
from tests.prototxt.data.conftest import encode


def numbered(count: int) -> list[tuple[bytes, bytes]]:
    return [(b"%08d" % i, encode(np.full((1, 2, 2), i % 251, np.uint8), i)) for i in range(count)]


def log_record(sequence: int, *writes: tuple[bytes, bytes | None]) -> bytes:
    """One batch of puts (and deletions: None) as a log holds it."""
    body = sequence.to_bytes(8, "little") + len(writes).to_bytes(4, "little")
    for key, value in writes:
        body += (b"\x01" + counted(key) + counted(value)) if value is not None else b"\x00" + counted(key)
    checked = b"\x01" + body
    return masked(crc32c(checked)).to_bytes(4, "little") + len(body).to_bytes(2, "little") + checked


def test_what_is_written_is_read_in_order_over_blocks_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leveldb_write, "TABLE_BYTES", 20_000)
    records = [(b"%05d" % i, random.Random(i).randbytes(i % 300)) for i in range(2000)]
    assert fill_leveldb(tmp_path / "db", records) == 2000
    assert len(list((tmp_path / "db").glob("*.ldb"))) > 10
    store = LevelDbStore(str(tmp_path / "db"))
    assert list(store.items()) == records
    assert store.entries == 2000
    assert list(store.values(3, 7)) == [value for _, value in records[3::7]]
    assert store.key(1999) == b"01999"
    assert store.key(2000) == b""


@pytest.mark.parametrize("size", [1, 32761, 32762, 100_000])
def test_a_manifest_of_any_length_is_written_over_the_blocks_of_a_log(size: int) -> None:
    record = random.Random(size).randbytes(size)
    assert list(log_records(leveldb_write._log(record))) == [record]


def test_younger_writes_in_a_log_replace_and_delete_those_in_tables(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    fill_leveldb(folder, [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
    log = log_record(10, (b"b", b"old"), (b"b", b"new"), (b"c", None)) + log_record(20, (b"d", b"4"))
    (folder / "000009.log").write_bytes(log + log_record(30, (b"e", b"5"))[:-3])  # its writer was killed
    assert list(LevelDbStore(str(folder)).items()) == [(b"a", b"1"), (b"b", b"new"), (b"d", b"4")]


@pytest.mark.parametrize("world", [1, 3])
def test_records_go_round_and_record_i_to_worker_i_mod_world(
    tmp_path: Path, open_layer: Any, world: int
) -> None:
    """The number of records is not known before the first turn is over; more than a turn may be left out."""
    write_database(tmp_path / "db", numbered(10), "leveldb")
    text = (
        'name: "d" type: "Data" top: "data" top: "label" '
        f'data_param {{ source: "{tmp_path}/db" batch_size: 4 backend: LEVELDB }}'
    )
    for rank in range(world):
        expected = [(rank + world * i) % 10 for i in range(40)]
        options = {"data_start": {"d": 6}}
        for start, context in ((0, {}), (24, {"options": options})):
            built = open_layer(text, "TRAIN", rank=rank, world=world, **context)
            got = [int(label) for _ in range(4) for label in built.module()[1]]
            assert got == expected[start : start + 16]


def test_nothing_is_written_and_many_read_at_once_from_a_read_only_folder(
    tmp_path: Path, open_layer: Any
) -> None:
    folder = tmp_path / "db"
    write_database(folder, numbered(8), "leveldb")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    text = (
        'name: "d" type: "Data" top: "data" top: "label" '
        f'data_param {{ source: "{folder}" batch_size: 8 backend: LEVELDB }}'
    )
    try:
        for built in [open_layer(text) for _ in range(3)]:
            assert built.module()[1].tolist() == list(range(8))
        assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
    finally:
        folder.chmod(0o755)


def test_keys_that_do_not_rise_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="key b'a' comes after b'b'; keys must rise"):
        write_database(tmp_path / "db", [(b"b", b""), (b"a", b"")], "leveldb")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_database_is_an_error_that_names_it_or_harmless(tmp_path: Path, seed: int) -> None:
    """A byte changed anywhere, or the end cut off: checksums find it, and no length is believed."""
    folder, rng = tmp_path / "db", random.Random(seed)
    fill_leveldb(folder, [(b"%03d" % i, bytes(40)) for i in range(200)])
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    good, unnamed = {path: path.read_bytes() for path in files}, 0
    for turn in range(60):
        path = rng.choice(files)
        data = bytearray(good[path])
        if turn % 3:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(bytes(data))
        try:
            list(LevelDbStore(str(folder)).items())
        except DataError as error:
            unnamed += str(folder) not in str(error)
        path.write_bytes(good[path])
    assert not unnamed


# Its parts -----------------------------------------------------------------------------------------------


def test_crc32c_of_known_texts() -> None:
    """RFC 3720, appendix B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(bytes(range(32))[5:], crc32c(bytes(range(5)))) == 0x46DD794E


def test_snappy_literals_and_copies() -> None:
    """Worked out by hand from the format: a literal, then copies with one, two and four bytes of offset."""
    text = string.ascii_lowercase.encode()
    assert snappy_unpack(varint(26) + bytes([25 << 2]) + text, 100) == text
    assert snappy_unpack(varint(7) + b"\x08abc" + bytes([1, 3]), 100) == b"abcabca"  # overlaps what it writes
    assert snappy_unpack(varint(6) + b"\x08abc" + bytes([2 << 2 | 2, 3, 0]), 100) == b"abcabc"
    assert snappy_unpack(varint(6) + b"\x08abc" + bytes([2 << 2 | 3, 3, 0, 0, 0]), 100) == b"abcabc"
    long = text * 10
    assert snappy_unpack(varint(260) + bytes([61 << 2, 3, 1]) + long, 1000) == long


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xff" * 9, varint(50) + b"\x08abc", varint(7) + b"\x08abc" + bytes([1, 4]),
     varint(1 << 31) + b"\0a", varint(3) + b"\x0cabcd", varint(9) + b"\xf4\xff",
     varint(101) + bytes([61 << 2, 100, 0]) + bytes(101)],
    ids=["empty", "length", "short", "before-the-start", "huge", "longer", "cut-short", "limit"],
)  # fmt: skip
def test_what_is_no_snappy_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="is no Snappy data"):
        snappy_unpack(packed, 100)


def test_no_block_or_stream_however_broken_is_read_beyond_its_end() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        data = rng.randbytes(rng.randrange(40))
        for parse in (leveldb_entries, lambda data: snappy_unpack(data, 1 << 16)):
            try:
                parse(data)
            except ValueError:
                continue


def test_a_database_of_the_original_is_read(shared: Path) -> None:
    store = LevelDbStore(str(shared / "golden" / "data" / "conv_leveldb"))
    assert [key for key, _ in store.items()] == [b"%08d_im %d.png" % (i, i) for i in range(7)]
    assert os.path.isabs(store.folder)
