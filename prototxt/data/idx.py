"""The idx files that MNIST comes in: a big-endian header, then bytes."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prototxt.errors import DataError

U8 = NDArray[np.uint8]
_UBYTE = 8  # the header's code of unsigned bytes
_PIECE = 1 << 20  # bytes unpacked at once
_MOST = 1 << 31  # bytes that are unpacked; no such data set is larger


def read_idx(path: str | os.PathLike[str], axes: int) -> U8:
    """The bytes of an idx file, gzipped or not, shaped as its header says.

    Raises DataError when it cannot be read, has another number of axes, or is longer or shorter than it says.
    """
    shown = os.path.abspath(path)
    try:
        raw = Path(path).read_bytes()
        content = _unpacked(path, axes) if raw[:2] == b"\x1f\x8b" else raw
    except OSError as error:
        raise DataError(f"cannot read {shown}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{shown} is a damaged gzip file: {error}") from error
    start = 4 + 4 * axes
    if len(content) < start or content[:4] != bytes((0, 0, _UBYTE, axes)):
        raise DataError(f"{shown} is no idx file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", content[4:start])
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=object):
        raise DataError(f"{shown} holds {values.size} values, its header says {'x'.join(map(str, shape))}")
    return values.reshape(shape)


def _unpacked(path: str | os.PathLike[str], axes: int) -> bytes:
    """A gzip file's content as far as its header says, and a byte more: what follows takes no memory."""
    with gzip.open(path) as file:
        head = file.read(4 + 4 * axes)
        if len(head) < 4 + 4 * axes or head[:4] != bytes((0, 0, _UBYTE, axes)):
            return b""
        claimed = prod(struct.unpack(f">{axes}I", head[4:]))
        pieces, left = [head], min(claimed, _MOST) + 1
        while left and (piece := file.read(min(left, _PIECE))):  # one read takes the memory for all
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def write_idx(path: str | os.PathLike[str], values: U8) -> None:
    """Write bytes of any shape as a gzipped idx file, the same for the same values."""
    header = bytes((0, 0, _UBYTE, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(header + np.ascontiguousarray(values).tobytes())
