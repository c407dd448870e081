"""The face that scripts of the original import: constructors, solvers, callbacks, settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shmtrain
from shmtrain import pycaffe as caffe
from shmtrain.options import ConfigError

NET = """
name: "small"
layer { name: "in" type: "Input" top: "x" include { stage: "deploy" }
  input_param { shape { dim: 2 dim: 3 } } }
layer { name: "d" type: "DummyData" top: "x" top: "t" exclude { stage: "deploy" } dummy_data_param {
  shape { dim: 2 dim: 3 } shape { dim: 2 dim: 1 } data_filler { value: 1 } data_filler { value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {
  num_output: 1 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" exclude { stage: "deploy" } }
"""
SOLVER = """net: "net.prototxt" base_lr: 0.1 lr_policy: "step" gamma: 0.5 stepsize: 4 max_iter: 6
random_seed: 3
test_iter: 2 test_interval: 3 snapshot_prefix: "s" """


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "s.prototxt").write_text(SOLVER)
    return tmp_path


def test_a_net_takes_phase_stages_and_weights_in_both_orders() -> None:
    caffe.set_mode_cpu()
    with caffe.Net("net.prototxt", caffe.TEST, stages=["deploy"]) as net:
        assert (net.inputs, net.outputs) == (["x"], ["y"])
        net.params["ip"][0].data[...] = 2
        net.save("w.caffemodel")
    with caffe.Net("net.prototxt", caffe.TEST, stages=["deploy"], weights="w.caffemodel") as new:
        out = new.forward(x=np.ones((2, 3)))
        np.testing.assert_allclose(out["y"], 6)
    with pytest.warns(DeprecationWarning, match=r"write Net\(file, phase, weights=weights\)"):
        old = caffe.Net("net.prototxt", "w.caffemodel", caffe.TRAIN)
    with old:
        assert (old.params["ip"][0].data == 2).all()
        assert old.phase == "TRAIN"


@pytest.mark.parametrize("phase", [2, -1, "TEST"])
def test_a_phase_that_is_none_is_refused(phase: int | str) -> None:
    with pytest.raises((ValueError, TypeError)):
        caffe.Net("net.prototxt", phase)


def test_stages_that_are_no_list_are_refused() -> None:
    with pytest.raises(TypeError, match=r"stages is a list of names: \['deploy'\], not 'deploy'"):
        caffe.Net("net.prototxt", caffe.TEST, stages="deploy")


def test_a_seed_makes_equal_fillers_and_each_net_its_own() -> None:
    def two() -> list[float]:
        caffe.set_random_seed(5)
        weights = []
        for _ in range(2):
            with caffe.Net("net.prototxt", caffe.TRAIN) as net:
                weights.append(float(net.params["ip"][0].data[0, 0]))
        return weights

    first, second = two(), two()
    assert first == second
    assert first[0] != first[1]


def test_only_the_cpu_is_there() -> None:
    with pytest.raises(RuntimeError, match="CPU only"):
        caffe.set_mode_gpu()
    with pytest.raises(RuntimeError, match="CPU only"):
        caffe.set_device(0)


def test_the_layer_types_are_listed() -> None:
    types = list(caffe.layer_type_list())
    assert {"Convolution", "Data", "SoftmaxWithLoss"} <= set(types)
    assert types == sorted(types)


def test_a_solver_steps_tests_and_shows_its_rate() -> None:
    with shmtrain.Solver("s.prototxt") as solver:
        assert (solver.iter, len(solver.test_nets)) == (0, 1)
        solver.step(3)
        assert solver.lr == pytest.approx(0.1)
        solver.step(2)
        assert solver.iter == 5
        assert solver.lr == pytest.approx(0.05)
        assert (solver.test_nets[0].params["ip"][0].data == solver.net.params["ip"][0].data).all()


def test_the_diff_after_a_step_is_the_update_that_was_subtracted() -> None:
    with caffe.SGDSolver("s.prototxt") as solver:
        before = solver.net.params["ip"][0].data.copy()
        solver.step(1)
        param = solver.net.params["ip"][0]
        np.testing.assert_allclose(before - param.data, param.diff, rtol=1e-5)
        assert np.abs(param.diff).max() > 0


def test_a_script_makes_its_own_step_from_forward_backward_and_apply_update() -> None:
    weights = []
    for by_hand in (False, True):
        with caffe.get_solver("s.prototxt") as solver:
            for _ in range(5):
                if by_hand:
                    solver.net.clear_param_diffs()
                    solver.net.forward()
                    solver.net.backward()
                    solver.apply_update()
                else:
                    solver.step(1)
            assert solver.iter == 5
            weights.append(solver.net.params["ip"][0].data.copy())
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)


def test_callbacks_run_before_each_forward_and_before_each_update() -> None:
    seen: list[str] = []
    with caffe.get_solver("s.prototxt") as solver:
        solver.add_callback(lambda: seen.append("start"), lambda: seen.append("ready"))
        solver.step(2)
    assert seen == ["start", "ready"] * 2


def test_the_base_rate_can_be_set_between_steps() -> None:
    with caffe.get_solver("s.prototxt") as solver:
        solver.step(1)
        before = solver.net.params["ip"][0].data.copy()
        solver.param.base_lr = 0
        solver.step(2)
        assert (solver.net.params["ip"][0].data == before).all()
        assert solver.param.max_iter == 6


def test_solve_trains_to_the_end_saves_and_can_go_on() -> None:
    with caffe.get_solver("s.prototxt") as solver:
        solver.solve()
        assert solver.iter == 6
        want = solver.net.params["ip"][0].data.copy()
    assert Path("s_iter_6.solverstate").exists()
    with caffe.get_solver("s.prototxt") as solver:
        solver.restore("s_iter_6.solverstate")
        assert solver.iter == 6
        assert (solver.net.params["ip"][0].data == want).all()


def test_a_named_solver_class_overrides_the_files_type_and_checks_it() -> None:
    with caffe.AdamSolver("s.prototxt") as solver:
        solver.step(1)
        solver.snapshot()
    Path("s.prototxt").write_text(SOLVER + "momentum: 0.9")
    with pytest.raises(ConfigError, match=r"momentum 0\.9 cannot be used with AdaGrad"):
        caffe.AdaGradSolver("s.prototxt")


def test_a_solver_type_that_is_none_is_told() -> None:
    Path("s.prototxt").write_text(SOLVER + 'type: "Adm"')
    with pytest.raises(ConfigError, match="Adm"):
        caffe.get_solver("s.prototxt")


def test_importing_the_package_loads_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, shmtrain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
