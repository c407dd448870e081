"""Snapshots: weights as .caffemodel, the solver's state as .solverstate, the workers' own states beside them.

    PREFIX_iter_N.caffemodel          the center
    PREFIX_iter_N.solverstate         iteration, current_step, the leader's history, as the original reads it
    PREFIX_iter_N.algorithm*.npz      what the way of sharing keeps besides, see algorithm_state
    PREFIX_iter_N.workerR.npz         several workers only: history and step count of worker R

With snapshot_format: HDF5 the first two are HDF5 files and their names end in .h5; which of the two a file is
its content decides, not its name.

A file appears under its name whole or not at all (temporary file, fsync, rename), the state after the weights
that it names: what is there can be resumed.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prototxt import caffemodel, hdf5_weights
from prototxt.errors import PrototxtError
from prototxt.schema import wire
from shmtrain.npz import F32, LONGEST_TEXT, UNREADABLE, Npz
from shmtrain.params import Params

STATE_VERSION = 1  # of the workers' own files


class SnapshotError(Exception):
    """A snapshot cannot be written, read or used by this net; names the file and what to do."""


@dataclass
class State:
    """What a .solverstate holds. ``history`` has one array a parameter, in the original's order, times the
    number of histories the rule keeps: all firsts, then all seconds."""

    iteration: int
    current_step: int
    learned_net: str | None
    history: list[F32]


@dataclass(frozen=True)
class Names:
    """The files of one snapshot."""

    prefix: str
    iteration: int
    hdf5: bool = False

    @property
    def stem(self) -> str:
        return f"{self.prefix}_iter_{self.iteration}"

    @property
    def model(self) -> str:
        return f"{self.stem}.caffemodel{self._ending}"

    @property
    def state(self) -> str:
        return f"{self.stem}.solverstate{self._ending}"

    @property
    def _ending(self) -> str:
        return ".h5" if self.hdf5 else ""

    def worker(self, rank: int) -> str:
        return f"{self.stem}.worker{rank}.npz"

    @classmethod
    def of_state(cls, path: str) -> Names | None:
        """The set that a state file belongs to; None when its name was changed."""
        found = re.fullmatch(r"(.*)_iter_(\d+)\.solverstate(\.h5)?", path, re.DOTALL)
        return cls(found[1], int(found[2]), bool(found[3])) if found else None


def write_atomically(path: str, write: Callable[[str], None]) -> None:
    """Let ``write(temporary)`` make a file and put it in place of ``path`` in one move.

    Raises SnapshotError when it cannot be written; ``path`` is then as before and nothing else is left.
    """
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(os.path.dirname(path) or ".")
    except (OSError, PrototxtError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise SnapshotError(f"cannot write snapshot {path}: {reason}") from e
    finally:
        Path(temporary).unlink(missing_ok=True)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# The solver's state --------------------------------------------------------------------------------------


def write_state(path: str, state: State, hdf5: bool = False) -> None:
    """Write a .solverstate as the original does: binary protobuf, or HDF5."""
    if hdf5:
        numbers = {"iter": state.iteration, "current_step": state.current_step}
        write_atomically(
            path, lambda to: hdf5_weights.write_state(to, numbers, state.learned_net, state.history)
        )
        return
    message = wire.SolverState(iter=state.iteration, current_step=state.current_step)
    if state.learned_net is not None:
        message.learned_net = state.learned_net
    for array in state.history:
        blob = message.history.add()
        blob.shape.dim.extend(array.shape)
        blob.data = np.ascontiguousarray(array, np.float32).tobytes()
    write_atomically(path, lambda to: caffemodel.write_message(to, message))


def read_state(path: str) -> State:
    """Read a .solverstate, binary or HDF5. Raises SnapshotError for anything else.

    With a hint where it is a weights file.
    """
    if not os.path.isfile(path):
        raise SnapshotError(f"snapshot {os.path.abspath(path)} does not exist")
    try:
        if caffemodel.is_hdf5(path):
            numbers, learned, history = hdf5_weights.read_state(path)
            return State(numbers["iter"], numbers.get("current_step", 0), learned, history)
        message = caffemodel.read_message(path, "SolverState")
        history = [caffemodel.blob_array(blob) for blob in message.history]
    except PrototxtError as e:
        raise _not_a_state(path, str(e)) from e
    if not message.HasField("iter"):
        raise _not_a_state(path, "it has no iteration")
    learned = os.fsdecode(message.learned_net) if message.HasField("learned_net") else None
    return State(message.iter, message.current_step, learned, history)


def _not_a_state(path: str, reason: str) -> SnapshotError:
    if ".caffemodel" in os.path.basename(path):
        state = path.replace(".caffemodel", ".solverstate")
        return SnapshotError(f"{path}: this is a weights file, use --weights; the state is {state}")
    return SnapshotError(f"{path}: not a solver state: {reason}")


def find_model(state: State, path: str) -> str:
    """The weights file of a state: as it was saved, else beside the state file."""
    if state.learned_net is None:
        raise SnapshotError(f"{path}: names no weights file")
    beside = os.path.join(os.path.dirname(path), os.path.basename(state.learned_net))
    for name in (state.learned_net, beside):
        if os.path.isfile(name):
            return name
    raise SnapshotError(f"{path}: its weights {state.learned_net} do not exist, nor does {beside}")


# The history in flat vectors -----------------------------------------------------------------------------


def history_arrays(params: Params, history: Sequence[Tensor]) -> list[F32]:
    """The rule's flat histories cut into one array a parameter; zeros for what is not trained."""
    arrays: list[F32] = []
    for vector in history:
        for slot in params.in_file_order():
            trained = slot.stop <= params.trained
            part = vector[slot.slice].numpy() if trained else np.zeros(slot.stop - slot.start, np.float32)
            arrays.append(part.reshape(slot.shape))
    return arrays


