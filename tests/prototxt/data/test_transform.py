"""transform_param to the pixel: against the same sums written out in numpy, exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prototxt import schema

SHAPE = (3, 8, 9)
COUNT = 6
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@pytest.fixture
def images() -> U8:
    return np.random.default_rng(5).integers(0, 256, (COUNT, *SHAPE), np.uint8)


@pytest.fixture
def mean_file(tmp_path: Path) -> tuple[Path, F32]:
    mean = np.random.default_rng(6).uniform(0, 255, SHAPE).astype(np.float32)
    channels, height, width = SHAPE
    blob = schema.BlobProto(num=1, channels=channels, height=height, width=width, data=mean.ravel().tolist())
    (tmp_path / "mean.binaryproto").write_bytes(blob.SerializeToString())
    return tmp_path / "mean.binaryproto", mean


def expected(image: U8 | F32, mean: F32, scale: float) -> F32:
    return ((image.astype(np.float32) - mean) * np.float32(scale)).astype(np.float32)


MEANS = ["", "mean_value: 100.5", "mean_value: 10 mean_value: 20.25 mean_value: 30", "file"]


@pytest.mark.parametrize("kind", ["uint8", "float32"])
@pytest.mark.parametrize("mean", MEANS, ids=["no-mean", "one-value", "a-value-a-channel", "mean-file"])
@pytest.mark.parametrize("crop", [0, 5, 8])
def test_a_test_net_takes_the_centre(request: pytest.FixtureRequest, mean: str, crop: int, kind: str) -> None:
    make_lmdb, data_layer = request.getfixturevalue("make_lmdb"), request.getfixturevalue("data_layer")
    images: U8 = request.getfixturevalue("images")
    path, mean_image = request.getfixturevalue("mean_file")
    field = f'mean_file: "{path}"' if mean == "file" else mean
    values = [float(word) for word in mean.split() if word[0].isdigit()]
    subtract = mean_image if mean == "file" else np.resize(values or [0], 3).astype(np.float32)[:, None, None]
    source = images if kind == "uint8" else images.astype(np.float32) / np.float32(7)
    folder = make_lmdb([(image, i) for i, image in enumerate(source)])
    extra = f"transform_param {{ scale: 0.00390625 crop_size: {crop} {field} }}"
    data, _ = data_layer(folder, COUNT, extra).module()
    whole = expected(source, subtract, 0.00390625)
    top, left = ((8 - crop) // 2, (9 - crop) // 2) if crop else (0, 0)
    rows, columns = (slice(top, top + crop), slice(left, left + crop)) if crop else (slice(None), slice(None))
    np.testing.assert_array_equal(data.numpy(), whole[:, :, rows, columns])


def legal(image: F32, crop: int, mirror: bool) -> set[tuple[bytes, tuple[int, int, bool]]]:
    """Every crop and flip of an image, by its bytes."""
    found = set()
    height, width = image.shape[1:]
    places = itertools.product(range(height - crop + 1), range(width - crop + 1), [False, True][: 1 + mirror])
    for top, left, flip in places:
        part = image[:, top : top + crop, left : left + crop]
        part = part[:, :, ::-1] if flip else part
        found.add((part.tobytes(), (top, left, flip)))
    return found


@pytest.mark.parametrize("mirror", [False, True])
def test_a_train_net_takes_every_crop_and_flip_and_nothing_else(
    make_lmdb: Any, data_layer: Any, images: U8, mean_file: tuple[Path, F32], mirror: bool
) -> None:
    """The mean is subtracted at the source's pixel: a crop of the image takes the same crop of the mean."""
    path, mean = mean_file
    folder = make_lmdb([(images[0], 0)])
    extra = f'transform_param {{ crop_size: 6 mirror: {str(mirror).lower()} mean_file: "{path}" }}'
    built = data_layer(folder, 400, extra, phase="TRAIN", seed=3)
    possible = dict(legal(expected(images[0], mean, 1), 6, mirror))
    seen = [possible[part.tobytes()] for part in built.module()[0].numpy()]  # a KeyError: not a legal crop
    places = len(possible)
    assert places == 3 * 4 * (1 + mirror)
    assert len(set(seen)) == places
    assert max(seen.count(place) for place in set(seen)) < 3 * 400 / places


def test_mirror_flips_half_of_the_images_in_a_test_net_too(
    make_lmdb: Any, data_layer: Any, images: U8
) -> None:
    built = data_layer(make_lmdb([(images[0], 0)]), 300, "transform_param { mirror: true }", seed=1)
    straight = images[0].astype(np.float32)
    flips = 0
    for image in built.module()[0].numpy():
        flipped = bool((image == straight[:, :, ::-1]).all())
        assert flipped or (image == straight).all()
        flips += flipped
    assert 110 < flips < 190


def test_images_of_many_sizes_share_a_batch_when_a_crop_makes_them_equal(
    make_lmdb: Any, data_layer: Any
) -> None:
    rng = np.random.default_rng(8)
    images = [rng.integers(0, 256, (1, side, side + 3), np.uint8) for side in (4, 9, 6)]
    data, _ = data_layer(
        make_lmdb([(image, 0) for image in images]), 3, "transform_param { crop_size: 4 }"
    ).module()
    for got, image in zip(data.numpy(), images, strict=True):
        top, left = (image.shape[1] - 4) // 2, (image.shape[2] - 4) // 2
        np.testing.assert_array_equal(got, image[:, top : top + 4, left : left + 4])


@pytest.fixture
def cv2() -> Any:
    return pytest.importorskip("cv2", reason="needs opencv-python-headless")


@pytest.mark.parametrize("force", ["", "force_color: true", "force_gray: true"])
@pytest.mark.parametrize("stored", ["color", "gray"])
def test_encoded_records_are_decoded_as_opencv_does(
    make_lmdb: Any, data_layer: Any, cv2: Any, force: str, stored: str
) -> None:
    """Blue, green, red planes; force_* converts, else the file decides. A raw record may stand among them."""
    shape = (7, 6, 3) if stored == "color" else (7, 6)
    image = np.random.default_rng(9).integers(0, 256, shape, np.uint8)
    png = bytes(cv2.imencode(".png", image)[1])
    record = schema.Datum(encoded=True, data=png, label=300).SerializeToString()
    flag = {"": -1, "force_color: true": cv2.IMREAD_COLOR, "force_gray: true": cv2.IMREAD_GRAYSCALE}[force]
    planes = cv2.imdecode(np.frombuffer(png, np.uint8), flag).reshape(7, 6, -1).transpose(2, 0, 1)
    raw = np.full(planes.shape, 9, np.uint8)
    extra = f"transform_param {{ {force} mean_value: 5 crop_size: 6 }}"
    data, label = data_layer(make_lmdb([record, (raw, 1), record]), 3, extra).module()
    for got, source in zip(data.numpy(), (planes, raw, planes), strict=True):
        np.testing.assert_array_equal(got, source[:, :6].astype(np.float32) - 5)
    assert label.tolist() == [300, 1, 300]
