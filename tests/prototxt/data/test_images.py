"""ImageData and WindowData: which images come in which order, and what of them."""

from __future__ import annotations

import os
import signal
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prototxt.data.config import WindowConfig
from prototxt.data.decode import LIMIT_PIXELS, Decoder, Undecodable
from prototxt.data.note import read_note
from prototxt.data.window_source import Window, place
from prototxt.errors import DataError

pytest.importorskip("cv2", reason="needs opencv-python-headless")
COUNT = 12


def colour(i: int) -> bytes:
    """A 4x5 image of one colour: blue i, green 2 i, red 3 i."""
    return b"P6 5 4 255\n" + bytes([3 * i, 2 * i, i]) * 20


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """list.txt of COUNT images whose label and colours are their number; some names hold blanks."""
    names = [f"im {i}.ppm" if i % 2 else f"im{i}.ppm" for i in range(COUNT)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(colour(i))
    (tmp_path / "list.txt").write_text("".join(f"{name} {i}\r\n" for i, name in enumerate(names)))
    return tmp_path


@pytest.fixture
def image_layer(open_layer: Any, images: Path) -> Any:
    def build(batch: int, extra: str = "", transform: str = "", **context: Any) -> Any:
        return open_layer(
            f'name: "d" type: "ImageData" top: "data" top: "label" transform_param {{ {transform} }} '
            f'image_data_param {{ source: "{images}/list.txt" root_folder: "{images}/" '
            f"batch_size: {batch} {extra} }}",
            **context,
        )

    return build


def labels(built: Any, batches: int) -> list[int]:
    return [int(label) for _ in range(batches) for label in built.module()[1]]


def test_images_come_in_the_lists_order_blue_first_and_wrap(image_layer: Any) -> None:
    built = image_layer(5)
    assert built.tops == [(5, 3, 4, 5), (5,)]
    seen = []
    for _ in range(6):
        data, label = built.module()
        for image, number in zip(data.numpy(), label, strict=True):
            np.testing.assert_array_equal(
                image, np.full((3, 4, 5), [[[number]], [[2 * number]], [[3 * number]]])
            )
        seen += [int(number) for number in label]
    assert seen == [i % COUNT for i in range(30)]


@pytest.mark.parametrize("threads", [1, 3])
def test_line_i_goes_to_worker_i_mod_world(image_layer: Any, threads: int) -> None:
    for rank in range(2):
        built = image_layer(3, phase="TRAIN", rank=rank, world=2, options={"decode_threads": threads})
        assert labels(built, 4) == [*range(rank, COUNT, 2)] * 2


def test_shuffled_images_come_once_a_pass_in_another_order_each_alike_for_all(image_layer: Any) -> None:
    passes = labels(image_layer(COUNT, "shuffle: true", seed=7), 3)
    turns = [passes[i : i + COUNT] for i in range(0, 3 * COUNT, COUNT)]
    assert all(sorted(turn) == [*range(COUNT)] for turn in turns)
    assert len({tuple(turn) for turn in turns}) == 3
    assert labels(image_layer(COUNT, "shuffle: true", seed=7), 3) == passes
    shares = [
        labels(image_layer(6, "shuffle: true", phase="TRAIN", seed=7, rank=rank, world=2), 1)
        for rank in range(2)
    ]
    assert sorted(shares[0] + shares[1]) == [*range(COUNT)]


def test_rand_skip_leaves_out_a_few_at_the_beginning_by_the_seed(image_layer: Any) -> None:
    starts = {labels(image_layer(1, "rand_skip: 6", seed=seed), 1)[0] for seed in range(4)}
    assert starts <= set(range(6))
    assert len(starts) > 1
    with pytest.raises(DataError, match=r"rand_skip leaves out \d+ of 12 lines"):
        image_layer(1, "rand_skip: 4000000000", seed=1)


def test_data_start_and_go_on_from_follow_the_batches_before(image_layer: Any) -> None:
    want = labels(image_layer(5, "shuffle: true", phase="TRAIN", seed=3), 8)[5 * 5 :]
    built = image_layer(5, "shuffle: true", phase="TRAIN", seed=3, options={"data_start": {"d": 5}})
    assert labels(built, 3) == want
    built.module.go_on_from(5)
    assert labels(built, 3) == want


def test_a_list_without_labels_gives_zeros(image_layer: Any, images: Path) -> None:
    (images / "list.txt").write_text("im0.ppm\nim2.ppm\n\n")
    assert labels(image_layer(2), 1) == [0, 0]


def test_a_death_in_the_decoder_names_the_image(image_layer: Any, images: Path) -> None:
    """OpenCV's decoders are C: what kills one must be told apart from its neighbours in the list."""
    (images / "list.txt").write_text("im0.ppm 0\nstuck.ppm 1\n")
    os.mkfifo(images / "stuck.ppm")  # opening it waits for ever, as a decoder in a loop would
    layer = image_layer(1, options={"decode_threads": 1})
    layer.module()
    reader = layer.module.reader
    end = time.monotonic() + 10.0
    while not read_note(reader._note) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(reader.pid, signal.SIGSEGV)
    death = r"list\.txt ended in SIGSEGV \(is it corrupt\?\), at .*/stuck\.ppm"
    with pytest.raises(DataError, match=death):  # noqa: PT012
        for _ in range(3):
            layer.module()


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("data", [png(60_000, 60_000), b"P5 60000 60000 255\n\0"], ids=["png", "pgm"])
def test_an_image_that_claims_too_many_pixels_takes_no_memory(data: bytes) -> None:
    with pytest.raises(Undecodable, match=f"it has more than {LIMIT_PIXELS} pixels"):
        Decoder().decode(data, "color")


# WindowData ----------------------------------------------------------------------------------------------


@pytest.fixture
def window_layer(open_layer: Any, images: Path) -> Any:
    """Image 3 is all 3, 6, 9; it has one window of class 5 and two of the background."""

    def build(extra: str = "", transform: str = "", **context: Any) -> Any:
        (images / "windows").write_text(
            f"# 0\n{images}/im 3.ppm\n3 4 5\n0\n".replace("im 3", "im2")
            + f"# 1\n{images}/im4.ppm\n3 4 5\n4\n5 0.9 0 0 2 3\n5 0.2 1 1 4 3\n0 0.0 0 1 3 2\n7 0.5 0 0 1 1\n"
        )
        return open_layer(
            f'name: "w" type: "WindowData" top: "data" top: "label" '
            f"transform_param {{ crop_size: 6 {transform} }} "
            f'window_data_param {{ source: "{images}/windows" batch_size: 8 {extra} }}',
            **context,
        )

    return build


@pytest.mark.parametrize("cache", ["", "cache_images: true"])
def test_a_batch_has_so_many_backgrounds_first_then_objects(window_layer: Any, cache: str) -> None:
    built = window_layer(f"fg_fraction: 0.25 fg_threshold: 0.6 bg_threshold: 0.4 {cache}", seed=1)
    assert built.tops == [(8, 3, 6, 6), (8,)]
    for _ in range(3):
        data, label = built.module()
        assert label.tolist() == [0] * 6 + [5] * 2
        np.testing.assert_array_equal(data.numpy(), np.broadcast_to([[[4]], [[8]], [[12]]], (8, 3, 6, 6)))


def test_windows_are_drawn_by_chance_all_of_them_and_by_the_seed(window_layer: Any) -> None:
    built = window_layer(seed=5)
    drawn = [built.module()[1].tolist() for _ in range(30)]
    assert {label for batch in drawn for label in batch} == {0, 5, 7}
    again = window_layer(seed=5)
    assert [again.module()[1].tolist() for _ in range(30)] == drawn


def test_context_outside_the_image_is_zero_and_the_mean_counts_inside_alone(window_layer: Any) -> None:
    built = window_layer("context_pad: 1 scale: 0.5 fg_fraction: 1", "mean_value: 2", seed=1)
    data = built.module()[0].numpy()
    inside = np.unique(data[:, 0])
    assert set(inside) == {0.0, 1.0}  # (4 - 2) / 2
    assert (data[0, 0, 0] == 0).all()  # the row above the image


@pytest.mark.parametrize(
    ("window", "config", "want"),
    [
        # worked out by hand from the original's formulas; crop 8, image 10 wide and 8 high
        ((2, 1, 5, 6), WindowConfig(), (2, 1, 5, 6, 8, 8, 0, 0, 0)),
        ((2, 2, 5, 5), WindowConfig(pad=2), (0, 0, 8, 7, 8, 7, 0, 0, 0)),
        ((0, 2, 3, 5), WindowConfig(pad=2), (0, 0, 6, 7, 6, 7, 0, 2, 0)),
        ((4, 1, 5, 6), WindowConfig(square=True), (2, 1, 8, 7, 8, 8, 0, 0, 0)),
    ],
    ids=["warp", "pad", "pad-left", "square"],
)
def test_where_a_window_goes(window: Any, config: WindowConfig, want: tuple[int, ...]) -> None:
    p = place(Window(0, 1, *window), 10, 8, 8, config)
    assert (p.x1, p.y1, p.x2, p.y2, p.width, p.height, p.top, p.left, p.right) == want
