"""How fast the reader process reads LMDBs, and what a training step pays for it, in one run.

    python benchmarks/data_lmdb.py [MEASURE ...] [--records 60000] [--jpegs 640] [--blocks 15] [--steps 60]
                                   [--threads T]

The LMDBs are made here: raw 28x28 records in batches of 64 and raw 3x32x32 ones in batches of 100. Prints one
JSON object a measure, of those named or of all:

read   images/s of a net that takes batches and does nothing else, median of --blocks, for one worker and for
       one of four (which passes over three records for each it takes). Bytes moved: 4 a pixel into the ring.
jpeg   images/s of a net that takes batches of 32 decoded JPEGs of 256x256, cropped to 227, mirrored, less
       a mean, over those of a bare loop of lmdb and cv2.imdecode in one thread, and over one in as many
       threads as the reader decodes in; medians of the rounds' ratios. The bar is 0.9 in as many threads
take   microseconds of the net's own time in one take(), the ring being full: after a pause, as in a training.
step   LeNet's forward, backward and update in plain torch with its batches from the reader, over the same on
       preloaded batches: blocks of --steps alternate in an order drawn by chance. The bar is 1.03, on an idle
       machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from operator import truediv
from pathlib import Path

import cv2
import lmdb
import numpy as np
import torch
from torch import Tensor, nn

from prototxt import schema
from prototxt._native import datum_head
from prototxt.data.config import ReaderConfig, TransformConfig
from prototxt.data.convert import Images, datum_records, write_once
from prototxt.data.source import Reader

Take = Callable[[], tuple[Tensor, ...]]
JPEG_SIDE = 256
PAUSE = 0.004  # seconds of a net's own work between two batches, for `take`


def say(measure: str, **values: object) -> None:
    print(json.dumps({"measure": measure, **values, "load": round(os.getloadavg()[0], 2)}), flush=True)


def make(folder: Path, shape: tuple[int, int, int], records: int) -> Path:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (records, *shape), np.uint8)
    write_once(folder, datum_records(Images(images, rng.integers(0, 10, records).astype(np.uint8), 8)))
    return folder


def open_reader(folder: Path, batch: int, world: int = 1) -> Reader:
    transform = TransformConfig(scale=1 / 256)
    config = ReaderConfig(
        "lmdb", str(folder), batch, ("data", "label"), train=True, world=world, transform=transform
    )
    return Reader(config, place="benchmark")


def read_speed(folder: Path, batch: int, world: int, blocks: int) -> float:
    """Images a second, median over blocks of 500 batches."""
    speeds = []
    with open_reader(folder, batch, world) as reader:
        for _ in range(blocks):
            start = time.perf_counter()
            for _ in range(500):
                reader.take()
            speeds.append(500 * batch / (time.perf_counter() - start))
    return statistics.median(speeds)


def make_jpegs(folder: Path, records: int) -> Path:
    """Records of smooth colours with some noise: a photograph's size as a JPEG, about 20 KB."""
    rng = np.random.default_rng(0)
    values = []
    for i in range(records):
        coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
        noise = rng.normal(0, 6, (JPEG_SIDE, JPEG_SIDE, 3))
        image = cv2.resize(coarse, (JPEG_SIDE, JPEG_SIDE), interpolation=cv2.INTER_CUBIC) + noise
        data = cv2.imencode(".jpg", image.clip(0, 255).astype(np.uint8))[1].tobytes()
        datum = schema.Datum(data=data, label=i % 10, encoded=True)
        values.append((b"%08d" % i, datum.SerializeToString()))
    write_once(folder, values)
    return folder


def bare_decoding(folder: Path, images: int, threads: int) -> float:
    """Seconds of lmdb and OpenCV alone for so many images."""
    cv2.setNumThreads(1)

    def decode(value: bytes) -> None:
        *_, offset, size, _ = datum_head(value)
        assert cv2.imdecode(np.frombuffer(value, np.uint8, size, offset), cv2.IMREAD_COLOR) is not None

    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as txn:
        values = (value for _ in range(images) for _, value in txn.cursor())
        start = time.perf_counter()
        if threads == 1:
            for value in islice(values, images):
                decode(value)
        else:
            with ThreadPoolExecutor(threads) as pool:
                while part := list(islice(values, min(8 * threads, images))):
                    list(pool.map(decode, part))
                    images -= len(part)
        return time.perf_counter() - start


