"""shmtrain.Exchange in a plain torch loop: the same as by prototxt, by every algorithm, when workers die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prototxt
import shmtrain
import smb
from prototxt import caffemodel
from shmtrain.options import ConfigError
from tests.shmtrain.jobs import train

BATCH, STEPS, LR, MOMENTUM, ALPHA = 8, 5, 0.05, 0.9, 0.4


def conv(name: str, bottom: str, stride: int, kernel: int = 3) -> str:
    pad = kernel // 2
    return f"""
layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{
  num_output: 4 kernel_size: {kernel} pad: {pad} stride: {stride} bias_term: false
  weight_filler {{ type: "msra" }} }} }}
layer {{ name: "{name}_bn" type: "BatchNorm" bottom: "{name}" top: "{name}" }}
layer {{ name: "{name}_scale" type: "Scale" bottom: "{name}" top: "{name}"
  scale_param {{ bias_term: true }} }}
"""


NET = f"""
name: "resnet"
layer {{ name: "data" type: "HDF5Data" top: "data" top: "label"
  hdf5_data_param {{ source: "files.txt" batch_size: {BATCH} }} }}
{conv("c1", "data", 1)}
layer {{ name: "r1" type: "ReLU" bottom: "c1" top: "c1" }}
{conv("c2", "c1", 2)}
layer {{ name: "r2" type: "ReLU" bottom: "c2" top: "c2" }}
{conv("c3", "c2", 1)}
{conv("short", "c1", 2, 1)}
layer {{ name: "sum" type: "Eltwise" bottom: "c3" bottom: "short" top: "sum" }}
layer {{ name: "r3" type: "ReLU" bottom: "sum" top: "sum" }}
layer {{ name: "pool" type: "Pooling" bottom: "sum" top: "pool"
  pooling_param {{ pool: AVE global_pooling: true }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param {{
  num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""
SOLVER = f"""net: "net.prototxt" base_lr: {LR} lr_policy: "fixed" momentum: {MOMENTUM} max_iter: {STEPS}
snapshot_prefix: "m" random_seed: 3
"""
CONVS = ("c1", "c2", "c3", "short")


class ResNet(nn.Module):
    """The net of NET."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"c1": (1, 3, 1), "c2": (4, 3, 2), "c3": (4, 3, 1), "short": (4, 1, 2)}
        for name, (inputs, kernel, stride) in shapes.items():
            self.add_module(name, nn.Conv2d(inputs, 4, kernel, stride, kernel // 2, bias=False))
            self.add_module(f"{name}_bn", nn.BatchNorm2d(4))
        self.ip = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        def part(name: str, x: Tensor) -> Tensor:
            y: Tensor = self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x))
            return y

        first = torch.relu(part("c1", x))
        second = torch.relu(part("c2", first))
        total = torch.relu(part("c3", second) + part("short", first))
        out: Tensor = self.ip(total.mean((2, 3)))
        return out

    def named(self) -> dict[tuple[str, int], Tensor]:
        """Parameters by layer and index of the prototxt."""
        found: dict[tuple[str, int], Tensor] = {("ip", 0): self.ip.weight, ("ip", 1): self.ip.bias}
        for name in CONVS:
            bn: Any = self.get_submodule(f"{name}_bn")
            found[name, 0] = self.get_parameter(f"{name}.weight")
            found[f"{name}_scale", 0], found[f"{name}_scale", 1] = bn.weight, bn.bias
        return found


def batches() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(1)
    data = rng.standard_normal((BATCH * STEPS, 1, 8, 8)).astype(np.float32)
    return torch.from_numpy(data), torch.from_numpy(rng.integers(0, 3, BATCH * STEPS))


def loop(
    model: nn.Module, exchange: shmtrain.Exchange, optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> None:
    data, labels = batches()
    for step in range(steps):
        part = slice(BATCH * step, BATCH * (step + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        exchange.step()


@pytest.mark.parametrize("tau", [1, 2])
def test_a_resnet_in_a_plain_loop_gets_the_weights_of_its_prototxt(
    tmp_path: Path, address: str, tau: int
) -> None:
    data, labels = batches()
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["data"], file["label"] = data.numpy(), labels.numpy().astype(np.float32)
    (tmp_path / "files.txt").write_text(f"{tmp_path}/d.h5\n")
    (tmp_path / "net.prototxt").write_text(NET.replace("files.txt", f"{tmp_path}/files.txt"))
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    model = ResNet()
    with prototxt.Net(str(tmp_path / "net.prototxt"), seed=3) as net:
        net.save(str(tmp_path / "start.caffemodel"))
        with torch.no_grad():
            for (layer, index), parameter in model.named().items():
                parameter.copy_(torch.from_numpy(net.params[layer][index].data))
    options = ["--smb", address, "--alpha", str(ALPHA), "--tau", str(tau), "--weights", "start.caffemodel"]
    job = train(tmp_path, "--workers", "1", *options)
    assert job.process.returncode == 0, job.text

    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    exchange = shmtrain.Exchange(model, address, "seasgd", alpha=ALPHA, tau=tau, job="loop")
    center = exchange.box.attach("loop/center")  # what the solver saves
    loop(model, exchange, optimizer)
    exchange._exchange.finish()
    exchange._flat.weights.copy_(torch.from_numpy(np.asarray(center.read())))
    layers = {
        layer.name: layer for layer in caffemodel.read_net(tmp_path / f"m_iter_{STEPS}.caffemodel").layer
    }
    for (name, index), value in model.named().items():
        want = caffemodel.blob_array(layers[name].blobs[index]).reshape(value.shape)
        assert np.abs(value.detach().numpy() - want).max() <= 1e-5 * max(np.abs(want).max(), 0.1), name


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize(
    "algorithm", ["seasgd", "easgd", "downpour", "sync", "allreduce", "hybrid", "diloco", "local"]
)
def test_every_algorithm_serves_a_plain_loop(address: str, algorithm: str) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    options = {"tau": 2} if algorithm == "diloco" else {}
    with shmtrain.Exchange(model, address, algorithm, optimizer=optimizer, **options) as exchange:
        loop(model, exchange, optimizer)
        kept = exchange.state_dict()
        exchange.load_state_dict(kept)
        with exchange.holding_center():
            assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert kept["steps"] == STEPS


def worker(address: str, algorithm: str, rank: int, dies: bool, out: Any) -> None:
    torch.set_num_threads(1)
    model = small(rank)  # all take the weights of the first
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    with shmtrain.Exchange(model, address, algorithm, rank=rank, workers=3, optimizer=optimizer) as exchange:
        loop(model, exchange, optimizer, 2)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        loop(model, exchange, optimizer)
        out.put([p.detach().numpy().copy() for p in model.parameters()])


@pytest.mark.parametrize("algorithm", ["sync", "allreduce"])
def test_the_others_go_on_when_one_of_them_is_killed(address: str, algorithm: str) -> None:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=worker, args=(address, algorithm, r, r == 1, out)) for r in range(3)]
    for process in processes:
        process.start()
    first, second = out.get(timeout=60), out.get(timeout=60)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    for process in processes:
        process.join(30)
    assert [p.exitcode for p in processes] == [0, -signal.SIGKILL, 0]


def other_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(3, 5))


DAMAGED = {
    "another way": ({"algorithm": "seasgd"}, "the state is one of seasgd, not of downpour"),
    "another model": (
        {"parameters": [p.shape for p in other_model().parameters()]},
        "the state is another model's: 6 tensors, not 8",
    ),
    "no vector": ({"vectors": {}}, "the state has no 'base' of 363 floats"),
    "no tensor": ({"vectors": {"base": [1.0], "owed": [1.0], "sum": [1.0]}}, "the state has no 'base'"),
    "a shorter one": ({"common": {"squares": torch.zeros(7)}}, "'squares' of 353 floats .7 of torch.float32"),
    "whole numbers": ({"common": {"squares": torch.zeros(353, dtype=torch.int64)}}, "353 of torch.int64"),
    "steps": ({"steps": "2"}, "the state's steps are '2'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(address: str, name: str) -> None:
    changed, message = DAMAGED[name]
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"server": "adagrad", "n_push": 3}
    with shmtrain.Exchange(model, address, "downpour", optimizer=optimizer, **options) as exchange:
        loop(model, exchange, optimizer, 4)
        before = exchange.state_dict()
        other = {part: {n: v + 1 for n, v in before[part].items()} for part in ("vectors", "common")}
        with pytest.raises(ValueError, match=message):
            exchange.load_state_dict({**before, **other, **changed})
        with pytest.raises(ValueError, match=r"no state_dict of a shmtrain\.Exchange"):
            exchange.load_state_dict({n: v for n, v in before.items() if n != "vectors"})
        after = exchange.state_dict()
        assert after["steps"] == before["steps"] == 4
        for part in ("vectors", "common"):
            for n, value in before[part].items():
                assert torch.equal(after[part][n], value), n


def test_what_cannot_be_shared_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="float64 on cpu: float32 on the CPU is shared"):
        shmtrain.Exchange(small().double(), address)
    with pytest.raises(ConfigError, match="sync acts between backward and the update: give optimizer="):
        shmtrain.Exchange(small(), address, "sync")
    with pytest.raises(ConfigError, match="unknown options: fetch"):
        shmtrain.Exchange(small(), address, fetch=2)
    with pytest.raises(ConfigError, match="rank 3 is not one of 3 workers"):
        shmtrain.Exchange(small(), address, rank=3, workers=3)
    with pytest.raises(smb.SmbError):
        shmtrain.Exchange(small(), "unix:/nonexistent/box.sock")
