"""Small data sets made at test time, and data layers built from a line of prototxt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from prototxt import schema
from prototxt.registry import BuildContext, LayerSpec, build_layer
from prototxt.text import net_from_text

PATH = "net.prototxt"

MakeLmdb = Callable[..., Path]
OpenLayer = Callable[..., Any]


def encode(image: NDArray[Any], label: int) -> bytes:
    """A raw Datum of a (channels, height, width) image: bytes for uint8, else float_data."""
    channels, height, width = image.shape
    datum = schema.Datum(channels=channels, height=height, width=width, label=label)
    if image.dtype == np.uint8:
        datum.data = image.tobytes()
    else:
        datum.float_data.extend(image.ravel().tolist())
    return bytes(datum.SerializeToString())


@pytest.fixture
def make_lmdb(tmp_path: Path) -> MakeLmdb:
    """make_lmdb(values, name="db"): an LMDB of these records (bytes, or (image, label) pairs)."""

    def make(values: list[Any], name: str = "db") -> Path:
        with (
            lmdb.open(str(tmp_path / name), map_size=64 << 20, lock=False) as env,
            env.begin(write=True) as txn,
        ):
            for i, value in enumerate(values):
                txn.put(b"%08d" % i, value if isinstance(value, bytes) else encode(*value), append=True)
        return tmp_path / name

    return make


@pytest.fixture
def numbered(make_lmdb: MakeLmdb) -> Callable[[int], Path]:
    """numbered(n): an LMDB whose record i is a 1x2x2 image with label i."""
    return lambda n: make_lmdb([(np.full((1, 2, 2), i % 251, np.uint8), i) for i in range(n)])


@pytest.fixture
def open_layer() -> Iterator[OpenLayer]:
    """open_layer(text, phase="TEST", **context): the Built of the layer in ``text``; closed afterwards."""
    opened: list[Any] = []

    def build(text: str, phase: str = "TEST", **context: Any) -> Any:
        source = net_from_text(f"layer {{ {text} }}", PATH)
        spec = LayerSpec(source.message.layer[0], PATH, 1, BuildContext(phase, **context))  # type: ignore[arg-type]
        built = build_layer(spec, [(1,)] * len(source.message.layer[0].bottom))
        opened.append(built.module)
        return built

    yield build
    for module in opened:
        module.close()


@pytest.fixture
def data_layer(open_layer: OpenLayer) -> OpenLayer:
    """data_layer(folder, batch, extra="", **context): a Data layer with two tops."""

    def build(folder: Path, batch: int, extra: str = "", **context: Any) -> Any:
        return open_layer(
            f'name: "d" type: "Data" top: "data" top: "label" {extra} '
            f'data_param {{ source: "{folder}" batch_size: {batch} backend: LMDB }}',
            **context,
        )

    return build
