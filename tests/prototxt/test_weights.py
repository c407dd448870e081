"""Weight files go out whole and come back equal; files of the original load; what does not fit says why."""

from __future__ import annotations

import logging
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from prototxt import hdf5_weights, schema
from prototxt.caffemodel import blob_array, fill_blob, parse_message, read_message, read_net, write_message
from prototxt.errors import WeightsError
from prototxt.net import Net
from prototxt.schema import wire
from tests.prototxt.nets import inputs, layer, net, product

DATA = inputs(data=(2, 3, 4, 4))
CONV = "convolution_param { num_output: 5 kernel_size: 3 weight_filler { type: 'xavier' } }"
TEXT = (
    'name: "small"\n'
    + DATA
    + layer("conv", "Convolution", "data", "conv", CONV + 'param { name: "w" }')
    + layer("bn", "BatchNorm", "conv", "conv")
    + product("ip", "conv", "ip", 4)
    + layer("twin", "Convolution", "data", "twin", CONV + 'param { name: "w" }')
)


def weights(built: Net) -> dict[str, list[float]]:
    return {f"{n}/{i}": b.data.ravel().tolist() for n, bs in built.params.items() for i, b in enumerate(bs)}


def test_saved_weights_come_back_equal(tmp_path: Path) -> None:
    first, second = net(TEXT, seed=1), net(TEXT, seed=2)
    first.params["bn"][2].data[...] = 3
    first.save(tmp_path / "w.caffemodel")
    assert weights(first) != weights(second)
    second.copy_from(tmp_path / "w.caffemodel")
    assert weights(first) == weights(second)
    assert weights(net(TEXT, weights=tmp_path / "w.caffemodel")) == weights(first)
    assert [p.name for p in tmp_path.iterdir()] == ["w.caffemodel"]