def load_history(params: Params, history: Sequence[Tensor], arrays: Sequence[F32], path: str) -> None:
    """The reverse, into ``history``; what the file has for parameters that are not trained is dropped.

    Raises SnapshotError when the counts or the sizes are another solver's or another net's.
    """
    slots = params.in_file_order()
    if len(arrays) != len(slots) * len(history):
        raise SnapshotError(_count_message(path, len(arrays), len(slots), len(history)))
    for i, vector in enumerate(history):
        for slot, array in zip(slots, arrays[i * len(slots) : (i + 1) * len(slots)], strict=True):
            if array.size != slot.stop - slot.start:
                raise SnapshotError(
                    f"{path}: is the state of another net: history of layer {slot.layer!r} parameter"
                    f" {slot.index} has shape {tuple(array.shape)}, the net's is {slot.shape}"
                )
            if slot.stop <= params.trained:
                vector[slot.slice] = torch.from_numpy(np.array(array, np.float32).reshape(-1))


def _count_message(path: str, found: int, parameters: int, histories: int) -> str:
    text = f"{path}: incorrect length of history blobs ({found} vs. {parameters * histories})"
    if found in (parameters, 2 * parameters):
        kind = "SGD, Nesterov, AdaGrad or RMSProp" if found == parameters else "AdaDelta or Adam"
        return f"{text}: it is the state of another solver type ({kind})"
    return f"{text}: it is the state of another net"


# The workers' own states ---------------------------------------------------------------------------------


@dataclass
class WorkerState:
    """One worker's part: its histories (flat, in the vector's order) and the updates it has made."""

    count: int
    history: tuple[F32, ...]


def write_worker(path: str, params: Params, state: WorkerState) -> None:
    """Write a worker's histories and step count; .npz without pickle."""
    fields: dict[str, Any] = {f"history{i}": vector for i, vector in enumerate(state.history)}
    fingerprint = np.frombuffer(params.fingerprint(), np.uint8)

    def write(to: str) -> None:
        with open(to, "wb") as file:
            np.savez(
                file, version=STATE_VERSION, count=state.count, fingerprint=fingerprint,
                histories=len(state.history), **fields,
            )  # fmt: skip

    write_atomically(path, write)


def read_worker(path: str, params: Params, histories: int) -> WorkerState | None:
    """A worker's state; None when the file is absent. Raises SnapshotError when it is another net's."""
    if not os.path.isfile(path):
        return None
    try:
        with Npz(path) as file:
            if (version := file.number("version")) != STATE_VERSION:
                raise SnapshotError(f"{path}: is of version {version}, not {STATE_VERSION}")
            if (
                file.text("fingerprint", LONGEST_TEXT) != params.fingerprint()
                or file.number("histories") != histories
            ):
                raise SnapshotError(f"{path}: is the state of another net or solver type")
            vectors = tuple(file.floats(f"history{i}", params.trained) for i in range(histories))
            return WorkerState(file.number("count"), vectors)
    except UNREADABLE as e:
        raise SnapshotError(f"{path}: not a worker's state: {e}") from e


# Finding -------------------------------------------------------------------------------------------------


def newest_whole(prefix: str, skipped: Callable[[str], None]) -> str | None:
    """The newest state file of ``prefix`` whose weights are there and can be read; None without one.

    ``skipped`` is told about each newer set that is not whole.
    """
    for names in _newest_first(prefix):
        try:
            _check_model(find_model(read_state(names.state), names.state))
        except (SnapshotError, PrototxtError) as e:
            skipped(f"not resuming from {names.state}: {e}")
            continue
        return names.state
    return None


def _check_model(path: str) -> None:
    """WeightsError unless the weights file can be read."""
    if caffemodel.is_hdf5(path):
        hdf5_weights.check(path)
    else:
        caffemodel.read_net(path)


def _newest_first(prefix: str) -> Iterator[Names]:
    found = (Names.of_state(path) for path in glob.glob(f"{glob.escape(prefix)}_iter_*.solverstate*"))
    yield from sorted(filter(None, found), key=lambda names: -names.iteration)
