"""The workers' own files, damaged or made by somebody hostile: one error that names them, within bounds."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from shmtrain import snapshot
from shmtrain.snapshot import SnapshotError

if TYPE_CHECKING:
    from shmtrain.params import Params


class Parameters:
    """Of a net, what a worker's state is checked against."""

    trained = 21

    def fingerprint(self) -> bytes:
        return b"net"


def array(shape: tuple[int, ...], descr: str = "<f4", data: bytes = b"") -> bytes:
    """An .npy that claims a shape, with as much behind it as there is."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue() + data


def number(value: int) -> bytes:
    return array((), "<i8", value.to_bytes(8, "little", signed=True))


STATE = {
    "version": number(1),
    "count": number(5),
    "fingerprint": array((3,), "|u1", b"net"),
    "histories": number(1),
    "history0": array((21,), "<f4", bytes(84)),
}
HOSTILE = {
    "pickle": ({"history0": array((21,), "|O", pickle.dumps([print]))}, r"history0 is \(21,\) of object"),
    "another length": ({"history0": array((22,), "<f4", bytes(88))}, r"is \(22,\) of float32, not 21 of"),
    "another shape": ({"history0": array((3, 7), "<f4", bytes(84))}, r"is \(3, 7\) of float32, not 21 of"),
    "another order": ({"history0": array((21,), ">f4", bytes(84))}, "of >f4, not 21 of float32"),
    "claims a lot": ({"history0": array((1 << 60,))}, "not 21 of float32"),
    "claims less than nothing": ({"history0": array((-21,))}, r"shape \(-21,\)"),
    "ends early": ({"history0": array((21,), "<f4", bytes(80))}, "history0 ends after 80 of 84 bytes"),
    "no history": ({"history0": None}, r"no item named 'history0\.npy'"),
    "no text": ({"fingerprint": array((1 << 30,), "|u1")}, "not at most 1024 of uint8"),
    "another net": ({"fingerprint": array((4,), "|u1", b"nets")}, "the state of another net or solver type"),
    "no number": ({"count": array((2,), "<i8", bytes(16))}, r"count is \(2,\) of int64, not 1 of int64"),
    "below zero": ({"count": number(-1)}, "count is -1"),
    "no array": ({"count": b"PK"}, "not a worker's state"),
    "head without end": ({"count": b"\x93NUMPY\x01\x00\xff\xff("}, "a head of 65535 bytes"),
    "another version": ({"version": number(7)}, "is of version 7, not 1"),
}


def write(path: Path, members: Mapping[str, bytes | None]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for key, data in members.items():
            if data is not None:
                file.writestr(f"{key}.npy", data)


def read(path: Path) -> snapshot.WorkerState | None:
    return snapshot.read_worker(str(path), cast("Params", Parameters()), 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_workers_state_is_one_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "w.npz"
    write(path, STATE)
    assert read(path) is not None
    changed, message = HOSTILE[name]
    write(path, STATE | changed)
    with pytest.raises(SnapshotError, match=message) as told:
        read(path)
    assert str(path) in str(told.value)


def test_a_workers_state_cut_anywhere_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    write(path, STATE)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(SnapshotError, match="not a worker's state"):
            read(path)


def test_a_workers_state_that_unpacks_to_much_more_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    write(path, STATE | {"history0": STATE["history0"] + bytes(1 << 25)})
    tracemalloc.start()
    try:
        assert read(path) is not None
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
