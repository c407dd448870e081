"""What scripts do with a net: layers and blobs, batches, callbacks, input arrays, files, Python layers."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prototxt.errors import PrototxtError
from shmtrain import pycaffe as caffe
from shmtrain.pycaffe import alias

NET = """
name: "small"
force_backward: true
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 } } }
layer { name: "a/1" type: "InnerProduct" bottom: "data" top: "a" inner_product_param {
  num_output: 2 weight_filler { type: "gaussian" } bias_filler { type: "gaussian" } } }
layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param {
  num_output: 3 weight_filler { type: "gaussian" } } }
layer { name: "c" type: "Power" bottom: "a" top: "c" power_param { scale: 2 } }
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[caffe.Net]:
    monkeypatch.chdir(tmp_path)
    Path("net").write_text(NET)
    caffe.set_random_seed(2)
    with caffe.Net("net", caffe.TRAIN) as made:
        yield made


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)


def test_layers_have_types_and_the_blobs_of_params(net: caffe.Net) -> None:
    split = "a_relu_0_split"
    assert list(net.layer_dict) == net._layer_names == ["data", "a/1", "relu", split, "b", "c"]
    assert [layer.type for layer in net.layers] == [
        "Input", "InnerProduct", "ReLU", "Split", "InnerProduct", "Power",
    ]  # fmt: skip
    assert net.layer_dict["b"].blobs[0] is net.params["b"][0]
    assert net.layers[2].blobs == []
    net.layers[1].blobs[0].data[...] = 1
    net.layers[1].blobs[1].data[...] = 0
    assert net.forward(data=np.ones((4, 3)), end="a/1")["a"].tolist() == [[3, 3]] * 4


def test_names_by_index_agree_with_names(net: caffe.Net) -> None:
    names = net._blob_names
    assert [names[i] for i in net._inputs] == net.inputs == ["data"]
    assert [names[i] for i in net._outputs] == net.outputs == ["b", "c"]
    for i, name in enumerate(net._layer_names):
        assert [names[k] for k in net._top_ids(i)] == net.top_names[name]
        assert [names[k] for k in net._bottom_ids(i)] == net.bottom_names[name]
    assert len(net._blobs) == len(net.blobs) == len(net.blob_loss_weights)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_forward_all_goes_through_in_batches_and_leaves_no_padding(count: int, net: caffe.Net) -> None:
    data = rows(count)
    got = net.forward_all(blobs=["a"], data=data)
    assert set(got) == {"a", "b", "c"}
    assert {name: len(values) for name, values in got.items()} == dict.fromkeys(got, count)
    weights, bias = (blob.data for blob in net.params["a/1"])
    np.testing.assert_allclose(got["a"], np.maximum(data @ weights.T + bias, 0), rtol=1e-4, atol=1e-6)


def test_forward_backward_all_gives_the_diffs_of_all_rows(net: caffe.Net) -> None:
    data = rows(6)
    seeds = {"b": np.ones((6, 3), np.float32), "c": np.zeros((6, 2), np.float32)}
    blobs, diffs = net.forward_backward_all(blobs=["a"], diffs=["a"], data=data, **seeds)
    assert blobs["b"].shape == (6, 3)
    above = np.ones((6, 3)) @ net.params["b"][0].data * (blobs["a"] > 0)
    np.testing.assert_allclose(diffs["data"], above @ net.params["a/1"][0].data, rtol=1e-4, atol=1e-5)
    assert diffs["a"].shape == (6, 2)
    with pytest.raises(ValueError, match=r"equally many rows: \[5, 6\]"):
        net.forward_backward_all(data=data[:5], **seeds)
    with pytest.raises(ValueError, match="no array is given"):
        net.forward_all()


def test_callbacks_see_each_layer_before_and_after(net: caffe.Net) -> None:
    seen: list[tuple[str, int]] = []
    for name in ("before_forward", "after_forward", "before_backward", "after_backward"):
        getattr(net, name)(lambda index, name=name: seen.append((name, index)))
    net.forward(start="b", end="b")
    net.backward(start="b", end="b")
    assert seen == [
        ("before_forward", 4), ("after_forward", 4), ("before_backward", 4), ("after_backward", 4),
    ]  # fmt: skip


