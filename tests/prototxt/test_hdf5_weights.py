"""HDF5 weights and states: their layout, what loads, and that no file does harm."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from prototxt import hdf5_weights
from prototxt.errors import WeightsError
from prototxt.net import Net
from tests.prototxt.nets import inputs, layer, net, product

SHARED = 'param { name: "w" } param { name: "b" }'
TEXT = (
    inputs(data=(2, 6))
    + product("in/1x1", "data", "a", 4)
    + layer("relu", "ReLU", "a", "a")
    + product("left", "a", "l", 3, SHARED)
    + product("right", "a", "r", 3, SHARED)
)


def built(seed: int = 3) -> Net:
    return net(TEXT, seed=seed)


def values(of: Net) -> dict[str, Any]:
    return {f"{name}/{i}": b.data.copy() for name, blobs in of.params.items() for i, b in enumerate(blobs)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    built().save_hdf5(tmp_path / "w")
    return tmp_path / "w"


def test_a_group_for_every_layer_and_shared_parameters_under_their_owner(tmp_path: Path) -> None:
    of = built()
    of.params["in/1x1"][0].diff[...] = 5
    of.save_hdf5(tmp_path / "w.h5", diff=True)
    with h5py.File(tmp_path / "w.h5") as file:
        data = file["data"]
        assert set(data) == {"data", "in", "relu", "left", "right", "a_relu_0_split"}
        assert (set(data["in/1x1"]), set(data["left"])) == ({"0", "1"}, {"0", "1"})
        assert (len(data["right"]), len(data["relu"])) == (0, 0)
        assert (data["left/0"].shape, data["left/0"].dtype) == ((3, 4), np.float32)
        assert (file["diff/in/1x1/0"][()] == 5).all()
        assert set(file["diff/right"]) == {"0", "1"}


def test_what_was_saved_loads_whatever_the_file_is_called(saved: Path) -> None:
    for name in ("x.caffemodel", "x.h5", "x"):
        saved.rename(saved.parent / name)
        saved = saved.parent / name
        other = built(4)
        other.copy_from(saved)
        for key, value in values(built()).items():
            np.testing.assert_array_equal(values(other)[key], value)


def test_layers_that_the_net_lacks_are_ignored_and_those_the_file_lacks_are_kept(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    other = net(inputs(data=(2, 6)) + product("in/1x1", "data", "a", 4) + product("new", "a", "n", 2), seed=8)
    before = values(other)
    other.load_hdf5(saved)
    assert "Ignoring source layer left" in caplog.text
    assert "Ignoring source layer in" not in caplog.text
    np.testing.assert_array_equal(values(other)["new/0"], before["new/0"])
    np.testing.assert_array_equal(values(other)["in/1x1/0"], values(built())["in/1x1/0"])


@pytest.mark.parametrize(
    ("message", "put", "value"),
    [
        (r"shape mismatch. Source param shape is 4 5 \(20\)", "data/in/1x1/0", np.ones((4, 5))),
        ("Incompatible number of blobs for layer left", "data/left/1", None),
        ("Incompatible number of blobs for layer in/1x1", "data/in/1x1/2", np.ones(1)),
        ("/data/left/1 is of type object, not numbers", "data/left/1", ["abc"] * 3),
        ("has no group 'data'", "data", None),
        ("has no group 'data'", "data", np.ones(1)),
    ],
)
def test_a_difference_is_named_and_nothing_is_copied(message: str, put: str, value: Any, saved: Path) -> None:
    with h5py.File(saved, "a") as file:
        if put in file:
            del file[put]
        if value is not None:
            file[put] = value
    other = built(4)
    before = values(other)
    with pytest.raises(WeightsError, match=message):
        other.copy_from(saved)
    for key, old in before.items():
        np.testing.assert_array_equal(values(other)[key], old)


def test_links_out_of_the_place_are_not_followed(saved: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret", "w") as file:
        file["x"] = np.ones((4, 6), np.float32)
    for link in (h5py.ExternalLink(str(tmp_path / "secret"), "/x"), h5py.SoftLink("/data/left/0")):
        with h5py.File(saved, "a") as file:
            del file["data/in/1x1/0"]
            file["data/in/1x1/0"] = link
        with pytest.raises(WeightsError, match="Incompatible number of blobs for layer in/1x1"):
            built().copy_from(saved)


@pytest.mark.parametrize("name", ["", ".", "a//b", "/a", "a/"])
def test_a_name_that_no_group_can_have_is_told_when_it_is_saved(name: str, tmp_path: Path) -> None:
    of = net(inputs(data=(2, 6)) + product(name, "data", "a", 4))
    with pytest.raises(WeightsError, match=f"layer '{name}' cannot be a group of an HDF5 file"):
        of.save_hdf5(tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_two_layers_of_one_name_and_a_layer_named_like_a_blob_are_refused(tmp_path: Path) -> None:
    for names in (("a", "a"), ("a", "a/0")):
        first, second = (product(n, "data", f"t{i}", 4) for i, n in enumerate(names))
        with pytest.raises(WeightsError, match="cannot write"):
            net(inputs(data=(2, 6)) + first + second).save_hdf5(tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_replaced_stays_as_it_was(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(WeightsError, match=r"cannot write .*No space left on device"):
        built(9).save_hdf5(saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["w"]
    with pytest.raises(WeightsError, match=r"cannot write .*No such file or directory"):
        built(9).save_hdf5(saved.parent / "none" / "w")


# States ---------------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    history = [np.arange(6, dtype=np.float32).reshape(2, 3), np.float32(7).reshape(())]
    hdf5_weights.write_state(tmp_path / "s", {"iter": 9, "current_step": 2}, "a b/ü.h5", history)
    numbers, learned, arrays = hdf5_weights.read_state(tmp_path / "s")
    assert (numbers, learned) == ({"iter": 9, "current_step": 2}, "a b/ü.h5")
    for got, want in zip(arrays, history, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("iter", None, "no iter or no history"),
        ("history/0", None, "history 0 of 1 is missing"),
        ("history/1", 1 << 40, "its history claims more numbers than the file has bytes"),
        ("iter", [1, 2], "iter is not one whole number"),
        ("learned_net", [1], "learned_net is not a text"),
    ],
)
def test_a_state_that_is_none_says_why(name: str, value: Any, message: str, tmp_path: Path) -> None:
    hdf5_weights.write_state(tmp_path / "s", {"iter": 9}, "w", [np.ones(3, np.float32)] * 2)
    with h5py.File(tmp_path / "s", "a") as file:
        del file[name]
        if isinstance(value, int):  # so many zeros, of which none is stored
            file.create_dataset(name, (value,), "f4", chunks=(1 << 20,))
        elif value is not None:
            file[name] = value
    assert (tmp_path / "s").stat().st_size < 1 << 16
    with pytest.raises(WeightsError, match=message):
        hdf5_weights.read_state(tmp_path / "s")


def test_damaged_files_end_in_our_error(saved: Path, tmp_path: Path) -> None:
    """Loading gives what a shape check lets pass, or a WeightsError; nothing else."""
    hdf5_weights.write_state(tmp_path / "s", {"iter": 9}, "w", [np.ones(3, np.float32)] * 2)
    rng, refused = random.Random(5), 0
    target = built()
    for path, read in ((saved, target.copy_from), (tmp_path / "s", hdf5_weights.read_state)):
        whole = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(whole)
            for _ in range(rng.choice((1, 4, 20))):
                damaged[rng.randrange(8, len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged[: rng.randrange(8, len(damaged))] if rng.random() < 0.2 else damaged)
            try:
                read(path)
            except WeightsError as error:
                refused += str(path) in str(error)
    assert refused > 15
