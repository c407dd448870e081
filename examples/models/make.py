"""Writes the prototxts of this folder: ``python examples/models/make.py [--check] [NAME ..]``.

The layers are in architectures.py; here are the data, the losses and the solvers around them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import architectures
from architectures import Heads
from google.protobuf import text_format

from prototxt import schema
from shmtrain.pycaffe import NetSpec
from shmtrain.pycaffe import layers as L
from shmtrain.pycaffe.net_spec import Top, assign_proto

FOLDER = Path(__file__).resolve().parent
HERE = "examples/models"
IMAGENET = 1_281_167  # images to train
TRAIN, TEST = schema.Phase.Value("TRAIN"), schema.Phase.Value("TEST")


@dataclass(frozen=True)
class Model:
    """One net and what surrounds it.

    batch, test_batch  images in a batch of the TRAIN and the TEST phase
    top_k              classes that count as right in a second Accuracy layer; 0: there is none
    solvers            file name -> fields of the solver, besides those that all have
    deploy             a net of Input and Softmax is written, too
    """

    title: str
    body: Callable[[NetSpec, Top], Heads]
    crop: int
    batch: int
    test_batch: int
    solvers: dict[str, dict[str, Any]]
    name: str
    deploy: bool = False
    top_k: int = 5
    lmdb: str = f"{HERE}/ilsvrc12"
    transform: dict[str, Any] = field(default_factory=lambda: {"mean_value": [104, 117, 123]})


def _steps(stepsize: int, max_iter: int, gamma: float = 0.1) -> dict[str, Any]:
    return {"lr_policy": "step", "gamma": gamma, "stepsize": stepsize, "max_iter": max_iter}


def _epochs(epochs: float, batch: int) -> int:
    return round(epochs * IMAGENET / batch)


def _usual(base_lr: float, weight_decay: float, **more: Any) -> dict[str, Any]:
    return dict(base_lr=base_lr, momentum=0.9, weight_decay=weight_decay, **more)


# As the ShmCaffe paper trains: no iter_size, 15 epochs, a tenth of the rate every 4.
SHMCAFFE = _usual(0.1, 0.0002, **_steps(_epochs(4, 60), _epochs(15, 60)))

MODELS = {
    "cifar10_full": Model(
        "The full net for CIFAR-10, about 81%; the LMDBs and the mean are those of `shmtrain data cifar10`.",
        architectures.cifar10_full, 0, 100, 100,
        {
            "solver": _usual(0.001, 0.004, lr_policy="fixed", max_iter=60_000, test_iter=[100]),
        },
        "CIFAR10_full", top_k=0, lmdb="examples/cifar10/cifar10",
        transform={"mean_file": "examples/cifar10/mean.binaryproto"},
    ),
    "alexnet": Model(
        "AlexNet (Krizhevsky, Sutskever, Hinton 2012), its two halves as groups on one device.",
        architectures.alexnet, 227, 256, 50,
        {"solver": _usual(0.01, 0.0005, test_iter=[1000], **_steps(100_000, 450_000))},
        "AlexNet", deploy=True,
    ),
    "caffenet": Model(
        "CaffeNet: AlexNet that pools before it normalises.",
        architectures.caffenet, 227, 256, 50,
        {"solver": _usual(0.01, 0.0005, test_iter=[1000], **_steps(100_000, 450_000))},
        "CaffeNet", deploy=True,
    ),
    "googlenet": Model(
        "GoogLeNet, Inception v1 (Szegedy et al. 2014), with its two auxiliary heads.",
        architectures.googlenet, 224, 60, 50,
        {
            "solver": _usual(
                0.01, 0.0002, test_iter=[1000], **_steps(_epochs(8, 60), _epochs(250, 60), 0.96)
            ),
            "shmcaffe_solver": SHMCAFFE | {"test_iter": [1000]},
        },
        "GoogLeNet", deploy=True,
    ),
    "vgg16": Model(
        "VGG16 (Simonyan, Zisserman 2014), column D.",
        architectures.vgg16, 224, 32, 25,
        {
            "solver": _usual(
                0.01, 0.0005, iter_size=8, lr_policy="multistep", gamma=0.1,
                stepvalue=[150_000, 250_000, 320_000], max_iter=370_000, test_iter=[2000],
            ),
        },
        "VGG16", deploy=True,
    ),
    "resnet50": Model(
        "ResNet-50 (He, Zhang, Ren, Sun 2015).",
        architectures.resnet50, 224, 32, 25,
        {
            "solver": _usual(
                0.1, 0.0001, iter_size=8, test_iter=[2000], **_steps(_epochs(30, 256), _epochs(90, 256))
            ),
        },
        "ResNet50",
    ),
    "inception_resnet_v2": Model(
        "Inception-ResNet-v2 (Szegedy, Ioffe, Vanhoucke, Alemi 2016), on 320 x 320 as the ShmCaffe paper.",
        architectures.inception_resnet_v2, 320, 32, 25,
        {
            "solver": dict(
                type="RMSProp", rms_decay=0.9, delta=1.0, base_lr=0.045,
                weight_decay=0.00004, test_iter=[2000],
                **_steps(_epochs(2, 32), _epochs(160, 32), 0.94),
            ),
        },
        "Inception_resnet_v2",
        transform={"mean_value": [128, 128, 128], "scale": 1 / 128},
    ),
}  # fmt: skip


def train_val(model: Model) -> Any:
    """The net of both phases."""
    net = NetSpec()
    net.data, net.label = L.Data(ntop=2)
    heads = model.body(net, net.data)
    for number, (scores, weight) in enumerate(heads, 1):
        name = "loss" if len(heads) == 1 else f"loss{number}/loss"
        net[name] = L.SoftmaxWithLoss(scores, net.label, loss_weight=weight)
    scores, test = heads[-1][0], {"phase": TEST}
    net.accuracy = L.Accuracy(scores, net.label, include=test)
    if model.top_k:
        net[f"accuracy_top{model.top_k}"] = L.Accuracy(scores, net.label, top_k=model.top_k, include=test)
    drawn = net.to_proto()
    message = schema.NetParameter(name=model.name)
    for phase, batch in ((TRAIN, model.batch), (TEST, model.test_batch)):
        message.layer.append(_data(model, drawn.layer[0], phase, batch))
    message.layer.extend(drawn.layer[1:])
    return message


def _data(model: Model, bare: Any, phase: int, batch: int) -> Any:
    layer = schema.LayerParameter()
    layer.CopyFrom(bare)
    assign_proto(layer, "include", {"phase": phase})
    crop = {"crop_size": model.crop, "mirror": phase == TRAIN} if model.crop else {}
    assign_proto(layer, "transform_param", crop | model.transform)
    backend = schema.DataParameter.LMDB
    source = f"{model.lmdb}_{'train' if phase == TRAIN else 'test' if model.top_k == 0 else 'val'}_lmdb"
    assign_proto(layer, "data_param", {"source": source, "backend": backend, "batch_size": batch})
    return layer


def deploy(model: Model) -> Any:
    """The net that answers: ten images in, probabilities out; the helping heads are left out."""
    net = NetSpec()
    net.data = L.Input(shape={"dim": [10, 3, model.crop, model.crop]})
    net.prob = L.Softmax(model.body(net, net.data)[-1][0])
    needed = _needed(net.prob)
    kept = NetSpec()
    for name, top in net.tops.items():
        if top.fn in needed:
            kept[name] = top
    message = schema.NetParameter(name=model.name)
    message.layer.extend(kept.to_proto().layer)
    return message


def _needed(last: Top) -> set[Any]:
    found, left = set(), [last.fn]
    while left:
        function = left.pop()
        if function not in found:
            found.add(function)
            left += [top.fn for top in function.inputs]
    return found


def solver(name: str, fields: dict[str, Any]) -> Any:
    folder = f"{HERE}/{name}"
    message = schema.SolverParameter(net=f"{folder}/train_val.prototxt", snapshot_prefix=f"{folder}/{name}")
    usual = {"test_interval": 1000, "display": 20, "snapshot": 10_000}
    for key, value in (usual | fields).items():
        assign_proto(message, key, value)
    return message


def files(name: str) -> Iterator[tuple[Path, str]]:
    """Each file of a model with its text."""
    model = MODELS[name]
    folder, title = FOLDER / name, f"# {model.title}\n# Written by {HERE}/make.py.\n"
    yield folder / "train_val.prototxt", title + text_format.MessageToString(train_val(model))
    if model.deploy:
        yield folder / "deploy.prototxt", title + text_format.MessageToString(deploy(model))
    for file, fields in model.solvers.items():
        yield folder / f"{file}.prototxt", title + text_format.MessageToString(solver(name, fields))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    p.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME", help="models (all)")
    p.add_argument("--check", action="store_true", help="write nothing; fail when a file is another one")
    args = p.parse_args()
    stale = []
    for name in args.names or MODELS:
        for path, text in files(name):
            if path.is_file() and path.read_text() == text:
                continue
            stale.append(path)
            if not args.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                print(f"wrote {path}")
    if args.check:
        for path in stale:
            print(f"{path} is not what make.py writes", file=sys.stderr)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
