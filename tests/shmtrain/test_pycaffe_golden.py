"""The face against the original's own files: its HDF5 snapshots go on here, its log's numbers come again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from prototxt.text import parse_solver
from shmtrain import pycaffe as caffe
from shmtrain.snapshot import read_state

KINDS = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


def assert_close(got: Any, want: Any, name: str) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()), err_msg=name)


def blobs(net: caffe.Net) -> Iterator[tuple[str, Any]]:
    for layer, params in net.params.items():
        for index, blob in enumerate(params):
            yield f"{layer}/{index}", blob.data


@pytest.mark.parametrize("kind", KINDS)
def test_an_hdf5_snapshot_goes_on_and_is_written_alike(
    kind: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared / "golden" / "solvers")
    theirs = Path(f"snap_{kind}_HDF5")
    golden = np.load(f"{theirs}.npz")
    message: Any = parse_solver(f"{theirs}.solver.prototxt")
    assert message.snapshot_format == 0
    message.snapshot, message.snapshot_after_train = 0, False
    message.snapshot_prefix = str(tmp_path / "s")
    with caffe.Solver(message) as solver:
        solver.restore(str(theirs / "s_iter_8.solverstate.h5"))
        assert solver.iter == 8
        for name, data in blobs(solver.net):
            assert_close(data, golden[f"w8/{name}"], name)
        solver.snapshot()
        for name in ("s_iter_8.solverstate.h5", "s_iter_8.caffemodel.h5"):
            assert contents(tmp_path / name) == contents(theirs / name)
        solver.step(4)
        for name, data in blobs(solver.net):
            assert_close(data, golden[f"w12_resumed_data_from_row0/{name}"], name)
    with caffe.Solver(message) as solver:
        solver.restore(str(theirs / "s_iter_8.solverstate.h5"))
        for _ in range(8):  # the batches that the original had read by then
            solver.net.forward(end=solver.net._layer_names[0])
        solver.step(4)
        for name, data in blobs(solver.net):
            assert_close(data, golden[f"w12/{name}"], name)


def contents(path: Path) -> dict[str, Any]:
    """Every member by name: its type and its numbers; of the weights' file name the last part."""
    found: dict[str, Any] = {}

    def visit(name: str, member: Any) -> None:
        found[name] = None
        if isinstance(member, h5py.Dataset):
            value: Any = bytes(member[()]) if name == "learned_net" else member[()].tolist()
            text = name == "learned_net"
            found[name] = (
                "text" if text else str(member.dtype),
                member.shape,
                member.id.get_type().get_class(),
                Path(value.decode()).name if text else value,
            )

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return found


def test_the_second_half_of_a_logged_training_comes_again(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's snapshot at 6 and its rows from there: its losses, its test, its weights and history."""
    golden = shared / "golden" / "cli"
    monkeypatch.chdir(tmp_path)
    for name in ("smallnet.prototxt", "full.solver.prototxt", "train_list.txt", "train.h5",
                 "full_iter_6.caffemodel", "full_iter_6.solverstate"):  # fmt: skip
        Path(name).write_bytes((golden / name).read_bytes())
    log = (golden / "train_finetune.log").read_text()
    with caffe.get_solver("full.solver.prototxt") as solver:
        solver.restore("full_iter_6.solverstate")
        for _ in range(6):
            solver.net.forward(end="d")
            solver.test_nets[0].forward(end="d")
        losses = {}
        for iteration in range(6, 12):
            solver.step(1)
            losses[iteration] = float(solver.net.blobs["loss"].data)
        shown = dict(re.findall(r"Iteration (\d+) \(.*\n.*Train net output #0: loss = (\S+)", log))
        assert_close([losses[i] for i in (6, 8, 10)], [float(shown[str(i)]) for i in (6, 8, 10)], "losses")
        (score,) = solver._trainer.scores
        tested = re.findall(r"Iteration 10, Testing.*\n(?:.*\n)?.*Test loss: (\S+)\n.*acc = (\S+)", log)
        assert_close([score.loss, *score.values["acc"]], [float(value) for value in tested[0]], "test")
        with caffe.Net("smallnet.prototxt", caffe.TRAIN, weights=golden / "full_iter_12.caffemodel") as net:
            for (name, got), (_, want) in zip(blobs(solver.net), blobs(net), strict=True):
                assert_close(got, want, name)
        assert solver.iter == 12
    ours = read_state("full_iter_12.solverstate")
    theirs = read_state(str(golden / "full_iter_12.solverstate"))
    assert (ours.iteration, ours.current_step) == (theirs.iteration, theirs.current_step)
    for index, (got, want) in enumerate(zip(ours.history, theirs.history, strict=True)):
        assert_close(got, want, f"history {index}")
