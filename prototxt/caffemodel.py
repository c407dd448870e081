"""Weight files and their kin (.caffemodel, .solverstate, mean files): protobuf messages with arrays in them.

Messages are those of prototxt.schema.wire, whose BlobProto holds its floats as bytes. No torch here.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, EncodeError

from prototxt import schema, upgrade
from prototxt.errors import WeightsError
from prototxt.files import replacing_file
from prototxt.room import MAX_AXES
from prototxt.schema import wire

Array = npt.NDArray[np.float32]
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


def read_net(path: str | os.PathLike[str]) -> Any:
    """The wire NetParameter of a binary .caffemodel, upgraded to the current format."""
    net = read_message(path, "NetParameter")
    try:
        upgrade.upgrade_net(net)
    except ValueError as error:
        raise WeightsError(f"{os.fspath(path)}: {error}") from error
    return net


def write_net(path: str | os.PathLike[str], message: Any) -> None:
    """Write a wire NetParameter; see write_message."""
    write_message(path, message)


def is_hdf5(path: str | os.PathLike[str]) -> bool:
    """By its content, whatever the name; WeightsError where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError as error:
        raise WeightsError(
            f"cannot read {os.fspath(path)!r}: {error.strerror}: {os.path.abspath(path)}"
        ) from error


def read_message(path: str | os.PathLike[str], name: str) -> Any:
    """Read a file that holds one binary message ``name``, as its wire variant.

    Files with unpacked floats, which the wire variant does not see, are read by the plain schema.
    Raises WeightsError for a file that is missing, empty, an HDF5 file, or no such message.
    """
    shown = os.fspath(path)
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise WeightsError(f"cannot read {shown!r}: {error.strerror}: {os.path.abspath(path)}") from error
    if not raw:
        raise WeightsError(f"{shown}: the file is empty; a {name} was expected")
    if raw.startswith(HDF5_MAGIC):
        raise WeightsError(f"{shown}: this is an HDF5 file; a binary {name} was expected")
    return parse_message(raw, name, shown)


def parse_message(raw: bytes, name: str, path: str = "<bytes>") -> Any:
    """As read_message, from bytes."""
    try:
        message = getattr(wire, name).FromString(raw)
        if all(_complete(blob) for blob in _blobs(message)):
            return message
        plain = getattr(schema, name).FromString(raw)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    except DecodeError as error:
        hint = " (is it a text prototxt?)" if _looks_like_text(raw) else " (is it truncated?)"
        raise WeightsError(f"{path}: not a binary {name}{hint}") from error
    message.DiscardUnknownFields()
    for blob, source in zip(_blobs(message), _blobs(plain), strict=True):
        for field in ("data", "diff"):
            values = getattr(source, field)
            setattr(blob, field, np.asarray(values, dtype="<f4").tobytes())
    return message


def write_message(path: str | os.PathLike[str], message: Any) -> None:
    """Serialise ``message`` into ``path`` by way of a temporary file beside it: whole or not at all.

    Raises WeightsError when the folder is missing, the disk full, or the message over protobuf's 2 GiB.
    """
    target = Path(path)
    try:
        raw = message.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise WeightsError(f"{target}: cannot be written as one message: {error}") from error
    try:
        with replacing_file(target) as beside:
            Path(beside).write_bytes(raw)
    except OSError as error:
        raise WeightsError(f"cannot write {target}: {error.strerror} ({len(raw)} bytes)") from error


def blob_shape(blob: Any) -> tuple[int, ...]:
    """The shape of a BlobProto; files older than ``shape`` give four sizes, axes of 1 included.

    Raises WeightsError for sizes below 0 and for more axes than a blob has: their product may take for ever.
    """
    if blob.HasField("shape"):
        shape = tuple(blob.shape.dim[: MAX_AXES + 1])
    else:
        shape = (blob.num, blob.channels, blob.height, blob.width)
    if len(shape) > MAX_AXES:
        raise WeightsError(f"a blob has {len(blob.shape.dim)} axes; {MAX_AXES} are the most")
    if any(size < 0 for size in shape):
        raise WeightsError(f"a blob has the impossible shape {shape}")
    return shape


def is_legacy(blob: Any) -> bool:
    """Whether the blob gives four sizes by name instead of a shape."""
    return not blob.HasField("shape") and any(
        blob.HasField(name) for name in ("num", "channels", "height", "width")
    )


def blob_array(blob: Any, field: str = "data") -> Array:
    """``data`` or ``diff`` of a wire BlobProto as float32 of its shape; read-only, on the message's bytes.

    Raises WeightsError when the count does not fit the shape.
    """
    shape = blob_shape(blob)
    doubles = getattr(blob, f"double_{field}")
    values: Array = (
        np.asarray(doubles, dtype=np.float32) if doubles else np.frombuffer(getattr(blob, field), "<f4")
    )
    if values.size != math.prod(shape):
        raise WeightsError(f"a blob of shape {shape} holds {values.size} numbers, not {math.prod(shape)}")
    return values.reshape(shape)


def fill_blob(blob: Any, data: Array, diff: Array | None = None) -> None:
    """Write arrays into a wire BlobProto, with the shape of ``data``."""
    blob.shape.dim.extend(data.shape)
    blob.data = np.ascontiguousarray(data, dtype="<f4").tobytes()
    if diff is not None:
        blob.diff = np.ascontiguousarray(diff, dtype="<f4").tobytes()


def wrong_number(path: str, layer: str, source: int, target: int) -> str:
    """The message for a layer whose blobs are fewer or more in the file than in the net."""
    return (
        f"{path}: Incompatible number of blobs for layer {layer}: the file has {source}, the net {target}; "
        f"to learn this layer's parameters anew, rename it"
    )


def wrong_shape(path: str, layer: str, index: int, source: tuple[int, ...], target: tuple[int, ...]) -> str:
    """The message for a blob whose shape is another in the file than in the net."""
    shapes = [f"{' '.join(map(str, shape))} ({math.prod(shape)})" for shape in (source, target)]
    return (
        f"{path}: Cannot copy param {index} weights from layer '{layer}'; shape mismatch. "
        f"Source param shape is {shapes[0]}; target param shape is {shapes[1]}. "
        f"To learn this layer's parameters from scratch rather than copying them, rename the layer"
    )


def _blobs(message: Any) -> list[Any]:
    """Every BlobProto of a message that may carry some, in order."""
    name = message.DESCRIPTOR.name
    if name == "BlobProto":
        return [message]
    if name == "SolverState":
        return list(message.history)
    if name == "BlobProtoVector":
        return list(message.blobs)
    if name == "NetParameter":
        old = [blob for entry in message.layers for blob in (*entry.blobs, *entry.layer.blobs)]
        return [blob for layer in message.layer for blob in layer.blobs] + old
    return []


def _complete(blob: Any) -> bool:
    """Whether the bytes hold all the floats that the shape announces."""
    count = math.prod(blob_shape(blob))
    return bool(blob.double_data) or (len(blob.data) == 4 * count and len(blob.diff) in (0, 4 * count))


def _looks_like_text(raw: bytes) -> bool:
    return all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in raw[:256])
