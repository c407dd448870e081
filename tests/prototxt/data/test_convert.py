"""``shmtrain data``: the LMDBs and mean files it makes, and what it says when it cannot."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from prototxt import schema
from prototxt.data.idx import read_idx, write_idx
from shmtrain import data_cli

ROOT = Path(__file__).resolve().parents[3]


def run(*words: str | Path) -> int:
    return data_cli.main([str(word) for word in words])


def records(folder: Path) -> list[tuple[bytes, Any]]:
    """(key, Datum) of each record."""
    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as txn:
        return [(bytes(key), schema.Datum.FromString(value)) for key, value in txn.cursor()]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A small set of idx files: 30 images of 4x5 to train, 10 to test."""
    folder = tmp_path / "digits"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for part, count in (("train", 30), ("t10k", 10)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 4, 5), np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", (np.arange(count) % 7).astype(np.uint8))
    return folder


def test_mnist_records_are_those_of_the_originals_converter(digits: Path, tmp_path: Path) -> None:
    """Key %08d, raw bytes, the five fields in the order of their numbers."""
    assert run("mnist", "--from", digits, "--out", tmp_path / "out") == 0
    images = read_idx(digits / "train-images-idx3-ubyte.gz", 3)
    found = records(tmp_path / "out" / "mnist_train_lmdb")
    assert [key for key, _ in found] == [b"%08d" % i for i in range(30)]
    for i, (_, datum) in enumerate(found):
        assert (datum.channels, datum.height, datum.width, datum.label) == (1, 4, 5, i % 7)
        assert datum.data == images[i].tobytes()
        assert not datum.HasField("encoded")
    assert len(records(tmp_path / "out" / "mnist_test_lmdb")) == 10
    assert os.listdir(tmp_path / "out" / "mnist_test_lmdb") == ["data.mdb"]


def test_idx_files_may_be_unpacked_and_named_with_dots(digits: Path, tmp_path: Path) -> None:
    for path in list(digits.iterdir()):
        unpacked = path.with_name(path.stem.replace("-idx", ".idx"))
        unpacked.write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert run("mnist", "--from", digits, "--out", tmp_path) == 0
    assert len(records(tmp_path / "mnist_train_lmdb")) == 30


def test_a_second_run_is_fine_and_other_data_needs_overwrite(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("mnist", "--from", digits, "--out", tmp_path)
    assert run(*words) == 0
    stamp = (tmp_path / "mnist_train_lmdb" / "data.mdb").stat().st_mtime_ns
    assert run(*words) == 0
    assert "mnist_train_lmdb: 30 records (there already)" in capsys.readouterr().out
    assert (tmp_path / "mnist_train_lmdb" / "data.mdb").stat().st_mtime_ns == stamp
    write_idx(digits / "train-labels-idx1-ubyte.gz", np.zeros(30, np.uint8))
    assert run(*words) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/mnist_train_lmdb exists and holds something else; --overwrite replaces it" in error
    assert run(*words, "--overwrite") == 0
    assert {datum.label for _, datum in records(tmp_path / "mnist_train_lmdb")} == {0}
    assert sorted(os.listdir(tmp_path)) == ["digits", "mnist_test_lmdb", "mnist_train_lmdb"]


def test_a_truncated_lmdb_is_replaced_not_read(digits: Path, tmp_path: Path) -> None:
    words = ("mnist", "--from", digits, "--out", tmp_path)
    assert run(*words) == 0
    os.truncate(tmp_path / "mnist_train_lmdb" / "data.mdb", 8192)
    assert run(*words) == 1
    assert run(*words, "--overwrite") == 0
    assert len(records(tmp_path / "mnist_train_lmdb")) == 30


def header(*sizes: int, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte.gz", None, "{folder} holds no train-images-idx3-ubyte.gz, packed or not"),
        ("train-labels-idx1-ubyte.gz", header(29) + bytes(29), "30 train images, but 29 labels"),
        ("t10k-labels-idx1-ubyte.gz", header(10) + bytes(9), "holds 9 values, its header says 10"),
        ("t10k-labels-idx1-ubyte.gz", header(10, kind=13) + bytes(40), "is no idx file of bytes with 1 axes"),
        ("t10k-images-idx3-ubyte.gz", b"", "is no idx file of bytes with 3 axes"),
        ("t10k-images-idx3-ubyte.gz", header(2**32 - 1, 2**32 - 1, 2**32 - 1), "holds 0 values, its header"),
        ("t10k-images-idx3-ubyte.gz", b"\x1f\x8b\x08garbage", "is a damaged gzip file"),
    ],
)
def test_broken_idx_files_are_named(
    digits: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, message: str
) -> None:
    if content is None:
        (digits / name).unlink()
    else:
        (digits / name).write_bytes(content)
    assert run("mnist", "--from", digits, "--out", digits) == 1
    error = capsys.readouterr().err
    assert error.startswith("shmtrain data mnist: ")
    assert message.replace("{folder}", str(digits)) in error
    assert error.count("\n") == 1


def test_away_from_the_checkout_the_message_says_where_the_digits_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("mnist") == 1
    assert f"no folder {tmp_path}/examples/mnist/digits: run this from the top" in capsys.readouterr().err


