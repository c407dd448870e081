"""A daemon's start, its end, its limits, and that nothing is left behind (design: promise 6)."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from smb import listen
from smb.listen import UnixListener, check_folder
from smb.memory import RESERVE, Budget, cgroup_left, parse, show
from smb.peer import Peer
from smb.store import Store
from tests.smb.processes import Program, ServeProcess, client, wait_for

F32 = np.float32


# Start and end -------------------------------------------------------------------------------------------


def test_the_socket_is_for_its_user_alone(folder: Path) -> None:
    os.umask(os.umask(0))
    with smb.serve(unix=folder / "new" / "box.sock") as daemon:
        assert daemon.addresses == [f"unix:{folder}/new/box.sock"]
        assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "new/box.sock").stat().st_mode) == 0o600


def test_a_live_daemon_is_not_replaced(served: smb.Daemon, folder: Path) -> None:
    with pytest.raises(smb.SmbError, match=f"a daemon already listens at {folder}/box.sock"):
        smb.serve(unix=folder / "box.sock")
    smb.connect(served.addresses[0]).close()


def test_a_stopped_daemon_is_alive_too(process: ServeProcess) -> None:
    process.stop()
    with pytest.raises(smb.SmbError, match="a daemon already listens"):
        smb.serve(unix=process.path)
    process.signal(signal.SIGCONT)


def test_a_killed_daemons_socket_is_replaced(process: ServeProcess) -> None:
    process.kill()
    assert process.path.exists()
    with smb.serve(unix=process.path) as daemon, smb.connect(daemon.addresses[0]) as box:
        assert box.list() == []
    assert not process.path.exists()


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "box.sock").write_text("precious")
    with pytest.raises(smb.SmbError, match=r"box\.sock exists and is no socket"):
        smb.serve(unix=folder / "box.sock")
    assert (folder / "box.sock").read_text() == "precious"


def test_of_two_that_replace_a_stale_socket_one_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, live = folder / "box.sock", listen._live

    def slowly(at: str) -> bool:
        answer = live(at)
        time.sleep(0.02)  # time enough for another to look as well
        return answer

    monkeypatch.setattr(listen, "_live", slowly)
    for _ in range(3):
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(path))
        stale.close()
        results: list[object] = []

        def start() -> None:
            try:
                results.append(UnixListener(path))  # noqa: B023
            except smb.SmbError as error:
                results.append(str(error))  # noqa: B023

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        winners = [one for one in results if isinstance(one, UnixListener)]
        assert len(winners) == 1, results
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
        winners[0].close()
        assert not path.exists()


def test_a_folder_that_others_can_write_to_is_no_place_for_the_default_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "smb").mkdir(mode=0o700)
    (folder / "smb").chmod(0o777)
    with pytest.raises(smb.TransportError, match="is not a folder that only this user can write to"):
        smb.serve()
    (folder / "smb").chmod(0o700)
    check_folder(folder / "smb")
    with smb.serve() as daemon:
        assert daemon.addresses == [f"unix:{folder}/smb/daemon.sock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_daemon_cleanly(process: ServeProcess, number: int) -> None:
    box = smb.connect(process.address)
    box.create("c", 1000, lifetime="stay")
    process.signal(number)
    assert process.ended(10) == 0
    assert [path.name for path in process.path.parent.iterdir()] == ["token"]  # the test's own
    box.close()


def test_an_exiting_program_removes_its_socket_without_being_asked(folder: Path) -> None:
    code = "import smb, sys; daemon = smb.serve(unix=sys.argv[1]); print('up')"
    with Program("-c", code, str(folder / "box.sock")) as program:
        assert program.line() == "up"
        assert program.ended() == 0
    assert list(folder.iterdir()) == []


def test_the_sessions_of_dead_processes_end_beyond_1024_descriptors(folder: Path) -> None:
    """Where select() would fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2200:
        pytest.skip("the hard limit of descriptors is below 2200")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2200, hard))
    fill = [os.dup(0) for _ in range(1100)]
    try:
        with smb.serve(unix=folder / "b.sock") as daemon:
            with client(daemon.addresses[0], "print('in')\ntime.sleep(60)") as program:
                assert program.line() == "in"
                program.kill()
            assert wait_for(lambda: not daemon.store.sessions())
    finally:
        for number in fill:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ((os.getuid() + 1, os.getpid()), "is not the daemon's"),
        ((os.getuid(), 0), "shared memory needs client and daemon in one PID namespace"),
        ((os.getuid(), 2**22 + 1), "pid 4194305 is gone"),
    ],
)
def test_who_cannot_share_memory_is_told_why_and_served_by_frames(
    monkeypatch: pytest.MonkeyPatch,
    served: smb.Daemon,
    caplog: pytest.LogCaptureFixture,
    who: tuple[int, int],
    message: str,
) -> None:
    def claim(peer: Peer, sock: socket.socket) -> None:
        peer.uid, peer.pid = who

    monkeypatch.setattr(Peer, "__init__", claim)
    with smb.connect(served.addresses[0]) as box:
        assert box.transport == "tcp"
        assert box.create("c", 10).write(np.ones(10, np.float32)) == 1
    assert message in caplog.text


