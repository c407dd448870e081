"""What is done with each kind of hostile file, as the product does it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np

from prototxt import caffemodel
from prototxt.data.config import ImageConfig, ReaderConfig, TransformConfig, WindowConfig
from prototxt.data.idx import read_idx
from prototxt.data.note import Note
from prototxt.data.reader import open_source
from prototxt.data.ring import batch_bytes
from prototxt.data.store import Stores
from prototxt.layers.transform_param import transform_of
from prototxt.net import Net
from prototxt.registry import BuildContext, LayerSpec
from prototxt.text import load_net, net_from_text
from shmtrain import snapshot
from shmtrain.config import TrainConfig
from tests.prototxt.hostile import mutations as m
from tests.prototxt.hostile.samples import WEIGHED
from tests.prototxt.hostile.trial import PIXELS

FLOOR = 48 << 20  # bytes that any work may take
SMALL = 200_000  # values of a net that is run, too


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    files   the samples it begins with; a folder is a database, of which one file is mutated
    work    what the product does with it
    apart   the product does it in a process of its own: that one may die of it
    floor   bytes of memory that are allowed whatever the file's size; ``times`` its size comes on top
    share   of all trials, relative to the others
    starts  it starts processes of its own
    """

    files: tuple[str, ...]
    work: Callable[[Path], object]
    mutations: tuple[m.Mutation, ...] = m.BYTES
    apart: bool = False
    floor: int = FLOOR
    times: int = 16
    share: int = 10
    starts: bool = False

    def prepare(self, rng: Random, samples: Path, scratch: Path) -> tuple[Path, str]:
        """A mutated copy in ``scratch``, and what was done to it."""
        name = rng.choice([name for name in self.files if (samples / name).exists()])
        path = scratch / name
        if (samples / name).is_dir():
            shutil.copytree(samples / name, path)
            file = rng.choice(sorted(path.iterdir()))
        else:
            shutil.copy(samples / name, path)
            file = path
        data = file.read_bytes() or b"\0"
        done = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            mutate = rng.choice(self.mutations)
            data = mutate(data, rng) or b"\0"
            done.append(getattr(mutate, "__qualname__", "").split(".")[0])
        file.write_bytes(data)
        return path, f"{file.relative_to(scratch)}: {', '.join(done)}"


# Read by the program itself --------------------------------------------------------------------------------


@cache
def weighed_net() -> Net:
    return Net(net_from_text(WEIGHED), "TEST", seed=1)


def weights(path: Path) -> None:
    weighed_net().copy_from(path)


def upgraded(path: Path) -> None:
    caffemodel.write_net(path.with_suffix(".new"), caffemodel.read_net(path))


def state(path: Path) -> None:
    snapshot.find_model(snapshot.read_state(str(path)), str(path))


def worker(path: Path) -> None:
    params: Any = SimpleNamespace(fingerprint=lambda: bytes(4), trained=20)
    snapshot.read_worker(str(path), params, 1)


def mean(path: Path) -> None:
    text = f'layer {{ name: "d" type: "ImageData" transform_param {{ mean_file: "{path}" }} }}'
    transform_of(LayerSpec(net_from_text(text).message.layer[0], "net", 1, BuildContext("TEST")))


def net(path: Path) -> None:
    """Built for both phases, and run where it is small."""
    source = load_net(path)
    for phase in ("TRAIN", "TEST"):
        with Net(source, phase, seed=1) as built:  # type: ignore[arg-type]
            values = sum(blob.count for blob in built.blobs.values())
            values += sum(blob.count for blobs in built.params.values() for blob in blobs)
            if values < SMALL:
                built.forward()


def idx(path: Path) -> None:
    read_idx(path, 3)


def solver(path: Path) -> None:
    TrainConfig.load(path)


# Read by a reader, or by a process of its own ------------------------------------------------------------


def _config(kind: str, source: Path, tops: int = 2, **more: Any) -> ReaderConfig:
    return ReaderConfig(kind, str(source), 8, ("data", "label")[:tops], False, **more)  # type: ignore[arg-type]


def batches(config: ReaderConfig, count: int = 6) -> None:
    source = open_source(config, None, Stores(), Note())
    for _ in range(count):
        shapes = source.advance()
        if batch_bytes(shapes) > 1 << 30:
            raise MemoryError(f"a batch of {batch_bytes(shapes)} bytes")
        finish = source.write([memoryview(np.zeros(int(np.prod(shape)), np.float32)) for shape in shapes])
        if finish is not None:
            finish()


def database(path: Path) -> None:
    kind = "leveldb" if path.name.endswith("leveldb") else "lmdb"
    batches(_config(kind, path))


