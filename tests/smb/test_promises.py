"""What holds when processes race, stop and die (design: promises 1, 2, 3 and 5)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.client import Box, Segment
from smb.segment import CHUNK_BYTES
from tests.smb.conftest import TOKEN
from tests.smb.processes import Program, ServeProcess, client, state, wait_for

pytestmark = pytest.mark.stress
F32 = np.float32
PER_CHUNK = CHUNK_BYTES // 4


@pytest.fixture
def box(process: ServeProcess) -> Iterator[Box]:
    with smb.connect(process.address, name="parent") as box:
        yield box


# Conservation --------------------------------------------------------------------------------------------

WORKERS, ROUNDS, COUNT = 8, 200, 1_000_000
MIXES = {"shm": (0, COUNT), "tcp": (WORKERS, 200_000), "shm and tcp": (WORKERS // 2, 400_000)}  # by tcp; size

EXCHANGER = """
rank, rounds = int(sys.argv[1]), int(sys.argv[2])
center = box.attach("center")
noise = np.random.default_rng(rank).standard_normal(center.count).astype(np.float32)
x = np.zeros(center.count, np.float32)
injected = np.zeros(center.count, np.float64)
fresh = np.random.default_rng(1000 + rank)
box.barrier("start", int(sys.argv[3]), 60)
for _ in range(rounds):
    noise = np.roll(noise, int(fresh.integers(1000)))
    injected += noise
    x += noise
    center.exchange(x, 0.1)
mine = box.create(f"sum/{rank}", center.count, "float64", lifetime="stay", initial=x - injected)
print("done")
"""


@pytest.mark.parametrize("mix", MIXES)
def test_the_sum_of_all_weights_is_kept_element_by_element(process: ServeProcess, box: Box, mix: str) -> None:
    """sum W_x + W_g - everything that was put in = 0; float32 rounding stays far below one lost increment."""
    by_tcp, count = MIXES[mix]
    center = box.create("center", count)
    programs = [
        client(
            process.addresses[rank < by_tcp],
            EXCHANGER,
            str(rank),
            str(ROUNDS),
            str(WORKERS),
            more=process.more,
        )
        for rank in range(WORKERS)
    ]
    try:
        assert [program.line() for program in programs] == ["done"] * WORKERS
    finally:
        for program in programs:
            program.__exit__(None, None, None)
    kept = center.read().astype(np.float64)
    for rank in range(WORKERS):
        kept += box.attach(f"sum/{rank}").read()
    assert center.version == WORKERS * ROUNDS
    assert np.abs(center.read()).max() > 1  # the noise did come to the center
    np.testing.assert_allclose(kept, 0, atol=2e-3)


ADDER = """
center, ones = box.attach("center"), np.ones(1_000_000, np.float32)
box.barrier("start", 4, 60)
for _ in range(100):
    center.accumulate(ones)
print("done")
"""


@pytest.mark.parametrize("by_tcp", [0, 2, 4])
def test_concurrent_accumulates_lose_no_update(process: ServeProcess, box: Box, by_tcp: int) -> None:
    center = box.create("center", COUNT)
    addresses = [process.addresses[rank < by_tcp] for rank in range(4)]
    programs = [client(address, ADDER, more=process.more) for address in addresses]
    try:
        assert [program.line() for program in programs] == ["done"] * 4
    finally:
        for program in programs:
            program.__exit__(None, None, None)
    np.testing.assert_array_equal(center.read(), 400)  # whole numbers: exact in any order
    assert center.version == 400


# A worker dies -------------------------------------------------------------------------------------------

# alpha = 1 swaps: after any number of exchanges, each element of the center is 0 or 1, whoever was killed.
SWAPPER = """
center = box.attach("center")
box.create(f"delta/{sys.argv[1]}", 1000, lifetime="owner")
x = np.ones(center.count, np.float32)
print("ready")
while True:
    center.exchange(x, 1.0)
"""


def stop_holding(center: Segment, program: Program, seconds: float = 20.0) -> bool:
    """Stop the process in the middle of a chunk; False when it was never caught there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        program.stop()
        if any(tid == program.pid for _, tid in center._attachment.holders()):
            return True
        program.signal(signal.SIGCONT)
        time.sleep(0.002)
    return False


def mixed_chunks(values: np.ndarray) -> int:
    """How many chunks are neither all 0 nor all 1; fails on any other value."""
    assert set(np.unique(values)) <= {0.0, 1.0}
    chunks = [values[i : i + PER_CHUNK] for i in range(0, len(values), PER_CHUNK)]
    return sum(chunk.min() != chunk.max() for chunk in chunks)


def check_killed_worker(process: ServeProcess, box: Box, center: Segment, rank: int) -> None:
    """Kill a worker that holds a chunk's lock; the center, the daemon and we are whole afterwards."""
    center.write(np.zeros(center.count, F32))
    with client(process.address, SWAPPER, str(rank)) as worker:
        assert worker.line() == "ready"
        assert stop_holding(center, worker), "never found in a chunk"
        worker.kill()
        before = time.monotonic()
        reader = box.attach("center", readonly=True)
        assert mixed_chunks(reader.read()) <= 1
        reader.detach()
        center.write(np.zeros(center.count, F32))  # every chunk can be locked
        assert time.monotonic() - before < 2
    assert wait_for(lambda: [row["name"] for row in box.sessions()] == ["parent"], 2)
    assert box.list() == ["center"]  # its own segment was freed
    assert center._attachment.holders() == []


