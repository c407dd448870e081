"""The models that come along: parameter counts of the literature, both phases, three steps of training."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prototxt import schema
from prototxt.net import Net
from prototxt.text import parse_net, parse_solver
from shmtrain.config import TrainConfig
from shmtrain.learner import Learner
from shmtrain.log import Log
from shmtrain.role import Alone

# Files, parameters that are trained, BatchNorm's accumulated ones, and the side of a small image.
LENET = ("examples/mnist/lenet_train_test", "examples/mnist/lenet_solver", 431_080, 0, 28)
QUICK = ("examples/cifar10/quick_train_test", "examples/cifar10/quick_solver", 145_578, 0, 32)
MODELS = {
    "cifar10_full": (89_578, 0, 32),
    "alexnet": (60_965_224, 0, 67),
    "caffenet": (60_965_224, 0, 67),
    "googlenet": (6_998_552 + 6_379_728, 0, 64),  # the net, its two heads
    "vgg16": (138_357_544, 0, 32),
    "resnet50": (25_557_032, 2 * 26_560 + 53, 33),
    "inception_resnet_v2": (55_843_464, 2 * 30_272 + 204, 75),
}
CASES = {"lenet": LENET, "cifar10_quick": QUICK} | {
    name: (f"examples/models/{name}/train_val", f"examples/models/{name}/solver", *numbers)
    for name, numbers in MODELS.items()
}
BIG = ("inception_resnet_v2",)  # trained by scripts/soak/models.py alone: half a minute


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of them wait for one another for longer than these small images take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dummy(root: Path, net: str, batch: int, side: int | None = None) -> Any:
    """The net of a file with made-up images in the place of its data; ``side``: how wide they are."""
    message = parse_net(root / f"{net}.prototxt")
    layers = list(message.layer)
    del message.layer[:]
    for layer in layers:
        if layer.type != "Data":
            message.layer.append(layer)
            continue
        usual = 28 if "mnist" in net else 32
        width = side or layer.transform_param.crop_size or usual
        made = message.layer.add(name=layer.name, type="DummyData", top=layer.top, include=layer.include)
        for dims in ((batch, 1 if "mnist" in net else 3, width, width), (batch,)):
            made.dummy_data_param.shape.add(dim=dims)
        spread = 1.0 if "mnist" in net else 60.0
        made.dummy_data_param.data_filler.add(type="gaussian", std=spread)
        made.dummy_data_param.data_filler.add(type="constant", value=3)
    return message


def small_solver(root: Path, solver: str, net: Any, folder: Path) -> TrainConfig:
    """The solver of a file for the net given, without its tests."""
    message = parse_solver(root / f"{solver}.prototxt")
    for name in ("net", "test_iter", "test_interval", "iter_size", "snapshot"):
        message.ClearField(name)
    message.net_param.CopyFrom(net)
    message.random_seed = 1
    message.snapshot_prefix = str(folder / "small")
    return TrainConfig.from_message(message, str(folder / "solver.prototxt"))


def train(config: TrainConfig, steps: int = 3) -> tuple[list[float], list[str]]:
    """The losses of some steps, and the parameters that did not move or had no gradient."""
    learner = Learner.open(config, Alone(), Log([], config.run.log))
    try:
        before = learner.params.vector.clone()
        losses, felt = [], torch.zeros_like(before, dtype=torch.bool)
        for step in range(steps):
            losses.append(learner.compute())
            felt |= learner.params.gradient != 0
            learner.update(learner.rate(step))
        moved = (learner.params.vector != before) & felt
        moved[learner.params.frozen_stop :] = learner.params.vector[learner.params.frozen_stop :] != 0
        still = [f"{slot.layer}/{slot.index}" for slot in learner.params.slots if not moved[slot.slice].any()]
        return losses, still
    finally:
        learner.close()


@pytest.mark.parametrize("name", CASES)
def test_a_model_builds_in_both_phases_with_the_parameters_of_the_literature(name: str, root: Path) -> None:
    net_file, _, trained, accumulated, _ = CASES[name]
    for phase in ("TRAIN", "TEST"):
        with torch.device("meta"):  # shapes without numbers: VGG16 has half a gigabyte of them
            net = Net(dummy(root, net_file, 2), phase)
        counts = [0, 0]
        for one in net.learnable:
            counts[one.statistics] += one.param.numel()
        assert counts == [trained, accumulated]
        assert ("accuracy" in net.blobs) == (phase == "TEST")


@pytest.mark.parametrize("name", [name for name in CASES if name not in BIG])
def test_a_model_trains_three_steps_and_every_layer_moves(name: str, root: Path, tmp_path: Path) -> None:
    net_file, solver_file, _, _, side = CASES[name]
    net = dummy(root, net_file, 2, side)
    losses, still = train(small_solver(root, solver_file, net, tmp_path))
    assert all(map(math.isfinite, losses))
    assert not still


@pytest.mark.parametrize("name", ["alexnet", "caffenet", "googlenet", "vgg16"])
def test_a_deploy_net_has_the_layers_of_its_model(name: str, root: Path) -> None:
    folder = root / "examples" / "models" / name
    deploy = parse_net(folder / "deploy.prototxt")
    known = {(layer.name, layer.type) for layer in parse_net(folder / "train_val.prototxt").layer}
    apart = [layer.name for layer in deploy.layer if (layer.name, layer.type) not in known]
    assert apart == ["data", "prob"]
    with torch.device("meta"):
        net = Net(deploy, "TEST")
    assert net.outputs == ["prob"]
    assert net.blobs["prob"].shape == (10, 1000)


def test_the_prototxts_are_what_their_generator_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "examples" / "models"
    monkeypatch.syspath_prepend(folder)
    make = runpy.run_path(str(folder / "make.py"))
    files: Callable[[str], Any] = make["files"]
    assert set(make["MODELS"]) == set(MODELS)
    for name in MODELS:
        for path, text in files(name):
            assert path.read_text() == text, f"run examples/models/make.py: {path} is stale"
            parse = parse_solver if "solver" in path.name else parse_net
            assert parse(path).IsInitialized()
            assert isinstance(parse(path), (schema.SolverParameter, schema.NetParameter))