def test_close_wakes_those_who_wait(served: smb.Daemon) -> None:
    box = smb.connect(served.addresses[0])
    failed: list[smb.SmbError] = []

    def wait() -> None:
        try:
            box.barrier("b", 2)
        except smb.SmbError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert wait_for(lambda: served.store.rendezvous._barriers)
    served.close()
    thread.join(5)
    assert not thread.is_alive()
    assert failed
    box.close()


# Limits --------------------------------------------------------------------------------------------------


def test_the_memory_limit_counts_all_segments_and_names_the_figures(folder: Path) -> None:
    limit = 1 << 20
    with smb.serve(unix=folder / "b.sock", memory_limit=limit) as daemon:
        box = smb.connect(daemon.addresses[0])
        first = box.create("a", 200_000)
        message = (
            r"segment 'b' of 390.6 KiB does not fit: segments hold 781.2 KiB, memory limit 1.0 MiB, MemAvail"
        )
        with pytest.raises(smb.OutOfMemory, match=message):
            box.create("b", 100_000)
        box.free("a")  # still attached: its memory is still there
        with pytest.raises(smb.OutOfMemory, match=r"segments hold 781\.2 KiB"):
            box.create("b", 100_000)
        first.detach()
        box.create("b", 100_000)
        box.close()


@pytest.mark.parametrize(
    ("machine", "cgroup", "fits"),
    [
        (None, None, True),
        (RESERVE + 1000, None, True),
        (RESERVE + 999, None, False),
        (None, RESERVE + 999, False),
        (RESERVE + 2000, RESERVE + 1000, True),
    ],
)
def test_memory_is_refused_before_the_machine_or_the_cgroup_runs_out(
    machine: int | None, cgroup: int | None, fits: bool
) -> None:
    budget = Budget(None, lambda: machine, lambda: cgroup)
    if fits:
        budget.check("k", 1000, used=5, pending=0)
    else:
        with pytest.raises(smb.OutOfMemory, match="segment 'k' of 1000 B does not fit"):
            budget.check("k", 1000, used=5, pending=0)
    if machine is not None:
        with pytest.raises(smb.OutOfMemory):  # what is promised to others but not populated yet
            budget.check("k", 1000, used=5, pending=1001)


