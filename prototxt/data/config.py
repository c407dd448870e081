"""What the reader process is told: plain values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

Shape = tuple[int, ...]
Kind = Literal["lmdb", "leveldb", "hdf5", "images", "windows"]


@dataclass(frozen=True)
class TransformConfig:
    """transform_param, checked. The mean image travels beside it, in a file descriptor.

    mean_values  none, one, or one a channel
    mean_shape   channels, height, width of the mean image; (0, 0, 0) without one
    """

    scale: float = 1.0
    mirror: bool = False
    crop: int = 0
    mean_values: tuple[float, ...] = ()
    mean_shape: tuple[int, int, int] = (0, 0, 0)
    force_color: bool = False
    force_gray: bool = False


@dataclass(frozen=True)
class ImageConfig:
    """image_data_param: images of a list. height and width are 0 where images keep their size.

    skip  so many lines at most are left out at the beginning, by chance
    """

    root: str = ""
    height: int = 0
    width: int = 0
    color: bool = True
    skip: int = 0


@dataclass(frozen=True)
class WindowConfig:
    """window_data_param: windows of images, some with an object and some without.

    pad     pixels of context on each side, after warping
    square  the window is widened to a square before it is warped
    cache   the image files are held in memory, encoded as they are
    """

    root: str = ""
    fg_threshold: float = 0.5
    bg_threshold: float = 0.5
    fg_fraction: float = 0.25
    pad: int = 0
    square: bool = False
    cache: bool = False


@dataclass(frozen=True)
class ReaderConfig:
    """One reader's task.

    tops         how many and, for HDF5, which data sets
    train        random crops and the share of ``rank``; a test net reads every record
    rank, world  record i belongs to worker i mod world
    start        batches to leave out at the beginning, of this worker's own
    claimed      the net says which batches are this worker's, one after the other; rank and start say nothing
    seed         of the random stream of crops and flips; shuffle_seed: equal on all workers
    slots        batches in memory at once, the one in the net's hands included; more when they are small,
                 fewer when they are huge
    threads      that decode images
    """

    kind: Kind
    source: str
    batch_size: int
    tops: tuple[str, ...]
    train: bool
    rank: int = 0
    world: int = 1
    start: int = 0
    claimed: bool = False
    seed: int = 0
    shuffle: bool = False
    shuffle_seed: int = 0
    slots: int = 5
    threads: int = 1
    transform: TransformConfig = field(default_factory=TransformConfig)
    images: ImageConfig = field(default_factory=ImageConfig)
    windows: WindowConfig = field(default_factory=WindowConfig)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ReaderConfig:
        """The inverse of to_json; JSON's lists become tuples again."""
        values = json.loads(text)
        transform = values.pop("transform")
        for name in ("mean_values", "mean_shape"):
            transform[name] = tuple(transform[name])
        values["tops"] = tuple(values["tops"])
        return cls(
            transform=TransformConfig(**transform),
            images=ImageConfig(**values.pop("images")),
            windows=WindowConfig(**values.pop("windows")),
            **values,
        )

    @property
    def share(self) -> tuple[int, int]:
        """(first record, step) of this worker: (rank, world); all for a test net, or where the net says."""
        if self.claimed:
            return 0, 1
        rank, world = (self.rank, self.world) if self.train else (0, 1)
        return rank + self.start * self.batch_size * world, world
