"""Files that are damaged, or made to harm, end in one of our errors: no crash, hang, memory or code run.

500 mutations here, 20,000 in scripts/soak/files.py. Each is tried in a process that has a limit of memory.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest

from prototxt import hdf5_weights, schema
from prototxt._native import crc32c, leveldb_entries
from prototxt.caffemodel import parse_message, read_message, read_net
from prototxt.data.apart import run_apart
from prototxt.data.decode import Decoder, Undecodable
from prototxt.data.hdf5_source import Hdf5File
from prototxt.data.idx import read_idx
from prototxt.data.leveldb_store import LevelDbStore, log_records, masked
from prototxt.data.leveldb_write import fill_leveldb
from prototxt.data.lmdb_store import LmdbStore
from prototxt.errors import DataError, LayerError, ParseError, PrototxtError, WeightsError
from prototxt.text import net_from_text, parse_net, parse_solver, parse_text
from shmtrain.snapshot import read_state
from tests.prototxt.nets import inputs, layer, net

COUNT = 500
FIRST = 100_000


def test_mutated_files_end_in_an_error_of_ours_or_are_read(root: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.prototxt.hostile.trial", str(tmp_path), str(FIRST), str(COUNT)]
    done = subprocess.run(
        words,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    good = {"fine", "refused", "told", "died apart"}
    assert [outcome for outcome in outcomes if outcome["end"] not in good] == []
    ends = Counter(outcome["end"] for outcome in outcomes)
    assert ends["refused"] > COUNT // 4  # they are damaged enough to be noticed
    assert ends["fine"] > COUNT // 20  # and little enough to be read on
    assert len({outcome["kind"] for outcome in outcomes}) == 18


# Text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", ["layer { ", "a { ", "a < ", "[", "{"])
def test_deeply_nested_text_is_refused_in_time(opened: str) -> None:
    start = time.process_time()
    with pytest.raises(ParseError):
        parse_text(opened * 20_000, "NetParameter")
    assert time.process_time() - start < 20  # it took minutes, and gigabytes for the enclosing names


# Nets ----------------------------------------------------------------------------------------------------


def test_a_blob_above_the_originals_limit_is_refused() -> None:
    with pytest.raises(
        LayerError, match=r"layer 'data': a blob of shape .* has \d+ values, above 2147483647"
    ):
        net(inputs(data=(1, 10**9, 10)))
    with pytest.raises(LayerError, match="above 2147483647"):
        net(
            inputs(data=(1, 10**6))
            + layer("ip", "InnerProduct", "data", "ip", "inner_product_param { num_output: 1000000000 }")
        )


def test_what_the_memory_cannot_hold_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prototxt.room.available_memory", lambda: 100 << 20)
    for text in (
        inputs(data=(1, 100))
        + layer("a", "InnerProduct", "data", "a", "inner_product_param { num_output: 1000000 }"),
        layer("a", "Parameter", "", "a", "parameter_param { shape { dim: 100000000 } }"),
        layer("a", "DummyData", "", "a", "dummy_data_param { shape { dim: 100000000 } }"),
    ):
        with pytest.raises(LayerError, match=r"layer 'a': .* takes 381 MiB of memory, 100 MiB are available"):
            net(text)


# Weights, states, means ------------------------------------------------------------------------------------


def test_a_blob_of_a_hundred_thousand_axes_is_refused_in_time(tmp_path: Path) -> None:
    blob = schema.BlobProto(data=[1.0])
    blob.shape.dim.extend([2**62] * 100_000)
    start = time.process_time()
    with pytest.raises(WeightsError, match="a blob has 100000 axes; 32 are the most"):
        parse_message(blob.SerializeToString(), "BlobProto")
    assert time.process_time() - start < 1  # the product of all axes took minutes


def test_a_state_with_sizes_below_zero_is_refused(tmp_path: Path) -> None:
    state = schema.SolverState(iter=1)
    blob = state.history.add(data=[0.0] * 16)
    blob.shape.dim.extend([-2, -8])
    (tmp_path / "s.solverstate").write_bytes(state.SerializeToString())
    with pytest.raises(Exception, match=r"s.solverstate: a blob has the impossible shape \(-2, -8\)"):
        read_state(str(tmp_path / "s.solverstate"))


def test_the_weights_that_a_state_names_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "s.solverstate").write_bytes(b"\x08\x05\x12\x03a\xffb")  # iter 5, a name that is no UTF-8
    assert read_state(str(tmp_path / "s.solverstate")).learned_net == os.fsdecode(b"a\xffb")


def test_an_old_layer_whose_name_is_no_utf8_is_refused(tmp_path: Path) -> None:
    old = schema.NetParameter()
    old.layers.add(name="QQQQ", type="RELU")
    (tmp_path / "w").write_bytes(old.SerializeToString().replace(b"QQQQ", b"\xffQQQ"))
    assert read_message(tmp_path / "w", "NetParameter").layers
    with pytest.raises(WeightsError):
        read_net(tmp_path / "w")


def test_an_hdf5_chunk_far_larger_than_its_file_is_not_unpacked(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.create_dataset("history/0", (4,), np.float32, maxshape=(None,), chunks=(1 << 28,))
        file["iter"] = 1
    with pytest.raises(
        WeightsError, match=r"a chunk of /history/0 takes 1073741824 bytes, too many for its size"
    ):
        hdf5_weights.read_state(tmp_path / "w.h5")


# Data ----------------------------------------------------------------------------------------------------


def test_hdf5_rows_and_chunks_far_larger_than_their_file_are_refused(tmp_path: Path) -> None:
    for number, (shape, chunks, what) in enumerate(
        [((2, 1 << 28), None, "a row"), ((40, 1), (1 << 28, 1), "a chunk")]
    ):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset(
                "data", shape, np.float32, maxshape=(None, shape[1]) if chunks else None, chunks=chunks
            )
        with pytest.raises(DataError, match=rf"{what} of data set 'data' takes 1073741824 bytes, too many"):
            Hdf5File(str(path), ("data",))


def test_an_empty_hdf5_file_that_claims_a_lot_is_not_read_as_a_whole(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("data", (50_000, 1000), np.float32, chunks=(1, 1000))  # 200 MB of nothing
    found = Hdf5File(str(tmp_path / "d.h5"), ("data",))
    assert isinstance(found._sets[0], h5py.Dataset)  # read as it is used
    found.close()


def test_what_an_idx_file_claims_is_not_taken_before_it_is_there(tmp_path: Path) -> None:
    """A packed file of a few bytes whose header claims 4 GiB."""
    (tmp_path / "i").write_bytes(gzip.compress(bytes((0, 0, 8, 1, 255, 255, 255, 255, 7))))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="holds 1 values"):
            read_idx(tmp_path / "i", 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_an_idx_file_is_unpacked_no_further_than_its_header_says(tmp_path: Path) -> None:
    head = struct.pack(">BBBB", 0, 0, 8, 1) + struct.pack(">I", 10)
    (tmp_path / "i").write_bytes(gzip.compress(head + bytes(50_000_000), 9))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="i holds 11 values, its header says 10"):
            read_idx(tmp_path / "i", 1)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def _lmdb(folder: Path, entries: int | None = None, root: int | None = None) -> Path:
    """An LMDB of 10 records whose newest head claims another number of them, or another root."""
    with lmdb.open(str(folder), lock=False) as env, env.begin(write=True) as txn:
        for i in range(10):
            txn.put(b"%d" % i, b"x")
    data = bytearray((folder / "data.mdb").read_bytes())
    for page in (0, 4096):  # page head 16, magic to mapsize 24, the free list's entry 48, then the main one
        at = page + 16 + 24 + 48
        if entries is not None:
            data[at + 32 : at + 40] = entries.to_bytes(8, "little")
        if root is not None:
            data[at + 40 : at + 48] = root.to_bytes(8, "little")
    (folder / "data.mdb").write_bytes(data)
    return folder


def test_an_lmdb_that_claims_records_it_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"claims 1099511627776 records, more than its \d+ bytes can hold"):
        LmdbStore(str(_lmdb(tmp_path / "many", 1 << 40)))
    with pytest.raises(DataError, match="claims 10 records and holds none"):  # the reader went round for ever
        LmdbStore(str(_lmdb(tmp_path / "none", root=2**64 - 1)))


def test_an_lmdb_whose_pages_are_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.mdb is damaged: "):
        LmdbStore(str(_lmdb(tmp_path / "db", root=1)))


def test_keys_of_a_leveldb_block_are_not_repeated_beyond_measure() -> None:
    key = b"k" * 60_000
    first = b"\0" + b"\xe0\xd4\x03" + b"\0" + key
    block = first + (b"\xe0\xd4\x03" + b"\0\0") * 20_000 + struct.pack("<II", 0, 1)
    with pytest.raises(ValueError, match="repeats its keys beyond measure"):  # 1.2 GB of them
        leveldb_entries(block)


def test_a_leveldb_whose_keys_go_back_is_refused(tmp_path: Path) -> None:
    fill_leveldb(tmp_path / "db", [(b"a", b"1"), (b"b", b"2")])
    (table,) = (tmp_path / "db").glob("*.ldb")
    data = table.read_bytes()
    at = data.index(b"a\x01")
    block_end = _first_block(data)
    block = bytearray(data[:block_end])
    block[at : at + 1] = b"c"
    crc = masked(crc32c(bytes(block) + data[block_end : block_end + 1])).to_bytes(4, "little")
    table.write_bytes(bytes(block) + data[block_end : block_end + 1] + crc + data[block_end + 5 :])
    with pytest.raises(DataError, match=r"key b'b' comes after b'c': it is damaged"):
        list(LevelDbStore(str(tmp_path / "db")).items())


def _first_block(data: bytes) -> int:
    """Where the first block of a table ends: its checksum fits there."""
    for end in range(1, len(data) - 5):
        if masked(crc32c(data[: end + 1])) == int.from_bytes(data[end + 1 : end + 5], "little"):
            return end
    raise AssertionError


def test_a_log_of_very_many_parts_is_joined_in_time() -> None:
    def part(kind: int, body: bytes) -> bytes:
        checked = bytes([kind]) + body
        return masked(crc32c(checked)).to_bytes(4, "little") + len(body).to_bytes(2, "little") + checked

    log = b"".join([part(2, b"x" * (32768 - 7)), *[part(3, b"y" * (32768 - 7))] * 300, part(4, b"z")])
    (record,) = log_records(log)
    assert len(record) == 301 * (32768 - 7) + 1


def test_an_image_is_not_resized_beyond_the_limit_of_pixels() -> None:
    with pytest.raises(Undecodable, match="is to be resized to 1000000x1000000, more than 100000000 pixels"):
        Decoder().decode(b"x", "color", 1_000_000, 1_000_000)


def test_whatever_goes_wrong_in_a_process_of_its_own_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"^TypeError: "):
        run_apart("prototxt.data.summary", "count", "x", wrong=1)
    assert capfd.readouterr().err == ""


def test_all_these_errors_are_the_packages_own() -> None:
    assert issubclass(DataError, PrototxtError)
    with pytest.raises(PrototxtError):
        net_from_text("name: 1")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ('name: "x" layer { }', "SolverParameter", "is this a net? a solver names it by 'net:'"),
        ("base_lr: 0.1", "NetParameter", "is this a solver? the net is the file that its 'net:' names"),
        (
            "\x0a\x05small\xa2\x06\x00",
            "NetParameter",
            "x: the file is binary (a weight file or an image?); a",
        ),
        (
            "\udc89HDF\r\n\x1a\n",
            "SolverParameter",
            "x: the file is binary (an HDF5 file?); a SolverParameter as",
        ),
    ],
)
def test_a_file_that_is_taken_for_another_is_told_as_what_it_is(text: str, kind: str, said: str) -> None:
    with pytest.raises(ParseError) as told:
        parse_text(text, kind, "x")
    assert said in str(told.value)


def test_an_empty_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(" \n")
    for parse in (parse_net, parse_solver):
        with pytest.raises(ParseError, match=r"net\.prototxt: the file is empty"):
            parse(tmp_path / "net.prototxt")
