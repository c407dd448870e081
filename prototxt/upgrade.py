"""Bring messages of earlier formats to the current one, as Caffe does on every load, in its order.

The functions take messages of the schema or of its wire variant, change them in place and raise ValueError.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

from prototxt.upgrade_v0 import upgrade_v0

Origins = list["int | None"]

# V1's enum of layer types, where the string is not just the enum's words capitalised and joined.
_V1_TYPES = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "IM2COL": "Im2col",
    "LRN": "LRN",
    "MVN": "MVN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}
_SOLVER_TYPES = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
_TRANSFORMS = ("scale", "mean_file", "crop_size", "mirror")
_V1_TRANSFORMED = {"DATA": "data_param", "IMAGE_DATA": "image_data_param", "WINDOW_DATA": "window_data_param"}
# V1 fields that mean the same in the current format and are not copied by name alone.
_V1_HANDLED = {"layer", "type", "param", "blob_share_mode", "blobs_lr", "weight_decay"}


def upgrade_net(net: Any) -> Origins:
    """Bring a NetParameter to the current format.

    Returns for each layer of the result the index of the `layer` or `layers` entry it came from, None for the
    Input layer made of the old input fields.
    """
    if net.layer and net.layers:
        raise ValueError(
            "refusing to upgrade inconsistent NetParameter input: it has both 'layer' and 'layers' "
            "(the current format is layer { type: \"Name\" ... }); change all of them to 'layer'"
        )
    origins: Origins = list(range(len(net.layer) or len(net.layers)))
    if any(entry.HasField("layer") for entry in net.layers):
        origins = list(upgrade_v0(net))
    _upgrade_v1(net)
    if net.input:
        origins = _upgrade_input(net, origins)
    for layer in net.layer:
        if layer.type == "BatchNorm" and len(layer.param) == 3:
            for param in layer.param:
                param.lr_mult = param.decay_mult = 0.0
    return origins


def _upgrade_v1(net: Any) -> None:
    for old in net.layers:
        kind = type(old).LayerType.Name(old.type)
        if kind in _V1_TRANSFORMED:
            _move_transform(old, getattr(old, _V1_TRANSFORMED[kind]))
        _convert_v1_layer(old, kind, net.layer.add())
    net.ClearField("layers")


def _move_transform(old: Any, data: Any) -> None:
    """Data layers of V1 kept the transformation among their own fields."""
    for name in _TRANSFORMS:
        if data.HasField(name):
            setattr(old.transform_param, name, getattr(data, name))
            data.ClearField(name)


def _convert_v1_layer(old: Any, kind: str, new: Any) -> None:
    for entry, value in old.ListFields():
        if entry.name in _V1_HANDLED:
            continue
        if entry.message_type is None:
            if isinstance(value, (str, bytes, int, float)):  # bytes: a text that is no UTF-8
                setattr(new, entry.name, value)
            else:
                getattr(new, entry.name).extend(value)
        else:
            getattr(new, entry.name).MergeFrom(value)
    if old.HasField("type"):
        new.type = _V1_TYPES.get(kind) if kind in _V1_TYPES else kind.title().replace("_", "")
    for field, target in (
        (old.param, "name"),
        (old.blob_share_mode, "share_mode"),
        (old.blobs_lr, "lr_mult"),
        (old.weight_decay, "decay_mult"),
    ):
        for index, value in enumerate(field):
            while len(new.param) <= index:
                new.param.add()
            setattr(new.param[index], target, value)


def _upgrade_input(net: Any, origins: Origins) -> Origins:
    """`input` with shapes or dims becomes a first layer of type Input; alone a weight file left it over."""
    names, shapes, dims = list(net.input), list(net.input_shape), list(net.input_dim)
    if shapes or dims:
        if shapes and len(shapes) != len(names):
            raise ValueError(
                f"{len(names)} input fields, but {len(shapes)} input_shape; one for each is needed"
            )
        if not shapes and len(dims) != 4 * len(names):
            raise ValueError(f"{len(names)} input fields need {4 * len(names)} input_dim, not {len(dims)}")
        rest = list(net.layer)
        layers = [type(rest[0] if rest else net.layer.add())(name="input", type="Input", top=names), *rest]
        for index in range(len(names)):
            sizes = shapes[index].dim if shapes else dims[4 * index : 4 * index + 4]
            layers[0].input_param.shape.add().dim.extend(sizes)
        net.ClearField("layer")
        net.layer.extend(layers)
        origins = [None, *origins]
    for name in ("input", "input_shape", "input_dim"):
        net.ClearField(name)
    return origins


def upgrade_solver(solver: Any, path: str) -> None:
    """solver_type (old) becomes type; an absent or directory snapshot_prefix takes the solver file's name."""
    upgrade_solver_type(solver)
    if not solver.HasField("snapshot_prefix"):
        solver.snapshot_prefix = str(PurePath(path).with_suffix(""))
    elif os.path.isdir(solver.snapshot_prefix):
        solver.snapshot_prefix = os.path.join(solver.snapshot_prefix, PurePath(path).stem)


def upgrade_solver_type(solver: Any) -> None:
    """solver_type, the enum of earlier files, becomes type, the string."""
    if solver.HasField("solver_type"):
        if solver.HasField("type"):
            raise ValueError("solver_type (the old enum) and type (the string) cannot be both specified")
        solver.type = _SOLVER_TYPES[type(solver).SolverType.Name(solver.solver_type)]
        solver.ClearField("solver_type")
