"""HDF5Data: rows of the data sets in HDF5 files."""

from __future__ import annotations

from prototxt.data.config import ReaderConfig
from prototxt.layers.read_ahead import no_bottoms, read_ahead, required, sharing
from prototxt.registry import Built, LayerSpec, Shape, layer


@layer("HDF5Data")
def hdf5_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Rows of the HDF5 files listed in ``source``, in order or shuffled; row i to worker i mod world.

    top i (batch, rest..) of the data set named as the top, float or integer
    """
    no_bottoms(spec, bottoms)
    if spec.message.HasField("transform_param"):
        raise spec.error("HDF5Data does not transform data.")
    if not spec.top:
        raise spec.error("HDF5Data needs a top, named as a data set of its files")
    config = ReaderConfig(
        "hdf5",
        required(spec, "hdf5_data_param", "source"),
        required(spec, "hdf5_data_param", "batch_size"),
        tuple(spec.top),
        shuffle=spec.hdf5_data_param.shuffle,
        **sharing(spec),
    )
    return read_ahead(spec, config)
