"""A daemon is killed and started again: its clients go on, nothing of theirs is lost or done twice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import protocol, restoring, snapshot
from smb.errors import ProtocolError, RequestError
from smb.segment import Mapping
from smb.server import Daemon
from smb.transport.base import Options
from smb.transport.shm import Standing
from tests.smb.processes import Program, ServeProcess, client, wait_for

COUNT = 200_000
LEASE = ("--lease", "2")


class Restarts:
    """`smb serve` that is killed and started again at the same socket."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, *options: str) -> None:
        self._stack, self._path, self._options = stack, path, options
        self.daemon = self._start()
        self.address = self.daemon.address

    def _start(self) -> ServeProcess:
        return self._stack.enter_context(ServeProcess(self._path, *LEASE, *self._options))

    def kill(self) -> None:
        self.daemon.kill()

    def start(self) -> None:
        self.daemon = self._start()

    def again(self) -> None:
        self.kill()
        self.start()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def box_process(folder: Path, stack: contextlib.ExitStack) -> Restarts:
    return Restarts(stack, folder / "box.sock")


@pytest.fixture
def kept_process(folder: Path, stack: contextlib.ExitStack) -> Restarts:
    return Restarts(stack, folder / "box.sock", "--snapshot-dir", str(folder / "snaps"))


@contextlib.contextmanager
def here(folder: Path, **options: object) -> Iterator[Daemon]:
    """A daemon in this process; closing it looks to its clients as its death does."""
    with smb.serve(folder / "box.sock", lease=2.0, **options) as daemon:  # type: ignore[arg-type]
        yield daemon


# Nothing is lost -----------------------------------------------------------------------------------------


