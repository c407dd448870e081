"""Layer kernels over contiguous float32 memory, given by address; the GIL is released."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

class Lrn:
    """y = x s^-beta, s = k + alpha (sum of x^2 over a window of 2 half + 1); alpha is divided already."""

    def __init__(self, half: int, alpha: float, beta: float, k: float) -> None: ...

def lrn_across_forward(
    x: int, y: int, batch: int, channels: int, area: int, lrn: Lrn, threads: int, /
) -> None: ...
def lrn_across_backward(
    x: int, dy: int, dx: int, batch: int, channels: int, area: int, lrn: Lrn, threads: int, /
) -> None: ...
def lrn_within_forward(
    x: int, y: int, planes: int, height: int, width: int, lrn: Lrn, threads: int, /
) -> None: ...
def lrn_within_backward(
    x: int, dy: int, dx: int, planes: int, height: int, width: int, lrn: Lrn, threads: int, /
) -> None: ...

class Machine:
    """An instruction set that max pooling is made for; ``here``: this machine has it."""

    avx512: ClassVar[Machine]
    avx2: ClassVar[Machine]
    plain: ClassVar[Machine]
    @property
    def here(self) -> bool: ...

class Windows:
    """How a pooling's windows are laid: (height, width) each (max_pool.hpp); by ``machine``, or the best."""

    def __init__(
        self,
        size: tuple[int, int],
        windows: tuple[int, int],
        kernel: tuple[int, int],
        stride: tuple[int, int],
        pad: tuple[int, int],
        machine: Machine | None = None,
    ) -> None: ...

def max_pool_forward(
    x: int, y: int, won: int, batch: int, channels: int, last: bool, windows: Windows, threads: int, /
) -> None: ...
def max_pool_backward(
    dy: int, won: int, dx: int, batch: int, channels: int, last: bool, windows: Windows, threads: int, /
) -> None: ...
def softmax_loss(
    scores: int,
    labels: int,
    gradient: int,
    rows: int,
    classes: int,
    ignoring: bool,
    ignored: float,
    largest: float,
    /,
) -> tuple[float, int, int]:
    """Sum of the losses, rows that count, first row with a label out of range or -1 (softmax_loss.hpp)."""

# Data layers: Datum records and the pixel transform (datum.hpp) ------------------------------------------

_Sides = tuple[int, int, int]  # channels, height, width

def datum_head(record: bytes | memoryview) -> tuple[_Sides, int, bool, int, int, int]:
    """Of one Datum: its shape, label, whether it is encoded, offset and size of its bytes in the record,
    and how many float values it has. ValueError when it is no Datum."""

class Transform:
    """(x - mean) * scale over a crop of each image, perhaps mirrored.

    mean_image   float32 bytes, planar, of mean_shape; subtracted at the source's pixel
    random_crop  rows and columns are drawn for each image, else the centre is taken
    seed         of the mt19937 stream that mirror, row and column of each image are drawn from
    """

    def __init__(
        self,
        *,
        scale: float = 1.0,
        mirror: bool = False,
        crop: int = 0,
        random_crop: bool = False,
        mean_values: Sequence[float] = (),
        mean_image: bytes | memoryview | None = None,
        mean_shape: _Sides = (0, 0, 0),
        seed: int = 0,
    ) -> None: ...
    def records(
        self,
        records: Sequence[bytes | memoryview],
        first: int,
        out: memoryview[float],
        labels: memoryview[float] | None,
        shape: _Sides,
    ) -> int:
        """Write records[first:] as float32 images of ``shape`` to out[i], their labels to labels[i].

        Stops at an encoded record and returns its index, else len(records). Raises
        ValueError(index, text) for a record that does not fit.
        """
    def draw(self) -> tuple[int, int, int]:
        """What chance says of the next image, for image(); not in several threads at once."""
    def image(
        self,
        pixels: memoryview | NDArray[np.uint8],
        index: int,
        out: memoryview[float],
        shape: _Sides,
        drawn: Sequence[int],
    ) -> None:
        """Write one uint8 image of (height, width[, channels]) to out[index], planar, as ``drawn`` says.

        In any threads; gives the GIL away. Raises ValueError(index, text).
        """

# Counts that two processes tell each other (words.hpp) ---------------------------------------------------

class Words:
    """The first ``count`` words of 64 bits behind a descriptor, each in a cache line of its own.

    What was written to other shared memory before store() is seen by whoever loads that value. The
    descriptor may be closed then. Raises ValueError when the file is too short, IndexError for a word beyond.
    """

    LINE: ClassVar[int]
    def __init__(self, fd: int, count: int) -> None: ...
    def load(self, index: int, /) -> int: ...
    def store(self, index: int, value: int, /) -> None: ...

# LevelDB's tables (leveldb.hpp) --------------------------------------------------------------------------

def crc32c(data: bytes, crc: int = 0) -> int:
    """CRC-32C of the bytes, going on from ``crc``."""

def snappy_unpack(packed: bytes, limit: int) -> bytes:
    """Raw Snappy data unpacked; ValueError when it is none, or would give more than ``limit`` bytes."""

def leveldb_entries(block: bytes) -> list[tuple[bytes, bytes]]:
    """(key, value) of each entry of an unpacked table block; ValueError when it is none."""
