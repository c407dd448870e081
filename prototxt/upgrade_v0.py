"""The oldest net format: one message with every layer's settings, nested in `layers`, becomes V1."""

from __future__ import annotations

from typing import Any

_TYPES = {
    "accuracy": "ACCURACY",
    "bnll": "BNLL",
    "concat": "CONCAT",
    "conv": "CONVOLUTION",
    "data": "DATA",
    "dropout": "DROPOUT",
    "euclidean_loss": "EUCLIDEAN_LOSS",
    "flatten": "FLATTEN",
    "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT",
    "im2col": "IM2COL",
    "images": "IMAGE_DATA",
    "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING",
    "relu": "RELU",
    "sigmoid": "SIGMOID",
    "softmax": "SOFTMAX",
    "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT",
    "tanh": "TANH",
    "window_data": "WINDOW_DATA",
}
_PARAMS = {
    "conv": "convolution_param",
    "innerproduct": "inner_product_param",
    "pool": "pooling_param",
    "dropout": "dropout_param",
    "lrn": "lrn_param",
    "data": "data_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "window_data": "window_data_param",
    "infogain_loss": "infogain_loss_param",
    "concat": "concat_param",
    "hdf5_output": "hdf5_output_param",
}
# Old field -> its name in the layer's message, and the layers that have it.
_FIELDS = {
    "num_output": ("num_output", {"conv", "innerproduct"}),
    "biasterm": ("bias_term", {"conv", "innerproduct"}),
    "weight_filler": ("weight_filler", {"conv", "innerproduct"}),
    "bias_filler": ("bias_filler", {"conv", "innerproduct"}),
    "pad": ("pad", {"conv", "pool"}),
    "kernelsize": ("kernel_size", {"conv", "pool"}),
    "group": ("group", {"conv"}),
    "stride": ("stride", {"conv", "pool"}),
    "pool": ("pool", {"pool"}),
    "dropout_ratio": ("dropout_ratio", {"dropout"}),
    "local_size": ("local_size", {"lrn"}),
    "alpha": ("alpha", {"lrn"}),
    "beta": ("beta", {"lrn"}),
    "k": ("k", {"lrn"}),
    "source": ("source", {"data", "hdf5_data", "images", "window_data", "infogain_loss"}),
    "batchsize": ("batch_size", {"data", "hdf5_data", "images", "window_data"}),
    "rand_skip": ("rand_skip", {"data", "images"}),
    "shuffle_images": ("shuffle", {"images"}),
    "new_height": ("new_height", {"images"}),
    "new_width": ("new_width", {"images"}),
    "concat_dim": ("concat_dim", {"concat"}),
    "det_fg_threshold": ("fg_threshold", {"window_data"}),
    "det_bg_threshold": ("bg_threshold", {"window_data"}),
    "det_fg_fraction": ("fg_fraction", {"window_data"}),
    "det_context_pad": ("context_pad", {"window_data"}),
    "det_crop_mode": ("crop_mode", {"window_data"}),
    "hdf5_output_param": ("", {"hdf5_output"}),
}
_TRANSFORMS = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}


def upgrade_v0(net: Any) -> list[int]:
    """Rewrite ``net.layers`` in place; returns the old index of each layer that is left."""
    pads, kept = _fold_padding(net)
    layers = [_convert(net.layers[index], pads.get(index)) for index in kept]
    net.ClearField("layers")
    net.layers.extend(layers)
    return kept


def _fold_padding(net: Any) -> tuple[dict[int, int], list[int]]:
    """A "padding" layer disappears into the pad of the convolution or pooling that follows."""
    pads: dict[int, int] = {}
    producers: dict[str, int] = {}
    for index, entry in enumerate(net.layers):
        for position, bottom in enumerate(entry.bottom):
            source = net.layers[producers[bottom]] if bottom in producers else None
            if source is None or source.layer.type != "padding":
                continue
            name = entry.layer.name
            if entry.layer.type not in ("conv", "pool") or len(entry.bottom) != 1:
                raise ValueError(f"layer {name!r}: a padding layer may only feed a conv or pool layer")
            if len(source.bottom) != 1 or len(source.top) != 1:
                raise ValueError(f"layer {source.layer.name!r}: padding has one bottom and one top")
            pads[index] = source.layer.pad
            entry.bottom[position] = source.bottom[0]
        producers.update(dict.fromkeys(entry.top, index))
    return pads, [index for index, entry in enumerate(net.layers) if entry.layer.type != "padding"]


def _convert(entry: Any, pad: int | None) -> Any:
    """One V1 layer out of a V0 one; ``pad`` of a folded padding layer."""
    new = type(entry)(bottom=entry.bottom, top=entry.top)
    old = entry.layer
    if pad is not None:
        old.pad = pad
    for field, value in old.ListFields():
        if field.name == "name":
            new.name = value
        elif field.name == "type":
            if value not in _TYPES:
                raise ValueError(f"layer {old.name!r}: unknown layer type {value!r} of the oldest format")
            new.type = type(entry).LayerType.Value(_TYPES[value])
        elif field.name in ("blobs", "blobs_lr", "weight_decay"):
            getattr(new, field.name).MergeFrom(value)
        elif field.name in _TRANSFORMS:
            setattr(new.transform_param, _TRANSFORMS[field.name], value)
        else:
            _set(new, old, field.name, value)
    return new


def _set(new: Any, old: Any, name: str, value: Any) -> None:
    """Move a setting into the message of the layer's type; what the type lacks is dropped, as in Caffe."""
    target, types = _FIELDS.get(name, ("", set()))
    if old.type not in types:
        return
    message = getattr(new, _PARAMS[old.type])
    if not target:
        message.CopyFrom(value)
    elif target.endswith("filler"):
        getattr(message, target).CopyFrom(value)
    elif old.type == "conv" and target in ("pad", "kernel_size", "stride"):
        getattr(message, target).append(value)
    else:
        setattr(message, target, value)