def test_a_worker_killed_inside_a_chunk_leaves_the_center_whole(process: ServeProcess, box: Box) -> None:
    center = box.create("center", 4_000_000)
    for rank in range(3):
        check_killed_worker(process, box, center, rank)
    with client(process.address, "print(box.attach('center').count)") as late:
        assert late.line() == "4000000"


def test_a_remote_worker_killed_anywhere_leaves_every_chunk_whole(process: ServeProcess, box: Box) -> None:
    """The daemon moves each chunk as a whole: nothing is half done, wherever the client was."""
    center = box.create("center", 1_000_000)
    fresh = np.random.default_rng(11)
    for rank in range(4):
        center.write(np.zeros(center.count, F32))
        with client(process.addresses[1], SWAPPER, str(rank), more=process.more) as worker:
            assert worker.line() == "ready"
            time.sleep(float(fresh.uniform(0.0, 0.05)))
            worker.kill()
        assert mixed_chunks(center.read()) == 0
        center.write(np.zeros(center.count, F32))  # every chunk can be locked
        assert center._attachment.holders() == []
    assert wait_for(lambda: [row["name"] for row in box.sessions()] == ["parent"], 6)  # the lease is 2 s
    assert box.list() == ["center"]  # their own segments were freed


def test_a_remote_reader_never_sees_a_torn_chunk(process: ServeProcess, box: Box) -> None:
    """Within a chunk all elements are of one update, though local and remote writers are at it."""
    box.create("center", 300_000, lifetime="stay")
    codes = [
        "center = box.attach('center')\nprint('in')\n"
        "while True:\n  for v in range(8): center.write(np.full(center.count, v, np.float32))"
    ] * 2
    programs = [client(process.addresses[i], code, more=process.more) for i, code in enumerate(codes)]
    try:
        assert [program.line() for program in programs] == ["in", "in"]
        with smb.connect(process.addresses[1], token=TOKEN) as remote:
            reader, seen = remote.attach("center", readonly=True), set[float]()
            for _ in range(200):
                values = reader.read()
                for start in range(0, len(values), PER_CHUNK):
                    chunk = values[start : start + PER_CHUNK]
                    assert chunk.min() == chunk.max()
                    seen.add(float(chunk[0]))
        assert len(seen) > 3
    finally:
        for program in programs:
            program.__exit__(None, None, None)


def test_a_reader_gets_past_a_writer_killed_inside_a_chunk(process: ServeProcess, box: Box) -> None:
    """Nobody but the daemon can write, so only its repair lets the read-only reader go on."""
    box.create("center", 4_000_000, lifetime="stay")
    reader = box.attach("center", readonly=True)
    code = "center = box.attach('center')\ncenter._attachment.hold_chunk(3)\nprint('in')\ntime.sleep(60)"
    with client(process.address, code) as writer:
        assert writer.line() == "in"
        writer.kill()
        before = time.monotonic()
        reader.read()
        assert time.monotonic() - before < 2


def test_a_dead_clients_lock_barrier_place_and_counter_are_free(process: ServeProcess, box: Box) -> None:
    code = "box.counter('n').add(5)\nbox.lock('l').acquire()\nprint('in')\nbox.barrier('b', 3, 60)"
    with client(process.address, code) as holder:
        assert holder.line() == "in"
        with pytest.raises(smb.WaitTimeout, match=r"2 of 3 came .* \(worker\)"):
            box.barrier("b", 3, timeout=0.5)
        holder.kill()
    box.lock("l").acquire(timeout=5)
    with pytest.raises(smb.WaitTimeout, match="1 of 3"):
        box.barrier("b", 3, timeout=0.2)
    assert box.counter("n").value == 0


def test_a_client_that_dies_while_it_fills_a_segment_makes_way(process: ServeProcess, box: Box) -> None:
    code = """
from smb import protocol
got = []
create = protocol.Create("c", 100, "float32", "stay", b"", False, False, 0.0)
box._transport._standing.connections.get().request(create, 10.0, got)
print("in")
time.sleep(60)
"""
    with client(process.address, code) as creator:
        assert creator.line() == "in"
        with pytest.raises(smb.KeyExists, match=r"'c' is being created by pid \d+ \(worker\)"):
            box.create("c", 100)
        with pytest.raises(smb.UnknownKey, match="no segment 'c'"):
            box.attach("c")
        creator.kill()
        segment = box.create("c", 100, lifetime="stay", initial=np.ones(100, F32), or_attach=True)
    assert segment.created
    np.testing.assert_array_equal(segment.read(), 1)


