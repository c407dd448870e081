"""The reference results of the original, and both executors run on the same inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prototxt.net import Net
from prototxt.text import load_net

Array = npt.NDArray[np.float32]
RELATIVE, ABSOLUTE = 1e-4, 1e-5  # of the largest value: what summation order explains
# Bottoms that get no gradient in the original; what stands in their diffs means nothing.
LABELS = {"t", "label", "labels", "sim", "cont", "idx", "sel"}


def assert_agrees(got: npt.ArrayLike, want: Array, what: str) -> None:
    values = np.asarray(got)
    if values.size <= 1:
        values = values.reshape(want.shape)
    assert values.shape == want.shape, f"{what}: shape {values.shape}, not {want.shape}"
    finite = np.abs(want[np.isfinite(want)])
    scale = max(float(finite.max()) if finite.size else 1.0, 1e-30)
    absolute = ABSOLUTE * (30 if want.size == 1 else 1) * scale
    np.testing.assert_allclose(values, want, rtol=RELATIVE, atol=absolute, err_msg=what)


class Case:
    """One reference file: inputs and weights, and what the original made of them, step by step."""

    def __init__(self, path: Path) -> None:
        self.prototxt = path.with_suffix(".prototxt")
        with np.load(path, allow_pickle=False) as archive:
            self.arrays: dict[str, Array] = {key: archive[key] for key in archive.files if key != "meta"}
            self.meta: dict[str, Any] = json.loads(str(archive["meta"]))
        self.phase: Any = self.meta["phase"]
        numbered = {key.split("/")[0] for key in self.arrays if key.startswith("step")}
        self.steps = sorted(numbered, key=lambda step: int(step[4:])) or [""]

    def group(self, step: str, kind: str) -> Iterator[tuple[str, Array]]:
        """The arrays of one kind by blob name or layer/index: those of all steps, then the step's own."""
        prefixes = [f"{kind}/"] + ([f"{step}/{kind}/"] if step else [])
        for prefix in prefixes:
            for key, array in self.arrays.items():
                if key.startswith(prefix):
                    yield key[len(prefix) :], array

    def begins(self, step: str) -> Iterator[tuple[str, Array]]:
        """The inputs to set before a step: those of the case before its first, and the step's own."""
        prefixes = (["in/"] if step == self.steps[0] else []) + ([f"{step}/in/"] if step else [])
        for prefix in prefixes:
            for key, array in self.arrays.items():
                if key.startswith(prefix):
                    yield key[len(prefix) :], array


def load_weights(net: Net, case: Case) -> None:
    for name, array in case.group("", "param"):
        layer, index = name.rsplit("/", 1)
        net.params[layer][int(index)].data[...] = array


def clear(net: Net) -> None:
    for blobs in net.params.values():
        for blob in blobs:
            blob.diff[...] = 0


def check_params(net: Net, case: Case, step: str, kind: str) -> None:
    for name, array in case.group(step, kind):
        layer, index = name.rsplit("/", 1)
        blob = net.params[layer][int(index)]
        assert_agrees(blob.diff if kind == "pdiff" else blob.data, array, f"{step} {kind} {name}")


def replay_layer_by_layer(case: Case) -> None:
    """Every blob, every diff, every parameter's gradient and value after it."""
    with Net(case.prototxt, case.phase) as net:
        load_weights(net, case)
        for step in case.steps:
            for name, array in case.begins(step):
                if net.blobs[name].shape != array.shape:
                    net.blobs[name].reshape(*array.shape)
                net.blobs[name].data[...] = array
            clear(net)
            loss = net.forward_range(0, len(net.layers) - 1)
            for name, array in case.group(step, "blob"):
                assert_agrees(net.blobs[name].data, array, f"{step} blob {name}")
            for _, array in case.group(step, "loss"):
                assert_agrees(loss, array, f"{step} loss")
            seeds, diffs = list(case.group(step, "topdiff")), list(case.group(step, "diff"))
            for name, array in seeds:
                net.blobs[name].diff[...] = array
            if seeds or diffs:
                net.backward_range(len(net.layers) - 1, 0)
            for name, array in diffs:
                if name not in LABELS:
                    assert_agrees(net.blobs[name].diff, array, f"{step} diff {name}")
            check_params(net, case, step, "pdiff")
            check_params(net, case, step, "param_after")


def with_learned_inputs(case: Case) -> tuple[Any, dict[str, str]]:
    """The net with Parameter layers for its inputs, so that a whole-graph run gives their gradients.

    Returns the net and, by input, the layer that holds it. Inputs that feed labels stay.
    """
    with Net(case.prototxt, case.phase) as net:
        fixed = feeds_labels(net) | LABELS
    source = load_net(case.prototxt)
    holders: dict[str, str] = {}
    if not source.message.force_backward:  # such a case holds no gradient of its inputs
        return source, holders
    for message in source.message.layer:
        if message.type == "Input" and message.top[0] not in fixed:
            holders[str(message.top[0])] = str(message.name)
            message.type = "Parameter"
            message.parameter_param.shape.CopyFrom(message.input_param.shape[0])
    return source, holders


def feeds_labels(net: Net) -> set[str]:
    """The blobs from which a bottom without gradient is made."""
    marked: set[str] = set()
    for node in reversed(net.layers):
        if marked & set(node.tops):
            marked |= set(node.bottoms)
        if node.need_backward:
            marked |= {name for i, name in enumerate(node.bottoms) if i in node.built.labels}
    return marked


def replay_whole_graph(case: Case) -> None:
    """The same in one autograd graph; in the TEST phase forward alone, as it records no gradient there."""
    source, holders = with_learned_inputs(case)
    with Net(source, case.phase) as net:
        load_weights(net, case)
        for step in case.steps:
            for name, array in case.begins(step):
                blob: Any = net.params[holders[name]][0] if name in holders else net.blobs[name]
                if blob.shape != array.shape:
                    blob.reshape(*array.shape)
                blob.data[...] = array
            clear(net)
            outcome = net.run()
            for _, array in case.group(step, "loss"):
                assert_agrees(outcome.loss.detach().numpy(), array, f"{step} loss")
            for name, array in case.group(step, "blob"):
                assert_agrees(net.blobs[name].data, array, f"{step} blob {name}")
            check_params(net, case, step, "param_after")
            if case.phase == "TRAIN" and backward(outcome, list(case.group(step, "topdiff"))):
                check_gradients(net, case, step, holders)


def backward(outcome: Any, seeds: list[tuple[str, Array]]) -> bool:
    """From the loss and from the seeds of the outputs; False when nothing has a gradient."""
    total: Tensor = outcome.loss
    for name, array in seeds:
        total = total + (outcome.outputs[name] * torch.tensor(array)).sum()
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    return total.requires_grad


def check_gradients(net: Net, case: Case, step: str, holders: dict[str, str]) -> None:
    check_params(net, case, step, "pdiff")
    for name, array in case.group(step, "diff"):
        if name in holders:
            assert_agrees(net.params[holders[name]][0].diff, array, f"{step} diff {name}")
