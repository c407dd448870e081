"""The reader process: its life and death, what it costs, and that nothing of it is left behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prototxt.data.config import ReaderConfig
from prototxt.data.reader import SMALL_RING_SLOTS
from prototxt.data.ring import FAILED
from prototxt.data.source import Reader
from prototxt.errors import DataError

ROOT = Path(__file__).resolve().parents[3]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def folder(make_lmdb: Any) -> Path:
    """An LMDB of 4 MB, so that a reader cannot have read it all ahead."""
    rng = np.random.default_rng(0)
    return make_lmdb([(rng.integers(0, 256, (1, 32, 32), np.uint8), i % 10) for i in range(4000)])  # type: ignore[no-any-return]


@pytest.fixture
def open_reader(folder: Path) -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make() -> Reader:
        config = ReaderConfig("lmdb", str(folder), 16, ("data", "label"), train=False)
        readers.append(Reader(config, place="net.prototxt:3: layer 'd'", timeout=20.0))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def take_until_error(reader: Reader, seconds: float = 5.0) -> str:
    """Take batches until the reader fails; the error's text."""
    end = time.monotonic() + seconds
    with pytest.raises(DataError) as caught:  # noqa: PT012
        while time.monotonic() < end:
            reader.take()
    return str(caught.value)


# Death of the reader -------------------------------------------------------------------------------------


def test_a_file_truncated_while_it_is_read_is_an_error_that_names_it(open_reader: Any, folder: Path) -> None:
    """LMDB maps the file: a page beyond its end kills the process that touches it, which must not be ours."""
    reader = open_reader()
    reader.take()
    os.truncate(folder / "data.mdb", 8192)
    start = time.monotonic()
    text = take_until_error(reader)
    assert time.monotonic() - start < 1.0
    assert text.startswith("net.prototxt:3: layer 'd': ")
    assert f"reading {folder} ended in SIGBUS (is it truncated, or its disk failing?)" in text
    with pytest.raises(DataError, match="SIGBUS"):
        reader.take()


@pytest.mark.parametrize("busy", [False, True], ids=["while-it-sleeps", "while-the-net-waits"])
def test_a_killed_reader_is_an_error_within_a_second(open_reader: Any, busy: bool) -> None:
    reader = open_reader()
    reader.take()
    if busy:
        killer = threading.Timer(0.1, os.kill, (reader.pid, signal.SIGKILL))
        killer.start()
    else:
        os.kill(reader.pid, signal.SIGKILL)
    start = time.monotonic()
    assert "ended in SIGKILL (out of memory, or killed by hand)" in take_until_error(reader)
    assert time.monotonic() - start < 1.1


def test_a_killed_reader_is_noticed_though_a_fork_of_it_holds_its_socket(open_reader: Any) -> None:
    """The end of the socket alone would not tell: some other process may have inherited it."""
    reader = open_reader()
    theirs = next(
        fd
        for fd in os.listdir(f"/proc/{reader.pid}/fd")
        if "socket" in os.readlink(f"/proc/{reader.pid}/fd/{fd}")
    )
    pidfd = os.pidfd_open(reader.pid)
    copy = _pidfd_getfd(pidfd, int(theirs))
    try:
        os.kill(reader.pid, signal.SIGKILL)
        start = time.monotonic()
        assert "SIGKILL" in take_until_error(reader)
        assert time.monotonic() - start < 5.0, "noticed by its timeout only"
    finally:
        os.close(copy)
        os.close(pidfd)


def _pidfd_getfd(pidfd: int, fd: int) -> int:
    import ctypes

    got = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0)
    if got < 0:
        pytest.skip("needs pidfd_getfd")
    return int(got)


def test_a_reader_that_stalls_is_an_error_after_the_timeout(open_reader: Any) -> None:
    reader = open_reader()
    reader._timeout = 0.3  # only now: the start may take longer on a busy machine
    os.kill(reader.pid, signal.SIGSTOP)
    try:
        text = take_until_error(reader)
    finally:
        if alive(reader.pid):
            os.kill(reader.pid, signal.SIGCONT)
    assert f"no batch for 0.3 s; reader process {reader.pid} is alive" in text
    assert wait_until(lambda: not alive(reader.pid))


