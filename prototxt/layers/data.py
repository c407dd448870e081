"""Data layers: Data (LMDB), HDF5Data, MemoryData, DummyData. No bottoms; forward() gives the next batch."""

from __future__ import annotations

import logging
import os
import zlib
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor, nn

from prototxt import schema
from prototxt.data.config import ReaderConfig, TransformConfig
from prototxt.data.ring import MAX_SLOTS
from prototxt.data.source import Reader
from prototxt.errors import DataError
from prototxt.fillers import fill
from prototxt.registry import Built, LayerSpec, Shape, layer

log = logging.getLogger(__name__)

F32 = NDArray[np.float32]
READ_SECONDS = 300.0  # until a batch that does not come is an error
MOVED = ("scale", "mean_file", "crop_size", "mirror")  # fields of data_param that transform_param replaced


# Layers with a reader process ----------------------------------------------------------------------------


class ReadAhead(nn.Module):
    """A batch a forward(), from a reader's memory: valid until the next forward().

    batches  taken so far by this worker; Net(options={"data_start": {layer: batches}}) goes on from there
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        super().__init__()
        self.reader = reader
        self._device = None if device.type == "cpu" else device
        self._single = len(reader.shapes) == 1

    @property
    def batches(self) -> int:
        return self.reader.batches

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        tops = self.reader.take()
        if self._device is not None:
            tops = tuple(top.to(self._device) for top in tops)
        return tops[0] if self._single else tops

    def close(self) -> None:
        """End the reader process; twice is fine."""
        self.reader.close()


def _read_ahead(spec: LayerSpec, config: ReaderConfig, mean_image: bytes | None = None) -> Built:
    context = spec.context
    place = str(spec.error("")).removesuffix(": ")
    timeout = float(context.options.get("reader_timeout", READ_SECONDS))
    reader = Reader(config, place=place, mean_image=mean_image, timeout=timeout)
    return Built(ReadAhead(reader, context.device), list(reader.shapes), source=True)


def _sharing(spec: LayerSpec) -> dict[str, Any]:
    """The part of a reader's task that depends on the worker."""
    context, train = spec.context, spec.phase == "TRAIN"
    start = int(context.options.get("data_start", {}).get(spec.name, 0))
    return {
        "train": train,
        "rank": context.rank,
        "world": context.world,
        "start": start,
        "seed": _seed(spec, f"{context.rank}/{start}"),
        "shuffle_seed": _seed(spec, "shuffle"),
    }


def _seed(spec: LayerSpec, purpose: str) -> int:
    """A seed of this layer's own from random_seed, or from the system without one."""
    if spec.context.seed is None:
        return int.from_bytes(os.urandom(4), "little")
    return zlib.crc32(f"{spec.context.seed}/{spec.phase}/{spec.name}/{purpose}".encode())


def _no_bottoms(spec: LayerSpec, bottoms: list[Shape]) -> None:
    if bottoms:
        raise spec.error(f"{spec.type} takes no bottom, {len(bottoms)} given")


def _required(spec: LayerSpec, group: str, name: str) -> Any:
    """A field of a parameter group that must be set, and above 0 when it is a number."""
    value = getattr(getattr(spec, group), name)
    if not value:
        raise spec.error(f"{group}.{name} must be set" + ("" if isinstance(value, str) else " and above 0"))
    return value


@layer("Data")
def data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Records of an LMDB in the order of their keys, for ever; record i goes to worker i mod world.

    top 0 (batch, channels, height, width) after transform_param, by the first record of each batch
    top 1 (batch,) labels, when there is a second top
    """
    _no_bottoms(spec, bottoms)
    if len(spec.top) not in (1, 2):
        raise spec.error(f"Data has 1 top (data) or 2 (data and label), {len(spec.top)} given")
    p = spec.data_param
    source, batch = _required(spec, "data_param", "source"), _required(spec, "data_param", "batch_size")
    if p.backend != p.LMDB:
        raise spec.error(_no_leveldb(source, p.HasField("backend")))
    for name in MOVED:
        if p.HasField(name):
            log.warning("%s", spec.error(f"data_param.{name} has no effect; set transform_param.{name}"))
    transform, mean_image = _transform(spec)
    slots = min(_required(spec, "data_param", "prefetch") + 1, MAX_SLOTS)
    config = ReaderConfig(
        "lmdb", source, batch, tuple(spec.top), slots=slots, transform=transform, **_sharing(spec)
    )
    return _read_ahead(spec, config, mean_image)


def _no_leveldb(source: str, explicit: bool) -> str:
    if os.path.exists(os.path.join(source, "data.mdb")):
        backend = "backend is LEVELDB" if explicit else "backend is not set and means LEVELDB"
        return f"{source} is an LMDB, but {backend}: set backend: LMDB"
    return f"backend LEVELDB cannot be read yet; convert {source} to LMDB and set backend: LMDB"


@layer("HDF5Data")
def hdf5_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Rows of the HDF5 files listed in ``source``, in order or shuffled; row i to worker i mod world.

    top i (batch, rest..) of the data set named as the top, float or integer
    """
    _no_bottoms(spec, bottoms)
    if spec.message.HasField("transform_param"):
        raise spec.error("HDF5Data does not transform data.")
    if not spec.top:
        raise spec.error("HDF5Data needs a top, named as a data set of its files")
    config = ReaderConfig(
        "hdf5",
        _required(spec, "hdf5_data_param", "source"),
        _required(spec, "hdf5_data_param", "batch_size"),
        tuple(spec.top),
        shuffle=spec.hdf5_data_param.shuffle,
        **_sharing(spec),
    )
    return _read_ahead(spec, config)


