"""Batches of the original, value by value, and the files that its tools wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import prototxt
from prototxt import schema
from prototxt.data.store import open_store
from shmtrain import data_cli

EXACT = [
    "conv_png", "crop_center", "crop_center_mean_file", "dummy", "gray_lmdb", "hdf5", "image_data",
    "image_data_gray", "image_data_resize", "leveldb", "lmdb_one_top", "lmdb_png", "lmdb_u8", "mean_file",
    "mean_value1", "png_gray", "scale",
]  # fmt: skip
DECODED = {"image_data", "image_data_gray", "image_data_resize", "lmdb_png", "png_gray"}
APART = {"hdf5_output", "train_crop_mirror"}  # a test of their own


@pytest.fixture
def golden(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shared / "golden" / "data")
    return shared / "golden" / "data"


def test_every_case_of_the_folder_is_listed(golden: Path) -> None:
    assert {path.stem for path in golden.glob("*.prototxt")} == {*EXACT, *APART}


@pytest.mark.parametrize("case", EXACT)
def test_four_batches_equal_those_of_the_original(golden: Path, case: str) -> None:
    if case in DECODED:
        pytest.importorskip("cv2", reason="needs opencv-python-headless")
    arrays = np.load(f"{case}.npz")
    with prototxt.Net(f"{case}.prototxt", phase="TEST") as net:
        for batch in range(4):
            outputs = net.run().outputs
            assert {f"batch{batch}/{name}" for name in outputs} == {
                key for key in arrays if key.startswith(f"batch{batch}/")
            }
            for name, tensor in outputs.items():
                np.testing.assert_array_equal(tensor.numpy(), arrays[f"batch{batch}/{name}"])


def test_training_crops_are_legal_crops_and_flips_of_the_records_in_order(golden: Path) -> None:
    arrays: Any = np.load("train_crop_mirror.npz")
    truth = np.load("lmdb_u8.npz")
    images = np.concatenate([truth[f"batch{i}/data"] for i in range(4)])
    with prototxt.Net("train_crop_mirror.prototxt", phase="TRAIN", seed=1701) as net:
        for batch in range(4):
            outputs = net.run().outputs
            np.testing.assert_array_equal(outputs["label"].numpy(), arrays[f"batch{batch}/label"])
            for got, image in zip(outputs["data"].numpy(), images[3 * batch : 3 * batch + 3], strict=True):
                assert any(
                    (got == part - 100).all()
                    for top in range(4)
                    for left in range(6)
                    for crop in [image[:, top : top + 7, left : left + 7]]
                    for part in (crop, crop[:, :, ::-1])
                )


def test_hdf5_output_writes_what_the_original_writes(golden: Path, tmp_path: Path) -> None:
    """Of the first pass; later ones add their rows, where the original gives up."""
    text = Path("hdf5_output.prototxt").read_text().replace("h5out.h5", str(tmp_path / "out.h5"))
    (tmp_path / "net.prototxt").write_text(text)
    with prototxt.Net(tmp_path / "net.prototxt", phase="TEST") as net:
        net.run()
        with h5py.File(tmp_path / "out.h5") as got, h5py.File("h5out.h5") as want:
            assert set(got) == set(want)
            for name in want:
                assert got[name].dtype == want[name].dtype
                np.testing.assert_array_equal(got[name], want[name])
        net.run()
        with h5py.File(tmp_path / "out.h5") as got:
            assert len(got["data"]) == len(got["label"]) == 6


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_converted_images_are_the_records_of_the_original(golden: Path, tmp_path: Path, backend: str) -> None:
    pytest.importorskip("cv2", reason="needs opencv-python-headless")
    words = ["convert-imageset", "--backend", backend, "img/", "list.txt", str(tmp_path / "db")]
    assert data_cli.main(words) == 0
    theirs = list(open_store("leveldb", "conv_leveldb").items())
    assert list(open_store(backend, str(tmp_path / "db")).items()) == theirs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("conv_png_lmdb", ["--encoded"]),
        ("conv_gray_lmdb", ["--gray", "--resize_width", "8", "--resize_height", "6"]),
    ],
)
def test_options_of_conversion_give_the_records_of_the_original(
    golden: Path, tmp_path: Path, folder: str, options: list[str]
) -> None:
    pytest.importorskip("cv2", reason="needs opencv-python-headless")
    assert data_cli.main(["convert-imageset", *options, "img/", "list.txt", str(tmp_path / "db")]) == 0
    ours, theirs = (list(open_store("lmdb", str(path)).items()) for path in (tmp_path / "db", folder))
    assert ours == theirs


def test_the_mean_of_a_database_is_that_of_the_original(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_cli.main(["image-mean", "conv_leveldb", str(tmp_path / "mean.binaryproto")]) == 0
    assert capsys.readouterr().out.count("mean_value channel") == 3
    ours, theirs = schema.BlobProto(), schema.BlobProto()
    ours.ParseFromString((tmp_path / "mean.binaryproto").read_bytes())
    theirs.ParseFromString(Path("conv_mean.binaryproto").read_bytes())
    np.testing.assert_allclose(ours.data, theirs.data, rtol=1e-4)
    ours.data[:] = theirs.data[:] = []
    assert ours == theirs