# A worker stops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_tcp", [False, True])
def test_a_stopped_lock_holder_is_killed_after_the_lease(
    process: ServeProcess, box: Box, by_tcp: bool
) -> None:
    center = box.create("center", 4_000_000)
    with (
        client(process.address, SWAPPER, "0") as worker,
        smb.connect(process.addresses[by_tcp], token=TOKEN, name="waiting") as waiting,
    ):
        assert worker.line() == "ready"
        mine = waiting.attach("center")
        assert stop_holding(center, worker)
        before = time.monotonic()
        mine.exchange(np.zeros(center.count, F32), 0.5)
        took = time.monotonic() - before
        assert worker.ended(5) == -signal.SIGKILL
    assert 2.0 <= took < 10.0  # the lease is 2 s


def test_a_stopped_client_that_holds_nothing_is_left_alone(process: ServeProcess, box: Box) -> None:
    center = box.create("center", 1000)
    code = "center = box.attach('center')\nprint('in')\nsys.stdin.read()"
    with client(process.address, code) as worker:
        assert worker.line() == "in"
        worker.stop()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            center.exchange(np.zeros(1000, F32), 0.5)
            time.sleep(0.01)
        assert state(worker.pid) == "T"


def test_a_holder_that_works_is_not_taken_for_a_stuck_one(process: ServeProcess, box: Box) -> None:
    """A report about a thread that has the lock again and again, but lives, must not kill it."""
    from smb import protocol

    center = box.create("center", 4_000_000)
    with client(process.address, SWAPPER, "0") as worker:
        assert worker.line() == "ready"
        end, reports = time.monotonic() + 4, 0
        while time.monotonic() < end:
            for chunk, tid in center._attachment.holders():
                box._call(protocol.Stuck(center._number, chunk, tid))
                reports += 1
            time.sleep(0.005)
        assert state(worker.pid) in set("RSD")
    assert reports > 10


# The daemon dies -----------------------------------------------------------------------------------------

WAITS = {
    "exchange": "x = np.zeros(1000, np.float32)\nwhile True: center.exchange(x, 0.5); time.sleep(0.001)",
    "wait": "center.wait(1 << 40)",
    "barrier": "box.barrier('b', 9)",
    "lock": "box.lock('held').acquire()",
    "counter": "box.counter('n').wait(1 << 40)",
    "list": "while True: box.list(); time.sleep(0.001)",
}
WATCHER = """
center = box.attach("center")
print("in")
try:
    {wait}
except smb.TransportError as error:
    told = time.time()
    print(told, center.rescue().sum(), error)
"""


def indent(code: str) -> str:
    return code.replace("\n", "\n    ")


def test_a_killed_daemon_is_noticed_by_all_and_the_center_is_rescued(process: ServeProcess, box: Box) -> None:
    center = box.create("center", 1000, initial=np.ones(1000, F32))
    box.lock("held").acquire()
    programs = [client(process.address, WATCHER.format(wait=indent(w))) for w in WAITS.values()]
    try:
        assert [program.line() for program in programs] == ["in"] * len(WAITS)
        assert wait_for(lambda: center.version > 100, 20)  # the exchanging one is at it
        time.sleep(0.2)
        killed = time.time()
        process.kill()
        for name, program in zip(WAITS, programs, strict=True):
            told, total, message = program.line(10).split(maxsplit=2)
            assert float(told) - killed < 5, name
            assert 0 < float(total) <= 1000, name
            assert "died" in message, message
    finally:
        for program in programs:
            program.__exit__(None, None, None)
    with pytest.raises(smb.TransportError, match=r"segment 'center': the daemon died"):
        center.exchange(np.zeros(1000, F32), 0.5)
    with pytest.raises(smb.TransportError, match="the daemon died"):
        box.list()
    assert 0 < center.rescue().sum() <= 1000


def test_a_daemon_that_ends_cleanly_is_noticed_too(process: ServeProcess, box: Box) -> None:
    center = box.create("center", 1000, initial=np.ones(1000, F32))
    process.signal(signal.SIGTERM)
    assert process.ended() == 0
    with pytest.raises(smb.TransportError, match="the daemon died"):
        center.exchange(np.zeros(1000, F32), 0.5)
    np.testing.assert_array_equal(center.rescue(), 1)


FORKING_DAEMON = """
import os, sys, time, smb
daemon = smb.serve(unix=sys.argv[1])
print("up")
time.sleep(float(sys.argv[2]))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_child_that_the_daemons_process_forked_does_not_hide_its_death(folder: Path) -> None:
    """The child has copies of the daemon's sockets, so that their end never comes by itself."""
    with Program("-c", FORKING_DAEMON, str(folder / "f.sock"), "1.5") as program:
        assert program.line() == "up"
        box = smb.connect(f"unix:{folder / 'f.sock'}")
        center = box.create("c", 10)
        child = int(program.line())
        try:
            threading.Timer(0.3, program.process.kill).start()
            before = time.monotonic()
            with pytest.raises(smb.TransportError, match="died"):
                box.barrier("b", 2, timeout=20)  # over this thread's connection, which the child has too
            assert time.monotonic() - before < 5
            with pytest.raises(smb.TransportError, match="died"):
                center.read()
            box.close()
        finally:
            os.kill(child, signal.SIGKILL)
