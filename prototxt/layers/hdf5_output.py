"""HDF5Output: a sink that writes two blobs to an HDF5 file."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
from torch import Tensor, nn

from prototxt.layers.common import expect, shape_text
from prototxt.layers.read_ahead import data_error, required
from prototxt.registry import Built, LayerSpec, Shape, layer

AXES = 4
NAMES = ("data", "label")
CHUNK_BYTES = 1 << 20


class Hdf5Output(nn.Module):
    """Adds the rows of each forward pass to the file; it is whole after each."""

    def __init__(self, spec: LayerSpec, path: str) -> None:
        super().__init__()
        self._spec, self._path = spec, Path(path)
        self._open("w").close()

    def _open(self, mode: str) -> h5py.File:
        try:
            return h5py.File(self._path, mode)
        except OSError as error:
            raise data_error(self._spec, f"cannot write {os.path.abspath(self._path)}: {error}") from error

    def forward(self, data: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        if len(data) != len(label):
            raise data_error(self._spec, f"{len(data)} rows of data, but {len(label)} of labels")
        with self._open("a") as file:
            for name, bottom in zip(NAMES, (data, label), strict=True):
                rows = bottom.detach().cpu().numpy()
                self._append(file, name, rows.reshape(*rows.shape, *(1,) * (AXES - rows.ndim)))
        return ()

    def _append(
        self, file: h5py.File, name: str, rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    ) -> None:
        row = rows.shape[1:]
        if name not in file:
            chunk = max(1, min(len(rows), CHUNK_BYTES // max(1, 4 * int(np.prod(row)))))
            file.create_dataset(
                name, data=rows, dtype=np.float32, maxshape=(None, *row), chunks=(chunk, *row)
            )
            return
        old = file[name]
        if old.shape[1:] != row:
            raise data_error(
                self._spec,
                f"rows of {name!r} were {shape_text(old.shape[1:])}, and are {shape_text(row)} now",
            )
        first = len(old)
        old.resize(first + len(rows), axis=0)
        old[first:] = rows


@layer("HDF5Output")
def hdf5_output(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Writes bottom 0 as data set ``data`` and bottom 1 as ``label``, with 4 axes each.

    The file is begun anew when the net is built; each forward pass adds its rows. (The original keeps those
    of the first.)
    """
    expect(spec, 2, 0)

    def tops(shapes: list[Shape]) -> list[Shape]:
        for shape in shapes:
            if not 1 <= len(shape) <= AXES:
                raise spec.error(f"HDF5Output writes 1 to {AXES} axes, not {shape_text(shape)}")
        return []

    made = tops(bottoms)
    return Built(Hdf5Output(spec, required(spec, "hdf5_output_param", "file_name")), made, reshape=tops)
