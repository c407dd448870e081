"""MemoryData: batches of arrays that a script hands over."""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prototxt.layers.read_ahead import data_error, no_bottoms, required
from prototxt.registry import Built, LayerSpec, Shape, layer

log = logging.getLogger(__name__)

F32 = NDArray[np.float32]


class MemoryData(nn.Module):
    """Batches of arrays that the caller hands over; no copy is made."""

    def __init__(self, spec: LayerSpec, shape: Shape) -> None:
        super().__init__()
        self._spec = spec
        self._batch, self._image = shape[0], shape[1:]
        self._arrays: tuple[Tensor, Tensor] | None = None
        self._at = 0

    def set_input_arrays(self, data: F32, labels: F32) -> None:
        """Go through these rows from the first, batch by batch, for ever.

        data    (n, channels, height, width) float32, C-contiguous; n a multiple of the batch size
        labels  n float32 values, C-contiguous

        The arrays are used in place. Raises DataError when they do not fit.
        """
        for name, array in (("data", data), ("labels", labels)):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise data_error(self._spec, f"the {name} array must be float32 and C-contiguous")
        if data.shape[1:] != self._image:
            raise data_error(self._spec, f"the data array is {data.shape}, but rows are {self._image}")
        if labels.size != len(data):
            raise data_error(self._spec, f"{len(data)} rows of data, but {labels.size} labels")
        if not len(data) or len(data) % self._batch:
            raise data_error(self._spec, f"{len(data)} rows are no multiple of batch_size {self._batch}")
        if self._spec.message.HasField("transform_param"):
            log.warning("%s", self._spec.error("MemoryData does not transform arrays"))
        self._arrays = torch.from_numpy(data), torch.from_numpy(labels.reshape(-1, 1, 1, 1))
        self._at = 0

    reset = set_input_arrays

    def forward(self) -> tuple[Tensor, Tensor]:
        if self._arrays is None:
            raise data_error(self._spec, "MemoryData has no data: call set_input_arrays first")
        data, labels = self._arrays
        rows = slice(self._at, self._at + self._batch)
        self._at = rows.stop % len(data)
        return data[rows].to(self._spec.context.device), labels[rows].to(self._spec.context.device)

    def close(self) -> None:
        self._arrays = None


@layer("MemoryData")
def memory_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Arrays given by set_input_arrays(data, labels).

    top 0 (batch, channels, height, width)  top 1 (batch,), and (batch, 1, 1, 1) from the first forward on
    """
    no_bottoms(spec, bottoms)
    if len(spec.top) != 2:
        raise spec.error(f"MemoryData has 2 tops (data and label), {len(spec.top)} given")
    sides = ("batch_size", "channels", "height", "width")
    batch, *image = (required(spec, "memory_data_param", side) for side in sides)
    shape = (batch, *image)
    return Built(MemoryData(spec, shape), [shape, (batch,)], source=True)
