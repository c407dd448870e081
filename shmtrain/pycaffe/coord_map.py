"""Where the pixels of one top lie in another's, and the Crop layer that aligns them.

A map (axis, scale, shift) takes a coordinate x of the one to scale x + shift of the other, on the axes after
``axis``; axis None fits any. scale and shift are numbers or arrays with one number a spatial axis.
Source: the geometry of convolution, as Long, Shelhamer, Darrell 2015 use it for skip layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmtrain.pycaffe.net_spec import Function, Top, layers

PASS_THROUGH_LAYERS = [
    "AbsVal", "BNLL", "BatchNorm", "Bias", "Clip", "Dropout", "ELU", "Eltwise", "Exp", "LRN", "Log", "MVN",
    "PReLU", "Power", "ReLU", "Scale", "Sigmoid", "Split", "Swish", "TanH", "Threshold",
]  # fmt: skip
LEGACY = ("kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w")

Map = tuple[Any, Any, Any]


class UndefinedMapException(Exception):
    """The layer's outputs have no place in its inputs: it looks at all of them, or moves them about."""


class AxisMismatchException(Exception):
    """Two maps on the way are about different axes."""


def coord_map(fn: Function) -> Map:
    """From a coordinate of the layer's input to one of its output; UndefinedMapException without one."""
    if fn.type_name in ("Convolution", "Pooling", "Im2col"):
        axis, stride, extent, pad = _window(fn)
        return axis, 1 / stride, (pad - (extent - 1) / 2) / stride
    if fn.type_name == "Deconvolution":
        axis, stride, extent, pad = _window(fn)
        return axis, stride, (extent - 1) / 2 - pad
    if fn.type_name in PASS_THROUGH_LAYERS:
        return None, 1, 0
    if fn.type_name == "Crop":
        params = fn.params.get("crop_param", fn.params)
        return params.get("axis", 2) - 1, 1, -np.array(params.get("offset", 0), ndmin=1)
    raise UndefinedMapException(f"{fn.type_name} layers have no map of coordinates")


def _window(fn: Function) -> tuple[Any, Any, Any, Any]:
    """Channel axis, stride, extent of the dilated kernel, padding."""
    params = fn.params.get("pooling_param" if fn.type_name == "Pooling" else "convolution_param", fn.params)
    given = [name for name in LEGACY if name in params]
    if given:
        raise AssertionError(f"cropping needs kernel_size, stride and pad, not {', '.join(given)}")
    if "kernel_size" not in params:
        raise UndefinedMapException(f"a {fn.type_name} layer without kernel_size has no map of coordinates")
    kernel, dilation = (np.array(params.get(name, 1), ndmin=1) for name in ("kernel_size", "dilation"))
    stride, pad = np.array(params.get("stride", 1), ndmin=1), np.array(params.get("pad", 0), ndmin=1)
    return params.get("axis", 1), stride, (kernel - 1) * dilation + 1, pad


def compose(base_map: Map, next_map: Map) -> Map:
    """The map that goes through ``next_map`` first, then through ``base_map``."""
    (axis, scale, shift), (other, next_scale, next_shift) = base_map, next_map
    if axis is not None and other is not None and axis != other:
        raise AxisMismatchException(f"one map is about axis {axis}, the other about axis {other}")
    return other if axis is None else axis, scale * next_scale, scale * next_shift + shift


def inverse(coord_map: Map) -> Map:
    """The way back."""
    axis, scale, shift = coord_map
    return axis, 1 / scale, -shift / scale


def coord_map_from_to(top_from: Top, top_to: Top) -> Map:
    """The map from ``top_from``'s coordinates to ``top_to``'s, by way of the nearest common ancestor.

    Raises RuntimeError when no layers with a map of coordinates connect the two.
    """
    from_maps = dict(_ancestors(top_from))
    for top, to_map in _ancestors(top_to):
        if top in from_maps:
            return compose(to_map, inverse(from_maps[top]))
    raise RuntimeError("no map between the tops: are they connected by spatial layers?")


def _ancestors(top: Top) -> list[tuple[Top, Map]]:
    """``top`` and all that it is made from by layers with a map, each with its map to ``top``."""
    found: dict[Top, Map] = {top: (None, 1, 0)}
    for reached in (order := [top]):
        try:
            through = coord_map(reached.fn)
        except UndefinedMapException:
            continue
        for bottom in reached.fn.inputs[: 1 if reached.fn.type_name == "Crop" else None]:
            if bottom not in found:
                found[bottom] = compose(found[reached], through)
                order.append(bottom)
    return [(reached, found[reached]) for reached in order]


def crop(top_from: Top, top_to: Top) -> Top:
    """A Crop layer that cuts ``top_from`` so that its pixels lie over those of ``top_to``.

    Raises AssertionError when their scales differ, or the offset would be negative or no whole number.
    """
    axis, scale, shift = coord_map_from_to(top_from, top_to)
    scale, shift = np.array(scale, ndmin=1), np.array(shift, ndmin=1)
    if not (scale == 1).all():
        raise AssertionError(f"cannot crop: the tops differ in scale ({scale})")
    if not (shift <= 0).all():
        raise AssertionError(f"cannot crop by a negative offset ({-shift})")
    if not (np.round(shift) == shift).all():
        raise AssertionError(f"cannot crop by an offset that is no whole number ({-shift})")
    offset = [int(part) for part in np.atleast_1d(-shift)]
    cut: Top = layers.Crop(
        top_from, top_to, crop_param={"axis": 2 if axis is None else axis + 1, "offset": offset}
    )
    return cut
