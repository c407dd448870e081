"""One reader for all workers of a machine: the batches are those of a reader each, and nobody hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prototxt.data.config import ReaderConfig, TransformConfig
from prototxt.data.process import join_shared
from prototxt.data.share import Share
from prototxt.data.source import Reader
from prototxt.errors import DataError

WORLD = 3
BYTES = 1 << 20


class Memory:
    """What a program gives: memory of a fixed size for each worker."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def __call__(self, key: str, size: int) -> int:
        self.descriptors.append(os.memfd_create("test"))
        os.ftruncate(self.descriptors[-1], size)
        return self.descriptors[-1]


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    for descriptor in memory.descriptors:
        os.close(descriptor)


@pytest.fixture
def folder(make_lmdb: Any) -> Path:
    rng = np.random.default_rng(0)
    return make_lmdb([(rng.integers(0, 256, (1, 16, 16), np.uint8), i) for i in range(500)])  # type: ignore[no-any-return]


Open = Callable[..., Reader]


@pytest.fixture
def open_reader(folder: Path, memory: Memory, tmp_path: Path) -> Iterator[Open]:
    """open_reader(rank, shared): worker ``rank``'s reader of ``folder``."""
    readers: list[Reader] = []

    def make(rank: int, shared: bool = True) -> Reader:
        config = ReaderConfig(
            "lmdb", str(folder), 8, ("data", "label"), train=True, rank=rank, world=WORLD, seed=rank,
            transform=TransformConfig(crop=9, mirror=True),
        )  # fmt: skip
        share = Share(f"job of {tmp_path}", memory) if shared else None
        readers.append(Reader(config, place=f"worker {rank}", timeout=20.0, share=share))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def test_each_worker_gets_what_a_reader_of_its_own_would_give_it(open_reader: Open) -> None:
    """In any pace, crops and flips included; one process does it all."""
    shared, alone = (
        [open_reader(rank) for rank in range(WORLD)],
        [open_reader(rank, False) for rank in range(WORLD)],
    )
    assert len({reader.pid for reader in shared}) == 1
    assert len({reader.pid for reader in alone}) == WORLD
    for rank, batches in enumerate((40, 3, 25)):
        for _ in range(batches):
            for got, want in zip(shared[rank].take(), alone[rank].take(), strict=True):
                assert (got == want).all()


def test_the_batches_lie_in_the_memory_that_the_program_gave(open_reader: Open, memory: Memory) -> None:
    data, _ = open_reader(1).take()
    assert len(memory.descriptors) == 1
    size = os.fstat(memory.descriptors[0]).st_size
    assert data.numpy().tobytes() in os.pread(memory.descriptors[0], size, 0)


def test_a_slow_worker_and_one_that_leaves_hold_up_nobody(open_reader: Open) -> None:
    slow, leaving, fast = (open_reader(rank) for rank in range(WORLD))
    slow.take()
    leaving.take()
    leaving.close()
    for _ in range(100):
        fast.take()
    slow.take()


def test_nets_that_come_and_go_leave_no_descriptor_in_the_shared_reader(open_reader: Open) -> None:
    """What a net hands over, and what comes of a net that hands over too little."""
    stays = open_reader(0)
    stays.take()

    def settled(most: int) -> int:
        """Descriptors of the reader, once there are at most so many, or after a while."""
        end = time.monotonic() + 5.0
        while (count := len(os.listdir(f"/proc/{stays.pid}/fd"))) > most and time.monotonic() < end:
            time.sleep(0.02)
        return count

    open_reader(1).close()
    before = settled(0)
    for i in range(8):
        net = open_reader(1)
        net.take()
        net.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as poor:
            poor.connect(stays._reader.sock.getpeername())
            if i % 2:
                poor.send(b"{}")
    assert settled(before) <= before
    stays.take()


def test_a_shared_reader_that_dies_is_named_by_all_and_the_next_worker_starts_another(
    open_reader: Open,
) -> None:
    readers = [open_reader(rank) for rank in range(WORLD)]
    for reader in readers:
        reader.take()
    os.kill(readers[0].pid, signal.SIGSEGV)
    start, texts = time.monotonic(), []
    for reader in readers:
        with pytest.raises(DataError) as caught:  # noqa: PT012
            while True:
                reader.take()
        texts.append(str(caught.value))
    assert time.monotonic() - start < 5.0
    assert "ended in SIGSEGV (is it corrupt?)" in texts[0]
    for rank, text in enumerate(texts[1:], 1):
        assert text.startswith(f"worker {rank}: the shared reader of ")
        assert "is gone; the worker that started it says why" in text
    assert open_reader(1).take()[0].shape == (8, 1, 9, 9)


def test_images_of_many_sizes_are_refused_where_the_memory_cannot_grow(
    make_lmdb: Any, memory: Memory
) -> None:
    folder = make_lmdb([(np.zeros((1, side, side), np.uint8), 0) for side in (8, 8, 99, 99)])
    config = ReaderConfig("lmdb", str(folder), 2, ("data", "label"), train=True)
    with Reader(config, place="w", share=Share(str(folder), memory)) as reader:
        reader.take()
        with pytest.raises(DataError, match="a slot of the memory that the workers share"):  # noqa: PT012
            for _ in range(3):
                reader.take()


WORKER = """
import os, sys
from prototxt.data.config import ReaderConfig
from prototxt.data.share import Share
from prototxt.data.source import Reader
def memory(key, size):
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd
config = ReaderConfig("lmdb", sys.argv[1], 8, ("data", "label"), train=True, rank=int(sys.argv[2]), world=2)
reader = Reader(config, place="worker", share=Share(sys.argv[1], memory))
reader.take()
print(reader.pid, flush=True)
if sys.argv[2] == "0":
    os.kill(os.getpid(), 9)
for line in sys.stdin:
    reader.take()
    print("taken", flush=True)
reader.close()
"""


def test_the_reader_outlives_the_worker_that_started_it_and_goes_with_the_last(folder: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER), str(folder), str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    second = start(1)
    assert second.stdout is not None
    assert second.stdin is not None
    with second:
        pid = int(second.stdout.readline())
        with start(0) as first:  # joins, and is killed by itself
            assert first.stdout is not None
            assert int(first.stdout.readline()) == pid
        assert first.returncode == -signal.SIGKILL
        for _ in range(100):  # more than lie ready
            second.stdin.write("\n")
            second.stdin.flush()
            assert second.stdout.readline() == "taken\n"
    end = time.monotonic() + 10.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_a_socket_that_nobody_serves_is_an_error_in_time(tmp_path: Path) -> None:
    import socket

    address = f"\0{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(address)
        with pytest.raises(DataError, match="no shared reader answers"):
            join_shared(address, 0.2)