def test_the_tightest_cgroup_counts_without_its_file_cache(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    inner = tmp_path / "sys/job/step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("500\n")
    (inner.parent / "memory.max").write_text("10000\n")
    (inner.parent / "memory.current").write_text("7000\n")
    (inner.parent / "memory.stat").write_text("anon 1\ninactive_file 2000\n")
    assert cgroup_left(tmp_path / "proc", tmp_path / "sys") == 5000
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/\n4:memory:/job\n0::/\n")
    (tmp_path / "sys/memory/job").mkdir(parents=True)
    (tmp_path / "sys/memory/job/memory.limit_in_bytes").write_text("900\n")
    (tmp_path / "sys/memory/job/memory.usage_in_bytes").write_text("300\n")
    assert cgroup_left(tmp_path / "proc", tmp_path / "sys") == 600


def test_sizes_are_read_and_shown_as_people_write_them() -> None:
    sizes = {"4G": 4 << 30, "512M": 512 << 20, "1.5GiB": 3 << 29, "10kb": 10240, "77": 77, "2T": 2 << 40}
    assert {text: parse(text) for text in sizes} == sizes
    for wrong in ("", "G", "-1G", "4X", "0", "nan"):
        with pytest.raises(ValueError, match="is no size such as 4G"):
            parse(wrong)
    assert [show(n) for n in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]


# Nothing is left behind ----------------------------------------------------------------------------------


def figures(pid: int) -> tuple[int, int]:
    """Open descriptors and threads."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def no_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    """A thread that was still ending may have been counted before."""
    return now[0] <= before[0] and now[1] <= before[1]


def resident(pid: int) -> int:
    """KiB of private and shared memory that the process has in RAM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def use(address: str, rank: int) -> None:
    with smb.connect(address) as box:
        segment = box.create(f"c/{rank}", 100_000, or_attach=True)
        box.attach(f"c/{rank}", readonly=True).read()
        segment.exchange(np.zeros(100_000, F32), 0.5)
        box.counter("n").add(1)
        box.barrier("b", 1, 1)
        with box.lock("l"), pytest.raises(smb.UnknownKey):
            box.attach("nobody")


def test_many_clients_leave_no_descriptor_thread_or_memory(process: ServeProcess) -> None:
    for rank in range(10):
        use(process.address, rank)
    ours = os.getpid()
    assert wait_for(lambda: figures(process.pid)[1] <= 5)
    before, memory, mine = figures(process.pid), resident(process.pid), figures(ours)
    for rank in range(150):
        use(process.address, rank)
    assert wait_for(lambda: no_more(figures(process.pid), before)), (figures(process.pid), before)
    assert no_more(figures(ours), mine)
    assert resident(process.pid) - memory < 4096
    with smb.connect(process.address) as box:
        assert box.list() == []
        assert len(box.sessions()) == 1


def test_dead_clients_leave_no_descriptor_thread_or_memory(process: ServeProcess) -> None:
    code = "c = box.create('c', 1_000_000, lifetime='owner', or_attach=True); print('in'); time.sleep(60)"
    smb.connect(process.address).close()
    time.sleep(0.2)
    before = figures(process.pid)
    for _ in range(3):
        with client(process.address, code) as program:
            assert program.line() == "in"
            program.kill()
        assert wait_for(lambda: no_more(figures(process.pid), before)), (figures(process.pid), before)


def test_threads_that_end_close_their_connections(process: ServeProcess) -> None:
    with smb.connect(process.address) as box:
        before = figures(process.pid), figures(os.getpid())
        for _ in range(20):
            thread = threading.Thread(target=box.list)
            thread.start()
            thread.join(10)
        assert wait_for(lambda: (figures(process.pid), figures(os.getpid())) == before)


def test_a_daemon_in_this_process_leaves_nothing(folder: Path) -> None:
    def once() -> None:
        with smb.serve(unix=folder / "b.sock") as daemon:
            use(daemon.addresses[0], 0)

    once()
    before = figures(os.getpid())
    for _ in range(10):
        once()
    assert wait_for(lambda: no_more(figures(os.getpid()), before)), (figures(os.getpid()), before)
    assert list(folder.iterdir()) == []


def test_a_failed_creation_leaves_neither_name_nor_memory(served: smb.Daemon) -> None:
    box = smb.connect(served.addresses[0])
    before = figures(os.getpid())
    for _ in range(10):
        with pytest.raises(smb.OutOfMemory):
            box.create("huge", 1 << 45)
    assert figures(os.getpid()) == before
    assert served.store.list("").segments == ()
    box.create("huge", 10)
    box.close()


def test_an_ended_session_can_do_nothing_more() -> None:
    store = Store()
    session = store.open_session(os.getpid(), "x")
    store.end_session(session)
    assert store.end_session(session) == 0
    assert store.sessions() == []
    store.close()
    store.close()
    with pytest.raises(smb.Closed, match="the daemon is closing"):
        store.open_session(os.getpid(), "x")


def test_what_a_thread_made_stays_when_the_thread_ends_with_its_answer(
    served: smb.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection may be gone before the daemon has returned from sending."""
    send_fds = socket.send_fds

    def slow(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        time.sleep(0.1)
        return sent

    monkeypatch.setattr(socket, "send_fds", slow)
    box = smb.connect(served.addresses[0])
    kept: list[smb.Segment] = []
    thread = threading.Thread(target=lambda: kept.append(box.create("a", 10)))
    thread.start()
    thread.join()
    time.sleep(0.2)  # the daemon's sending is over too
    assert box.list() == ["a"]
    box.close()
