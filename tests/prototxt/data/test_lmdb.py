"""The Data layer: which records come, in which order, to which worker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prototxt
from prototxt import schema


def labels_of(built: Any, batches: int) -> list[int]:
    return [int(label) for _ in range(batches) for label in built.module()[1]]


def test_records_come_in_the_order_of_their_keys_and_wrap(numbered: Any, data_layer: Any) -> None:
    built = data_layer(numbered(5), 3)
    assert built.tops == [(3, 1, 2, 2), (3,)]
    assert labels_of(built, 4) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_pixels_are_those_of_the_record(make_lmdb: Any, data_layer: Any) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 3, 5, 4), np.uint8)
    built = data_layer(make_lmdb([(image, i) for i, image in enumerate(images)]), 7)
    data, label = built.module()
    np.testing.assert_array_equal(data.numpy(), images.astype(np.float32))
    np.testing.assert_array_equal(label.numpy(), np.arange(7))


@pytest.mark.parametrize(
    ("records", "world", "batch"), [(12, 3, 2), (10, 3, 2), (2, 5, 3), (7, 4, 7), (1, 3, 2)]
)
def test_record_i_goes_to_worker_i_mod_world(
    numbered: Any, data_layer: Any, records: int, world: int, batch: int
) -> None:
    """The original's rule, across the end of the data set too: equal to skipping one record at a time."""
    folder, batches = numbered(records), 9
    for rank in range(world):
        built = data_layer(folder, batch, phase="TRAIN", rank=rank, world=world)
        expected = [(rank + k * world) % records for k in range(batches * batch)]
        assert labels_of(built, batches) == expected


def test_a_test_net_reads_every_record_whatever_its_rank(numbered: Any, data_layer: Any) -> None:
    assert labels_of(data_layer(numbered(6), 3, phase="TEST", rank=1, world=2), 2) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("world", [1, 3])
def test_data_start_goes_on_where_another_run_stopped(numbered: Any, data_layer: Any, world: int) -> None:
    folder = numbered(10)
    whole = data_layer(folder, 2, phase="TRAIN", rank=world - 1, world=world)
    expected = labels_of(whole, 12)[2 * 5 :]
    assert whole.module.batches == 12
    again = data_layer(
        folder, 2, phase="TRAIN", rank=world - 1, world=world, options={"data_start": {"d": 5}}
    )
    assert labels_of(again, 7) == expected
    assert again.module.batches == 12


def test_one_top_is_the_data_alone(numbered: Any, open_layer: Any) -> None:
    folder = numbered(3)
    built = open_layer(
        f'name: "d" type: "Data" top: "x" data_param {{ source: "{folder}" batch_size: 2 backend: LMDB }}'
    )
    assert built.tops == [(2, 1, 2, 2)]
    assert built.module().shape == (2, 1, 2, 2)


@pytest.mark.parametrize("label", [0, 127, 128, 999, 70000, -1, 2**31 - 1])
def test_labels_of_any_size_arrive(make_lmdb: Any, data_layer: Any, label: int) -> None:
    """They take one to ten bytes in a record."""
    folder = make_lmdb([(np.zeros((1, 2, 2), np.uint8), label), (np.ones((1, 2, 2), np.uint8), 5)])
    assert data_layer(folder, 2).module()[1].tolist() == [np.float32(label), 5]


def test_float_records_and_packed_ones_are_read(make_lmdb: Any, data_layer: Any) -> None:
    image = np.random.default_rng(1).normal(size=(2, 3, 2)).astype(np.float32)
    head = schema.Datum(channels=2, height=3, width=2, label=4).SerializeToString()
    packed = head + bytes([6 << 3 | 2, image.nbytes]) + image.tobytes()
    data, label = data_layer(make_lmdb([(image, 4), packed]), 2, "transform_param { scale: 2 }").module()
    np.testing.assert_array_equal(data.numpy(), np.stack([image, image]) * np.float32(2))
    assert label.tolist() == [4, 4]


def test_fields_that_a_newer_schema_adds_are_skipped(make_lmdb: Any, data_layer: Any) -> None:
    known = schema.Datum(channels=1, height=1, width=2, data=b"\x03\x04", label=1).SerializeToString()
    varint, fixed64, block, fixed32 = b"\x78\x85\x01", b"\x79" + bytes(8), b"\x7a\x02ab", b"\x7d" + bytes(4)
    data, label = data_layer(make_lmdb([varint + known + fixed64 + block + fixed32]), 1).module()
    assert data.flatten().tolist() == [3, 4]
    assert label.tolist() == [1]


