"""HDF5Data: rows in order over all files, or shuffled; float and integer data sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from prototxt.data import hdf5_source
from prototxt.data.config import ReaderConfig
from prototxt.data.hdf5_source import Hdf5Source
from prototxt.errors import LayerError
from tests.prototxt.nets import inputs, layer, net

MakeFiles = Callable[..., Path]


@pytest.fixture
def make_files(tmp_path: Path) -> MakeFiles:
    """make_files(rows, ...): a list file of HDF5 files with so many rows each, numbered in "label"."""

    def make(*rows: int) -> Path:
        names, first = [], 0
        for i, count in enumerate(rows):
            numbers = np.arange(first, first + count)
            with h5py.File(tmp_path / f"{i}.h5", "w") as file:
                file["data"] = np.repeat(numbers, 6).reshape(count, 2, 3).astype(np.float64) / 4
                file["label"] = numbers.astype(np.int64)
                file["flags"] = (numbers % 2).astype(np.uint8)
            names.append(str(tmp_path / f"{i}.h5"))
            first += count
        (tmp_path / "list.txt").write_text("\n".join(names) + "\n\n")
        return tmp_path / "list.txt"

    return make


@pytest.fixture
def hdf5_layer(open_layer: Any) -> Callable[..., Any]:
    def build(listed: Path, batch: int, extra: str = "", **context: Any) -> Any:
        return open_layer(
            f'name: "h" type: "HDF5Data" top: "data" top: "label" top: "flags" '
            f'hdf5_data_param {{ source: "{listed}" batch_size: {batch} {extra} }}',
            **context,
        )

    return build


def labels_of(built: Any, batches: int) -> list[int]:
    return [int(value) for _ in range(batches) for value in built.module()[1]]


def test_rows_run_through_all_files_and_wrap(make_files: MakeFiles, hdf5_layer: Any) -> None:
    built = hdf5_layer(make_files(3, 1, 4), 3)
    assert built.tops == [(3, 2, 3), (3,), (3,)]
    for first in range(0, 30, 3):
        data, label, flags = built.module()
        rows = np.arange(first, first + 3) % 8
        np.testing.assert_array_equal(label.numpy(), rows)
        np.testing.assert_array_equal(flags.numpy(), rows % 2)
        np.testing.assert_array_equal(data.numpy(), np.repeat(rows, 6).reshape(3, 2, 3) / np.float32(4))


@pytest.mark.parametrize("rows", [(8,), (3, 1, 4), (1, 1)])
def test_row_i_goes_to_worker_i_mod_world(make_files: MakeFiles, hdf5_layer: Any, rows: tuple[int]) -> None:
    listed, total = make_files(*rows), sum(rows)
    for rank in range(3):
        built = hdf5_layer(listed, 2, phase="TRAIN", rank=rank, world=3)
        assert labels_of(built, 9) == [(rank + 3 * k) % total for k in range(18)]


def test_shuffled_rows_come_once_an_epoch_and_in_another_order_each(
    make_files: MakeFiles, hdf5_layer: Any
) -> None:
    built = hdf5_layer(make_files(12, 12), 8, "shuffle: true", phase="TRAIN", seed=4)
    epochs = [labels_of(built, 3) for _ in range(4)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(24)) not in epochs
    again = hdf5_layer(make_files(12, 12), 8, "shuffle: true", phase="TRAIN", seed=4)
    assert labels_of(again, 3) == epochs[0]


def test_shuffling_workers_with_one_seed_share_an_epoch_without_overlap(
    make_files: MakeFiles, hdf5_layer: Any
) -> None:
    listed = make_files(24)
    parts = [
        labels_of(hdf5_layer(listed, 4, "shuffle: true", phase="TRAIN", seed=4, rank=rank, world=2), 3)
        for rank in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == list(range(24))


def test_data_start_goes_on_where_another_run_stopped(make_files: MakeFiles, hdf5_layer: Any) -> None:
    listed = make_files(5, 2)
    expected = labels_of(hdf5_layer(listed, 2, phase="TRAIN", rank=1, world=2), 9)[2 * 6 :]
    options = {"data_start": {"h": 6}}
    assert labels_of(hdf5_layer(listed, 2, phase="TRAIN", rank=1, world=2, options=options), 3) == expected


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_file_too_large_for_memory_gives_the_same_rows(
    make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch, shuffle: bool, world: int
) -> None:
    config = ReaderConfig(
        "hdf5", str(make_files(5, 6)), 4, ("data", "label"), train=True, world=world, shuffle=shuffle
    )

    def rows() -> list[Any]:
        source, taken = Hdf5Source(config), []
        for _ in range(8):
            tops = [np.empty(shape, np.float32) for shape in source.advance()]
            source.write([top.reshape(-1).data.cast("B").cast("f") for top in tops])
            taken.append(np.concatenate([top.reshape(4, -1) for top in tops], axis=1))
        return taken

    whole = rows()
    monkeypatch.setattr(hdf5_source, "WHOLE_BYTES", 0)
    np.testing.assert_array_equal(rows(), whole)


def test_names_in_the_list_may_hold_blanks_or_share_a_line(
    make_files: MakeFiles, hdf5_layer: Any, tmp_path: Path
) -> None:
    listed = make_files(2, 2, 2)
    (tmp_path / "0.h5").rename(tmp_path / "a b.h5")
    listed.write_text(f"  {tmp_path / 'a b.h5'}\n{tmp_path / '1.h5'} {tmp_path / '2.h5'}")
    assert labels_of(hdf5_layer(listed, 6), 1) == list(range(6))


def test_more_than_two_giga_values_are_read_as_they_are_used(
    tmp_path: Path, open_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^31 and more values in one data set, which no memory here holds: rows of both ends."""
    rows, width = 1 << 21, 1025
    with h5py.File(tmp_path / "large.h5", "w") as file:  # sparse: what is not written takes no room
        data = file.create_dataset("data", (rows, width), np.float32, chunks=(1, width))
        data[:4], data[-4:] = 1, 2
        file.create_dataset("label", (rows,), np.int32, chunks=(4096,))[-4:] = 3
    (tmp_path / "list").write_text("large.h5")
    monkeypatch.chdir(tmp_path)
    text = (
        'name: "h" type: "HDF5Data" top: "data" top: "label" '
        'hdf5_data_param {{ source: "list" batch_size: 4 {} }}'
    )
    built = open_layer(text.format(""), "TRAIN", options={"data_start": {"h": rows // 4 - 1}})
    (last, labels), (first, _) = ([top.clone() for top in built.module()] for _ in range(2))
    assert (last == 2).all()
    assert labels.tolist() == [3.0] * 4
    assert (first == 1).all()
    assert open_layer(text.format("shuffle: true"), seed=1).module()[0].shape == (4, width)


def test_rows_that_hdf5_output_has_written_stay_when_the_net_is_reshaped(tmp_path: Path) -> None:
    param = f'hdf5_output_param {{ file_name: "{tmp_path / "out.h5"}" }}'
    with net(inputs(x=(2, 3), t=(2,)) + layer("out", "HDF5Output", "x t", "", param)) as built:
        built.forward(x=np.ones((2, 3)), t=np.ones(2))
        for name, shape in (("x", (4, 3)), ("t", (4,))):
            built.blobs[name].reshape(*shape)
        built.reshape()
        built.forward(x=np.full((4, 3), 2), t=np.ones(4))
        with h5py.File(tmp_path / "out.h5") as file:
            assert file["data"][:, 0, 0, 0].tolist() == [1, 1, 2, 2, 2, 2]
        built.blobs["t"].reshape()
        with pytest.raises(LayerError, match="layer 'out': HDF5Output writes 1 to 4 axes, not"):
            built.reshape()