def test_an_error_comes_in_its_place_after_the_good_batches(make_lmdb: Any) -> None:
    good = [(np.full((1, 2, 2), i, np.uint8), i) for i in range(6)]
    source = make_lmdb([*good, b"\xff no datum"])
    config = ReaderConfig("lmdb", str(source), 2, ("data", "label"), train=False)
    with Reader(config, place="p") as reader:
        assert [reader.take()[1].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        for _ in range(2):
            with pytest.raises(DataError, match=r"db: record 6 \(key b'00000006'\) is no Datum"):
                reader.take()


def test_what_a_reader_said_last_is_heard_though_it_left_a_message_unread() -> None:
    """The kernel tells of the unread one first, and only then gives what was sent."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader = Reader.__new__(Reader)
    reader._sock, reader._pidfd, reader._timeout = mine, -1, 5.0
    mine.setblocking(False)
    with mine:
        mine.send(bytes([1, 2]))
        theirs.send(FAILED + b"why")
        theirs.close()
        assert reader._receive() == FAILED + b"why"


# The reader's end ----------------------------------------------------------------------------------------


def test_close_ends_the_reader_at_once_and_twice_is_fine(open_reader: Any) -> None:
    reader = open_reader()
    data = reader.take()[0]
    start = time.monotonic()
    reader.close()
    reader.close()
    assert time.monotonic() - start < 1.0
    assert not Path(f"/proc/{reader.pid}").exists()
    assert data.sum() > 0, "tensors that were taken stay valid"
    with pytest.raises(DataError, match="this reader is closed"):
        reader.take()


def test_a_forgotten_reader_ends_and_leaves_no_descriptor(folder: Path) -> None:
    def open_files() -> int:
        gc.collect()  # of other tests too, or they would go in the midst of this one
        return len(os.listdir("/proc/self/fd"))

    config = ReaderConfig("lmdb", str(folder), 16, ("data", "label"), train=False)
    before = open_files()
    pids = []
    for _ in range(3):
        reader = Reader(config, place="p")
        reader.take()
        pids.append(reader.pid)
        del reader
        gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert open_files() == before


def run_program(body: str, folder: Path) -> subprocess.Popen[str]:
    """A program with a reader in it; ``body`` goes on when it has taken a batch and printed its pid."""
    program = f"""
        import os, signal, sys, threading, time
        from prototxt.data.config import ReaderConfig
        from prototxt.data.source import Reader
        config = ReaderConfig("lmdb", {str(folder)!r}, 16, ("data", "label"), train=False)
        reader = Reader(config, place="p")
        reader.take()
        print(reader.pid, flush=True)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(body)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)", "os._exit(0)", "raise RuntimeError"],
    ids=["kill-9", "exit", "hard-exit", "exception"],
)
def test_the_reader_dies_with_its_net(folder: Path, body: str) -> None:
    program = run_program(body, folder)
    out, _ = program.communicate(timeout=60)
    assert wait_until(lambda: not alive(int(out)))


def test_the_reader_dies_with_its_net_though_a_fork_lives_on(folder: Path) -> None:
    """A fork keeps the socket open; the fork's own end must not end the reader either."""
    program = run_program(
        """
        child = os.fork()
        if not child:
            os.close(1); os.close(2)
            time.sleep(60)
            os._exit(0)
        if not os.fork():
            sys.exit(0)  # runs the finalizers
        time.sleep(0.3)
        assert all(reader.take() for _ in range(100)), "a fork's exit ended the reader"  # more than lie ready
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        folder,
    )
    out, err = program.communicate(timeout=60)
    assert len(out.split()) == 2, err
    reader, child = map(int, out.split())
    try:
        assert wait_until(lambda: not alive(reader))
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_reader_may_outlive_the_thread_that_made_it(folder: Path) -> None:
    """PR_SET_PDEATHSIG would kill it then: that signal follows the thread, not the process."""
    made: list[Reader] = []
    config = ReaderConfig("lmdb", str(folder), 16, ("data", "label"), train=False)
    thread = threading.Thread(target=lambda: made.append(Reader(config, place="p")))
    thread.start()
    thread.join()
    with made[0] as reader:
        for _ in range(100):
            reader.take()


def test_ctrl_c_reaches_the_trainer_alone(open_reader: Any) -> None:
    """The original finishes its iteration and snapshots on SIGINT: its data must not die of it."""
    reader = open_reader()
    assert os.getsid(reader.pid) != os.getsid(0)


def test_a_fork_cannot_use_its_parents_reader(open_reader: Any) -> None:
    reader = open_reader()
    reader.take()
    pid = os.fork()
    if not pid:  # pragma: no cover
        try:
            reader.take()
        except DataError as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reader.take()


def test_readers_start_in_forks_while_other_threads_run(folder: Path) -> None:
    """As in a forkserver's worker: threads hold locks at the moment of the fork."""
    program = run_program(
        """
        reader.close()
        stop = threading.Event()
        threads = [threading.Thread(target=lambda: [sorted(range(99)) for _ in iter(stop.is_set, True)])
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        pids = []
        for _ in range(4):
            pids.append(os.fork())
            if not pids[-1]:
                with Reader(config, place="p") as reader:
                    good = all(len(reader.take()[1]) == 16 for _ in range(30))
                os._exit(0 if good else 1)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        stop.set()
        sys.exit(any(codes))
        """,
        folder,
    )
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0, err


# What it costs -------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_full_ring_costs_no_processor_time(open_reader: Any) -> None:
    reader = open_reader()
    reader.take()
    time.sleep(0.3)
    before = cpu_seconds(reader.pid)
    time.sleep(0.7)
    assert cpu_seconds(reader.pid) - before <= 0.01


def test_the_reader_of_raw_records_loads_neither_torch_nor_numpy(open_reader: Any) -> None:
    reader = open_reader()
    reader.take()
    maps = Path(f"/proc/{reader.pid}/maps").read_text()
    assert "lmdb" in maps
    assert "torch" not in maps
    assert "numpy" not in maps


def test_batches_are_not_copied_in_the_net_process(open_reader: Any) -> None:
    """Each tensor lies in one of the ring's few slots, aligned for vector instructions."""
    reader = open_reader()
    addresses = set()
    for _ in range(40):
        data, label = reader.take()
        addresses.add(data.data_ptr())
        assert data.data_ptr() % 64 == 0
        assert label.data_ptr() % 64 == 0
    assert len(addresses) <= SMALL_RING_SLOTS