def test_an_out_folder_that_cannot_be_made_is_named(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("mnist", "--from", digits, "--out", tmp_path / "file") == 1
    assert f"cannot write {tmp_path}/file/mnist_train_lmdb: " in capsys.readouterr().err


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """CIFAR-10's binary files with 4 images each."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(2)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        images = rng.integers(0, 256, (4, 3073), np.uint8)
        images[:, 0] = rng.integers(0, 10, 4)
        images.tofile(folder / name)
    return folder


def test_cifar_records_and_mean_are_those_of_the_originals_tools(batches: Path, tmp_path: Path) -> None:
    assert run("cifar10", "--from", tmp_path, "--out", tmp_path) == 0
    raw = np.concatenate([np.fromfile(batches / f"data_batch_{i}.bin", np.uint8) for i in range(1, 6)])
    raw = raw.reshape(-1, 3073)
    found = records(tmp_path / "cifar10_train_lmdb")
    assert [key for key, _ in found] == [b"%05d" % i for i in range(20)]
    for row, (_, datum) in zip(raw, found, strict=True):
        assert (datum.channels, datum.height, datum.width, datum.label) == (3, 32, 32, row[0])
        assert datum.data == row[1:].tobytes()
    assert len(records(tmp_path / "cifar10_test_lmdb")) == 4
    blob = schema.BlobProto.FromString((tmp_path / "mean.binaryproto").read_bytes())
    assert (blob.num, blob.channels, blob.height, blob.width) == (1, 3, 32, 32)
    sums = np.zeros(3072, np.float32)  # the original adds up in float32
    for row in raw:
        sums += row[1:]
    np.testing.assert_array_equal(np.array(blob.data, np.float32), sums / np.float32(20))


def test_cifar_jpegs_become_red_green_and_blue_planes(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="needs opencv-python-headless")
    arrays: dict[str, Any] = {}
    for part, count in (("train", 5), ("test", 2)):
        images = np.zeros((count, 32, 32, 3), np.uint8)
        images[..., 0] = 250  # blue, as OpenCV orders them
        images[..., 2] = np.arange(count)[:, None, None] * 40
        files = [cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 100])[1].ravel() for image in images]
        arrays[f"{part}_jpeg"] = np.concatenate(files)
        arrays[f"{part}_offset"] = np.cumsum([0, *map(len, files)])
        arrays[f"{part}_label"] = np.arange(count, dtype=np.uint8)
    np.savez(tmp_path / "c.npz", **arrays)
    assert run("cifar10", "--from", tmp_path / "c.npz", "--out", tmp_path) == 0
    labels = []
    for _, datum in records(tmp_path / "cifar10_train_lmdb"):
        planes = np.frombuffer(datum.data, np.uint8).reshape(3, 32, 32).mean(axis=(1, 2))
        np.testing.assert_allclose(planes, [40 * datum.label, 0, 250], atol=3)
        labels.append(datum.label)
    assert sorted(labels) == [0, 1, 2, 3, 4]
    assert labels != sorted(labels)  # a file sorted by class would give batches of one class


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "data_batch_3.bin").unlink(), "cannot read data_batch_3.bin: No such file"),
        (lambda f: (f / "test_batch.bin").write_bytes(bytes(3072)), "has 3072 bytes, no multiple of 3073"),
        (lambda f: (f / "test_batch.bin").write_bytes(b"\x0a" + bytes(3072)), "label 10 is above 9"),
    ],
)
def test_broken_cifar_batches_are_named(
    batches: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    spoil(batches)
    assert run("cifar10", "--from", batches, "--out", batches) == 1
    assert message in capsys.readouterr().err


def test_an_npz_of_something_else_is_named_and_never_unpickled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "o.npz", train_jpeg=np.array([object()], dtype=object))
    assert run("cifar10", "--from", tmp_path / "o.npz", "--out", tmp_path) == 1
    assert f"{tmp_path}/o.npz is no .npz of CIFAR-10 JPEGs: " in capsys.readouterr().err


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, train_jpeg=np.zeros(9, np.uint8), train_offset=np.zeros(2, int), train_label=np.zeros(5))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no .npz of CIFAR-10 JPEGs"),
        (_npz()[:200], "is no .npz of CIFAR-10 JPEGs"),
        (_npz(), "5 train labels, but 2 offsets"),
    ],
    ids=["empty", "truncated", "other counts"],
)
def test_a_damaged_npz_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    pytest.importorskip("cv2", reason="needs opencv-python-headless")
    (tmp_path / "c.npz").write_bytes(content)
    assert run("cifar10", "--from", tmp_path / "c.npz", "--out", tmp_path) == 1
    assert message in capsys.readouterr().err


def test_ls_tells_what_an_lmdb_holds(make_lmdb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = np.zeros((1, 2, 3), np.uint8), np.zeros((3, 8, 8), np.uint8)
    encoded = schema.Datum(encoded=True, data=b"...", label=4).SerializeToString()
    folder = make_lmdb([(small, 4), (small, 0), (large, 4), encoded])
    assert run("ls", folder) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: 4 records, keys 00000000 to 00000003",
        "  1x2x3: 2",
        "  3x8x8: 1",
        "  encoded: 1",
        "  labels: 0: 1, 4: 3",
    ]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "holds neither data.mdb"),
        (lambda file: os.truncate(file, 8192), "is truncated: it has 8192 bytes and needs"),
        (lambda file: file.write_bytes(b"no lmdb" * 2000), "cannot be read as an LMDB"),
    ],
)
def test_ls_of_a_broken_lmdb_is_an_error_not_a_crash(
    make_lmdb: Any, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    folder = make_lmdb([(np.zeros((1, 2, 3), np.uint8), 4)])
    spoil(folder / "data.mdb")
    assert run("ls", folder) == 1
    assert message in capsys.readouterr().err


def test_no_command_loads_torch(digits: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from shmtrain import data_cli; data_cli.main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules)"
    )
    words = ["mnist", "--from", str(digits), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "mnist_train_lmdb" / "data.mdb").exists()