def rows(path: Path) -> None:
    listed = path.with_suffix(".list")
    listed.write_text(f"{path}\n")
    batches(_config("hdf5", listed))


def image(path: Path) -> None:
    listed = path.with_suffix(".list")
    listed.write_text(f"{path} 1\n")
    batches(replace(_config("images", listed), batch_size=1), 2)


def listed(path: Path) -> None:
    os.chdir(path.parent)
    _pictures(path.parent)
    batches(_config("images", path, images=ImageConfig(height=6, width=6)), 2)


def windows(path: Path) -> None:
    os.chdir(path.parent)
    _pictures(path.parent)
    transform = TransformConfig(crop=8, mirror=True)
    batches(_config("windows", path, transform=transform, windows=WindowConfig(pad=1)), 3)


def _pictures(folder: Path) -> None:
    for name in ("image.png", "image.jpg", "image.bmp"):
        cv2.imwrite(str(folder / name), np.zeros((12, 12, 3), np.uint8))


def through_a_reader(path: Path) -> None:
    """The whole way: a net whose data layer starts a reader process."""
    if path.is_dir():
        backend = "LEVELDB" if path.name.endswith("leveldb") else "LMDB"
        source, parameters = path, f'type: "Data" data_param {{ backend: {backend} '
    elif path.suffix == ".h5":
        source, parameters = path.with_suffix(".list"), 'type: "HDF5Data" hdf5_data_param { '
        source.write_text(f"{path}\n")
    else:
        source, parameters = path.with_suffix(".list"), 'type: "ImageData" image_data_param { '
        source.write_text(f"{path} 1\n")
    text = f'layer {{ name: "d" top: "data" top: "label" {parameters} source: "{source}" batch_size: 8 }} }}'
    with Net(net_from_text(text), "TEST", options={"reader_timeout": 20.0}) as built:
        built.forward()
        built.forward()


PICTURES = tuple(f"image.{kind}" for kind in ("jpg", "png", "bmp", "tiff", "webp", "jp2", "pgm", "gif"))
KINDS = {
    "caffemodel": Kind(("net.caffemodel",), weights, (*m.BYTES, *[m.wired("NetParameter")] * 8)),
    "old caffemodel": Kind(("old.caffemodel",), weights, (*m.BYTES, *[m.wired("NetParameter")] * 8)),
    "upgraded caffemodel": Kind(
        ("net.caffemodel", "old.caffemodel"), upgraded, (*m.BYTES, *[m.wired("NetParameter")] * 4), share=4
    ),
    "HDF5 caffemodel": Kind(("net.caffemodel.h5",), weights, share=14),
    "solverstate": Kind(("net.solverstate",), state, (*m.BYTES, *[m.wired("SolverState")] * 8)),
    "HDF5 solverstate": Kind(("net.solverstate.h5",), state, share=14),
    "worker's state": Kind(("worker.npz",), worker, share=4),
    "mean file": Kind(("mean.binaryproto",), mean, (*m.BYTES, *[m.wired("BlobProto")] * 6), share=6),
    "idx file": Kind(("images.gz",), idx, (*m.BYTES, m.bombed_gzip), share=3, times=16),
    "net": Kind(
        ("net.prototxt", "net.prototxt", "old.prototxt", "oldest.prototxt"), net, m.TEXT, floor=1 << 30,
        share=20,
    ),
    "solver": Kind(("solver.prototxt",), solver, m.TEXT, share=8),
    "LMDB": Kind(("raw_lmdb", "encoded_lmdb"), database, apart=True, share=14),
    "LevelDB": Kind(
        ("raw_leveldb", "encoded_leveldb"), database, (*m.BYTES, *[m.summed_leveldb] * 10), apart=True,
        share=14,
    ),
    "HDF5 data": Kind(("rows.h5", "chunks.h5"), rows, apart=True, share=14),
    "image": Kind(
        PICTURES, image, (*m.BYTES, *[m.checked_png] * 3, m.bombed_png), apart=True,
        floor=FLOOR + 32 * PIXELS, share=20,
    ),
    "list of images": Kind(("list.txt",), listed, (*m.BYTES, m.renumbered, m.reordered), apart=True, share=2),
    "window file": Kind(
        ("windows.txt",), windows, (*m.BYTES, m.renumbered, m.reordered), apart=True, share=4
    ),
    "through a reader": Kind(
        ("raw_lmdb", "encoded_lmdb", "raw_leveldb", "rows.h5", "image.png", "image.jpg"), through_a_reader,
        floor=FLOOR + 64 * PIXELS, share=2, starts=True,
    ),
}  # fmt: skip