def jpeg_speed(folder: Path, rounds: int, threads: int) -> dict[str, object]:
    config = ReaderConfig(
        "lmdb", str(folder), 32, ("data", "label"), train=True, threads=threads,
        transform=TransformConfig(crop=227, mirror=True, mean_values=(104.0, 117.0, 123.0)),
    )  # fmt: skip
    images = 32 * 20
    speeds: dict[str, list[float]] = {"reader": [], "bare": [], "bare_threads": []}
    with Reader(config, place="benchmark") as reader:

        def read() -> float:
            for _ in range(12):  # what lies ready
                reader.take()
            start = time.perf_counter()
            for _ in range(20):
                reader.take()
            return time.perf_counter() - start

        ways = {
            "reader": read,
            "bare": lambda: bare_decoding(folder, images, 1),
            "bare_threads": lambda: bare_decoding(folder, images, threads),
        }
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                speeds[name].append(images / ways[name]())
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        **{name: round(speed) for name, speed in medians.items()},
        **{
            f"over_{name}": round(statistics.median(map(truediv, speeds["reader"], speeds[name])), 3)
            for name in ("bare", "bare_threads")
        },
    }


def take_times(folder: Path, batch: int, count: int = 500) -> list[float]:
    """Sorted microseconds of take() after a pause."""
    times = []
    with open_reader(folder, batch) as reader:
        for _ in range(count):
            time.sleep(PAUSE)
            start = time.perf_counter()
            reader.take()
            times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def preloaded(folder: Path, batch: int, count: int = 20) -> Iterator[tuple[Tensor, ...]]:
    """Batches in memory, round and round."""
    with open_reader(folder, batch) as reader:
        batches = [tuple(top.clone() for top in reader.take()) for _ in range(count)]
    while True:
        yield from batches


class Lenet:
    """A training step of LeNet on whatever batches ``take`` gives."""

    def __init__(self, take: Take) -> None:
        torch.manual_seed(1)
        self._take = take
        self._module = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.MaxPool2d(2, 2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2, 2), nn.Flatten(),
            nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
        self._optimizer = torch.optim.SGD(
            self._module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005, foreach=True
        )

    def steps(self, count: int) -> float:
        """Milliseconds a step."""
        start = time.perf_counter()
        for _ in range(count):
            data, label = self._take()
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._module(data), label.long()).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return (time.perf_counter() - start) / count * 1000


def step_ratio(folder: Path, blocks: int, steps: int) -> dict[str, object]:
    memory = preloaded(folder, 64)
    times: dict[str, list[float]] = {"reader": [], "memory": []}
    with open_reader(folder, 64) as reader:
        loops = {"reader": Lenet(reader.take), "memory": Lenet(lambda: next(memory))}
        for loop in loops.values():
            loop.steps(10)
        for _ in range(blocks):
            for name in random.sample(list(loops), 2):
                times[name].append(loops[name].steps(steps))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "reader_ms": round(medians["reader"], 3),
        "memory_ms": round(medians["memory"], 3),
        "ratio": round(medians["reader"] / medians["memory"], 4),
        "spread": [round(f(times["memory"]), 3) for f in (min, max)],
    }


def measure_read(folder: Path, args: argparse.Namespace) -> None:
    gray = make(folder / "gray", (1, 28, 28), args.records)
    colour = make(folder / "colour", (3, 32, 32), args.records // 3)
    for name, records, batch in (("1x28x28", gray, 64), ("3x32x32", colour, 100)):
        for world in (1, 4):
            speed = read_speed(records, batch, world, args.blocks)
            say("read", record=name, batch=batch, workers=world, images_per_second=round(speed))


def measure_jpeg(folder: Path, args: argparse.Namespace) -> None:
    jpegs = make_jpegs(folder / "jpegs", args.jpegs)
    for threads in sorted({1, args.threads}):
        say("jpeg", threads=threads, **jpeg_speed(jpegs, args.blocks, threads))


def measure_take(folder: Path, args: argparse.Namespace) -> None:
    times = take_times(make(folder / "gray", (1, 28, 28), args.records), 64)
    say("take", p50_us=round(times[len(times) // 2], 1), p99_us=round(times[len(times) * 99 // 100], 1))


def measure_step(folder: Path, args: argparse.Namespace) -> None:
    gray = make(folder / "gray", (1, 28, 28), args.records)
    say("step", threads=args.threads, **step_ratio(gray, args.blocks, args.steps))


MEASURES = {"read": measure_read, "jpeg": measure_jpeg, "take": measure_take, "step": measure_step}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measures", metavar="MEASURE", nargs="*", help="read, jpeg, take, step; default: all")
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--jpegs", type=int, default=640)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if unknown := set(args.measures) - set(MEASURES):
        parser.error(f"unknown measure: {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    for name in args.measures or MEASURES:
        with tempfile.TemporaryDirectory() as temporary:
            MEASURES[name](Path(temporary), args)


if __name__ == "__main__":
    main()