def test_a_solver_steps_layer_by_layer_while_somebody_looks_on(tmp_path: Path) -> None:
    """And comes to the same weights as one that is not watched."""
    text = (
        NET.replace("Input", "DummyData")
        .replace(
            "input_param { shape { dim: 4 dim: 3 } }",
            "dummy_data_param { shape { dim: 4 dim: 3 } data_filler { value: 1 } }",
        )
        .replace("force_backward: true", "")
    )
    text += 'layer { name: "l" type: "EuclideanLoss" bottom: "c" bottom: "a" top: "l" }'  # fmt: skip
    (tmp_path / "net").write_text(text)
    solver = f'net: "{tmp_path}/net" base_lr: 0.01 lr_policy: "fixed" max_iter: 9 random_seed: 4'
    (tmp_path / "solver").write_text(solver + f' snapshot_prefix: "{tmp_path}/s"')
    weights, seen = [], []
    for watched in (False, True):
        with caffe.get_solver(str(tmp_path / "solver")) as made:
            if watched:
                made.net.after_backward(seen.append)
            made.step(3)
            weights.append(made.net.params["a/1"][0].data.copy())
            assert float(made.net.blobs["l"].data) > 0
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)
    assert len(seen) == 3 * len(made.net.layers)


def test_a_solver_shares_its_weights_with_a_net(net: caffe.Net, tmp_path: Path) -> None:
    text = f'net: "net" base_lr: 0.1 lr_policy: "fixed" max_iter: 1 snapshot_prefix: "{tmp_path}/s"'
    Path("solver").write_text(text)
    with caffe.SGDSolver("solver") as solver:
        solver.share_weights(net)
        solver.net.params["b"][0].data[...] = 5
        assert (net.params["b"][0].data == 5).all()


def test_both_kinds_of_weight_files_load_by_either_name(net: caffe.Net) -> None:
    net.save("w.h5")  # binary, whatever its name
    net.save_hdf5("w.caffemodel")
    want = net.params["a/1"][0].data.copy()
    for load in ("copy_from", "load_hdf5"):
        for file in ("w.h5", "w.caffemodel"):
            net.params["a/1"][0].data[...] = 0
            getattr(net, load)(file)
            np.testing.assert_array_equal(net.params["a/1"][0].data, want)


def test_arrays_for_a_memory_data_layer_are_checked_and_used(tmp_path: Path, net: caffe.Net) -> None:
    Path("m").write_text('layer { name: "m" type: "MemoryData" top: "x" top: "y" memory_data_param '
                         "{ batch_size: 2 channels: 1 height: 2 width: 3 } }")  # fmt: skip
    with caffe.Net("m", caffe.TEST) as memory:
        data = np.arange(24, dtype=np.float32).reshape(4, 1, 2, 3)
        labels = np.arange(4, dtype=np.float32)
        memory.set_input_arrays(data, labels)
        assert [memory.forward()["y"].ravel().tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
        memory.set_input_arrays(data, labels.reshape(4, 1, 1, 1))
        np.testing.assert_array_equal(memory.forward()["x"], data[:2])
        with pytest.raises(RuntimeError, match=r"3 rows are no multiple of batch_size 2"):
            memory.set_input_arrays(data[:3], labels[:3])
        with pytest.raises(RuntimeError, match="must be float32"):
            memory.set_input_arrays(data.astype(float), labels)
    with pytest.raises(RuntimeError, match="needs a MemoryData layer first; 'data' is a Input"):
        net.set_input_arrays(data, labels)


def test_blobs_outlive_their_net_and_nets_their_solver(tmp_path: Path) -> None:
    (tmp_path / "net").write_text(NET)
    net = caffe.Net(str(tmp_path / "net"), caffe.TRAIN)
    net.forward(data=np.ones((4, 3)))
    view, blob = net.blobs["c"].data, net.params["b"][0]
    want = view.copy()
    del net
    gc.collect()
    np.testing.assert_array_equal(view, want)
    assert blob.data.size == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the old order of arguments
def test_a_file_that_is_not_there_is_a_runtime_error(net: caffe.Net) -> None:
    for call in (lambda: caffe.Net("none", caffe.TEST), lambda: caffe.Net("net", "none", caffe.TEST),
                 lambda: caffe.Net("net", caffe.TEST, weights="none")):  # fmt: skip
        with pytest.raises(RuntimeError, match="Could not open file none"):
            call()


def test_settings_are_taken_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert (caffe.solver_count(), caffe.solver_rank(), caffe.has_nccl()) == (1, 0, False)
    caffe.set_solver_count(3)
    caffe.set_solver_rank(2)
    caffe.set_multiprocess(True)
    assert (caffe.solver_count(), caffe.solver_rank()) == (3, 2)
    caffe.set_solver_count(1)
    caffe.set_solver_rank(0)
    with pytest.raises(RuntimeError, match=r"has_nccl.*--workers N"):
        caffe.NCCL(None, b"")
    caffe.log("first")
    caffe.init_log(1)
    caffe.log("second")
    caffe.init_log(0, False)
    caffe.log("third")
    caffe.init_log()
    caffe.log("fourth")
    lines = capsys.readouterr().err.splitlines()
    assert [line[0] + line.rpartition("] ")[2] for line in lines] == ["Ifirst", "Ifourth"]
    with pytest.raises(ValueError, match="log level 4 is out of range"):
        caffe.init_log(4)


def test_a_timer_counts_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=10.0)
    monkeypatch.setattr("shmtrain.pycaffe.settings.time", clock)
    timer = caffe.Timer()
    timer.stop()
    assert timer.ms == 0
    timer.start()
    clock.now = 10.5
    assert timer.ms == 500
    timer.stop()
    clock.now = 99
    timer.stop()
    assert timer.ms == 500


