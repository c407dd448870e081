"""Batches of the original, value by value. Those that wait: ImageData, LevelDB and HDF5Output come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prototxt

EXACT = [
    "conv_png", "crop_center", "crop_center_mean_file", "dummy", "gray_lmdb", "hdf5", "lmdb_one_top",
    "lmdb_png", "lmdb_u8", "mean_file", "mean_value1", "png_gray", "scale",
]  # fmt: skip
ENCODED = {"conv_png", "lmdb_png", "png_gray"}
WAITING = {"hdf5_output", "image_data", "image_data_gray", "image_data_resize", "leveldb"}


@pytest.fixture
def golden(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shared / "golden" / "data")
    return shared / "golden" / "data"


def test_every_case_is_run_or_named_as_waiting(golden: Path) -> None:
    assert {path.stem for path in golden.glob("*.prototxt")} == {*EXACT, *WAITING, "train_crop_mirror"}


@pytest.mark.parametrize("case", EXACT)
def test_four_batches_equal_those_of_the_original(golden: Path, case: str) -> None:
    if case in ENCODED:
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
