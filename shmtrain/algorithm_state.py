"""The algorithm's own state, beside a snapshot: what weights and histories do not tell of a job.

    PREFIX_iter_N.algorithm.npz          the job's: vectors in the box, or the same at all workers
    PREFIX_iter_N.algorithm.workerR.npz  worker R's own: what it owes the center, what a narrow type has lost

An algorithm that has any gives ``kept()`` (a worker's own) and ``common()`` (the job's) by name: arrays that
are read and written in place, and segments. All workers start from the center, so no weights are in here.
What a file does not have starts at zero: the files of a job of another size, or of another algorithm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shmtrain.npz import F32, LONGEST_TEXT, UNREADABLE, Npz
from shmtrain.snapshot import SnapshotError, write_atomically

if TYPE_CHECKING:
    from shmtrain.crowd import Crowd
    from smb import Segment

VERSION = 1


class AlgorithmState:
    """Saves and restores one worker's exchange; ``parameters`` is the net's fingerprint."""

    def __init__(self, algorithm: str, exchange: object, crowd: Crowd, parameters: bytes) -> None:
        self._algorithm, self._crowd, self._parameters = algorithm, crowd, parameters
        self._kept = cast(Callable[[], Mapping[str, F32]], getattr(exchange, "kept", dict))
        self._common = cast("Callable[[], Mapping[str, F32 | Segment]]", getattr(exchange, "common", dict))

    def save(self, stem: str, leads: bool) -> None:
        """Beside the snapshot ``stem``; the job's part by the worker that leads. Raises SnapshotError."""
        if leads and (common := self._common()):
            self._write(_of_job(stem), {name: _read(vector) for name, vector in common.items()})
        if kept := self._kept():
            self._write(_of_worker(stem, self._crowd.rank), kept)

    def restore(self, stem: str, log: Callable[[str], None]) -> None:
        """The other way round; the job's vectors in the box are written once. Raises SnapshotError."""
        common, kept = self._common(), self._kept()
        if common:
            with self._crowd.lock("restoring"):
                first = self._crowd.box.counter(self._crowd.key("restored")).add(1) == 0
                self._load(_of_job(stem), common, first, log)
        if kept:
            self._load(_of_worker(stem, self._crowd.rank), kept, True, log)

    def _write(self, path: str, vectors: Mapping[str, F32]) -> None:
        head: dict[str, Any] = {
            "version": VERSION,
            "algorithm": np.frombuffer(self._algorithm.encode(), np.uint8),
            "fingerprint": np.frombuffer(self._parameters, np.uint8),
        }

        def write(to: str) -> None:
            with open(to, "wb") as file:
                fields = {**head, **{f"vector {name}": vector for name, vector in vectors.items()}}
                np.savez(file, **fields)

        write_atomically(path, write)

    def _load(
        self, path: str, into: Mapping[str, F32 | Segment], first: bool, log: Callable[[str], None]
    ) -> None:
        found = self._read_file(path, {name: _size(vector) for name, vector in into.items()})
        for name, vector in into.items():
            value = found.get(name)
            if value is None:
                log(f"No {name} of {self._algorithm} in {path}: it starts at zero")
            elif isinstance(vector, np.ndarray):
                vector[:] = value
            elif first:
                vector.write(value)

    def _read_file(self, path: str, sizes: Mapping[str, int]) -> dict[str, F32]:
        """Those of its vectors that ``sizes`` names; empty when it is absent or another algorithm's."""
        if not os.path.isfile(path):
            return {}
        try:
            with Npz(path) as file:
                if file.text("fingerprint", LONGEST_TEXT) != self._parameters:
                    raise SnapshotError(f"{path}: is the state of another net")
                if file.text("algorithm", LONGEST_TEXT) != self._algorithm.encode():
                    return {}
                names = [name for name in sizes if f"vector {name}" in file.names]
                return {name: file.floats(f"vector {name}", sizes[name]) for name in names}
        except UNREADABLE as e:
            raise SnapshotError(f"{path}: not an algorithm's state: {e}") from e


def _of_job(stem: str) -> str:
    return f"{stem}.algorithm.npz"


def _of_worker(stem: str, rank: int) -> str:
    return f"{stem}.algorithm.worker{rank}.npz"


def _read(vector: F32 | Segment) -> F32:
    return vector if isinstance(vector, np.ndarray) else np.asarray(vector.read())


def _size(vector: F32 | Segment) -> int:
    return vector.size if isinstance(vector, np.ndarray) else vector.count
