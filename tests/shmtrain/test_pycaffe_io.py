"""Images and arrays on their way into a net, and the nets that take them: Classifier, Detector, draw."""

from __future__ import annotations

import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from shmtrain import pycaffe as caffe
from shmtrain.pycaffe import draw, io
from shmtrain.pycaffe.proto import caffe_pb2

cv2 = pytest.importorskip("cv2")
RANDOM = np.random.default_rng(3)

# Messages -------------------------------------------------------------------------------------------------


def test_arrays_become_blobs_and_come_back() -> None:
    array = RANDOM.normal(size=(2, 1, 3)).astype(np.float32)
    blob = io.array_to_blobproto(array, diff=2 * array)
    assert list(blob.shape.dim) == [2, 1, 3]
    np.testing.assert_array_equal(io.blobproto_to_array(blob), array)
    np.testing.assert_array_equal(io.blobproto_to_array(blob, return_diff=True), 2 * array)
    several = io.blobprotovector_str_to_arraylist(io.arraylist_to_blobprotovector_str([array, array[0]]))
    assert [each.shape for each in several] == [(2, 1, 3), (1, 3)]


def test_old_blobs_have_four_axes_and_shapeless_ones_none() -> None:
    old = caffe_pb2.BlobProto(num=1, channels=2, height=1, width=3, data=range(6))
    assert io.blobproto_to_array(old).shape == (1, 2, 1, 3)
    assert io.blobproto_to_array(caffe_pb2.BlobProto(data=[7])) == 7
    with pytest.raises(ValueError, match="reshape"):
        io.blobproto_to_array(caffe_pb2.BlobProto(data=[7, 8]))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_arrays_become_datums_and_come_back(dtype: Any) -> None:
    array = RANDOM.integers(0, 255, (3, 4, 5)).astype(dtype)
    datum = io.array_to_datum(array, label=4)
    assert (datum.label, bool(datum.data)) == (4, dtype == np.uint8)
    np.testing.assert_array_equal(io.datum_to_array(datum), array)
    assert not io.array_to_datum(array).HasField("label")
    with pytest.raises(ValueError, match=r"the array's shape is \(4, 5\)"):
        io.array_to_datum(array[0])


# Images ---------------------------------------------------------------------------------------------------


def test_an_image_is_rgb_from_0_to_1_whatever_it_is_in_the_file(tmp_path: Path) -> None:
    bgr = RANDOM.integers(0, 256, (5, 6, 3), np.uint8)
    alpha = np.dstack([bgr, np.full((5, 6), 9, np.uint8)])
    cases = {"c": bgr, "a": alpha, "g": bgr[:, :, 0], "w": bgr.astype(np.uint16) * 257}
    rgb = bgr[:, :, ::-1] / 255.0
    for name, pixels in cases.items():
        cv2.imwrite(str(tmp_path / f"{name}.png"), pixels)
        colour = io.load_image(tmp_path / f"{name}.png")
        want = np.repeat(bgr[:, :, :1] / 255.0, 3, axis=2) if name == "g" else rgb
        np.testing.assert_allclose(colour, want, rtol=1e-6)
        assert colour.dtype == np.float32
        grey = io.load_image(str(tmp_path / f"{name}.png"), color=False)
        weighed = (rgb * [0.2125, 0.7154, 0.0721]).sum(2, keepdims=True)
        np.testing.assert_allclose(grey, want[:, :, :1] if name == "g" else weighed, rtol=1e-5)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("hello")
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1 << 20).to_bytes(4, "big") * 2 + b"\x08\2\0\0\0"
    (tmp_path / "huge.png").write_bytes(head + zlib.crc32(head[12:]).to_bytes(4, "big") + b"\0\0\0\0IDAT")
    for name in ("empty.png", "text.jpg", "none.png", "huge.png"):
        with pytest.raises(OSError, match=name):
            io.load_image(tmp_path / name)


def test_images_are_resized_with_pixels_as_squares() -> None:
    """Between two pixels linear, beyond the border the least value; nearest takes whole pixels."""
    line = np.array([1.0, 2.0])[np.newaxis, :, np.newaxis]
    assert io.resize_image(line, (1, 4))[0, :, 0].tolist() == [1, 1.25, 1.75, 1.75]
    assert io.resize_image(line, (1, 4), interp_order=0)[0, :, 0].tolist() == [1, 1, 2, 2]
    assert io.resize_image(line[:, ::-1], (1, 4))[0, :, 0].tolist() == [1.75, 1.75, 1.25, 1]
    small = io.resize_image(np.arange(16.0).reshape(4, 4, 1), (2, 2))
    assert small[:, :, 0].tolist() == [[2.5, 4.5], [10.5, 12.5]]
    assert (io.resize_image(np.full((3, 3, 3), 7.0), (5, 2)) == 7).all()


