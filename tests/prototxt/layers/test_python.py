"""Python layers: pycaffe's protocol through both executors, and where their code may come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from prototxt import python_modules
from prototxt.errors import LayerError, NetError, PythonLayerError
from prototxt.net import Net
from prototxt.python_layer import Layer
from tests.prototxt.nets import inputs, layer, net, product

CODE = """
    import caffe
    import numpy as np
    from beside import TEN


    class Euclid(caffe.Layer):
        def setup(self, bottom, top):
            if len(bottom) != 2:
                raise Exception("Need two inputs to compute distance.")

        def reshape(self, bottom, top):
            if bottom[0].count != bottom[1].count:
                raise Exception("Inputs must have the same dimension.")
            self.diff = np.zeros_like(bottom[0].data, dtype=np.float32)
            top[0].reshape(1)

        def forward(self, bottom, top):
            self.diff[...] = bottom[0].data - bottom[1].data
            top[0].data[...] = np.sum(self.diff**2) / bottom[0].num / 2.0

        def backward(self, top, propagate_down, bottom):
            self.down = list(propagate_down)
            for i in range(2):
                if propagate_down[i]:
                    bottom[i].diff[...] = (1 if i == 0 else -1) * self.diff / bottom[i].num * top[0].diff[0]


    class Gain(caffe.Layer):
        def setup(self, bottom, top):
            self.blobs.add_blob(1)
            self.blobs[0].data[...] = float(self.param_str)

        def reshape(self, bottom, top):
            top[0].reshape(*bottom[0].data.shape)

        def forward(self, bottom, top):
            top[0].data[...] = self.blobs[0].data * bottom[0].data

        def backward(self, top, propagate_down, bottom):
            self.blobs[0].diff[...] += np.sum(top[0].diff * bottom[0].data)
            bottom[0].diff[...] = self.blobs[0].data * top[0].diff


    class Reversal(caffe.Layer):
        def backward(self, top, propagate_down, bottom):
            bottom[0].diff[...] *= -TEN

        def forward(self, bottom, top):
            pass


    class Phase(caffe.Layer):
        def reshape(self, bottom, top):
            top[0].reshape()

        def forward(self, bottom, top):
            top[0].data[()] = self.phase


    class Broken(caffe.Layer):
        def forward(self, bottom, top):
            raise KeyError("no such row")


    class Stranger:
        pass