def test_batches_may_differ_in_size(make_lmdb: Any, data_layer: Any) -> None:
    """The first record of each batch decides; the ring grows for larger ones."""
    sides = [2, 2, 40, 40, 3, 3, 150, 150]
    records = [(np.full((3, side, side), side, np.uint8), side) for side in sides]
    built = data_layer(make_lmdb(records), 2)
    assert built.tops[0] == (2, 3, 2, 2)
    for side in [*sides[::2]] * 6:
        data, label = built.module()
        assert data.shape == (2, 3, side, side)
        assert (data == side).all()
        assert label.tolist() == [side, side]


def test_a_batch_stands_until_the_next_forward(numbered: Any, data_layer: Any) -> None:
    """The reader must not overwrite what the net still computes with, however far ahead it could be."""
    built = data_layer(numbered(200), 4)
    for first in range(0, 160, 4):
        data, label = built.module()
        copies = data.clone(), label.clone()
        assert label.tolist() == list(range(first, first + 4))
        subprocess.run(["sleep", "0.01"], check=True)  # time for the reader to fill whatever slot it may
        assert (data == copies[0]).all()
        assert (label == copies[1]).all()


def test_a_read_only_folder_is_enough_and_nothing_is_written(numbered: Any, data_layer: Any) -> None:
    folder = numbered(4)
    folder.joinpath("data.mdb").chmod(0o444)
    folder.chmod(0o555)
    try:
        assert labels_of(data_layer(folder, 2), 2) == [0, 1, 2, 3]
        assert os.listdir(folder) == ["data.mdb"]
    finally:
        folder.chmod(0o755)


def test_many_workers_and_a_test_net_share_one_lmdb(numbered: Any, data_layer: Any) -> None:
    folder = numbered(64)
    workers = [data_layer(folder, 4, phase="TRAIN", rank=rank, world=4) for rank in range(4)]
    test = data_layer(folder, 8)
    seen = [label for built in workers for label in labels_of(built, 4)]
    assert sorted(seen) == list(range(64))
    assert labels_of(test, 8) == list(range(64))


def test_crops_and_flips_follow_the_seed_and_differ_by_rank(make_lmdb: Any, data_layer: Any) -> None:
    images = np.random.default_rng(2).integers(0, 256, (30, 1, 9, 9), np.uint8)
    folder = make_lmdb([(image, i) for i, image in enumerate(images)])
    extra = "transform_param { crop_size: 4 mirror: true }"

    def first(seed: int | None, rank: int) -> Any:
        return data_layer(folder, 30, extra, phase="TRAIN", seed=seed, rank=rank).module()[0].clone()

    assert (first(7, 0) == first(7, 0)).all()
    assert not (first(7, 0) == first(8, 0)).all()
    assert not (first(None, 0) == first(None, 0)).all()


def test_a_relative_source_is_taken_from_the_working_directory(
    numbered: Any, data_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = numbered(2)
    monkeypatch.chdir(folder.parent)
    assert labels_of(data_layer(Path(folder.name), 2), 1) == [0, 1]


def test_a_net_of_prototxt_trains_on_an_lmdb(make_lmdb: Any, tmp_path: Path) -> None:
    """End to end through Net: forward, backward, close."""
    rng = np.random.default_rng(3)
    folder = make_lmdb([(rng.integers(0, 256, (1, 6, 6), np.uint8), i % 3) for i in range(20)])
    net_file = tmp_path / "net.prototxt"
    net_file.write_text(f"""
        layer {{ name: "d" type: "Data" top: "data" top: "label" transform_param {{ scale: 0.004 }}
                data_param {{ source: "{folder}" batch_size: 5 backend: LMDB }} }}
        layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
                inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
        layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}""")
    with prototxt.Net(net_file, phase="TRAIN", seed=1) as net:
        for _ in range(5):
            outcome = net.run()
            outcome.loss.backward()  # type: ignore[no-untyped-call]
        assert float(outcome.loss.detach()) > 0
        assert net.learnable[0].param.grad is not None
        assert set(net.forward()) == {"loss"}
        assert net.blobs["label"].data.shape == (5,)


def test_two_layers_of_one_net_read_apart(numbered: Any, tmp_path: Path) -> None:
    folder = numbered(6)
    copy = shutil.copytree(folder, tmp_path / "copy")
    text = "".join(
        f'layer {{ name: "{name}" type: "Data" top: "{name}" top: "l{name}" '
        f'data_param {{ source: "{source}" batch_size: {batch} backend: LMDB }} }}\n'
        for name, source, batch in (("a", folder, 2), ("b", copy, 3))
    )
    (tmp_path / "two.prototxt").write_text(text)
    with prototxt.Net(tmp_path / "two.prototxt", phase="TEST") as net:
        runs = [net.run().outputs for _ in range(2)]
        assert [int(v) for v in runs[1]["la"]] == [2, 3]
        assert [int(v) for v in runs[1]["lb"]] == [3, 4, 5]
