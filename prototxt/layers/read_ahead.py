"""What the data layers that read files share: the batches of a reader process, and what it is told."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prototxt.data.config import ReaderConfig
from prototxt.data.source import Reader
from prototxt.errors import DataError
from prototxt.registry import Built, LayerSpec, Shape

READ_SECONDS = 300.0  # until a batch that does not come is an error
MOST_THREADS = 4  # that decode images, by default


class ReadAhead(nn.Module):
    """A batch a forward(), from a reader's memory: valid until the next forward().

    batches  taken so far by this worker; Net(options={"data_start": {layer: batches}}) goes on from there,
             where the batches are not claimed (data/claims.py)
    images   in one of them, by the file, and in one of this worker: see Net(options={"batch_parts": N})
    """

    def __init__(
        self, open_at: Callable[[int], Reader], start: int, device: torch.device, images: tuple[int, int]
    ) -> None:
        super().__init__()
        self._open_at = open_at
        self.reader = open_at(start)
        self.images = images
        self._device = None if device.type == "cpu" else device
        self._single = len(self.reader.shapes) == 1

    @property
    def batches(self) -> int:
        return self.reader.batches

    @property
    def waited(self) -> float:
        """Seconds that the net has waited for its batches so far."""
        return self.reader.waited

    def go_on_from(self, batches: int) -> None:
        """The next forward() gives the batch that follows so many of this worker."""
        old, self.reader = self.reader, self._open_at(batches)
        old.close()

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        tops = self.reader.take()
        if self._device is not None:
            tops = tuple(top.to(self._device) for top in tops)
        return tops[0] if self._single else tops

    def close(self) -> None:
        """End the reader process; twice is fine."""
        self.reader.close()


def read_ahead(spec: LayerSpec, config: ReaderConfig, mean_image: bytes | None = None) -> Built:
    """The layer of a task for a reader."""
    context = spec.context
    place = str(spec.error("")).removesuffix(": ")
    timeout = float(context.options.get("reader_timeout", READ_SECONDS))
    share = context.options.get("share") if config.train else None
    claims = context.options.get("claims") if config.train else None
    whole = config.batch_size
    if config.train:
        config = replace(config, batch_size=part_of(whole, int(context.options.get("batch_parts", 1))))

    def open_at(start: int) -> Reader:
        seed = _seed(spec, f"{context.rank}/{start}")
        at = replace(config, start=0 if claims else start, claimed=claims is not None, seed=seed)
        return Reader(at, place=place, mean_image=mean_image, timeout=timeout, share=share, claims=claims)

    start = int(context.options.get("data_start", {}).get(spec.name, 0))
    module = ReadAhead(open_at, start, context.device, (whole, config.batch_size))
    return Built(module, list(module.reader.shapes), source=True)


def part_of(batch: int, workers: int) -> int:
    """Images of each of so many workers that share a batch out: the nearest whole number, at least 1."""
    return max(1, round(batch / workers))


def sharing(spec: LayerSpec) -> dict[str, Any]:
    """The part of a reader's task that depends on the worker."""
    context, train = spec.context, spec.phase == "TRAIN"
    return {
        "train": train,
        "rank": context.rank,
        "world": context.world,
        "shuffle_seed": _seed(spec, "shuffle"),
        "threads": int(context.options.get("decode_threads", 0)) or _threads(context.world if train else 1),
    }


def _threads(workers: int) -> int:
    """That decode images: this worker's part of the machine's cores."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // workers))


def _seed(spec: LayerSpec, purpose: str) -> int:
    """A seed of this layer's own from random_seed, or from the system without one."""
    if spec.context.seed is None:
        return int.from_bytes(os.urandom(4), "little")
    return zlib.crc32(f"{spec.context.seed}/{spec.phase}/{spec.name}/{purpose}".encode())


def no_bottoms(spec: LayerSpec, bottoms: list[Shape]) -> None:
    if bottoms:
        raise spec.error(f"{spec.type} takes no bottom, {len(bottoms)} given")


def required(spec: LayerSpec, group: str, name: str) -> Any:
    """A field of a parameter group that must be set, and above 0 when it is a number."""
    value = getattr(getattr(spec, group), name)
    if not value:
        raise spec.error(f"{group}.{name} must be set" + ("" if isinstance(value, str) else " and above 0"))
    return value


def data_error(spec: LayerSpec, text: str) -> DataError:
    return DataError(str(spec.error(text)))
