"""Reads a .npz that may be damaged or hostile: each array's kind and size are known before it is read.

No pickle, and no more memory than the arrays that are asked for, whatever the file's heads claim.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
UNREADABLE = (  # what the reading of a file raises that is no .npz, or a broken or another one
    OSError, ValueError, KeyError, EOFError, MemoryError, NotImplementedError, RuntimeError, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip
LONGEST_HEAD = 1 << 12  # bytes of an array's description
LONGEST_TEXT = 1 << 10  # bytes of a name or a fingerprint


class Npz:
    """An open .npz. All its methods raise what UNREADABLE lists."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._zip = zipfile.ZipFile(path)

    def __enter__(self) -> Npz:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    @property
    def names(self) -> list[str]:
        return [name.removesuffix(".npy") for name in self._zip.namelist() if name.endswith(".npy")]

    def number(self, name: str) -> int:
        """A whole number, from 0 to what int64 holds."""
        value = int(self._array(name, "i8", ())[()])
        if value < 0:
            raise ValueError(f"{name} is {value}")
        return value

    def text(self, name: str, longest: int) -> bytes:
        """So many bytes at most."""
        text: bytes = self._array(name, "u1", (None,), longest).tobytes()
        return text

    def floats(self, name: str, count: int) -> F32:
        """(count,) float32."""
        values: F32 = self._array(name, "f4", (count,), count)
        return values

    def _array(self, name: str, kind: str, shape: tuple[int | None, ...], longest: int = 1) -> Any:
        """An array of that kind and shape; None stands for any number up to ``longest``."""
        with self._zip.open(f"{name}.npy") as member:
            found, dtype = _head(member)
            wanted = np.dtype(kind)
            fits = len(found) == len(shape) and all(w in (None, n) for w, n in zip(shape, found, strict=True))
            if dtype != wanted or not fits or any(n > longest for n in found):
                size = f"{longest}" if None not in shape else f"at most {longest}"
                raise ValueError(f"{name} is {found} of {dtype}, not {size} of {wanted}")
            bytes_ = int(np.prod(found, dtype=np.int64)) * wanted.itemsize
            data = member.read(bytes_)
        if len(data) < bytes_:
            raise EOFError(f"{name} ends after {len(data)} of {bytes_} bytes")
        return np.frombuffer(data, wanted).reshape(found).copy()


def _head(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an .npy, of which no more than its head is read."""
    if np.lib.format.read_magic(member) != (1, 0):
        raise ValueError("an array of another format's version")
    size = member.read(2)
    length = int.from_bytes(size, "little")
    if length > LONGEST_HEAD:
        raise ValueError(f"an array with a head of {length} bytes")
    head = io.BytesIO(size + member.read(length))
    shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    if any(n < 0 for n in shape):
        raise ValueError(f"an array of shape {shape}")
    return shape, dtype
