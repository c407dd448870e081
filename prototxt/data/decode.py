"""Encoded images to pixels, by OpenCV as the original does it. For reader processes: a decoder may die."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from prototxt._native import Transform

U8 = NDArray[np.uint8]
Mode = Literal["color", "gray", "unchanged"]
T = TypeVar("T")
AHEAD = 2  # images a thread that are decoded before they are asked for: more would only take memory

# OpenCV reads the limit once, when it is loaded: the size in an image's head is looked at before memory is
# taken for it. A user who has larger images sets the same variable.
LIMIT_NAME = "OPENCV_IO_MAX_IMAGE_PIXELS"
LIMIT_PIXELS = 100_000_000


class Undecodable(ValueError):
    """Bytes that are no image, or one that is not wanted."""


def load_cv2() -> Any:
    """OpenCV with the limit of pixels set, one thread. Raises Undecodable when it is not installed."""
    os.environ.setdefault(LIMIT_NAME, str(LIMIT_PIXELS))
    try:
        import cv2
    except ImportError as error:
        raise Undecodable("is an encoded image; to read it install opencv-python-headless") from error
    cv2.setNumThreads(1)
    return cv2


class Decoder:
    """Decodes in ``threads`` threads, or where the result is asked for when that is 1."""

    def __init__(self, threads: int = 1) -> None:
        self._cv2 = load_cv2()
        self._flags = {
            "color": self._cv2.IMREAD_COLOR,
            "gray": self._cv2.IMREAD_GRAYSCALE,
            "unchanged": self._cv2.IMREAD_UNCHANGED,
        }
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "decode") if threads > 1 else None

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start ``work``; what is returned gives its result, or raises what it raised."""
        if self._pool is None:
            return work
        return self._pool.submit(work).result

    def close(self) -> None:
        """Let the threads end when they have done what they do now; what has not begun is left out."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def decode(self, data: bytes | memoryview, mode: Mode, height: int = 0, width: int = 0) -> U8:
        """(height, width, channels) uint8, channels in the order blue, green, red.

        height, width  resize to this, bilinear, whatever the shape was; 0: as it is
        Raises Undecodable.
        """
        size = len(data)
        if height * width and height * width > (limit := int(os.environ[LIMIT_NAME])):
            raise Undecodable(
                f"is to be resized to {width}x{height}, more than {limit} pixels ({LIMIT_NAME})"
            )
        try:
            image = self._cv2.imdecode(np.frombuffer(data, np.uint8), self._flags[mode]) if size else None
        except self._cv2.error as error:
            raise Undecodable(f"cannot be decoded: {_reason(error)}") from error
        if image is None:
            raise Undecodable(f"is marked as encoded, but its {size} bytes are no image")
        if image.dtype != np.uint8:
            raise Undecodable(f"is a {image.dtype} image; only 8 bits a value are supported")
        if height and width:
            image = self._cv2.resize(image, (width, height))
        return np.ascontiguousarray(image if image.ndim == 3 else image[:, :, None])


class Images:
    """The images of one batch, decoded and then written to its top by the decoder's threads.

    begin() the first of them before the top is known; place() each in its order, for each draws by chance;
    then finishing().

    wrong  the error for an image of the batch, by its index and what is wrong
    """

    def __init__(
        self, decoder: Decoder, transform: Transform, wrong: Callable[[int, str], Exception]
    ) -> None:
        self.decoder, self._transform, self._wrong = decoder, transform, wrong
        self._begun: dict[int, Callable[[], U8]] = {}
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # for what is begun
        self._placed: list[tuple[int, Callable[[], None]]] = []

    def ahead(self, batch: int) -> range:
        """Which of a batch of so many are to begin before its top is known; the others go on meanwhile."""
        return range(max(1, min(AHEAD * self.decoder.threads, batch // 2)))

    def begin(self, index: int, read: Callable[[], U8]) -> None:
        """Decode by ``read`` what is wanted soon."""
        self._begun[index] = self.decoder.begin(read)

    def pixels(self, index: int) -> U8:
        """Of an image that is begun. Raises what is wrong with it."""
        pixels = self._got(index, self._begun[index])
        self._begun[index] = lambda: pixels  # where no thread decodes, it is not decoded twice
        return pixels

    def place(
        self, index: int, read: Callable[[], U8], out: memoryview[float], top: tuple[int, int, int]
    ) -> None:
        """Let it be decoded, unless it is begun, and written to out[index]."""
        drawn, begun = self._transform.draw(), self._begun.get(index)
        get = begun or read

        def write() -> None:
            self._transform.image(get(), index, out, top, drawn)

        if begun:
            self._waiting.append((index, write))
        else:
            self._placed.append((index, self.decoder.begin(write)))

    def finishing(self) -> Callable[[], None] | None:
        """What waits until all are written and raises what is wrong with the first that is.

        None when they are: where no thread decodes.
        """
        for index, write in self._waiting:  # here: no thread that decodes waits for another's image
            self._got(index, write)
        self._waiting, self._begun = [], {}
        if self.decoder.threads > 1:
            return self._finish
        self._finish()
        return None

    def _finish(self) -> None:
        placed, self._placed = self._placed, []
        for index, result in placed:
            self._got(index, result)

    def _got(self, index: int, result: Callable[[], T]) -> T:
        try:
            return result()
        except Undecodable as error:
            raise self._wrong(index, str(error)) from error
        except ValueError as error:
            if len(error.args) != 2:
                raise
            raise self._wrong(index, error.args[1]) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if LIMIT_NAME in text or "PIXELS" in text:
        limit = os.environ[LIMIT_NAME]
        return f"it has more than {limit} pixels (the environment variable {LIMIT_NAME} raises the limit)"
    return text[-200:]