# transform_param -----------------------------------------------------------------------------------------


def _transform(spec: LayerSpec) -> tuple[TransformConfig, bytes | None]:
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
        raise _data_error(spec, f"cannot read the mean file {shown}: {error.strerror}") from error
    except DecodeError as error:
        raise _data_error(spec, f"the mean file {shown} is no BlobProto") from error
    values = np.array(blob.data or blob.double_data, np.float32)
    dims = tuple(blob.shape.dim) or (blob.num, blob.channels, blob.height, blob.width)
    dims = (1,) * (4 - len(dims)) + dims
    if len(dims) != 4 or dims[0] != 1 or values.size != np.prod(dims) or not values.size:
        raise _data_error(
            spec, f"the mean file {shown} holds {values.size} values of shape {dims}, not one image"
        )
    return (dims[1], dims[2], dims[3]), values.tobytes()


def _data_error(spec: LayerSpec, text: str) -> DataError:
    return DataError(str(spec.error(text)))


# Layers without a file -----------------------------------------------------------------------------------


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
                raise _data_error(self._spec, f"the {name} array must be float32 and C-contiguous")
        if data.shape[1:] != self._image:
            raise _data_error(self._spec, f"the data array is {data.shape}, but rows are {self._image}")
        if labels.size != len(data):
            raise _data_error(self._spec, f"{len(data)} rows of data, but {labels.size} labels")
        if not len(data) or len(data) % self._batch:
            raise _data_error(self._spec, f"{len(data)} rows are no multiple of batch_size {self._batch}")
        if self._spec.message.HasField("transform_param"):
            log.warning("%s", self._spec.error("MemoryData does not transform arrays"))
        self._arrays = torch.from_numpy(data), torch.from_numpy(labels.reshape(-1, 1, 1, 1))
        self._at = 0

    reset = set_input_arrays

    def forward(self) -> tuple[Tensor, Tensor]:
        if self._arrays is None:
            raise _data_error(self._spec, "MemoryData has no data: call set_input_arrays first")
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
    _no_bottoms(spec, bottoms)
    if len(spec.top) != 2:
        raise spec.error(f"MemoryData has 2 tops (data and label), {len(spec.top)} given")
    sides = ("batch_size", "channels", "height", "width")
    batch, *image = (_required(spec, "memory_data_param", side) for side in sides)
    shape = (batch, *image)
    return Built(MemoryData(spec, shape), [shape, (batch,)], source=True)


class DummyData(nn.Module):
    """Filled tensors: a constant filler fills once, any other at each forward."""

    def __init__(self, spec: LayerSpec, shapes: list[Shape], fillers: list[Any]) -> None:
        super().__init__()
        self._spec = spec
        self._fillers = fillers
        self._tops = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        for top, filler in zip(self._tops, fillers, strict=True):
            fill(top, filler, spec.context.generator, spec)

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        for i, filler in enumerate(self._fillers):
            if filler.type != "constant":
                self._tops[i] = torch.empty_like(self._tops[i])  # the batch before may still be in use
                fill(self._tops[i], filler, self._spec.context.generator, self._spec)
        tops = tuple(top.to(self._spec.context.device) for top in self._tops)
        return tops[0] if len(tops) == 1 else tops

    def close(self) -> None:
        """Nothing to end."""


@layer("DummyData")
def dummy_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Tops of given shapes filled by fillers; one shape and one filler serve all tops, else one each."""
    _no_bottoms(spec, bottoms)
    p = spec.dummy_data_param
    fillers = list(p.data_filler) or [schema.FillerParameter()]
    if len(fillers) not in (1, len(spec.top)):
        raise spec.error(
            f"data_filler must be given 0, 1 or {len(spec.top)} times (once a top), not {len(fillers)} times"
        )
    shapes = _dummy_shapes(spec)
    module = DummyData(spec, shapes, fillers * len(shapes) if len(fillers) == 1 else fillers)
    return Built(module, shapes, source=True)


def _dummy_shapes(spec: LayerSpec) -> list[Shape]:
    p, tops = spec.dummy_data_param, len(spec.top)
    sides = [p.num, p.channels, p.height, p.width]
    if any(sides) and p.shape:
        raise spec.error("shape and num/channels/height/width are both given; one of them is allowed")
    names = ["num", "channels", "height", "width"] if any(sides) else ["shape"]
    given = sides if any(sides) else [[tuple(shape.dim) for shape in p.shape]]
    for name, values in zip(names, given, strict=True):
        if len(values) not in (1, tops):
            raise spec.error(
                f"{name} must be given once or once a top ({tops} times), not {len(values)} times"
            )
    each = [list(values) * tops if len(values) == 1 else list(values) for values in given]
    shapes: list[Shape] = list(zip(*each, strict=True)) if any(sides) else each[0]
    for shape in shapes:
        if any(side < 1 for side in shape):
            raise spec.error(f"every dimension must be above 0, not {shape}")
    return shapes
