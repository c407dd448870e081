"""A group of workers with torch.distributed's gloo in it, that is made anew when it has lost one.

gloo waits as long as its sockets stay open, and looks at nothing else: here each wait is cut into slices,
between which the job's rows tell who has died or ended. Ranks meet through the box: no file, no port to
agree on.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shmtrain.crowd import Crowd, Wait
from shmtrain.group import Column, State
from smb.errors import UnknownKey, WaitTimeout

if TYPE_CHECKING:
    from smb import Segment

KNOCKS = -1  # instead of a generation: a worker that waits to be let in
POLL = 0.005
SLICE = timedelta(seconds=0.5)


class Lost(Exception):
    """The group is not whole any more."""


class BoxStore(dist.Store):  # type: ignore[name-defined, misc]  # torch has no stub of it
    """What the ranks of one process group tell each other to connect: one segment a key.

    ``check`` is asked while waiting and raises when there is nothing to wait for.
    """

    def __init__(self, crowd: Crowd, prefix: str, check: Callable[[], None]) -> None:
        super().__init__()
        self._crowd, self._prefix, self._check = crowd, prefix, check
        self._mine: list[Segment] = []

    def set(self, key: str, value: Any) -> None:
        data = np.frombuffer(value.encode("latin-1") if isinstance(value, str) else bytes(value), np.uint8)
        segment = self._crowd.box.create(
            self._key(key), count=data.size, dtype="uint8", lifetime="owner", initial=data
        )
        self._mine.append(segment)

    def get(self, key: str) -> bytes:
        while True:
            try:
                with self._crowd.box.attach(self._key(key)) as segment:
                    return np.asarray(segment.read()).tobytes()
            except UnknownKey:
                self._check()
                time.sleep(POLL)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def clear(self) -> None:
        """Free this rank's keys."""
        for segment in self._mine:
            with suppress(UnknownKey):
                self._crowd.box.free(segment.key)
            segment.detach()
        self._mine.clear()

    def _key(self, key: str) -> str:
        return self._crowd.key(f"{self._prefix}/{key}")


class Group:
    """The living workers of ``ranks``. ``members`` are their ranks, the first is the root.

    Each forming is a generation. A worker comes to the next one when it has seen that the last is broken;
    nobody stays in one that another has left.
    """

    def __init__(self, crowd: Crowd, name: str, ranks: Sequence[int]) -> None:
        self.crowd, self.members = crowd, tuple(ranks)
        self._name, self._ranks, self._generation = name, tuple(ranks), 0
        self._table = crowd.box.create(
            crowd.key("generations"), count=crowd.world, dtype="int64", lifetime="attached", or_attach=True
        )
        self._process_group: Any = None
        self._store: BoxStore | None = None

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def index(self) -> int:
        return self.members.index(self.crowd.rank)

    @property
    def is_root(self) -> bool:
        return self.members[0] == self.crowd.rank

    def form(self) -> None:
        """Connect with all that have come to the next generation. Raises Lost, and WaitTimeout with names."""
        self._let_go()
        self._generation += 1
        self._table.write(np.array([self._generation], np.int64), offset=self.crowd.rank)
        self.members = self._gathered()
        wait = self.crowd.wait(f"{self._name}, generation {self._generation}")
        prefix = f"gloo/{self.members[0]}/{self._name}/{self._generation}"
        self._store = BoxStore(self.crowd, prefix, lambda: self._look(wait))
        limit = timedelta(seconds=self.crowd.wait_limit)
        try:
            self._process_group = dist.ProcessGroupGloo(self._store, self.index, len(self.members), limit)
        except WaitTimeout:
            raise
        except (Lost, RuntimeError) as error:
            raise Lost(str(error)) from error

    # Workers that come later ------------------------------------------------------------------------------

    def let_in(self) -> bool:
        """Of the root, before a collective: let those that knock into the next generation; whether one does.

        They are in the table before this worker comes to that generation, so all others find them there.
        """
        rows, table = self.crowd.rows, np.asarray(self._table.read())
        knocking = [r for r in self._ranks if table[r] == KNOCKS and rows.state(r) is State.JOINING]
        for rank in knocking:
            self._table.write(np.array([self._generation + 1], np.int64), offset=rank)
            self.crowd.progress.put(rank, Column.STATE, State.TRAINING)
        return bool(knocking)

    def knock(self) -> bool:
        """Of one that comes later: wait until the group lets it in; False when there is nobody to do it."""
        self._table.write(np.array([KNOCKS], np.int64), offset=self.crowd.rank)
        wait = self.crowd.wait(f"{self._name}: to be let in")
        while (generation := int(np.asarray(self._table.read())[self.crowd.rank])) == KNOCKS:
            rows, table = self.crowd.rows, np.asarray(self._table.read())
            others = [r for r in self._ranks if r != self.crowd.rank and not rows.gone(r)]
            if not others:
                self._generation = max(int(table[r]) for r in self._ranks if r != self.crowd.rank)
                self._generation = max(self._generation, 0)
                self.crowd.begin()
                return False
            wait.check(others, rows)
            time.sleep(POLL)
        self._generation = generation - 1
        return True

    def _gathered(self) -> tuple[int, ...]:
        wait = self.crowd.wait(f"{self._name}, generation {self._generation}")
        while True:
            rows = self.crowd.rows  # before the table: one that has gone comes to no further generation
            table = np.asarray(self._table.read())
            here = tuple(r for r in self._ranks if table[r] >= self._generation)
            missing = [r for r in self._ranks if r not in here and not rows.gone(r)]
            if not missing:
                return here
            wait.check(missing, rows)
            time.sleep(POLL)

    def _look(self, wait: Wait) -> None:
        """Raise Lost when a member has gone or left this generation, WaitTimeout when the limit is over."""
        rows, table = self.crowd.rows, np.asarray(self._table.read())
        for rank in self.members:
            if rows.gone(rank) or table[rank] > self._generation:
                raise Lost(f"worker {rank} has left")
        wait.check([r for r in self.members if r != self.crowd.rank], rows)

    # Collectives: all members call the same ones in the same order ---------------------------------------

    def allreduce(self, parts: Sequence[Tensor]) -> list[Any]:
        """Begin to sum each part over the members, in place; ``wait`` ends it."""
        return [self._process_group.allreduce([part]) for part in parts]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """``tensor`` of the member number ``root`` for all."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self.wait([self._process_group.broadcast([tensor], options)], "a broadcast")

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """A few whole numbers of every member, in their order."""
        mine = torch.tensor(list(row), dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in self.members]
        self.wait([self._process_group.allgather([every], [mine])], "a gathering")
        return [[int(v) for v in one] for one in every]

    def wait(self, works: Sequence[Any], what: str) -> None:
        """Wait for operations. Raises Lost and WaitTimeout."""
        wait = self.crowd.wait(f"{self._name}: {what}")
        for work in works:
            while not self._done(work, wait):
                pass

    def _done(self, work: Any, wait: Wait) -> bool:
        try:
            work.wait(SLICE)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise Lost(str(error)) from error
            self._look(wait)
            return False
        return True

    def _let_go(self) -> None:
        if self._process_group is not None:
            _keep_for_ever(self._process_group)
            self._process_group = None
        if self._store is not None:
            self._store.clear()

    def close(self) -> None:
        """Leave; the others notice. Twice is fine."""
        self._process_group = None
        if self._store is not None:
            self._store.clear()


def _keep_for_ever(broken: Any) -> None:
    """An operation may still hang in it, and its destructor would wait for that: it ends with the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(broken))
