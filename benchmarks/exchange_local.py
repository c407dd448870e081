"""What benchmarks/exchange.py measures without MPI: the box's exchange, and the memory's own limits.

All memory is on 4 KiB pages: the box's files are, and the private memory they are compared with is kept so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

import smb
from shmtrain.bench.job import floats
from smb import _native
from smb.segment import Mapping

F32 = npt.NDArray[np.float32]
ALPHA = 0.05
MIB = 1 << 20


def private(nbytes: int) -> F32:
    """Private float32 on 4 KiB pages, all present."""
    return floats(nbytes // 4, 0.25)


def timed(work: Callable[[], object], repeat: int = 3) -> list[float]:
    """Seconds of each call after one that warms the caches, as the MPI ranks are measured too."""
    work()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


@contextmanager
def pinned() -> Iterator[None]:
    """To the processor that the last MPI rank, which is the one measured, is bound to."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def timed_on(threads: int, work: Callable[[], object]) -> list[float]:
    """As timed(); one thread is pinned here, several pin themselves."""
    with pinned() if threads == 1 else nullcontext():
        return timed(work)


class Exchanges:
    """One worker's exchange of a size: through the box from Python, and the bare kernel on private memory."""

    def __init__(self, box: Any, mib: int) -> None:
        nbytes = mib * MIB
        self.segment = box.create(f"bench/{mib}", count=nbytes // 4, initial=np.full(nbytes // 4, 0.5, "f"))
        self.local, self.other, self.center = private(nbytes), private(nbytes), private(nbytes)

    def shm(self, threads: int) -> list[float]:
        return timed_on(threads, lambda: self.segment.exchange(self.local, ALPHA, threads=threads))

    def read(self) -> list[float]:
        return timed_on(1, lambda: self.segment.read(self.local))

    def write(self) -> list[float]:
        return timed_on(1, lambda: self.segment.write(self.local))

    def memcpy(self) -> list[float]:
        """The C library's copy between private arrays, which chooses its stores itself."""
        ends = self.other.ctypes.data, self.center.ctypes.data, self.other.nbytes
        return timed_on(1, lambda: ctypes.memmove(*ends))

    def kernel(self, threads: int, check: bool = True) -> list[float]:
        move = partial(_native.exchange, self.other, self.center, ALPHA, threads=threads, check=check)
        return timed_on(threads, move)


class Small:
    """4 KiB exchanges from Python, many to a sample: seconds of one."""

    def __init__(self, box: Any, calls: int = 500, batches: int = 11) -> None:
        self.segment = box.create("bench/small", count=1024, initial=np.ones(1024, np.float32))
        self.local = private(4096)
        self.calls, self.batches = calls, batches

    def exchange(self) -> list[float]:
        return [statistics.median(self._batch() for _ in range(self.batches))]

    def _batch(self) -> float:
        exchange, local = self.segment.exchange, self.local
        began = time.perf_counter()
        for _ in range(self.calls):
            exchange(local, ALPHA)
        return (time.perf_counter() - began) / self.calls


def prefault(nbytes: int, threads: int) -> list[float]:
    """Making a new segment, its memory files and mappings included, less its unmapping."""
    began = time.perf_counter()
    mapping = Mapping.create(nbytes // 4, "float32", prefault_threads=threads)
    elapsed = time.perf_counter() - began
    mapping.close()
    return [elapsed]


def memset(nbytes: int) -> list[float]:
    """One thread's memset of fresh private memory."""
    began = time.perf_counter()
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    view = (ctypes.c_char * nbytes).from_buffer(memory)
    ctypes.memset(view, 1, nbytes)
    elapsed = time.perf_counter() - began
    del view
    memory.close()
    return [elapsed]


class Workers:
    """Forked processes with weights of their own that exchange with one center at the same time."""

    def __init__(self, most: int, sizes: list[int]) -> None:
        self.centers = {mib: Mapping.create(mib * MIB // 4, "float32") for mib in sizes}
        self.pipes: list[Connection] = []
        self.pids: list[int] = []
        for _ in range(most):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()  # else it would keep the other end of its own pipe open and never see its end
                try:
                    self._serve(theirs)
                finally:
                    os._exit(0)
            theirs.close()
            self.pipes.append(ours)
            self.pids.append(pid)

    def _serve(self, pipe: Connection) -> None:
        for inherited in self.pipes:
            inherited.close()
        locals_ = {mib: private(mib * MIB) for mib in self.centers}
        bare = {mib: self._bare_center(mib) for mib in self.centers}
        for mib, mapping in self.centers.items():
            mapping.exchange(locals_[mib], ALPHA)
        while (job := _next(pipe)) is not None:
            mib, locked, rounds = job
            pipe.send("ready")
            pipe.recv()
            for _ in range(rounds):
                if locked:
                    self.centers[mib].exchange(locals_[mib], ALPHA)
                else:
                    _native.exchange(locals_[mib], bare[mib], ALPHA)
            pipe.send("done")

    def _bare_center(self, mib: int) -> F32:
        return np.frombuffer(mmap.mmap(self.centers[mib].payload_fd, mib * MIB), np.float32)

    def run(self, count: int, mib: int, locked: bool, rounds: int) -> list[float]:
        """Wall seconds of one exchange, all workers counted together."""
        pipes = self.pipes[:count]
        for pipe in pipes:
            pipe.send((mib, locked, rounds))
        for pipe in pipes:
            pipe.recv()
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            pipe.recv()
        return [(time.perf_counter() - began) / (count * rounds)]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
            pipe.close()
        for pid in self.pids:
            os.waitpid(pid, 0)
        for mapping in self.centers.values():
            mapping.close()


def _next(pipe: Connection) -> tuple[int, bool, int] | None:
    try:
        job: tuple[int, bool, int] | None = pipe.recv()
    except EOFError:
        return None
    return job


def open_box(folder: str) -> tuple[Any, Any]:
    """A daemon in this process and a connection to it through its socket: the shm transport."""
    path = os.path.join(folder, "box")
    daemon = smb.serve(unix=path)
    return daemon, smb.connect(f"unix:{path}")