def test_other_channel_counts_are_resized_with_the_corners_kept() -> None:
    image = np.stack([np.arange(3.0), 10 + np.arange(3.0)], -1)[np.newaxis]
    got = io.resize_image(image, (1, 5))
    assert got[0, :, 0].tolist() == [0, 0.5, 1, 1.5, 2]
    assert got[0, :, 1].tolist() == [10, 10.5, 11, 11.5, 12]


@pytest.mark.parametrize(
    ("shape", "size", "order", "message"),
    [
        ((4, 4, 3), (2, 2), 3, "interpolation order 3 is out of range"),
        ((4, 4), (2, 2), 1, "cannot resize"),
        ((4, 4, 3), (0, 2), 1, "cannot resize"),
        ((4, 4, 3), (2,), 1, "cannot resize"),
    ],
)
def test_a_resize_that_cannot_be_is_told(shape: Any, size: Any, order: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        io.resize_image(np.zeros(shape), size, order)


def test_ten_crops_are_corners_centre_and_these_mirrored() -> None:
    image = np.arange(5 * 6, dtype=np.float32).reshape(5, 6, 1)
    crops = io.oversample([image, image + 100], (3, 2))
    assert crops.shape == (20, 3, 2, 1)
    assert [int(crop[0, 0, 0]) for crop in crops[:5]] == [0, 4, 12, 16, 8]
    np.testing.assert_array_equal(crops[5:10], crops[:5, :, ::-1])
    np.testing.assert_array_equal(crops[10:], crops[:10] + 100)
    with pytest.raises(ValueError, match="crops of 6 x 2 do not fit into 5 x 6"):
        io.oversample([image], (6, 2))


# Transformer ----------------------------------------------------------------------------------------------


def transformer() -> io.Transformer:
    made = io.Transformer({"data": (1, 3, 4, 5)})
    made.set_transpose("data", (2, 0, 1))
    made.set_channel_swap("data", (2, 1, 0))
    made.set_raw_scale("data", 255)
    made.set_mean("data", np.array([104.0, 117.0, 123.0]))
    made.set_input_scale("data", 0.5)
    return made


def test_the_steps_are_made_in_the_originals_order() -> None:
    image = RANDOM.random((4, 5, 3)).astype(np.float32)
    before = image.copy()
    got = transformer().preprocess("data", image)
    bgr = image.transpose(2, 0, 1)[::-1]
    want = (bgr * 255 - np.array([104.0, 117.0, 123.0]).reshape(3, 1, 1)) * 0.5
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert (got.dtype, got.shape) == (np.float32, (3, 4, 5))
    np.testing.assert_array_equal(image, before)
    np.testing.assert_allclose(transformer().deprocess("data", got[np.newaxis]), image, rtol=1e-4, atol=1e-6)


def test_an_image_of_another_size_is_resized_and_so_is_a_mean() -> None:
    made = io.Transformer({"data": (1, 3, 4, 5)})
    made.set_transpose("data", (2, 0, 1))
    image = RANDOM.random((9, 7, 3)).astype(np.float32)
    np.testing.assert_array_equal(
        made.preprocess("data", image), io.resize_image(image, (4, 5)).transpose(2, 0, 1)
    )
    mean = RANDOM.random((3, 8, 8))
    made.set_mean("data", mean)
    want = io.resize_image(mean.transpose(1, 2, 0), (4, 5)).transpose(2, 0, 1)
    np.testing.assert_array_equal(made.mean["data"], want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.preprocess("x", np.zeros((4, 5, 3))), "'x' is no input of the net .inputs: data."),
        (lambda t: t.set_transpose("data", (1, 0)), "must name each axis"),
        (lambda t: t.set_channel_swap("data", (1, 0)), "must name each of 3 channels"),
        (lambda t: t.set_mean("data", np.zeros(4)), "a mean of 4 channels for an input of 3"),
        (lambda t: t.set_mean("data", np.zeros((1, 3, 4, 5))), "neither per channel nor an image"),
    ],
)
def test_a_wrong_step_is_told(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(io.Transformer({"data": (1, 3, 4, 5)}))


# Classifier and Detector ----------------------------------------------------------------------------------

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 6 dim: 6 } } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param {
  num_output: 5 weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "prob" type: "Softmax" bottom: "fc" top: "prob" }
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "net").write_text(NET)
    caffe.set_random_seed(1)
    with caffe.Net(str(tmp_path / "net"), caffe.TEST) as net:
        net.save(tmp_path / "weights")
    return str(tmp_path / "net"), str(tmp_path / "weights")


