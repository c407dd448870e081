"""Batches of Datum records, as Caffe's Data layer reads them. For the reader process: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from prototxt._native import Transform, datum_head
from prototxt.data.config import ReaderConfig, Shape
from prototxt.data.ring import MAX_COUNT
from prototxt.data.store import Store
from prototxt.errors import DataError

if TYPE_CHECKING:  # numpy and OpenCV are loaded when the first encoded record is met
    from prototxt.data.decode import U8, Decoder, Images, Mode

Sides = tuple[int, int, int]  # channels, height, width


def make_transform(config: ReaderConfig, mean_image: bytes | None) -> Transform:
    """transform_param's pixels, with this worker's random stream."""
    t = config.transform
    return Transform(
        scale=t.scale,
        mirror=t.mirror,
        crop=t.crop,
        random_crop=config.train,
        mean_values=t.mean_values,
        mean_image=mean_image,
        mean_shape=t.mean_shape,
        seed=config.seed,
    )


def top_sides(config: ReaderConfig, sides: Sides) -> Sides:
    """What an image of this shape becomes. Raises ValueError with what is wrong with it."""
    crop = config.transform.crop
    shown = "x".join(map(str, sides))
    if min(sides) <= 0:
        raise ValueError(f"has the impossible shape {shown}")
    if crop > min(sides[1:]):
        raise ValueError(f"is {shown}, smaller than crop_size {crop}")
    return sides[0], crop or sides[1], crop or sides[2]


def refuse_batch(config: ReaderConfig, place: str, top: Sides) -> None:
    """Raise DataError when a batch of such tops is more than a blob may hold."""
    batch = config.batch_size
    if (count := batch * top[0] * top[1] * top[2]) > MAX_COUNT:
        what = f"a batch of {batch} images {'x'.join(map(str, top))}"
        raise DataError(f"{place}: {what} has {count} values, above {MAX_COUNT}")


class DatumSource:
    """This worker's records, in the order of their keys, for ever.

    Where the batches are claimed: from where it is sent on, passing over the others' without a copy.
    """

    def __init__(self, config: ReaderConfig, store: Store, mean_image: bytes | None) -> None:
        self._config = config
        self._store = store
        self._getters: Iterator[Callable[[], bytes]] = iter(())
        self._stream = self._open()
        self._taken = 0  # records of finished batches
        self._place = self._begun = 0  # where claimed: of the next record, and of the batch's first
        self._records: list[bytes] = []
        self._images: Images | None = None  # of this batch, once there is an encoded one
        self._top: Sides = (0, 0, 0)
        self._decoder: Decoder | None = None
        self.notes: list[str] = []
        self._transform = make_transform(config, mean_image)

    def seek(self, record: int) -> None:
        beyond = record - self._place
        if beyond < 0:  # only what was looked at for its shape lies behind
            self._stream, beyond = self._open(), record
        if self._store.entries is not None:
            beyond %= self._store.entries
        next(islice(self._getters, beyond, beyond), None)
        self._place = record

    def advance(self) -> list[Shape]:
        """Fetch the next batch's records; the shapes of its tops, by its first record."""
        self._taken += len(self._records)
        if not self._taken:
            self._check_size()
        self._begun = self._place
        self._records = list(islice(self._stream, self._config.batch_size))
        self._place += len(self._records)
        self._images = None
        sides, encoded = self._begin()
        self._top = self._sides_of_top(sides)
        if not encoded and not self._taken and self._forces:
            self.notes.append("force_color and force_gray are only for encoded records; these are raw")
        batch = len(self._records)
        return [(batch, *self._top), (batch,)][: len(self._config.tops)]

    def write(self, tops: list[memoryview[float]]) -> Callable[[], None] | None:
        """Transform the records fetched last into the tops; raises DataError for one that does not fit.

        Where threads decode, what is returned waits for them, and raises that.
        """
        out, labels = tops[0], tops[1] if len(tops) > 1 else None
        records, at = self._records, 0
        try:
            while (at := self._transform.records(records, at, out, labels, self._top)) < len(records):
                read, label = self._encoded(at)
                self._decoding(at).place(at, read, out, self._top)
                if labels is not None:
                    labels[at] = label
                at += 1
        except ValueError as error:
            if len(error.args) != 2:
                raise
            if self._images is not None and (finish := self._images.finishing()):
                finish()  # perhaps one before it is wrong
            raise self._wrong(self._before, *error.args) from error
        return None if self._images is None else self._images.finishing()

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    def _check_size(self) -> None:
        """Refuse an impossible batch before its records are fetched."""
        self._records = list(islice(self._stream, 1))
        refuse_batch(self._config, self._store.folder, self._sides_of_top(self._begin()[0]))
        self._records, self._stream, self._images = [], self._open(), None

    @property
    def _forces(self) -> bool:
        return self._config.transform.force_color or self._config.transform.force_gray

    def _open(self) -> Iterator[bytes]:
        if not self._config.claimed:
            return self._values()
        self._getters = self._passed_over()
        return (get() for get in self._getters)

    def _passed_over(self) -> Iterator[Callable[[], bytes]]:
        while True:
            yield from self._store.getters(0)

    def _values(self) -> Iterator[bytes]:
        first, step = self._config.share
        while True:
            if self._store.entries is not None:
                first %= self._store.entries
            yield from self._store.values(first, step)
            entries = self._store.entries
            assert entries is not None  # known after a whole pass
            taken = max(0, -(-(entries - first) // step))
            first += taken * step - entries

    def _begin(self) -> tuple[Sides, bool]:
        """(shape of the batch's first image, whether it is encoded); then decoding has begun."""
        try:
            sides, _, encoded, *_ = datum_head(self._records[0])
        except ValueError as error:
            raise self._wrong(self._before, 0, str(error)) from error
        if not encoded:
            return sides, False
        images = self._decoding(0)
        for index in images.ahead(len(self._records)):
            if not _is_encoded(self._records[index]):
                break
            images.begin(index, self._encoded(index)[0])
        return _sides(images.pixels(0)), True

    def _encoded(self, index: int) -> tuple[Callable[[], U8], int]:
        """(what decodes a record of the batch, its label)."""
        record = self._records[index]
        _, label, _, offset, size, _ = datum_head(record)
        decode = self._decoding(index).decoder.decode
        return partial(decode, memoryview(record)[offset : offset + size], self._mode), label

    def _decoding(self, index: int) -> Images:
        """The batch's images; a decoder from the first encoded record on, which is ``index``."""
        if self._images is None:
            from prototxt.data.decode import Decoder, Images, Undecodable

            wrong = partial(self._wrong, self._before)
            try:
                self._decoder = self._decoder or Decoder(self._config.threads)
            except Undecodable as error:
                raise wrong(index, str(error)) from error
            self._images = Images(self._decoder, self._transform, wrong)
        return self._images

    @property
    def _before(self) -> int:
        """This worker's records before the batch."""
        return self._begun if self._config.claimed else self._taken

    @property
    def _mode(self) -> Mode:
        if not self._forces:
            return "unchanged"
        return "color" if self._config.transform.force_color else "gray"

    def _sides_of_top(self, sides: Sides) -> Sides:
        try:
            return top_sides(self._config, sides)
        except ValueError as error:
            raise self._wrong(self._before, 0, str(error)) from error

    def _wrong(self, before: int, index: int, text: str) -> DataError:
        """Names a record by number and key: of the batch that has so many of this worker's before it."""
        first, step = self._config.share
        number = first + (before + index) * step
        if self._store.entries is not None:
            number %= self._store.entries
        return DataError(f"{self._store.folder}: record {number} (key {self._store.key(number)!r}) {text}")


def _is_encoded(record: bytes) -> bool:
    try:
        return datum_head(record)[2]
    except ValueError:  # write() names it, in its turn
        return False


def _sides(pixels: U8) -> Sides:
    height, width, channels = pixels.shape
    return channels, height, width
