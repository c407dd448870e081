"""Snapshots: the original's files load in ours, ours have its structure, and a set is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from prototxt import caffemodel, schema
from shmtrain import Solver, snapshot
from shmtrain.pycaffe import get_solver
from shmtrain.snapshot import SnapshotError, newest_whole, read_state

KINDS = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")

NET = """
name: "small"
layer { name: "d" type: "DummyData" top: "x" top: "t" dummy_data_param {
  shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 }
  data_filler { type: "constant" value: 0.5 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {
  num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""
SOLVER = (
    'net: "net.prototxt"\nbase_lr: 0.1\nlr_policy: "fixed"\nmomentum: 0.9\nmax_iter: 10\nrandom_seed: 3\n'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path


def small(text: str = "", base: str = SOLVER) -> Solver:
    Path("s.prototxt").write_text(base + text)
    return Solver("s.prototxt")


@pytest.mark.parametrize("kind", KINDS)
def test_the_originals_snapshot_goes_on_in_ours(
    kind: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / "golden" / "solvers"
    monkeypatch.chdir(folder)
    golden = np.load(f"snap_{kind}_BINARYPROTO.npz", allow_pickle=False)
    message = _without_snapshots(folder / f"snap_{kind}_BINARYPROTO.solver.prototxt")
    with Solver(message) as solver:
        solver.restore(f"snap_{kind}_BINARYPROTO/s_iter_8.solverstate")
        assert solver.iter == 8
        _assert_weights(solver, golden, "w8")
        solver.step(4)
        _assert_weights(solver, golden, "w12_resumed_data_from_row0")


def _without_snapshots(path: Path) -> object:
    from prototxt.text import parse_solver

    message = parse_solver(path)
    message.snapshot, message.snapshot_after_train = 0, False
    return message


def _assert_weights(solver: Solver, golden: np.lib.npyio.NpzFile, when: str) -> None:
    for key in (k for k in golden.files if k.startswith(when + "/")):
        _, layer, index = key.split("/")
        want = golden[key]
        scale = float(np.abs(want).max())
        got = solver.net.params[layer][int(index)].data
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * scale, err_msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_our_snapshot_has_the_originals_structure(
    kind: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = shared / "golden" / "solvers"
    monkeypatch.chdir(golden)
    message = _without_snapshots(golden / f"snap_{kind}_BINARYPROTO.solver.prototxt")
    message.snapshot_prefix = str(tmp_path / "s")  # type: ignore[attr-defined]
    with Solver(message) as solver:
        solver.step(8)
        solver.snapshot()
    theirs = golden / f"snap_{kind}_BINARYPROTO"
    for name in ("s_iter_8.solverstate", "s_iter_8.caffemodel"):
        kind_of = schema.SolverState if name.endswith("state") else schema.NetParameter
        ours, want = (kind_of.FromString((f / name).read_bytes()) for f in (tmp_path, theirs))
        assert _skeleton(ours) == _skeleton(want)


def _skeleton(message: object) -> str:
    """The message as text, with the numbers of its blobs and its file names left out."""
    import re

    text = re.sub(r"^\s*(data|diff): \S+\n", "", str(message), flags=re.MULTILINE)
    return re.sub(r'learned_net: ".*?([^/"]+)"', r'learned_net: "\1"', text)


def test_restored_training_goes_on_as_if_never_interrupted(folder: Path) -> None:
    with small() as solver:
        solver.step(4)
        solver.snapshot()
        solver.step(3)
        want = solver.net.params["ip"][0].data.copy()
    with small() as solver:
        solver.restore("s_iter_4.solverstate")
        solver.step(3)
        np.testing.assert_array_equal(solver.net.params["ip"][0].data, want)


def test_a_weights_file_given_as_state_is_named_with_the_way_out(folder: Path) -> None:
    with small() as solver:
        solver.step(2)
        solver.snapshot()
        with pytest.raises(
            SnapshotError, match=r"this is a weights file, use --weights; the state is s_iter_2.solverstate"
        ):
            solver.restore("s_iter_2.caffemodel")


def test_a_state_of_another_solver_type_is_refused(folder: Path) -> None:
    with small() as solver:
        solver.step(1)
        solver.snapshot()
    with (
        small('type: "Adam"\n') as adam,
        pytest.raises(
            SnapshotError, match=r"incorrect length of history blobs \(2 vs. 4\).*another solver type"
        ),
    ):
        adam.restore("s_iter_1.solverstate")


def test_a_state_of_another_net_is_refused(folder: Path) -> None:
    with small() as solver:
        solver.step(1)
        solver.snapshot()
    Path("net.prototxt").write_text(
        NET.replace("num_output: 2", "num_output: 1").replace("dim: 4 dim: 2", "dim: 4 dim: 1")
    )
    with (
        small() as other,
        pytest.raises(SnapshotError, match="is the state of another net: history of layer 'ip'"),
    ):
        other.restore("s_iter_1.solverstate")


@pytest.mark.parametrize("content", [b"", b"not a state", b"\x08", b"\x08\x01\x1a\x05\x3a\x03\x0a\x01\x05"])
def test_garbage_is_no_state(folder: Path, content: bytes) -> None:
    Path("x.solverstate").write_bytes(content)
    with pytest.raises(SnapshotError, match=r"x\.solverstate"):
        read_state("x.solverstate")


def test_the_weights_are_found_beside_a_state_that_was_moved(folder: Path) -> None:
    with small() as solver:
        solver.step(1)
        solver.snapshot()
    (folder / "moved").mkdir()
    for name in ("s_iter_1.caffemodel", "s_iter_1.solverstate"):
        Path(name).rename(folder / "moved" / name)
    with small() as solver:
        solver.restore("moved/s_iter_1.solverstate")
        assert solver.iter == 1


@pytest.mark.parametrize("text", ["", "snapshot_format: HDF5\n"])
@pytest.mark.parametrize(
    ("policy", "saved", "rates"),
    [
        ('lr_policy: "step" gamma: 0.1 stepsize: 500', (600, 1), [0.001, 0.001]),
        ('lr_policy: "fixed"', (600, 0), [0.01, 0.01]),
        ('lr_policy: "multistep" gamma: 0.1 stepvalue: [10, 20, 30]', (100, 0), [1e-3, 1e-4, 1e-5, 1e-5]),
    ],
)
def test_the_rate_after_a_resume_is_the_solver_files_at_the_states_iteration(
    policy: str, saved: tuple[int, int], rates: list[float], text: str, folder: Path
) -> None:
    """The rate is no part of a state. base_lr was ten times less when this one was saved."""
    base = SOLVER.replace('lr_policy: "fixed"', policy).replace("max_iter: 10", "max_iter: 999") + text
    with small(base=base.replace("base_lr: 0.1", "base_lr: 0.001")) as solver:
        solver._learner.rates.current_step = saved[1]
        path = solver._learner.save(saved[0])
    with small(base=base.replace("base_lr: 0.1", "base_lr: 0.01")) as solver:
        solver.restore(path)
        assert solver.iter == saved[0]
        assert [solver._learner.rate(saved[0] + i) for i in range(len(rates))] == pytest.approx(rates)


# HDF5 ----------------------------------------------------------------------------------------------------

HDF5 = "snapshot_format: HDF5\n"


def test_an_hdf5_snapshot_goes_on_as_a_binary_one_does_under_any_name(folder: Path) -> None:
    with small(HDF5) as solver:
        solver.step(4)
        solver.snapshot()
        assert {p.name for p in folder.glob("s_*")} == {"s_iter_4.caffemodel.h5", "s_iter_4.solverstate.h5"}
        solver.step(3)
        want = solver.net.params["ip"][0].data.copy()
    Path("s_iter_4.solverstate.h5").rename("state")
    for text in ("", HDF5):  # how it goes on saving does not matter
        with small(text) as solver:
            solver.restore("state")
            assert solver.iter == 4
            solver.step(3)
            np.testing.assert_array_equal(solver.net.params["ip"][0].data, want)


def test_the_faults_of_hdf5_files_are_told_as_those_of_binary_ones(folder: Path) -> None:
    with small(HDF5) as solver:
        solver.step(1)
        solver.snapshot()
        with pytest.raises(SnapshotError, match=r"use --weights; the state is s_iter_1\.solverstate\.h5"):
            solver.restore("s_iter_1.caffemodel.h5")
    with small('type: "Adam"\n') as adam, pytest.raises(SnapshotError, match="another solver type"):
        adam.restore("s_iter_1.solverstate.h5")
    Path("s_iter_1.solverstate.h5").write_bytes(Path("s_iter_1.solverstate.h5").read_bytes()[:900])
    with pytest.raises(SnapshotError, match=r"s_iter_1\.solverstate\.h5: not a solver state: .*truncated"):
        read_state("s_iter_1.solverstate.h5")


def test_resume_chooses_the_newest_among_both_formats(folder: Path) -> None:
    for text, iteration in (("", 1), (HDF5, 2), ("", 3), (HDF5, 4)):
        with small(text) as solver:
            solver.step(iteration)
            solver.snapshot()
    skipped: list[str] = []
    assert newest_whole("s", skipped.append) == "s_iter_4.solverstate.h5"
    cut = Path("s_iter_4.caffemodel.h5").read_bytes()
    Path("s_iter_4.caffemodel.h5").write_bytes(cut[: len(cut) // 2])
    Path("s_iter_3.caffemodel").unlink()
    assert newest_whole("s", skipped.append) == "s_iter_2.solverstate.h5"
    assert ["s_iter_4" in skipped[0], "s_iter_3" in skipped[1], len(skipped)] == [True, True, 2]


# Whole or not there --------------------------------------------------------------------------------------


def _sets(*iterations: int) -> None:
    with small() as solver:
        for iteration in iterations:
            solver.step(iteration - solver.iter)
            solver.snapshot()


def test_resume_takes_the_newest_whole_set_and_says_what_it_skips(folder: Path) -> None:
    _sets(2, 9, 10, 11)
    Path("s_iter_11.solverstate").write_bytes(b"")
    Path("s_iter_10.caffemodel").unlink()
    skipped: list[str] = []
    assert newest_whole("s", skipped.append) == "s_iter_9.solverstate"
    assert ["s_iter_11" in skipped[0], "s_iter_10" in skipped[1], len(skipped)] == [True, True, 2]
    cut = Path("s_iter_9.caffemodel").read_bytes()
    Path("s_iter_9.caffemodel").write_bytes(cut[: len(cut) // 2])
    assert newest_whole("s", skipped.append) == "s_iter_2.solverstate"
    assert newest_whole("other", skipped.append) is None


def test_a_full_disk_is_named_and_leaves_the_older_set_and_no_rubbish(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small() as solver:
        solver.step(2)
        solver.snapshot()
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        solver.step(2)
        monkeypatch.setattr(os, "fsync", _no_space)
        with pytest.raises(SnapshotError, match=r"s_iter_4.caffemodel: .*No space left on device"):
            solver.snapshot()
        monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def _no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_existing_snapshot_is_replaced_whole_or_not_at_all(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"old")

    def half(to: str) -> None:
        Path(to).write_bytes(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SnapshotError):
        snapshot.write_atomically(str(path), half)
    assert [p.name for p in folder.iterdir() if p.name.startswith("file")] == ["file"]
    assert path.read_bytes() == b"old"

    def whole(to: str) -> None:
        Path(to).write_bytes(b"new")

    snapshot.write_atomically(str(path), whole)
    assert path.read_bytes() == b"new"


# The workers' own states ---------------------------------------------------------------------------------


def test_a_workers_state_comes_back_and_another_nets_is_refused(folder: Path) -> None:
    with small() as solver:
        params = solver._learner.params
        vectors = (np.arange(params.trained, dtype=np.float32),)
        snapshot.write_worker("w.npz", params, snapshot.WorkerState(7, vectors))
        got = snapshot.read_worker("w.npz", params, 1)
        assert got is not None
        assert got.count == 7
        np.testing.assert_array_equal(got.history[0], vectors[0])
        with pytest.raises(SnapshotError, match="another net or solver type"):
            snapshot.read_worker("w.npz", params, 2)
        assert snapshot.read_worker("none.npz", params, 1) is None
        Path("bad.npz").write_bytes(b"PK\x03\x04 rubbish")
        with pytest.raises(SnapshotError, match=r"bad\.npz"):
            snapshot.read_worker("bad.npz", params, 1)


def test_get_solver_takes_the_type_from_the_file(folder: Path) -> None:
    Path("s.prototxt").write_text(SOLVER + 'type: "Nesterov"\n')
    with get_solver("s.prototxt") as solver:
        assert type(solver).__name__ == "NesterovSolver"


def test_the_state_of_the_original_reads_back_as_it_was_written(shared: Path, tmp_path: Path) -> None:
    theirs = shared / "golden" / "solvers" / "snap_Adam_BINARYPROTO" / "s_iter_8.solverstate"
    state = read_state(str(theirs))
    snapshot.write_state(str(tmp_path / "copy.solverstate"), state)
    again = caffemodel.read_message(tmp_path / "copy.solverstate", "SolverState")
    assert str(again) == str(caffemodel.read_message(theirs, "SolverState"))