def test_a_classifier_averages_ten_crops_or_takes_the_centre(files: tuple[str, str]) -> None:
    images = [RANDOM.random((11, 9, 3)).astype(np.float32) for _ in range(3)]
    with caffe.Classifier(*files, image_dims=(8, 10), raw_scale=255, channel_swap=(2, 1, 0),
                          mean=np.array([1.0, 2.0, 3.0]), input_scale=0.01) as net:  # fmt: skip
        resized = [io.resize_image(image, (8, 10)) for image in images]
        crops = [io.oversample([image], (6, 6)) for image in resized]
        each = [[net.transformer.preprocess("data", crop) for crop in ten] for ten in crops]
        ten = np.array([net.forward_all(data=np.array(rows))["prob"].mean(0) for rows in each])
        got = net.predict(images)
        assert got.shape == (3, 5)
        np.testing.assert_allclose(got, ten, rtol=1e-5)
        np.testing.assert_allclose(got.sum(1), 1, rtol=1e-5)
        centre = np.array([rows[4] for rows in each])
        np.testing.assert_allclose(
            net.predict(images, oversample=False), net.forward_all(data=centre)["prob"]
        )
    with caffe.Classifier(*files) as net:
        assert tuple(net.image_dims) == (6, 6)


def test_a_detector_scores_windows(files: tuple[str, str], tmp_path: Path) -> None:
    pixels = RANDOM.integers(0, 256, (20, 30, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "i.png"), pixels)
    windows = np.array([[0, 0, 20, 30], [5, 6, 15, 12], [2, 3, 9, 29]])
    with caffe.Detector(*files, raw_scale=255) as net:
        found = net.detect_windows([(str(tmp_path / "i.png"), windows)])
        assert [tuple(d["window"]) for d in found] == [tuple(window) for window in windows]
        image = io.load_image(tmp_path / "i.png")
        crop = net.transformer.preprocess("data", image[5:15, 6:12])
        want = net.forward_all(data=crop[np.newaxis])["prob"][0]
        np.testing.assert_allclose(found[1]["prediction"], want, rtol=1e-5)
        assert found[1]["filename"] == str(tmp_path / "i.png")
        assert net.detect_windows([]) == []
        with pytest.raises(ImportError, match="selective_search"):
            net.detect_selective_search([str(tmp_path / "i.png")])


def test_context_around_a_window_is_the_images_or_the_mean(files: tuple[str, str]) -> None:
    """The window fills all but context_pad pixels on each side; beyond the image lies the mean."""
    image = np.full((40, 40, 3), 0.5, np.float32)
    with caffe.Detector(*files, raw_scale=2, mean=np.array([0.2, 0.4, 0.6]), channel_swap=(2, 1, 0),
                        context_pad=1) as net:  # fmt: skip
        inside = net.crop(image, np.array([10, 10, 20, 20]))
        assert inside.shape == (6, 6, 3)
        np.testing.assert_allclose(inside, 0.5, rtol=1e-6)
        corner = net.crop(image, np.array([0, 0, 9, 9]))
        np.testing.assert_allclose(
            corner[0], np.tile([0.3, 0.2, 0.1], (6, 1)), rtol=1e-6
        )  # mean, RGB, unscaled
        np.testing.assert_allclose(corner[2:, 2:], 0.5, rtol=1e-6)
        with pytest.raises(ValueError, match="lies outside the image"):
            net.crop(image, np.array([90, 90, 99, 99]))


# Pictures -------------------------------------------------------------------------------------------------


def test_a_net_is_drawn_from_its_message(tmp_path: Path) -> None:
    net = caffe_pb2.NetParameter()
    text_format.Merge(NET + 'layer { name: "only" type: "ReLU" bottom: "fc" top: "fc" '
                      "include { phase: TRAIN } }", net)  # fmt: skip
    names = [text.text for text in ET.fromstring(draw.draw_net(net, "TB", "svg")).iter() if text.text]
    assert {"data", "fc", "InnerProduct", "5 out", "prob", "only"} <= set(names)
    assert b"only" not in draw.draw_net(net, ext="svg", phase=caffe.TEST)
    draw.draw_net_to_file(net, tmp_path / "n.png", "LR")
    picture = cv2.imread(str(tmp_path / "n.png"))
    assert picture.shape[1] > picture.shape[0]
    net.layer[1].param.add(lr_mult=0.5)
    assert b"lr_mult 0.5" in draw.draw_net(net, ext="svg", display_lrm=True)
