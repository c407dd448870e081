"""Each fault of a solver file or the command line has its own clear message, before anything is started."""

# ruff: noqa: E501  (a table with one fault a line)

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from shmtrain.config import TrainConfig
from shmtrain.options import ConfigError, Options

NET = 'name: "n"\nlayer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 } } }\n'
GOOD = 'net: "net.prototxt"\nbase_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 10\nsnapshot_after_train: false\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a net file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "empty.prototxt").write_text("# no layer\n")
    return tmp_path


def load(text: str, options: Options | None = None) -> TrainConfig:
    Path("solver.prototxt").write_text(text)
    return TrainConfig.load("solver.prototxt", options)


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


FAULTS = {
    "no train net": (changed('net: "net.prototxt"\n', ""), "solver.prototxt: a train net must be specified by one of"),
    "two train nets": (GOOD + 'train_net: "net.prototxt"\n', "net and train_net are both given; only one of net, net_param"),
    "missing net": (changed("net.prototxt", "nets/other.prototxt"), "nets/other.prototxt (relative to the working directory)"),
    "no lr_policy": (changed('lr_policy: "fixed"\n', ""), "lr_policy is missing (allowed: fixed, step, exp, inv"),
    "unknown lr_policy": (changed("fixed", "stepp"), "lr_policy 'stepp' is unknown (allowed: fixed, step"),
    "no base_lr": (changed("base_lr: 0.1\n", ""), "base_lr is missing"),
    "nan base_lr": (changed("0.1", "nan"), "base_lr nan is not a finite number"),
    "negative gamma": (changed('"fixed"', '"exp" gamma: -0.5'), "gamma -0.5 must be at least 0 for lr_policy 'exp'"),
    "no stepsize": (changed('"fixed"', '"step" gamma: 0.5'), "stepsize 0 must be above 0 for lr_policy 'step'"),
    "poly to 0": (changed('"fixed"\nmax_iter: 10', '"poly" power: 1'), "max_iter must be above 0 for lr_policy 'poly'"),
    "unknown type": (GOOD + 'type: "Adamm"\n', "solver type 'Adamm' is unknown (allowed: SGD, Nesterov, AdaGrad, RMSProp, AdaDelta, Adam); did you mean 'Adam'?"),
    "momentum with AdaGrad": (GOOD + 'type: "AdaGrad" momentum: 0.9\n', "momentum 0.9 cannot be used with AdaGrad"),
    "momentum with RMSProp": (GOOD + 'type: "RMSProp" momentum: 0.9\n', "momentum 0.9 cannot be used with RMSProp"),
    "rms_decay of 1": (GOOD + 'type: "RMSProp" rms_decay: 1\n', "rms_decay 1 must lie in [0, 1)"),
    "Adam without decay": (GOOD + 'type: "Adam" momentum2: 1\n', "momentum2 1 must lie in [0, 1) with Adam"),
    "regularization": (GOOD + 'regularization_type: "L3"\n', "regularization_type 'L3' is unknown (allowed: L1, L2)"),
    "no layers": (GOOD.replace("net.prototxt", "empty.prototxt"), "training net from net file 'empty.prototxt' holds no layers"),
    "iter_size 0": (GOOD + "iter_size: 0\n", "iter_size 0 must be at least 1"),
    "average_loss 0": (GOOD + "average_loss: 0\n", "average_loss 0 must be at least 1"),
    "negative max_iter": (changed("max_iter: 10", "max_iter: -1"), "max_iter -1 is below 0"),
    "negative display": (GOOD + "display: -5\n", "display -5 is below 0"),
    "no test_interval": (GOOD + "test_iter: 5\n", "test_interval must be above 0 when there are test nets"),
    "test_iter 0": (GOOD + "test_iter: 0 test_interval: 5\n", "test_iter 0 must be at least 1"),
    "too few test_iter": (GOOD + 'test_net: "net.prototxt" test_interval: 5\n', "test_iter must be given once for each test net: 0 for 1"),
    "test_state count": (GOOD + "test_iter: 1 test_interval: 5 test_state {} test_state {}\n", "test_state must be absent or given once for each test net: 2 for 1"),
    "snapshot folder": (GOOD + 'snapshot: 5 snapshot_prefix: "no/such/x"\n', "cannot write to snapshot prefix 'no/such/x'"),
    "missing weights": (GOOD + 'weights: "w.caffemodel"\n', "weights file"),
    "moving_rate of 1": (GOOD + "moving_rate: 1.0\n", "moving_rate 1 is out of range: alpha must lie between 0 and 1"),
    "update_interval 0": (GOOD + "update_interval: 0\n", "update_interval 0 is out of range: tau must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_solver_file_is_refused_with_its_message(fault: str) -> None:
    text, message = FAULTS[fault]
    with pytest.raises(ConfigError) as error:
        load(text)
    assert message in str(error.value)


WRONG_OPTIONS = {
    "no worker": (Options(workers=0), "--workers 0: at least one worker is needed"),
    "too many workers": (Options(workers=1_000_000), "--workers 1000000: must lie in 1..1024"),
    "too many threads": (Options(threads=100_000_000), "--threads 100000000: must lie in 1..1024"),
    "max_iter beyond the field": (Options(max_iter=99_999_999_999), "--max-iter 99999999999: must lie in 1..2147483647"),
    "level beyond the field": (Options(level=-(2**31) - 1), "--level -2147483649: must lie in -2147483648..2147483647"),
    "seed beyond the generator": (Options(seed=2**64), "--seed 18446744073709551616: must lie in "),
    "empty weights": (Options(weights=("",)), "--weights '': is empty"),
    "weights of a comma": (Options(weights=(",",)), "--weights ',': is empty"),
    "empty snapshot": (Options(snapshot=""), "--snapshot '': is empty"),
    "empty smb": (Options(smb=""), "--smb '': is empty"),
    "empty job": (Options(workers=2, job=""), "--job '': is empty"),
    "empty log folder": (Options(log_dir=""), "--log-dir '': is empty"),
    "alpha of 0": (Options(workers=2, alpha=0.0), "--alpha 0 is out of range: alpha must lie between 0 and 1"),
    "alpha nan": (Options(workers=2, alpha=float("nan")), "--alpha nan is out of range"),
    "tau of 0": (Options(workers=2, tau=0), "--tau 0 is out of range: tau must be at least 1"),
    "snapshot and weights": (Options(snapshot="a", weights=("b",)), "not both"),
    "snapshot and resume": (Options(snapshot="a", resume=True), "not both"),
    "weights as snapshot": (Options(snapshot="x_iter_5.caffemodel"), "this is a weights file, use --weights; the state is x_iter_5.solverstate"),
    "no such snapshot": (Options(snapshot="x_iter_5.solverstate"), "snapshot file"),
    "signal effect": (Options(sigint_effect="die"), "--sigint-effect 'die' is unknown (allowed: stop, snapshot, none)"),
    "no thread": (Options(threads=0), "--threads 0: must be at least 1"),
    "precision": (Options(precision="half"), "--precision 'half' is unknown (allowed: float32, bf16)"),
    "lr rule": (Options(workers=2, lr_rule="cubic"), "--lr-rule 'cubic' is none of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_OPTIONS)
def test_a_wrong_option_is_refused_with_its_message(fault: str) -> None:
    options, message = WRONG_OPTIONS[fault]
    with pytest.raises(ConfigError) as error:
        load(GOOD, options)
    assert message in str(error.value)


def test_compile_without_a_compiler_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"^--compile: .*no 'no-such-compiler' here: install g\+\+"):
        load(GOOD, Options(compile=True))


def test_a_missing_solver_file_is_named_by_its_whole_path(folder: Path) -> None:
    with pytest.raises(ConfigError, match=str(folder / "none.prototxt")):
        TrainConfig.load("none.prototxt")


def test_a_net_that_lies_beside_the_solver_is_pointed_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "solver.prototxt").write_text(GOOD)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    with pytest.raises(ConfigError) as error:
        TrainConfig.load("../solver.prototxt")
    assert f"not found: {folder}/elsewhere/net.prototxt" in str(error.value)
    assert f"{folder}/net.prototxt exists" in str(error.value)


def test_alpha_and_tau_come_from_the_options_then_the_file_then_the_default() -> None:
    file = GOOD + "moving_rate: 0.25 update_interval: 3\n"
    assert (load(file).sharing.alpha, load(file).sharing.tau) == (0.25, 3)
    both = load(file, Options(workers=2, alpha=0.5, tau=7)).sharing
    assert (both.alpha, both.tau) == (0.5, 7)
    default = load(GOOD, Options(workers=4)).sharing
    assert default.alpha == pytest.approx(0.225)
    assert default.tau == 1


def test_test_nets_come_in_the_originals_order_with_their_states() -> None:
    text = GOOD + (
        'test_net_param { name: "inline" } test_net: "net.prototxt" test_iter: 1 test_iter: 2 test_iter: 3'
        ' test_interval: 5 test_state { stage: "a" } test_state { level: 2 } test_state {}'
    )
    tests = load(text).tests
    assert [t.iterations for t in tests] == [1, 2, 3]
    assert [t.net.path for t in tests] == [None, "net.prototxt", "net.prototxt"]
    assert [(t.net.phase, t.net.level, t.net.stages) for t in tests] == [
        ("TEST", 0, ("a",)),
        ("TEST", 2, ()),
        ("TEST", 0, ()),
    ]


def test_the_nets_own_state_is_below_the_solvers_and_stages_add_up(folder: Path) -> None:
    (folder / "net.prototxt").write_text(NET + 'state { level: 1 stage: "net" }\n')
    config = load(GOOD + 'train_state { stage: "file" }\n', Options(stages=("line",)))
    assert (config.train.phase, config.train.level, config.train.stages) == (
        "TRAIN",
        1,
        ("net", "file", "line"),
    )


@pytest.mark.parametrize(
    ("given", "wanted"), [("", "solver"), ('snapshot_prefix: "out"\n', "out/solver"), ('snapshot_prefix: "p/x"\n', "p/x")]
)  # fmt: skip
def test_the_snapshot_prefix_is_the_solver_file_or_completed_by_it(
    given: str, wanted: str, folder: Path
) -> None:
    (folder / "out").mkdir()
    (folder / "p").mkdir()
    assert load(GOOD + given).snapshots.prefix == wanted


def test_a_config_can_be_sent_to_a_worker_process() -> None:
    config = load(GOOD)
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_solver_file_is_read_without_torch() -> None:
    Path("solver.prototxt").write_text(GOOD)
    code = (
        "import sys; from shmtrain.config import TrainConfig; TrainConfig.load('solver.prototxt');"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