def test_a_saved_file_is_plain_caffe(tmp_path: Path) -> None:
    built = net(TEXT, seed=1)
    built.forward()
    built.save(tmp_path / "w.caffemodel", diff=True)
    message = schema.NetParameter.FromString((tmp_path / "w.caffemodel").read_bytes())
    assert (message.name, message.layer[0].type, message.layer[0].phase) == ("small", "Input", 0)
    by_name = {entry.name: entry for entry in message.layer}
    assert "data_data_0_split" in by_name
    assert list(by_name["conv"].blobs[0].shape.dim) == [5, 3, 3, 3]
    assert list(by_name["conv"].blobs[0].data) == built.params["conv"][0].data.ravel().tolist()
    assert list(by_name["twin"].blobs[0].data) == list(by_name["conv"].blobs[0].data)
    assert list(by_name["conv"].blobs[1].diff) == [0] * 5
    assert [param.lr_mult for param in by_name["bn"].param] == [0, 0, 0]
    assert not net(TEXT).to_proto().layer[2].blobs[0].HasField("diff")


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdaDelta"])
def test_snapshots_of_the_original_load_equal(
    shared: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / "golden" / "solvers"
    monkeypatch.chdir(folder)
    files = sorted(folder.glob(f"snap_{kind}_BINARYPROTO/*.caffemodel"))
    if not files:
        pytest.skip(f"no snapshot of {kind} among the references")
    want = np.load(folder / f"snap_{kind}_BINARYPROTO.npz")
    with Net(folder / "smallnet.prototxt", weights=files[0]) as built:
        compared = 0
        for name, blobs in built.params.items():
            for index, blob in enumerate(blobs):
                np.testing.assert_array_equal(blob.data, want[f"w8/{name}/{index}"])
                compared += 1
    assert compared >= 4


def test_hdf5_weights_of_the_original_load_equal(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared / "golden" / "solvers"
    monkeypatch.chdir(folder)
    (file,) = folder.glob("snap_SGD_HDF5/*.caffemodel.h5")
    want = np.load(folder / "snap_SGD_HDF5.npz")
    with Net(folder / "smallnet.prototxt", weights=file) as built:
        for name, blobs in built.params.items():
            for index, blob in enumerate(blobs):
                np.testing.assert_array_equal(blob.data, want[f"w8/{name}/{index}"])


# Matching -------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, *layers: tuple[str, list[np.ndarray]]) -> Path:
    message = wire.NetParameter()
    for name, blobs in layers:
        entry = message.layer.add(name=name, type="Whatever")
        for array in blobs:
            fill_blob(entry.blobs.add(), array)
    write_message(tmp_path / "w.caffemodel", message)
    return tmp_path / "w.caffemodel"


IP = inputs(data=(1, 6)) + product("fc6", "data", "fc6", 4)


def test_layers_match_by_name_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ones = [np.ones((4, 6), np.float32), np.ones(4, np.float32)]
    built = net(IP + product("mine", "fc6", "mine", 2))
    mine = built.params["mine"][0].data.copy()
    with caplog.at_level(logging.INFO):
        built.copy_from(saved(tmp_path, ("fc6", ones), ("fc8", ones), ("data", [])))
    assert built.params["fc6"][0].data.min() == 1
    assert (built.params["mine"][0].data == mine).all()
    assert [r.message for r in caplog.records if r.levelno == logging.INFO] == ["Ignoring source layer fc8"]


def test_layers_of_one_name_match_in_their_order(tmp_path: Path) -> None:
    text = inputs(data=(1, 6)) + product("ip", "data", "a", 4) + product("ip", "data", "b", 4)
    first, second = net(text, seed=1), net(text, seed=2)
    first.save(tmp_path / "w")
    second.copy_from(tmp_path / "w")
    values = [[entry.param.tolist() for entry in built.learnable] for built in (first, second)]
    assert values[0] == values[1]
    assert values[0][0] != values[0][2]


def test_four_legacy_sizes_fit_fewer_axes(tmp_path: Path) -> None:
    message = wire.NetParameter()
    entry = message.layer.add(name="fc6")
    for height, width in ((4, 6), (1, 4)):
        values = np.arange(height * width, dtype="<f4")
        entry.blobs.add(num=1, channels=1, height=height, width=width, data=values.tobytes())
    write_message(tmp_path / "w", message)
    built = net(IP, weights=tmp_path / "w")
    assert built.params["fc6"][0].data.tolist()[1] == [6, 7, 8, 9, 10, 11]
    assert built.params["fc6"][1].data.tolist() == [0, 1, 2, 3]
    conv = layer("fc6", "Convolution", "data", "fc6", "convolution_param { num_output: 4 kernel_size: 1 }")
    with pytest.raises(
        WeightsError, match=r"Source param shape is 1 1 4 6 \(24\); target param shape is 4 6 1 1 \(24\)"
    ):
        net(inputs(data=(1, 6, 1, 1)) + conv, weights=tmp_path / "w")


def test_another_shape_is_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    built = net(IP + product("fc7", "fc6", "fc7", 2))
    before = weights(built)
    good = [np.ones((4, 6), np.float32), np.ones(4, np.float32)]
    bad = [np.ones((3, 4), np.float32), np.ones(3, np.float32)]
    message = (
        r"Cannot copy param 0 weights from layer 'fc7'; shape mismatch. Source param shape is 3 4 \(12\); "
        r"target param shape is 2 4 \(8\).*rename the layer"
    )
    with pytest.raises(WeightsError, match=message):
        built.copy_from(saved(tmp_path, ("fc6", good), ("fc7", bad)))
    assert weights(built) == before


def test_another_number_of_blobs_is_refused(tmp_path: Path) -> None:
    five = [np.zeros(3, np.float32)] * 5
    with pytest.raises(
        WeightsError, match="Incompatible number of blobs for layer bn1: the file has 5, the net 3"
    ):
        net(
            inputs(data=(2, 3)) + layer("bn1", "BatchNorm", "data", "y"),
            weights=saved(tmp_path, ("bn1", five)),
        )
    with pytest.raises(
        WeightsError, match="Incompatible number of blobs for layer data: the file has 5, the net 0"
    ):
        net(IP, weights=saved(tmp_path, ("data", five)))


def test_old_weight_files_with_v1_layers_and_bare_inputs_load(tmp_path: Path) -> None:
    message = wire.NetParameter(input=["data"])
    old = message.layers.add(name="fc6", type=14, blobs_lr=[1, 2])
    fill_blob(old.blobs.add(), np.full((4, 6), 2, np.float32))
    fill_blob(old.blobs.add(), np.full(4, 3, np.float32))
    write_message(tmp_path / "w", message)
    assert [entry.type for entry in read_net(tmp_path / "w").layer] == ["InnerProduct"]
    assert net(IP, weights=tmp_path / "w").params["fc6"][1].data.tolist() == [3] * 4


def test_hdf5_weights_load_with_slashes_in_names(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    text = inputs(data=(1, 6)) + product("in/1x1", "data", "y", 4)
    with h5py.File(tmp_path / "w", "w") as file:
        file["data/in/1x1/0"] = np.ones((4, 6), np.float32)
        file["data/in/1x1/1"] = np.full(4, 5, np.float32)
    assert net(text, weights=tmp_path / "w").params["in/1x1"][1].data.tolist() == [5] * 4
    with h5py.File(tmp_path / "w", "a") as file:
        del file["data/in/1x1/1"]
    with pytest.raises(WeightsError, match="Incompatible number of blobs for layer in/1x1"):
        net(text, weights=tmp_path / "w")


def test_a_state_or_a_mean_given_as_weights_is_told_as_what_it_is(tmp_path: Path) -> None:
    write_message(tmp_path / "s_iter_1.solverstate", wire.SolverState(iter=1, learned_net="w", history=[{}]))
    hdf5_weights.write_state(tmp_path / "s_iter_1.solverstate.h5", {"iter": 1}, "w", [])
    for ending in ("", ".h5"):
        path = tmp_path / f"s_iter_1.solverstate{ending}"
        with pytest.raises(WeightsError, match=rf"use --snapshot; the weights are .*caffemodel{ending}$"):
            net(IP, weights=path)
    mean = schema.BlobProto(num=1, channels=1, height=1, width=2, data=[1, 2])
    (tmp_path / "mean.binaryproto").write_bytes(mean.SerializeToString())
    with pytest.raises(WeightsError, match=r"mean.binaryproto: not a weight file: it holds no layers"):
        net(IP, weights=tmp_path / "mean.binaryproto")


def test_a_file_of_which_nothing_fits_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net(IP, weights=saved(tmp_path, ("other", [np.ones((4, 6), np.float32)])))
    assert "nothing was loaded: no layer with parameters has a name that the net has too" in caplog.text


# Files ----------------------------------------------------------------------------------------------------


def test_unpacked_floats_are_read_too() -> None:
    values = [1.0, -2.5, 3.0]
    raw = b"".join(b"\x2d" + np.float32(value).tobytes() for value in values) + b"\x3a\x03\x0a\x01\x03"
    assert schema.BlobProto.FromString(raw).data == values
    blob = parse_message(raw, "BlobProto")
    assert blob_array(blob).tolist() == values
    assert schema.BlobProto.FromString(blob.SerializeToString()).data == values


def test_doubles_are_read_as_floats() -> None:
    blob = parse_message(
        schema.BlobProto(double_data=[1, 2], num=1, channels=2, height=1, width=1).SerializeToString(),
        "BlobProto",
    )
    assert blob_array(blob).tolist() == [[[[1]], [[2]]]]


def test_a_mean_file_and_a_solver_state_of_the_original_are_read(shared: Path) -> None:
    mean = read_message(shared / "golden" / "data" / "mean.binaryproto", "BlobProto")
    assert blob_array(mean).ndim == 4
    (state,) = (shared / "golden" / "cli").glob("full_iter_12.solverstate")
    read = read_message(state, "SolverState")
    assert (read.iter, read.learned_net) == (12, "full_iter_12.caffemodel")
    assert all(np.isfinite(blob_array(entry)).all() for entry in read.history)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file or directory"),
        (b"", "the file is empty; a NetParameter was expected"),
        (b"\x89HDF\r\n\x1a\n1234", "cannot be read as an HDF5 weight file"),
        (b'name: "a"\nlayer { }', "not a binary NetParameter .is it a text prototxt"),
        ("truncated", "not a binary NetParameter .is it truncated"),
        ("wrong count", r"a blob of shape \(4, 6\) holds 3 numbers, not 24"),
    ],
)
def test_a_file_that_is_no_weight_file_says_so(
    tmp_path: Path, content: bytes | str | None, message: str
) -> None:
    path = tmp_path / "w.caffemodel"
    if content == "truncated":
        net(TEXT).save(path)
        path.write_bytes(path.read_bytes()[:-40])
    elif content == "wrong count":
        plain = schema.NetParameter()
        blob = plain.layer.add(name="fc6").blobs.add(data=[1, 2, 3])
        blob.shape.dim.extend([4, 6])
        plain.layer[0].blobs.add().shape.dim.append(4)
        path.write_bytes(plain.SerializeToString())
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        net(IP, weights=path)


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "w.caffemodel"
    built = net(IP)
    built.save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(WeightsError, match=r"cannot write .*w.caffemodel: File too large .* bytes"):
            built.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.caffemodel"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"cannot write .*/nowhere/w.caffemodel: No such file or directory"
    ):
        net(IP).save(tmp_path / "nowhere" / "w.caffemodel")