"""


class FaceOf:
    """What shmtrain puts in place of the original, as far as these layers need it."""

    def __init__(self) -> None:
        self.module: Any = type(sys)("caffe")
        self.module.Layer = Layer

    def install(self) -> None:
        sys.modules.setdefault("caffe", self.module)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on PYTHONPATH with the module ``userlayers``; nothing of it stays imported."""
    (tmp_path / "userlayers.py").write_text(dedent(CODE))
    (tmp_path / "beside.py").write_text("TEN = 10\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(python_modules, "_FACES", [FaceOf().install])
    monkeypatch.setattr(python_modules, "_FOLDERS", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("caffe", "userlayers", "beside", "elsewhere", "wrong"):
            del sys.modules[name]


def python(kind: str, bottom: str, top: str, more: str = "", param_str: str = "") -> str:
    fields = f'module: "userlayers" layer: "{kind}" param_str: "{param_str}" share_in_parallel: true'
    return layer(kind.lower(), "Python", bottom, top, f"python_param {{ {fields} }} {more}")


REGRESSION = (
    inputs(x=(4, 3), t=(4, 2))
    + product("ip", "x", "a")
    + python("Gain", "a", "b", param_str="1.5")
    + python("Euclid", "b t", "loss", "loss_weight: 3")
)
BUILT_IN = (
    inputs(x=(4, 3), t=(4, 2))
    + product("ip", "x", "a")
    + layer("gain", "Scale", "a", "b", "scale_param { num_axes: 0 filler { value: 1.5 } }")
    + layer("euclid", "EuclideanLoss", "b t", "loss", "loss_weight: 3")
)


def filled(text: str) -> Net:
    built = net(text, seed=3)
    generator = np.random.default_rng(5)
    for name in ("x", "t"):
        built.blobs[name].data[...] = generator.standard_normal(built.blobs[name].shape)
    return built


def test_a_python_loss_trains_as_the_built_in_one_through_both_executors(folder: Path) -> None:
    with filled(REGRESSION) as own, filled(BUILT_IN) as known:
        wanted = known.run()
        wanted.loss.backward()  # type: ignore[no-untyped-call]
        got = own.run()
        got.loss.backward()  # type: ignore[no-untyped-call]
        assert float(got.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-5)
        diffs = [blob.diff.copy() for blobs in known.params.values() for blob in blobs]
        for got_diff, want in zip(_diffs(own), diffs, strict=True):
            np.testing.assert_allclose(got_diff.reshape(want.shape), want, rtol=1e-5)
        own.clear_param_diffs()
        assert own.forward_range(0, len(own.layers) - 1) == pytest.approx(
            float(wanted.loss.detach()), rel=1e-5
        )
        own.backward_range(len(own.layers) - 1, 0)
        for got_diff, want in zip(_diffs(own), diffs, strict=True):
            np.testing.assert_allclose(got_diff.reshape(want.shape), want, rtol=1e-5)
        assert own.layer_dict["euclid"].module.layer.down == [True, False]  # type: ignore[union-attr]


def _diffs(built: Net) -> list[Any]:
    return [blob.diff.copy() for blobs in built.params.values() for blob in blobs]


def test_gradients_of_several_passes_add_up_in_a_python_layers_blobs(folder: Path) -> None:
    with filled(REGRESSION) as own:
        for _ in range(2):
            own.run().loss.backward()  # type: ignore[no-untyped-call]
        twice = own.params["gain"][0].diff.copy()
        own.clear_param_diffs()
        own.run().loss.backward()  # type: ignore[no-untyped-call]
        np.testing.assert_allclose(twice, 2 * own.params["gain"][0].diff, rtol=1e-6)
        assert own.layer_dict["gain"].module.layer.blobs[0].diff == own.params["gain"][0].diff  # type: ignore[union-attr]


def test_a_python_loss_without_a_weight_is_warned_about(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with net(REGRESSION.replace("loss_weight: 3", "")) as own:
        assert not own.has_loss
        assert not own.run().loss.requires_grad
    assert "no layer contributes to the loss: nothing will be trained" in caplog.text
    with net(REGRESSION) as own:
        assert own.run().loss.requires_grad


def test_a_python_layer_in_place_has_its_bottom_as_its_top(folder: Path) -> None:
    text = inputs(x=(2, 3)) + python("Reversal", "x", "x") + layer("y", "Power", "x", "y", "loss_weight: 1")
    with net(text + " force_backward: true") as own:
        own.forward(x=np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(own.blobs["y"].data, np.arange(6).reshape(2, 3))
        own.backward()
        assert (own.blobs["x"].diff == -10).all()


def test_the_shape_may_change_between_forwards(folder: Path) -> None:
    with net(inputs(x=(2, 3)) + python("Gain", "x", "y", param_str="2")) as own:
        own.blobs["x"].reshape(4, 1, 2)
        own.reshape()
        assert own.blobs["y"].shape == (4, 1, 2)
        own.blobs["x"].reshape(5)
        assert own.forward(x=np.ones(5))["y"].shape == (5,)
        own.blobs["x"].data[...] = 3
        assert (own.run().outputs["y"] == 6).all()


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_a_python_layer_knows_its_phase(folder: Path, phase: Any) -> None:
    with net(python("Phase", "", "phase"), phase) as own:
        assert own.forward()["phase"] == (phase == "TEST")


def test_a_learned_blob_is_saved_loaded_and_shared(folder: Path, tmp_path: Path) -> None:
    text = inputs(x=(2,)) + python("Gain", "x", "y", param_str="2")
    with net(text) as one, net(text) as other:
        one.params["gain"][0].data[...] = 7
        one.save(tmp_path / "w.caffemodel")
        other.copy_from(tmp_path / "w.caffemodel")
        assert other.forward(x=[1, 2])["y"].tolist() == [7, 14]
        other.share_with(one)
        one.params["gain"][0].data[...] = 3
        assert other.forward(x=[1, 2])["y"].tolist() == [3, 6]


def test_python_layers_share_a_named_parameter(folder: Path) -> None:
    param = 'param { name: "g" }'
    text = inputs(x=(2,)) + "".join(
        python("Gain", bottom, top, param, "2").replace('name: "gain"', f'name: "{top}"')
        for bottom, top in (("x", "y"), ("y", "z"))
    )
    with net(text) as own:
        assert len(own.learnable) == 1
        own.params["y"][0].data[...] = 3
        assert own.forward(x=[1, 2])["z"].tolist() == [9, 18]


def test_what_a_layer_raises_is_named_with_its_place(folder: Path) -> None:
    with pytest.raises(
        PythonLayerError, match=r"Euclid\.setup: Exception: Need two inputs .*userlayers\.py:10\)"
    ):
        net(inputs(x=(2,)) + python("Euclid", "x", "loss"))
    with net(inputs(x=(2,)) + python("Broken", "x", "y")) as own:
        for run in (own.forward, own.run):
            with pytest.raises(RuntimeError, match=r"net:2: layer 'broken': .*Broken\.forward: KeyError"):
                run()


def test_a_layer_that_exits_or_calls_wrongly_is_named_with_its_own_line(folder: Path) -> None:
    """Not with that of numpy or of this package; and sys.exit(0) does not pass for a good end."""
    (folder / "wrong.py").write_text(
        dedent("""
            import sys
            import caffe
            import numpy as np
            class Same(caffe.Layer):
                def reshape(self, bottom, top):
                    top[0].reshape(*bottom[0].data.shape)
                def forward(self, bottom, top): top[0].data[...] = bottom[0].data
            class Deep(Same):
                def forward(self, bottom, top): np.testing.assert_equal(1, 2)
            class Shape(Same):
                def reshape(self, bottom, top): top[0].reshape("x")
            class Exits(Same):
                def forward(self, bottom, top): sys.exit(0)
            class ExitsBack(Same):
                def backward(self, top, down, bottom): sys.exit(0)
            class Endless(Same):
                def forward(self, bottom, top): self.forward(bottom, top)
        """)
    )
    loss = layer("loss", "Reduction", "y", "loss", "loss_weight: 1")
    for name, line in (("Deep", 10), ("Shape", 12), ("Exits", 14), ("ExitsBack", 16), ("Endless", 18)):
        fields = f'python_param {{ module: "wrong" layer: "{name}" }}'
        text = inputs(x=(2, 2)) + product("ip", "x", "a") + layer("wrong", "Python", "a", "y", fields) + loss
        with pytest.raises(Exception, match=rf"layer 'wrong': wrong\.{name}\.(?s:.)*wrong\.py:{line}\)"):
            _trained_once(text)


def _trained_once(text: str) -> None:
    with net(text) as own:
        own.forward()
        own.backward()


def test_a_class_that_is_no_layer_is_refused(folder: Path) -> None:
    for name, what in (("Stranger", "has no layer"), ("Absent", "has no class"), ("np", "has no layer")):
        with pytest.raises(
            LayerError, match=rf"'userlayers' .*{what} '{name}': a class derived from caffe\.Layer"
        ):
            net(inputs(x=(2,)) + python(name, "x", "y"))
    with pytest.raises(LayerError, match="needs module and layer"):
        net(inputs(x=(2,)) + layer("p", "Python", "x", "y"))


def test_only_modules_on_the_named_path_are_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither beside the net, nor in the working directory, nor installed; and their code has not run."""
    text = inputs(x=(2,)) + python("Gain", "x", "y", param_str="2").replace("userlayers", "elsewhere")
    place = tmp_path / "other"
    place.mkdir()
    (place / "elsewhere.py").write_text((folder / "userlayers.py").read_text())
    (place / "net.prototxt").write_text(text)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", ["", str(place), *sys.path])
    with pytest.raises(
        PythonLayerError, match=r"no module 'elsewhere' on the path for Python layers .*PYTHONPATH"
    ):
        Net(place / "net.prototxt")
    assert "elsewhere" not in sys.modules
    Net(place / "net.prototxt", options={"python_path": [place]}).close()
    assert "elsewhere" in sys.modules


@pytest.mark.parametrize("name", ["antigravity", "json.tool"])
def test_an_installed_module_is_not_loaded_for_a_net(folder: Path, name: str) -> None:
    text = inputs(x=(2,)) + python("Gain", "x", "y").replace("userlayers", name)
    with pytest.raises(PythonLayerError, match=f"no module '{name}' on the path"):
        net(text)
    assert name not in sys.modules


def test_a_package_on_the_named_path_may_hold_layers(folder: Path) -> None:
    package = folder / "elsewhere"
    (package / "inner").mkdir(parents=True)
    for place in (package, package / "inner"):
        (place / "__init__.py").write_text("")
    (package / "inner" / "gain.py").write_text((folder / "userlayers.py").read_text())
    text = inputs(x=(2,)) + python("Gain", "x", "y", param_str="2").replace(
        "userlayers", "elsewhere.inner.gain"
    )
    for _ in range(2):  # loaded, then found
        with net(text) as own:
            assert own.forward(x=[1, 2])["y"].tolist() == [2, 4]


def test_a_module_that_fails_to_load_is_tried_again(folder: Path) -> None:
    text = inputs(x=(2,)) + python("Gain", "x", "y", param_str="2")
    good = (folder / "userlayers.py").read_text()
    (folder / "userlayers.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(PythonLayerError, match="module 'userlayers': No module named 'nothing_of_this_name'"):
        net(text)
    (folder / "userlayers.py").write_text(good + "\n")
    net(text).close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("np.zeros(1)", r"NameError: name 'np' is not defined \(.*/wrong\.py:2\)"),
        ("raise SystemExit(0)", r"SystemExit: 0 \(.*/wrong\.py:2\)"),
        ("import nothing_of_this_name", r"No module named 'nothing_of_this_name' \(.*/wrong\.py:2\)"),
    ],
)
def test_a_module_that_fails_to_load_is_named_with_its_line(folder: Path, line: str, said: str) -> None:
    (folder / "wrong.py").write_text(f"import caffe\n{line}\n")
    text = inputs(x=(2,)) + python("Gain", "x", "y").replace("userlayers", "wrong")
    with pytest.raises(PythonLayerError, match=rf"net:2: layer 'gain': module 'wrong': {said}"):
        net(text)


def test_a_missing_caffe_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_modules, "_FACES", [])
    with pytest.raises(PythonLayerError, match=r"No module named 'caffe' \(`import shmtrain` brings one\)"):
        net(inputs(x=(2,)) + python("Gain", "x", "y", param_str="2"))


def test_a_script_names_its_own_folders_and_not_the_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *sys.path])
    found = python_modules.script_folders()
    assert found[0] == str(tmp_path)
    assert "" not in found
    assert not any(Path(folder, "json").is_dir() or Path(folder, "torch").is_dir() for folder in found)


def test_double_precision_and_strided_bottoms_are_taken(folder: Path) -> None:
    with net(inputs(x=(2, 3)) + python("Gain", "x", "y", param_str="2")) as own:
        made = own.layer_dict["gain"].module(torch.arange(6.0, dtype=torch.float64).view(3, 2).T)
        np.testing.assert_array_equal(made[0].detach().numpy(), 2 * np.arange(6).reshape(3, 2).T)


def test_a_layer_that_loses_its_bottoms_shape_says_so(folder: Path) -> None:
    with filled(REGRESSION) as own:
        own.blobs["t"].reshape(4, 3)
        with pytest.raises(NetError, match="Inputs must have the same dimension"):
            own.run()


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("forward", "def setup(self, bottom, top): pass"),
        ("backward", "def forward(self, bottom, top): pass"),
        ("forward", "def forward(self, bottom): pass"),
        ("__init__", "def __init__(self): pass"),
    ],
)
def test_a_method_that_is_missing_or_takes_other_arguments_is_named_with_the_classs_file(
    folder: Path, method: str, code: str
) -> None:
    """Nothing of the class has run, so there is no line of it."""
    (folder / "wrong.py").write_text(
        f"import caffe\nclass Wrong(caffe.Layer):\n    {code}\n"
        "    def reshape(self, bottom, top): top[0].reshape(*bottom[0].data.shape)\n"
    )
    fields = 'python_param { module: "wrong" layer: "Wrong" }'
    text = inputs(x=(2, 2)) + product("ip", "x", "a") + layer("wrong", "Python", "a", "y", fields)
    with pytest.raises(
        PythonLayerError, match=rf"net:3: layer 'wrong': wrong\.Wrong\.{method}: .*/wrong\.py\)"
    ):
        _trained_once(text + layer("loss", "Reduction", "y", "loss", "loss_weight: 1"))
