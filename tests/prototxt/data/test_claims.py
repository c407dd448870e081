"""Batches by number: workers that claim them read each record once an epoch, whoever comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest

from prototxt.data.claims import AHEAD
from prototxt.data.config import ReaderConfig
from prototxt.data.leveldb_write import fill_leveldb
from prototxt.data.source import Reader
from tests.prototxt.data.conftest import encode

BATCH, RECORDS = 3, 20  # an epoch ends within a batch
BATCHES = 30


class Tickets:
    """One counter for all workers, which claim a few batches at once."""

    def __init__(self, at_once: int) -> None:
        self._at_once, self._next = at_once, 0

    def worker(self) -> Callable[[int], int | None]:
        mine: list[int] = []

        def claims(n: int) -> int | None:
            if n == len(mine):
                mine.extend(range(self._next, self._next + self._at_once))
                self._next += self._at_once
            return mine[n]

        return claims


def leveldb(folder: Path) -> None:
    records = ((b"%08d" % i, encode(np.full((1, 2, 2), i, np.uint8), i)) for i in range(RECORDS))
    fill_leveldb(folder, records)


def lmdb(folder: Path, make_lmdb: Any) -> None:
    make_lmdb([(np.full((1, 2, 2), i, np.uint8), i) for i in range(RECORDS)], folder.name)


def hdf5(folder: Path) -> None:
    names = []
    for part in (range(8), range(8, RECORDS)):
        names.append(f"{folder}{part.start}.h5")
        with h5py.File(names[-1], "w") as file:
            file["data"] = np.repeat(np.arange(part.start, part.stop, dtype=np.float32), 4).reshape(-1, 4)
            file["label"] = np.arange(part.start, part.stop, dtype=np.float32)
    folder.write_text("\n".join(names))


def images(folder: Path) -> None:
    lines = []
    for i in range(RECORDS):
        cv2.imwrite(f"{folder}{i}.png", np.full((2, 2), i, np.uint8))
        lines.append(f"{folder}{i}.png {i}\n")
    folder.write_text("".join(lines))


@pytest.fixture(params=["lmdb", "leveldb", "hdf5", "images"])
def config(request: pytest.FixtureRequest, tmp_path: Path, make_lmdb: Any) -> ReaderConfig:
    """Of a source whose record i has the label i; lists are shuffled at each pass."""
    kind, source = request.param, tmp_path / "source"
    {"leveldb": leveldb, "hdf5": hdf5, "images": images}.get(kind, lambda f: lmdb(f, make_lmdb))(source)
    return ReaderConfig(
        kind, str(source), BATCH, ("data", "label"), train=True, world=2, shuffle=True, shuffle_seed=5,
        claimed=True,
    )  # fmt: skip


@pytest.fixture
def opened(config: ReaderConfig) -> Iterator[Callable[..., Reader]]:
    with ExitStack() as stack:
        yield lambda claims: stack.enter_context(Reader(config, place="data", timeout=20.0, claims=claims))


def labels(reader: Reader) -> list[int]:
    data, label = reader.take()
    assert (data.flatten(1)[:, 0] == label).all()
    return [int(value) for value in label]


def test_the_batch_of_a_number_is_the_same_whoever_reads_it(opened: Callable[..., Reader]) -> None:
    """The reference reads all in turn; two others claim from one counter, and one of them falls behind."""
    alone = opened(lambda n: n)
    want = [labels(alone) for _ in range(BATCHES)]
    flat = [label for batch in want for label in batch]
    for epoch in range(0, len(flat) - RECORDS, RECORDS):
        assert sorted(flat[epoch : epoch + RECORDS]) == list(range(RECORDS))
    tickets = Tickets(2)
    numbers = [tickets.worker(), tickets.worker()]
    readers = [opened(claims) for claims in numbers]
    for turn in range(9):
        for rank, reader in enumerate(readers):
            if rank == 0 or turn % 3 == 0:
                n = turn if rank == 0 else turn // 3
                assert labels(reader) == want[numbers[rank](n)]  # type: ignore[index]


def test_a_batch_that_nobody_can_claim_follows_the_last(opened: Callable[..., Reader]) -> None:
    """Of the loss that is shown once more at the end; and a little is claimed before it is needed."""
    asked: list[int] = []

    def claims(n: int) -> int | None:
        asked.append(n)
        return 7 if n == 0 else None

    reader = opened(claims)
    assert not asked
    first, second = labels(reader), labels(reader)
    alone = opened(lambda n: n)
    whole = [labels(alone) for _ in range(9)]
    assert [first, second] == whole[7:]
    assert max(asked) <= AHEAD
