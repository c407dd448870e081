"""What the workers of a job know of one another where another launcher than ours has started them.

Each leaves a mark in the box that goes with its session: at once when its process dies on the box's host,
after a lease where it came over a network. The lowest rank that lives buries those whose mark has gone, and
names them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import smb
from shmtrain.environment import Placed, numbers
from shmtrain.grace import DROPPED
from shmtrain.group import Progress, Rows
from shmtrain.log import Log
from shmtrain.watch import Steps

LOOK = 0.5  # seconds
POLL = 0.05
MISSED = 2  # looks in a row without a mark: a box that was started again gets them back one by one


def machine() -> str:
    """This host and no other: two may have one name, and two names one machine."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def marks(box: smb.Box, job: str) -> list[Placed]:
    """The workers that are there, by rank."""
    prefix = _key(job, "")
    found = (_read(stat.key.removeprefix(prefix), stat.meta) for stat in box.stats(prefix))
    return sorted(filter(None, found), key=lambda placed: placed.rank)


def all_marks(box: smb.Box, job: str, world: int, patience: float) -> list[Placed]:
    """Those of all workers. Raises WaitTimeout naming who has not come within ``patience`` seconds."""
    until = time.monotonic() + patience
    while len(places := marks(box, job)) < world:
        if time.monotonic() > until:
            missing = sorted(set(range(world)) - {place.rank for place in places})
            raise smb.WaitTimeout(
                f"the workers of job {job}: nothing from {numbers(missing)} in {patience:g} s"
            )
        time.sleep(POLL)
    return places


def machines(places: list[Placed]) -> list[tuple[int, ...]]:
    """The ranks of each machine, the one with the lowest rank first."""
    alike: dict[str, list[int]] = {}
    for place in places:
        alike.setdefault(place.machine, []).append(place.rank)
    return [tuple(ranks) for ranks in alike.values()]


def _key(job: str, rank: int | str) -> str:
    return f"{job}/mark/{rank}"


def _coming_key(job: str, rank: int, pid: int) -> str:
    return f"{job}/coming/{rank}/{pid}"


def _read(rank: str, meta: bytes) -> Placed | None:
    """A mark; None for what is none: others may write into the box, too."""
    try:
        told = json.loads(meta)
        placed = Placed(
            int(rank), str(told["host"])[:64], str(told["transport"])[:8], int(told["pid"]), told["machine"]
        )
    except (ValueError, KeyError, TypeError):
        return None
    return placed if placed.host.isprintable() and placed.transport.isprintable() else None


def is_coming(box: smb.Box, job: str, rank: int, pid: int) -> bool:
    """Whether a worker that has taken a row has a process still, though it has not left its mark yet."""
    key = _coming_key(job, rank, pid)
    return any(stat.key == key for stat in box.stats(key))


def announce(box: smb.Box, job: str, rank: int) -> None:
    """What a worker leaves before it takes a row, until it has loaded all that it needs to leave a mark."""
    box.create(_coming_key(job, rank, os.getpid()), count=1, dtype="uint8", lifetime="owner")


def _leave_mark(box: smb.Box, job: str, rank: int) -> None:
    told: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "transport": box.transport,
        "machine": machine(),
    }
    meta = json.dumps(told).encode()
    box.create(_key(job, rank), count=1, dtype="uint8", lifetime="owner", meta=meta)


class Witness:
    """This worker's mark, and its look at those of the others: in a thread with a connection of its own.

    marked  so many ranks, from 0, leave marks too; of others only those are buried whose mark was seen
    stuck   seconds without a step after which a worker is named
    told    takes the lines of the lowest living rank
    """

    def __init__(
        self,
        connect: Callable[[], smb.Box],
        job: str,
        rank: int,
        *,
        marked: int,
        stuck: float,
        told: Log,
    ) -> None:
        self._box, self._job, self._rank = connect(), job, rank
        self._box.patient = False
        self._marked, self._patience, self._told = marked, stuck, told
        self._progress = Progress.attach(self._box, job)
        self._known: dict[int, Placed] = {}
        self._missing: dict[int, int] = {}
        self._steps: dict[int, Steps] = {}
        _leave_mark(self._box, self._job, self._rank)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the mark away; twice is fine."""
        self._ending.set()
        self._thread.join(10)
        self._box.close()

    def __enter__(self) -> Witness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ending.wait(LOOK):
            try:
                self._look()
            except DROPPED:
                continue
            except smb.TransportError:
                return  # the training meets it, too, and says so

    def _look(self) -> None:
        here = {placed.rank: placed for placed in marks(self._box, self._job)}
        if self._rank not in here:
            # Lost with a box that was started again: theirs may be, too.
            _leave_mark(self._box, self._job, self._rank)
            self._missing.clear()
            return
        self._known |= here
        if min(here) != self._rank:
            return
        rows = self._progress.rows()
        for rank, placed in here.items():
            self._missing.pop(rank, None)
            steps = self._steps.setdefault(rank, Steps(rank, placed.name))
            if line := steps.stuck(rows, self._patience):
                self._told.warning(line)
        for rank in rows.working:
            if rank not in here:
                self._miss(rank, rows)

    def _miss(self, rank: int, rows: Rows) -> None:
        """A worker that makes steps, or is about to, has no mark."""
        known = self._known.get(rank)
        if known is None and rank >= self._marked:
            return
        self._missing[rank] = self._missing.get(rank, 0) + 1
        if self._missing[rank] >= MISSED and (known is None or known.pid == rows.pid(rank)):
            self._progress.bury(rank)
            name = known.name if known else f"Worker {rank} (pid {rows.pid(rank)})"
            self._told.error(f"{name} is gone after {rows.done(rank)} iterations of its own")