# import caffe ---------------------------------------------------------------------------------------------


def test_import_caffe_gives_this_face_and_no_copy_of_it() -> None:
    assert "caffe" not in sys.modules
    alias.install()
    alias.install()
    try:
        import caffe as other
        import caffe.io
        from caffe import layers
        from caffe.coord_map import crop
        from caffe.proto import caffe_pb2

        import shmtrain.pycaffe.coord_map as ours

        assert other is sys.modules["shmtrain.pycaffe"]
        assert (layers, crop, caffe_pb2) == (other.layers, ours.crop, other.proto.caffe_pb2)
        assert caffe.io is sys.modules["shmtrain.pycaffe.io"]
        assert other.__spec__.name == "shmtrain.pycaffe"
        with pytest.raises(ModuleNotFoundError, match=r"caffe\.nothing"):
            import caffe.nothing
    finally:
        alias.uninstall()
    with pytest.raises(ModuleNotFoundError):
        import caffe
    assert "shmtrain.pycaffe.io" in sys.modules


@pytest.mark.parametrize(
    ("files", "always", "theirs"),
    [
        (["__init__.py"], False, True),
        (["__init__.py"], True, False),
        (["__init__.py", "_caffe.cpp"], False, False),  # the original's source, never built
        (["__init__.py", "_caffe.cpp", "_caffe.so"], False, True),
    ],
)
def test_an_original_that_is_installed_comes_first_unless_ours_is_asked_for(
    files: list[str], always: bool, theirs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "caffe").mkdir()
    for name in files:
        (tmp_path / "caffe" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    alias.install()
    alias.install(always)
    try:
        import caffe as found

        assert (found is not sys.modules["shmtrain.pycaffe"]) == theirs
    finally:
        alias.uninstall()
        sys.modules.pop("caffe", None)


SCRIPT = """
import sys
import numpy as np
import caffe

caffe.set_mode_gpu()
net = caffe.Net(sys.argv[1], caffe.TEST)
assert net.layers[1].seen == 0, "a Python layer is the script's own object"
print(caffe.__name__, net.forward(data=np.ones((4, 3)))["y"].sum(), net.layers[1].seen, *sys.argv[2:])
"""
LAYER = """
import caffe


class Twice(caffe.Layer):
    def setup(self, bottom, top):
        self.seen = 0

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        self.seen += 1
        top[0].data[...] = 2 * bottom[0].data
"""


def test_a_script_for_the_original_runs_unchanged_with_its_python_layers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text(LAYER)
    (tmp_path / "net").write_text(NET[: NET.index('layer { name: "a/1"')] + (
        'layer { name: "t" type: "Python" bottom: "data" top: "y" '
        'python_param { module: "mine" layer: "Twice" } }'))  # fmt: skip
    (tmp_path / "caffe.py").write_text("raise ImportError('another caffe')")
    command = [sys.executable, "-m", "shmtrain.pycaffe", "--cpu"]
    ran = subprocess.run([*command, tmp_path / "script.py", tmp_path / "net", "-v"],
                         capture_output=True, text=True, timeout=100, check=False)  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["shmtrain.pycaffe", "24.0", "1", "-v"]


def test_running_no_script_tells_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    from shmtrain.pycaffe.__main__ import main

    assert (main([]), main(["-x"]), main(["none.py"]), main(["--help"])) == (2, 2, 2, 0)
    told = capsys.readouterr()
    assert "usage: python -m shmtrain.pycaffe [--cpu] SCRIPT.py" in told.err
    assert "usage: " in told.out
    assert "no such script: " in told.err


def test_errors_of_a_net_are_those_of_prototxt(net: caffe.Net) -> None:
    Path("bad").write_text(NET.replace("InnerProduct", "Inner"))
    with pytest.raises(PrototxtError, match="unknown layer type 'Inner'"):
        caffe.Net("bad", caffe.TRAIN)
    with pytest.raises(PrototxtError, match="the net has no layer 'nope'"):
        net.forward(start="nope")
