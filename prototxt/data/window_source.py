"""Batches of windows of images, as Caffe's WindowData reads them for R-CNN. For the reader process: no torch.

Windows are drawn by chance, those with an object apart from those without; each is cut out with some context,
warped to a square of crop_size and perhaps mirrored. What lies outside the image is left at zero.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prototxt.data.config import ReaderConfig, Shape, WindowConfig
from prototxt.data.datum_source import refuse_batch
from prototxt.data.decode import AHEAD, U8, Decoder, Undecodable, load_cv2
from prototxt.data.image_source import read_image
from prototxt.data.note import Note
from prototxt.errors import DataError

T = TypeVar("T", int, float)
CHANNELS = 3  # images are read in colour
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """A box of an image, corners included; label 0 is background."""

    image: int
    label: int
    x1: int
    y1: int
    x2: int
    y2: int


@dataclass(frozen=True)
class Placed:
    """What of an image is cut out, the size it is warped to, and where that stands in the crop.

    left is for an image as it is, right for one that is mirrored.
    """

    x1: int
    y1: int
    x2: int
    y2: int
    width: int
    height: int
    top: int
    left: int
    right: int


def place(window: Window, width: int, height: int, crop: int, config: WindowConfig) -> Placed:
    """Where a window of an image of this size goes; float32 throughout, as the original computes it.

    Raises ValueError when the window does not lie in the image.
    """
    x1, y1, x2, y2 = window.x1, window.y1, window.x2, window.y2
    if not (config.pad or config.square):
        if not (0 <= x1 <= x2 < width and 0 <= y1 <= y2 < height):
            raise ValueError(f"is not inside the image of {width}x{height}")
        return Placed(x1, y1, x2, y2, crop, crop, 0, 0, 0)
    x1, y1, x2, y2 = _expand(window, crop, config)
    out_left, out_top = max(0, -x1), max(0, -y1)
    out_right, out_bottom = max(0, x2 - width + 1), max(0, y2 - height + 1)
    scale_x = np.float32(crop) / np.float32(x2 - x1 + 1)
    scale_y = np.float32(crop) / np.float32(y2 - y1 + 1)
    x1, y1, x2, y2 = x1 + out_left, y1 + out_top, x2 - out_right, y2 - out_bottom
    if x1 > x2 or y1 > y2:
        raise ValueError(f"lies outside the image of {width}x{height}")
    top, left, right = (
        _round(np.float32(out) * scale)
        for out, scale in ((out_top, scale_y), (out_left, scale_x), (out_right, scale_x))
    )
    wide, high = _round(np.float32(x2 - x1 + 1) * scale_x), _round(np.float32(y2 - y1 + 1) * scale_y)
    return Placed(x1, y1, x2, y2, wide, min(high, crop - top), top, left, right)


def _expand(window: Window, crop: int, config: WindowConfig) -> tuple[int, int, int, int]:
    """The corners of the window and its context, which may lie outside the image."""
    scale = np.float32(crop) / np.float32(crop - 2 * config.pad)
    half_height = np.float32(window.y2 - window.y1 + 1) / np.float32(2)
    half_width = np.float32(window.x2 - window.x1 + 1) / np.float32(2)
    center_x, center_y = np.float32(window.x1) + half_width, np.float32(window.y1) + half_height
    if config.square:
        half_height = half_width = max(half_height, half_width)
    return (
        _round(center_x - half_width * scale),
        _round(center_y - half_height * scale),
        _round(center_x + half_width * scale),
        _round(center_y + half_height * scale),
    )


def _round(value: np.float32) -> int:
    """Halves go away from zero, as in C."""
    return int(math.copysign(math.floor(abs(float(value)) + 0.5), value))


class WindowFile:
    """The images and windows that a window file names.

    For each image: ``# index``, path, channels, height, width, number of windows, and for each of these
    ``label overlap x1 y1 x2 y2``.
    """

    def __init__(self, source: str, config: WindowConfig) -> None:
        self.path = os.path.abspath(source)
        self.images: list[str] = []
        self.foreground: list[Window] = []
        self.background: list[Window] = []
        self._config = config
        try:
            with open(source, encoding="utf-8", errors="surrogateescape") as file:
                self._words = enumerate(file.read().split())
        except OSError as error:
            raise DataError(f"cannot read the window file {self.path}: {error.strerror}") from error
        self._at = 0
        while (mark := next(self._words, None)) is not None:
            self._read_image(mark[1])
        for name, windows in (("foreground", self.foreground), ("background", self.background)):
            if not windows:
                raise DataError(f"{self.path} has no {name} window")

    def _read_image(self, mark: str) -> None:
        index = self._number(int)
        if mark != "#" or index != len(self.images):
            raise DataError(
                f"{self.path}: image {len(self.images)} begins with {mark!r} {index}, not with"
                f" '# {len(self.images)}'"
            )
        self.images.append(self._config.root + self._word())
        channels, _, _, count = (self._number(int) for _ in range(4))
        if channels != CHANNELS:
            raise DataError(f"{self.path}: image {index} has {channels} channels; {CHANNELS} are read")
        for _ in range(count):
            self._read_window(index)

    def _read_window(self, image: int) -> None:
        label, overlap = self._number(int), self._number(float)
        corners = [self._number(int) for _ in range(4)]
        if overlap >= self._config.fg_threshold:
            if label <= 0:
                raise DataError(f"{self.path}: image {image}: a foreground window has label {label}")
            self.foreground.append(Window(image, label, *corners))
        elif overlap < self._config.bg_threshold:
            self.background.append(Window(image, 0, *corners))

    def _word(self) -> str:
        found = next(self._words, None)
        if found is None:
            raise DataError(f"{self.path} ends within image {len(self.images) - 1}")
        self._at = found[0]
        return found[1]

    def _number(self, kind: Callable[[str], T]) -> T:
        word = self._word()
        try:
            return kind(word)
        except ValueError as error:
            raise DataError(f"{self.path}: word {self._at + 1}, {word!r}, is no number") from error


class WindowSource:
    """Windows drawn by this worker's own chance, for ever; in a batch, background comes first."""

    def __init__(self, config: ReaderConfig, mean_image: bytes | None, note: Note) -> None:
        self._note = note
        self._config, self._windows = config, config.windows
        self._file = WindowFile(config.source, config.windows)
        self._decoder, self._cv2 = Decoder(config.threads), load_cv2()
        self._random = np.random.default_rng(config.seed)
        self._mean = self._mean_of(mean_image)
        self._cache = [self._read(path) for path in self._file.images] if config.windows.cache else []
        crop = config.transform.crop
        refuse_batch(config, self._file.path, (CHANNELS, crop, crop))
        self.notes: list[str] = []

    def _mean_of(self, mean_image: bytes | None) -> F32:
        """What is subtracted, of a shape that broadcasts to (crop, crop, channels)."""
        t = self._config.transform
        if mean_image is None:
            return np.array(t.mean_values or (0,), np.float32)
        planes = np.frombuffer(mean_image, np.float32).reshape(t.mean_shape)
        channels, height, width = t.mean_shape
        offset = (width - t.crop) // 2  # by the width alone, as in the original
        if channels != CHANNELS or offset < 0 or height < offset + t.crop:
            raise DataError(f"the mean file is {channels}x{height}x{width}, too small for crop_size {t.crop}")
        middle = planes[:, offset : offset + t.crop, offset : offset + t.crop]
        return np.ascontiguousarray(middle.transpose(1, 2, 0))

    def _read(self, path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read()
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read the image {os.path.abspath(path)}: {error}") from error

    def seek(self, record: int) -> None:
        """Chance draws the windows: there is no sequence of them."""

    def advance(self) -> list[Shape]:
        batch, crop = self._config.batch_size, self._config.transform.crop
        return [(batch, CHANNELS, crop, crop), (batch,)]

    def write(self, tops: list[memoryview[float]]) -> None:
        """A batch drawn anew; raises DataError naming the image of a window that does not fit."""
        batch, crop = self._config.batch_size, self._config.transform.crop
        data = np.asarray(tops[0]).reshape(batch, CHANNELS, crop, crop)
        data[...] = 0
        drawn = list(self._draw())
        images: dict[int, Callable[[], U8]] = {}
        for index, (window, mirror) in enumerate(drawn):
            for ahead in range(index, min(index + AHEAD * self._config.threads, batch)):
                if ahead not in images:
                    images[ahead] = self._begin(drawn[ahead][0].image)
            self._put(data[index], images.pop(index)(), window, mirror)
            tops[1][index] = window.label

    def close(self) -> None:
        self._decoder.close()

    def _draw(self) -> Iterator[tuple[Window, bool]]:
        """(window, whether it is mirrored) for a batch."""
        batch = self._config.batch_size
        foreground = int(np.float32(batch) * np.float32(self._windows.fg_fraction))
        for count, windows in (
            (batch - foreground, self._file.background),
            (foreground, self._file.foreground),
        ):
            for _ in range(count):
                window = windows[int(self._random.integers(len(windows)))]
                yield window, self._config.transform.mirror and bool(self._random.integers(2))

    def _begin(self, image: int) -> Callable[[], U8]:
        path = self._file.images[image]
        if not self._cache:
            return self._decoder.begin(lambda: read_image(self._decoder, path, True, note=self._note))

        def decode() -> U8:
            try:
                with self._note.during(path):
                    return self._decoder.decode(self._cache[image], "color")
            except Undecodable as error:
                raise DataError(f"the image {os.path.abspath(path)} {error}") from error

        return self._decoder.begin(decode)

    def _put(self, out: F32, image: U8, window: Window, mirror: bool) -> None:
        t = self._config.transform
        height, width, _ = image.shape
        try:
            p = place(window, width, height, t.crop, self._windows)
        except ValueError as error:
            corners = f"{window.x1} {window.y1} {window.x2} {window.y2}"
            name = self._file.images[window.image]
            raise DataError(f"{self._file.path}: window {corners} of {name} {error}") from error
        left = p.right if mirror else p.left
        wide, high = min(p.width, t.crop - left), p.height
        if wide < 1 or high < 1:  # a sliver that warping leaves nothing of
            return
        part = image[p.y1 : p.y2 + 1, p.x1 : p.x2 + 1]
        warped = self._cv2.resize(part, (wide, high), interpolation=self._cv2.INTER_LINEAR)
        if mirror:
            warped = warped[:, ::-1]
        mean = self._mean
        if mean.ndim == 3:
            mean = mean[p.top : p.top + high, left : left + wide]
        values = (warped.astype(np.float32) - mean) * np.float32(t.scale)
        out[:, p.top : p.top + high, left : left + wide] = values.transpose(2, 0, 1)
