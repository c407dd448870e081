"""Data: records of an LMDB or a LevelDB."""

from __future__ import annotations

import os
from typing import Literal

from prototxt.data.config import ReaderConfig
from prototxt.data.ring import MAX_SLOTS
from prototxt.layers.read_ahead import no_bottoms, read_ahead, required, sharing
from prototxt.layers.transform_param import transform_of, warn_of_moved
from prototxt.registry import Built, LayerSpec, Shape, layer


@layer("Data")
def data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Records of a database in the order of their keys, for ever; record i goes to worker i mod world.

    top 0 (batch, channels, height, width) after transform_param, by the first record of each batch
    top 1 (batch,) labels, when there is a second top
    """
    no_bottoms(spec, bottoms)
    if len(spec.top) not in (1, 2):
        raise spec.error(f"Data has 1 top (data) or 2 (data and label), {len(spec.top)} given")
    p = spec.data_param
    source, batch = required(spec, "data_param", "source"), required(spec, "data_param", "batch_size")
    backend: Literal["lmdb", "leveldb"] = "lmdb" if p.backend == p.LMDB else "leveldb"
    if backend == "leveldb" and os.path.exists(os.path.join(source, "data.mdb")):
        set_to = "is LEVELDB" if p.HasField("backend") else "is not set and means LEVELDB"
        raise spec.error(f"{source} is an LMDB, but backend {set_to}: set backend: LMDB")
    warn_of_moved(spec, "data_param")
    transform, mean_image = transform_of(spec)
    slots = min(required(spec, "data_param", "prefetch") + 1, MAX_SLOTS)
    config = ReaderConfig(
        backend, source, batch, tuple(spec.top), slots=slots, transform=transform, **sharing(spec)
    )
    return read_ahead(spec, config, mean_image)
