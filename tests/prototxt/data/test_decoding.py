"""Encoded records: decoded in threads and across the borders of batches, they give what one thread gives."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prototxt import schema
from prototxt._native import Transform
from prototxt.data.config import ReaderConfig, TransformConfig
from prototxt.data.share import Share
from prototxt.data.source import Reader
from prototxt.errors import DataError

cv2: Any = pytest.importorskip("cv2", reason="needs opencv-python-headless")
LARGE = 1 << 20  # values of a batch that is written past the caches
U8 = NDArray[np.uint8]


def expected(image: U8, crop: int, drawn: tuple[int, int, int], mean: Any, scale: float) -> NDArray[Any]:
    height, width = image.shape[:2]
    values: NDArray[Any] = (image.astype(np.float32) - mean) * np.float32(scale)
    if crop:
        top, left = drawn[1] % (height - crop + 1), drawn[2] % (width - crop + 1)
        values = values[top : top + crop, left : left + crop]
    if drawn[0] % 2:
        values = values[:, ::-1]
    return np.ascontiguousarray(values.transpose(2, 0, 1))


@pytest.mark.parametrize("count", [0, LARGE], ids=["through-the-caches", "past-them"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("way", ["value", "values", "image"])
def test_an_image_is_cut_turned_and_scaled_exactly_at_every_width(
    way: str, channels: int, count: int
) -> None:
    """Rows shorter and longer than what is done at once, planes that begin anywhere in a cache line."""
    rng = np.random.default_rng(7)
    for height, width, crop in ((3, 4, 0), (5, 16, 0), (40, 47, 17), (33, 90, 32), (2, 35, 0), (70, 61, 57)):
        image = rng.integers(0, 256, (height, width, channels), np.uint8)
        planes = rng.uniform(0, 255, (channels, height, width)).astype(np.float32)
        values = [3.5, 40.25, 7.0, 90.0][: channels if way == "values" else 1]
        means: dict[str, Any] = {"mean_values": values}
        if way == "image":
            means = {"mean_image": planes.tobytes(), "mean_shape": planes.shape}
        transform = Transform(scale=0.3, mirror=True, crop=crop, random_crop=True, seed=3, **means)
        mean = planes.transpose(1, 2, 0) if way == "image" else np.array(values, np.float32)
        top = (channels, crop or height, crop or width)
        size = int(np.prod(top))
        out: NDArray[Any] = np.full(max(count, 5 * size + 3), -1, np.float32)
        view: Any = out.data
        for start in range(3):  # of the batch in memory
            drawn = transform.draw()
            transform.image(image, 1 + start, view[start:], top, drawn)
            begin = start + (1 + start) * size
            want = expected(image, crop, drawn, mean, 0.3)
            np.testing.assert_array_equal(out[begin : begin + size].reshape(top), want)
            assert out[begin - 1] == out[begin + size] == -1
            out[:] = -1


def test_pixels_of_another_kind_are_refused() -> None:
    transform, out = Transform(), memoryview(bytearray(256)).cast("f")
    for pixels in (np.zeros((4, 4), np.float32), np.zeros(16, np.uint8), np.zeros((1, 2, 2, 1), np.uint8)):
        with pytest.raises(ValueError, match="pixels must be bytes of shape"):
            transform.image(pixels, 0, out, (1, 4, 4), (0, 0, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out must be 32 writable float32 values"):
        transform.image(np.zeros((4, 4), np.uint8), 1, out[:31], (1, 4, 4), (0, 0, 0))


def encoded(image: U8, label: int) -> bytes:
    datum = schema.Datum(encoded=True, data=bytes(cv2.imencode(".png", image)[1]), label=label)
    return bytes(datum.SerializeToString())


def records(count: int, broken: tuple[int, ...] = ()) -> list[Any]:
    """Images of many sizes, some of them raw; those of ``broken`` are marked as encoded and are not."""
    rng = np.random.default_rng(1)
    made: list[Any] = []
    for i in range(count):
        image = rng.integers(0, 256, (20 + i % 5, 24 - i % 3, 3), np.uint8)
        raw = (np.ascontiguousarray(image.transpose(2, 0, 1)), i)
        made.append(raw if i % 11 in (4, 5) else encoded(image, i))
    for i in broken:
        made[i] = schema.Datum(encoded=True, data=b"no image", label=i).SerializeToString()
    return made


def config(folder: Path, batch: int, threads: int, **more: Any) -> ReaderConfig:
    transform = TransformConfig(crop=18, mirror=True, mean_values=(9.0,))
    return ReaderConfig(
        "lmdb", str(folder), batch, ("data", "label"), train=True, seed=4, threads=threads,
        transform=transform, **more,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 7])
def test_threads_change_neither_the_order_nor_a_pixel(make_lmdb: Any, batch: int) -> None:
    folder = make_lmdb(records(31))
    with (
        Reader(config(folder, batch, 1), place="one") as one,
        Reader(config(folder, batch, 3), place="three") as three,
        Reader(config(folder, batch, 3, claimed=True), place="claimed", claims=lambda n: n) as claimed,
    ):
        for _ in range(70 // batch):
            want = one.take()
            for reader in (three, claimed):
                for got, wanted in zip(reader.take(), want, strict=True):
                    np.testing.assert_array_equal(got.numpy(), wanted.numpy())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_image_is_named_after_the_good_batches_the_first_of_its_batch(
    make_lmdb: Any, threads: int
) -> None:
    """While a batch is written the threads have the next one's images already."""
    for bad in (12, 14):  # the batch's first, which gives its shape, and one of the others
        folder = make_lmdb(records(24, (bad, 15, 17)), f"bad{bad}")
        with Reader(config(folder, 6, threads), place="p") as reader:
            assert [reader.take()[1].tolist() for _ in range(2)] == [[*range(6)], [*range(6, 12)]]
            with pytest.raises(DataError, match=rf"record {bad} \(key .*\) is marked as encoded, but its 8"):
                reader.take()


def test_the_threads_that_decode_go_with_their_net(make_lmdb: Any, tmp_path: Path) -> None:
    folder = make_lmdb(records(24))

    def memory(name: str, size: int) -> int:
        fd = os.memfd_create("ring")
        os.truncate(fd, size)
        return fd

    share = Share(f"job of {tmp_path}", memory)
    first, second = (
        Reader(config(folder, 6, threads, world=2, rank=rank), place="p", share=share)
        for rank, threads in enumerate((1, 4))
    )
    tasks = Path(f"/proc/{first.pid}/task")

    def count() -> int:
        return len(list(tasks.iterdir()))

    first.take()
    end = time.monotonic() + 10.0
    while (
        count() < 3 + 4 and time.monotonic() < end
    ):  # its own, one a net, those that decode: begun when needed
        second.take()
    assert count() == 3 + 4
    second.close()
    while (left := count()) > 2 and time.monotonic() < end:
        time.sleep(0.02)
    first.take()
    first.close()
    assert left == 2
