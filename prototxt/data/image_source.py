"""Batches of image files, as Caffe's ImageData reads them. For the reader process: no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.datum_source import Sides, make_transform, refuse_batch, top_sides
from prototxt.data.decode import U8, Decoder, Images, Undecodable
from prototxt.data.lists import read_list
from prototxt.data.note import Note
from prototxt.errors import DataError


def read_image(
    decoder: Decoder, path: str, color: bool, size: tuple[int, int] = (0, 0), note: Note | None = None
) -> U8:
    """(height, width, channels) of a file, noted while it is read; size as Decoder.decode's height and width.

    Raises DataError that names the file.
    """
    shown = os.path.abspath(path)
    with (note or Note()).during(shown):
        try:
            with open(path, "rb") as file:
                data = file.read()
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            raise DataError(f"cannot read the image {shown}: {error}") from error
        try:
            return decoder.decode(data, "color" if color else "gray", *size)
        except Undecodable as error:
            raise DataError(f"the image {shown} {error}") from error


class ImageSource:
    """This worker's lines of the list, in order or shuffled anew for each pass, for ever.

    With rand_skip so many lines as chance says are left out at the beginning, the same on all workers.
    """

    def __init__(self, config: ReaderConfig, mean_image: bytes | None, note: Note) -> None:
        self._config, self._note = config, note
        self._list = os.path.abspath(config.source)
        self._lines = read_list(config.source)
        self._decoder = Decoder(config.threads)
        self._transform = make_transform(config, mean_image)
        self._next, self._step = config.share
        self._skip = self._skipped()
        self._next += self._skip
        self._order: tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = -1, np.arange(0)
        self._batch: list[tuple[str, int]] = []
        self._images = self._of_batch()
        self._top: Sides = (0, 0, 0)
        self.notes: list[str] = []

    def _skipped(self) -> int:
        limit = self._config.images.skip
        if not limit:
            return 0
        skip = int(np.random.default_rng([self._config.shuffle_seed, limit]).integers(limit))
        if skip >= len(self._lines):
            raise DataError(f"{self._list}: rand_skip leaves out {skip} of {len(self._lines)} lines")
        return skip

    def seek(self, record: int) -> None:
        self._next = record + self._skip

    def advance(self) -> list[Shape]:
        """Take the next lines; the shapes of the tops, by the first image."""
        first = self._next
        self._next += self._step * self._config.batch_size
        self._batch = [self._line(place) for place in range(first, self._next, self._step)]
        self._images = self._of_batch()
        for index in self._images.ahead(len(self._batch)):
            self._images.begin(index, self._reading(self._batch[index][0]))
        self._top = self._sides_of_top(self._images.pixels(0))
        refuse_batch(self._config, self._list, self._top)
        batch = self._config.batch_size
        return [(batch, *self._top), (batch,)][: len(self._config.tops)]

    def write(self, tops: list[memoryview[float]]) -> Callable[[], None] | None:
        """The images of the lines taken last; raises DataError naming the file of one that does not fit.

        Where threads decode, what is returned waits for them, and raises that.
        """
        for index, (path, label) in enumerate(self._batch):
            self._images.place(index, self._reading(path), tops[0], self._top)
            if len(tops) > 1:
                tops[1][index] = label
        return self._images.finishing()

    def close(self) -> None:
        self._decoder.close()

    def _of_batch(self) -> Images:
        batch = self._batch
        return Images(self._decoder, self._transform, lambda index, text: self._wrong(batch[index][0], text))

    def _line(self, place: int) -> tuple[str, int]:
        """Path and label at a place of the endless sequence."""
        turn, index = divmod(place, len(self._lines))
        if self._config.shuffle:
            if self._order[0] != turn:
                random = np.random.default_rng([self._config.shuffle_seed, turn])
                self._order = turn, random.permutation(len(self._lines))
            index = int(self._order[1][index])
        name, label = self._lines[index]
        return self._config.images.root + name, label

    def _reading(self, path: str) -> Callable[[], U8]:
        images = self._config.images
        size = images.height, images.width
        return partial(read_image, self._decoder, path, images.color, size, self._note)

    def _sides_of_top(self, pixels: U8) -> Sides:
        height, width, channels = pixels.shape
        try:
            return top_sides(self._config, (channels, height, width))
        except ValueError as error:
            raise self._wrong(self._batch[0][0], str(error)) from error

    def _wrong(self, path: str, text: str) -> DataError:
        return DataError(f"{self._list}: the image {os.path.abspath(path)} {text}")
