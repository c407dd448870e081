"""The examples that come along: real digits, nets that build, solvers that fit them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import prototxt
from prototxt.data.convert import read_mnist
from prototxt.data.idx import read_idx
from prototxt.text import parse_net, parse_solver
from shmtrain import data_cli

TEST = 1  # of the schema's enum Phase
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DIGITS = EXAMPLES / "mnist" / "digits"
SOLVERS = ["mnist/lenet_solver", "mnist/lenet_small_solver", "cifar10/quick_solver"]


def test_the_digits_are_ten_thousand_different_ones_split_in_two() -> None:
    train, held_out = read_mnist(DIGITS, "train"), read_mnist(DIGITS, "t10k")
    assert (train.images.shape, held_out.images.shape) == ((8000, 1, 28, 28), (2000, 1, 28, 28))
    hashes = [hashlib.sha256(image.tobytes()).digest() for image in [*train.images, *held_out.images]]
    assert len(set(hashes)) == 10_000
    assert hashes == sorted(hashes), "the split is by hash, so that anyone gets it again"
    for part in (train, held_out):
        share = np.bincount(part.labels, minlength=10) / len(part)
        assert (share > 0.08).all()
        assert (share < 0.12).all()


def test_every_digit_is_one_of_mnists_own(shared: Path) -> None:
    folder = shared / "data" / "mnist"
    images = read_idx(folder / "train-images-idx3-ubyte.gz", 3)
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", 1)
    known = {image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
    for part in ("train", "t10k"):
        ours = read_mnist(DIGITS, part)
        for image, label in zip(ours.images, ours.labels, strict=True):
            assert known[image.tobytes()] == label


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads on a busy machine wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_name_their_nets_from_the_top_of_the_checkout(name: str) -> None:
    """And test on each held-out image once."""
    solver = parse_solver(EXAMPLES / f"{name}.prototxt")
    net = parse_net(EXAMPLES.parent / solver.net)
    (test,) = (layer for layer in net.layer if layer.type == "Data" and layer.include[0].phase == TEST)
    images = 2000 if "small" in name else 10_000
    assert solver.test_iter[0] * test.data_param.batch_size == images
    assert solver.snapshot_prefix.startswith(f"examples/{Path(name).parent}/")


@pytest.mark.usefixtures("one_thread")
def test_lenet_learns_from_the_lmdbs_that_shmtrain_data_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README says it, in an empty folder: the paths in the net are those that the command writes."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    assert data_cli.main(["mnist", "--out", str(out)]) == 0
    text = (EXAMPLES / "mnist" / "lenet_train_test.prototxt").read_text()
    assert text.count("examples/mnist/mnist_") == 2
    (tmp_path / "net.prototxt").write_text(text.replace("examples/mnist/mnist_", f"{out}/mnist_"))
    losses = []
    with prototxt.Net(tmp_path / "net.prototxt", phase="TRAIN", seed=1) as net:
        for _ in range(40):
            outcome = net.run()
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            for learnable in net.learnable:
                param = learnable.param
                assert param.grad is not None
                param.data -= 0.1 * param.grad
                param.grad = None
            losses.append(float(outcome.loss.detach()))
    assert losses[0] > 2
    assert sum(losses[-5:]) / 5 < 1