def test_updates_of_local_clients_survive_kills_of_the_daemon_once_each(box_process: Restarts) -> None:
    """Each thread adds ones; after three kills the sum is the number of additions that returned."""
    done = [0, 0]
    stop = threading.Event()

    def add(mine: int) -> None:
        with smb.connect(box_process.address, reconnect=20) as own:
            center, ones = own.attach("center"), np.ones(COUNT, np.float32)
            while not stop.is_set():
                center.accumulate(ones)
                done[mine] += 1

    with smb.connect(box_process.address, reconnect=20) as box:
        center = box.create("center", COUNT)
        threads = [threading.Thread(target=add, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert wait_for(lambda: min(done) > 0, 20)  # both have connected before the first kill
            for _ in range(3):
                before = sum(done)
                assert wait_for(lambda: sum(done) > before + 10, 20)  # noqa: B023
                box_process.again()
            before = sum(done)
            assert wait_for(lambda: sum(done) > before + 10, 20)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        np.testing.assert_array_equal(center.read(), sum(done))
        assert center.version == sum(done)


def test_an_operation_under_way_when_the_daemon_dies_is_done_once(box_process: Restarts) -> None:
    """It waits for a chunk that another thread holds, through the daemon's death, and is then done."""
    held, go_on, failed = threading.Event(), threading.Event(), list[Exception]()
    with smb.connect(box_process.address, reconnect=20) as box:
        center = box.create("center", COUNT)

        def hold() -> None:
            center._attachment.hold_chunk(0, False)  # type: ignore[attr-defined]
            held.set()
            go_on.wait(20)
            center._attachment.release_chunk(0)  # type: ignore[attr-defined]

        def add() -> None:
            try:
                center.accumulate(np.ones(COUNT, np.float32))
            except smb.SmbError as error:
                failed.append(error)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(5)
        adder = threading.Thread(target=add)
        adder.start()
        time.sleep(0.3)
        box_process.kill()
        time.sleep(0.5)
        box_process.start()
        go_on.set()
        adder.join(20)
        holder.join(20)
        assert failed == []
        np.testing.assert_array_equal(center.read(), 1)


def test_counters_locks_owners_and_readers_survive_with_the_clients(box_process: Restarts) -> None:
    with smb.connect(box_process.address, reconnect=20) as box:
        center = box.create("center", 10, lifetime="attached", meta=b"job")
        reader = box.attach("center", readonly=True)
        delta = box.create("delta", 10, lifetime="owner")
        box.counter("claims").add(7)
        with box.lock("turn"):
            box_process.again()
            center.write(np.arange(10, dtype=np.float32))
            delta.write(np.arange(10, dtype=np.float32))
            np.testing.assert_array_equal(reader.read(), np.arange(10))
            with pytest.raises(smb.NotPermitted):
                reader.write(np.zeros(1, np.float32))
            assert box.counter("claims").add(1) == 7
            with smb.connect(box_process.address) as other:
                assert other.stat("center").meta == b"job"
                with pytest.raises(smb.WaitTimeout):
                    other.lock("turn").acquire(timeout=0.1)
        delta.detach()
        assert box.list() == ["center", "delta"]  # an owner's lives as long as its session
    with smb.connect(box_process.address) as other:
        assert other.list() == []


def test_what_the_dead_left_locked_and_half_written_is_mended_when_it_comes_back(
    box_process: Restarts,
) -> None:
    hold = "s = box.attach('center'); s._attachment.hold_chunk(0); print('holds', flush=True); time.sleep(60)"
    with smb.connect(box_process.address, reconnect=20) as box:
        center = box.create("center", COUNT)
        reader = box.attach("center", readonly=True)
        with client(box_process.address, hold) as victim:
            assert victim.line() == "holds"
            box_process.kill()
            victim.kill()
            box_process.start()
            began = time.monotonic()
            reader.read()
            center.write(np.ones(COUNT, np.float32))
            assert time.monotonic() - began < 5


def test_memory_is_mended_before_anybody_else_gets_it(folder: Path) -> None:
    memory = Mapping.create(1000, "float32")
    dead = threading.Thread(target=memory.hold_chunk, args=(0,))
    dead.start()
    dead.join()
    with here(folder) as daemon:
        hand_back(daemon.addresses[0].removeprefix("unix:"), memory, 1000)
        assert memory.repair() == 0  # nothing is left to mend
    memory.close()


SURVIVOR = """
import sys, time, signal, numpy as np, smb
box = smb.connect(sys.argv[1], reconnect=20)
center = box.create("center", 1000, lifetime="stay")
box.snapshot()
center.write(np.full(1000, 5, np.float32))
print("wrote", flush=True)
time.sleep(60)
"""


def test_a_request_for_a_key_whose_client_lives_waits_until_it_has_handed_its_memory_back(
    kept_process: Restarts,
) -> None:
    """The client is stopped while the daemon starts; the snapshot, which is older, is not given out."""
    with Program("-c", SURVIVOR, kept_process.address) as survivor:
        assert survivor.line() == "wrote"
        survivor.stop()
        kept_process.again()
        threading.Timer(1.0, survivor.signal, [signal.SIGCONT]).start()
        with smb.connect(kept_process.address) as other:
            began = time.monotonic()
            assert other.attach("center").read().max() == 5
            assert time.monotonic() - began < 6


def test_no_snapshot_is_written_of_a_box_that_is_only_half_restored(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    """It would lack what is still on its way, and push out the snapshot that has it."""
    snaps = folder / "snaps"
    process = Restarts(stack, folder / "box.sock", "--snapshot-dir", str(snaps), "--snapshot-every", "0.1")
    with Program("-c", SURVIVOR, process.address) as survivor:
        assert survivor.line() == "wrote"
        survivor.stop()
        process.again()
        before = sorted(snaps.iterdir())
        time.sleep(0.8)
        assert sorted(snaps.iterdir()) == before
        survivor.signal(signal.SIGCONT)
        assert wait_for(lambda: sorted(snaps.iterdir()) != before, 10)
        newest = snapshot.newest(snaps, print)
        assert newest is not None
        assert [segment.key for segment in newest.description.segments] == ["center"]


def test_a_snapshot_without_survivors_is_given_out_at_once(kept_process: Restarts) -> None:
    with Program("-c", SURVIVOR, kept_process.address) as survivor:
        assert survivor.line() == "wrote"
    kept_process.again()
    with smb.connect(kept_process.address) as other:
        began = time.monotonic()
        assert other.attach("center").read().max() == 0  # zeros, as when the snapshot was taken
        assert time.monotonic() - began < 2


# Refused -------------------------------------------------------------------------------------------------


def test_memory_that_comes_too_late_is_refused_and_what_it_had_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snaps = folder / "snaps"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(here(folder))
        box = stack.enter_context(smb.connect(first.addresses[0], reconnect=20))
        kept = box.create("kept", 10, initial=np.ones(10, np.float32))
        lost = box.create("lost", 10)
        box.free("lost")
        box.snapshot(snaps)
        kept.write(np.full(10, 2, np.float32))
        first.close()
        monkeypatch.setattr(restoring, "_lives", lambda session: False)  # nobody is waited for
        stack.enter_context(here(folder, snapshot_dir=snaps))
        with pytest.raises(smb.Restarted, match=r"segment 'kept' went back .* its memory came back too late"):
            kept.read()
        np.testing.assert_array_equal(kept.read(), 1)  # the snapshot's
        assert kept.write(np.zeros(10, np.float32)) == 1
        assert lost.read().shape == (10,)  # within the window an unknown key is taken
        assert "hands segment 'kept' back too late" in caplog.text


def test_after_the_window_no_memory_is_taken_and_the_loss_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(here(folder))
        box = stack.enter_context(smb.connect(first.addresses[0], reconnect=20))
        center = box.create("center", 10)
        first.close()
        monkeypatch.setattr(restoring.Restoring.__init__, "__defaults__", (0.0,))
        stack.enter_context(here(folder))
        for _ in range(2):
            with pytest.raises(smb.Restarted, match="segment 'center' did not survive"):
                center.write(np.zeros(10, np.float32))
        assert box.list() == []
        box.create("center", 10)


def hand_back(where: str, mapping: Mapping, count: int, number: int = 1 << 62, fds: object = None) -> None:
    standing = Standing(where, Options("test", 5.0))
    try:
        request = protocol.HandBack("center", number, count, "float32", "stay", b"", True)
        standing.ask(request, 0.0, None, fds or (mapping.control_fd, mapping.payload_fd))  # type: ignore[arg-type]
    finally:
        standing.close()


def test_memory_that_others_could_shrink_or_of_another_size_is_refused(folder: Path) -> None:
    good = Mapping.create(1000, "float32")
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.truncate(loose, 4096)
    with here(folder) as daemon:
        where = daemon.addresses[0].removeprefix("unix:")
        with pytest.raises(ProtocolError, match="payload file: not sealed"):
            hand_back(where, good, 1000, fds=(good.control_fd, loose))
        with pytest.raises(ProtocolError, match="expected"):
            hand_back(where, good, 100_000)
        with pytest.raises(ProtocolError, match="no sealable memory file"):
            hand_back(where, good, 1000, fds=os.pipe())
        readonly = good.readonly_fds()
        with pytest.raises(RequestError, match="cannot be mapped"):
            hand_back(where, good, 1000, fds=readonly)
        hand_back(where, good, 1000)
        with smb.connect(daemon.addresses[0]) as box:
            assert box.list() == ["center"]
    good.close()


def test_memory_from_before_the_snapshot_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that slept through two lives of the daemon has older memory than the second's snapshot."""
    old = Mapping.create(1000, "float32")
    snaps = folder / "snaps"
    with here(folder) as daemon, smb.connect(daemon.addresses[0]) as box:
        box.create("center", 1000, lifetime="stay", initial=np.ones(1000, np.float32))
        box.snapshot(snaps)
    monkeypatch.setattr(restoring, "_lives", lambda session: True)
    with here(folder, snapshot_dir=snaps) as daemon:
        with pytest.raises(smb.KeyExists, match="older than the snapshot's"):
            hand_back(daemon.addresses[0].removeprefix("unix:"), old, 1000, number=1)
        hand_back(daemon.addresses[0].removeprefix("unix:"), old, 1000)
    old.close()


def test_only_who_knows_the_sessions_secret_inherits_from_it(folder: Path) -> None:
    snaps = folder / "snaps"
    with here(folder) as daemon, smb.connect(daemon.addresses[0]) as box:
        box.create("delta", 10, lifetime="owner")
        standing = box._transport._standing  # type: ignore[attr-defined]
        session, secret = standing.session, standing.secret
        box.snapshot(snaps)
    with here(folder, snapshot_dir=snaps) as daemon, smb.connect(daemon.addresses[0]) as heir:
        with pytest.raises(smb.NotPermitted):
            heir._call(protocol.Inherit(session, secret ^ 1, True))
        heir._call(protocol.Inherit(session, secret, True))
        assert heir.stat("delta").owner == os.getpid()
        heir.close()
        with smb.connect(daemon.addresses[0]) as other:
            assert other.list() == []


# While it is away ----------------------------------------------------------------------------------------


def test_an_impatient_client_is_told_that_the_box_is_away_and_goes_on_later(box_process: Restarts) -> None:
    with smb.connect(box_process.address, reconnect=20) as box:
        center = box.create("center", 10)
        box.patient = False
        box_process.kill()
        for operation in (center.read, box.list, lambda: box.counter("n").add(1)):
            began = time.monotonic()
            with pytest.raises(smb.Away):
                assert wait_for(operation, 5)
            assert time.monotonic() - began < 2
        box_process.start()
        assert wait_for(lambda: _works(center), 10)


def _works(segment: smb.Segment) -> bool:
    try:
        segment.read()
    except smb.Away:
        return False
    return True


def test_a_client_gives_up_when_no_daemon_comes_and_can_still_rescue(box_process: Restarts) -> None:
    with smb.connect(box_process.address, reconnect=0.5) as box:
        center = box.create("center", 10, initial=np.arange(10, dtype=np.float32))
        box_process.kill()
        began = time.monotonic()
        with pytest.raises(smb.TransportError, match=r"none came in 0\.5 s"):
            center.read()
        assert time.monotonic() - began < 5
        with pytest.raises(smb.TransportError):
            box.list()
        np.testing.assert_array_equal(center.rescue(), np.arange(10))


def test_a_request_that_may_have_been_done_is_reported_and_not_made_twice(box_process: Restarts) -> None:
    """Who waits at a barrier when the daemon dies is told; who waits for a counter waits on."""
    told: list[object] = []

    def at_barrier(box: smb.Box) -> None:
        try:
            box.barrier("all", 2, 20)
        except smb.SmbError as error:
            told.append(error)

    with smb.connect(box_process.address, reconnect=20) as box:
        claims = box.counter("claims")
        claims.add(1)
        waits = threading.Thread(target=lambda: told.append(claims.wait(2, 20)))
        meets = threading.Thread(target=at_barrier, args=(box,))
        waits.start()
        meets.start()
        time.sleep(0.3)
        box_process.again()
        meets.join(10)
        assert [type(one) for one in told] == [smb.Restarted]
        claims.add(1)
        waits.join(10)
        assert told[1:] == [2]


def test_a_client_without_reconnect_fails_at_once_as_before(box_process: Restarts) -> None:
    with smb.connect(box_process.address) as box:
        center = box.create("center", 10)
        box_process.again()
        with pytest.raises(smb.TransportError):
            center.read()
        with pytest.raises(smb.TransportError):
            box.list()


# Over TCP ------------------------------------------------------------------------------------------------


def test_over_tcp_nothing_from_before_the_last_snapshot_is_lost_and_nothing_is_done_twice(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    token = folder / "token"
    token.write_text("ab" * 32)
    token.chmod(0o600)
    port = _free_port()
    options = ("--tcp", f"127.0.0.1:{port}", "--token", str(token), "--snapshot-dir", str(folder / "snaps"))
    process = Restarts(stack, folder / "box.sock", *options)
    with smb.connect(f"tcp://127.0.0.1:{port}", token=token, reconnect=20) as box:
        center = box.create("center", COUNT)
        delta = box.create("delta", 10, lifetime="owner")
        ones = np.ones(COUNT, np.float32)
        for _ in range(3):
            center.accumulate(ones)
        box.snapshot()
        center.accumulate(ones)
        process.again()
        done = 0
        for _ in range(3):
            with contextlib.suppress(smb.Restarted):  # where it was under way before the client knew
                center.accumulate(ones)
                done += 1
        assert done >= 2
        np.testing.assert_array_equal(center.read(), 3 + done)  # three of the snapshot, and these
        assert center.version == 3 + done
        delta.write(np.ones(10, np.float32))
        assert box.stat("delta").owner == os.getpid()
    with smb.connect(process.address) as other:
        assert wait_for(lambda: other.list() == [], 5)


def test_over_tcp_every_operation_on_a_segment_that_the_snapshot_lacks_says_that_it_is_lost(
    folder: Path, stack: contextlib.ExitStack
) -> None:
    port = _free_port()
    options = ("--tcp", f"127.0.0.1:{port}", "--snapshot-dir", str(folder / "snaps"))
    process = Restarts(stack, folder / "box.sock", *options)
    with smb.connect(f"tcp://127.0.0.1:{port}", reconnect=20) as box:
        kept = box.create("kept", 10)
        box.snapshot()
        late, *_others = [box.create("late" + "r" * n, 10) for n in range(60)]  # so kept is not the first
        process.again()
        with contextlib.suppress(smb.Restarted):  # where it was under way before the client knew
            kept.write(np.ones(10, np.float32))
        operations: list[Callable[[], object]] = [
            lambda: late.version,
            lambda: late.wait(1, 1.0),
            late.norm,
            lambda: kept.dot(late),
            lambda: kept.axpy(1.0, late),
            lambda: late.adagrad(kept, kept, 0.1),
            late.read,
            lambda: late.exchange(np.ones(10, np.float32), 0.5),
        ]
        for operation in operations:
            with pytest.raises(smb.UnknownKey, match="lost with the daemon's restart: no segment 'late'"):
                operation()
        kept.write(np.ones(10, np.float32))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
