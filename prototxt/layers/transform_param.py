"""transform_param of a data layer, checked, with its mean image."""

from __future__ import annotations

import logging
import os
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from prototxt import schema
from prototxt.data.config import TransformConfig
from prototxt.layers.read_ahead import data_error
from prototxt.registry import LayerSpec

log = logging.getLogger(__name__)

MOVED = ("scale", "mean_file", "crop_size", "mirror")  # old fields that transform_param replaced


def warn_of_moved(spec: LayerSpec, group: str, fields: tuple[str, ...] = MOVED) -> None:
    """Say so when an old field of the parameter group is set: it has no effect, as in the original."""
    parameters: Any = getattr(spec, group)
    for name in fields:
        if parameters.HasField(name):
            log.warning("%s", spec.error(f"{group}.{name} has no effect; set transform_param.{name}"))


def transform_of(spec: LayerSpec) -> tuple[TransformConfig, bytes | None]:
    """transform_param, checked, and the mean image's float32 values."""
    p = spec.transform_param
    if p.HasField("mean_file") and p.mean_value:
        raise spec.error("mean_file and mean_value are both given; one of them is allowed")
    if p.force_color and p.force_gray:
        raise spec.error("force_color and force_gray are both set; one of them is allowed")
    shape, values = (0, 0, 0), None
    if p.HasField("mean_file"):
        shape, values = _mean_image(spec, p.mean_file)
    return (
        TransformConfig(
            scale=p.scale,
            mirror=p.mirror,
            crop=p.crop_size,
            mean_values=tuple(p.mean_value),
            mean_shape=shape,
            force_color=p.force_color,
            force_gray=p.force_gray,
        ),
        values,
    )


def _mean_image(spec: LayerSpec, path: str) -> tuple[tuple[int, int, int], bytes]:
    """(channels, height, width) and float32 values of a mean file, a BlobProto."""
    blob = schema.BlobProto()
    shown = os.path.abspath(path)
    try:
        with open(path, "rb") as file:
            blob.ParseFromString(file.read())
    except OSError as error:
        raise data_error(spec, f"cannot read the mean file {shown}: {error.strerror}") from error
    except DecodeError as error:
        raise data_error(spec, f"the mean file {shown} is no BlobProto") from error
    values = np.array(blob.data or blob.double_data, np.float32)
    dims = tuple(blob.shape.dim[:5]) or (blob.num, blob.channels, blob.height, blob.width)
    dims = (1,) * (4 - len(dims)) + dims
    if len(dims) != 4 or dims[0] != 1 or min(dims) < 0 or values.size != prod(dims) or not values.size:
        raise data_error(
            spec, f"the mean file {shown} holds {values.size} values of shape {dims}, not one image"
        )
    return (dims[1], dims[2], dims[3]), values.tobytes()
