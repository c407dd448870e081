"""How fast the reader process reads LMDBs, and what a training step pays for it, in one run.

    python benchmarks/data_lmdb.py [--records 60000] [--blocks 15] [--steps 60] [--threads T]

The LMDBs are made here: raw 28x28 records in batches of 64 and raw 3x32x32 ones in batches of 100. Prints one
JSON object a measure:

read   images/s of a net that takes batches and does nothing else, median of --blocks, for one worker and for
       one of four (which passes over three records for each it takes). Bytes moved: 4 a pixel into the ring.
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
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from prototxt.data.config import ReaderConfig, TransformConfig
from prototxt.data.convert import Images, datum_records, write_once
from prototxt.data.source import Reader

Take = Callable[[], tuple[Tensor, ...]]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        gray = make(Path(temporary) / "gray", (1, 28, 28), args.records)
        colour = make(Path(temporary) / "colour", (3, 32, 32), args.records // 3)
        for name, folder, batch in (("1x28x28", gray, 64), ("3x32x32", colour, 100)):
            for world in (1, 4):
                speed = read_speed(folder, batch, world, args.blocks)
                say("read", record=name, batch=batch, workers=world, images_per_second=round(speed))
        times = take_times(gray, 64)
        say("take", p50_us=round(times[len(times) // 2], 1), p99_us=round(times[len(times) * 99 // 100], 1))
        say("step", threads=args.threads, **step_ratio(gray, args.blocks, args.steps))


if __name__ == "__main__":
    main()
