"""How a program finds its box, and what a fork may do with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from tests.smb.conftest import ON_HOST, Connect
from tests.smb.processes import Program


@pytest.fixture(autouse=True)
def _own_runtime_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


@pytest.fixture
def served_elsewhere(folder: Path) -> Iterator[smb.Daemon]:
    with smb.serve(unix=folder / "elsewhere.sock") as daemon:
        yield daemon


def test_without_any_daemon_the_box_is_in_this_process_one_for_all(caplog: pytest.LogCaptureFixture) -> None:
    with smb.connect() as one, smb.connect() as other:
        assert (one.transport, one.address) == ("local", "local")
        one.create("c", 10)
        assert other.list() == ["c"]
    told = [r.message for r in caplog.records if "inside this process" in r.message]
    assert len(told) <= 1  # an earlier test may have made the one box of this process


def test_it_is_said_in_the_log() -> None:
    with Program(
        "-c", "import logging, smb, sys; logging.basicConfig(stream=sys.stdout); smb.connect()"
    ) as p:
        assert "no daemon at" in (line := p.line())
        assert f"using a memory box inside this process, pid {p.pid}; other processes do not see it" in line
        assert p.ended() == 0


def test_the_users_own_daemon_is_found() -> None:
    with smb.serve() as daemon, smb.connect() as box:
        assert (box.transport, box.address) == ("shm", daemon.addresses[0])


def test_a_dead_daemons_socket_does_not_stop_anybody(folder: Path) -> None:
    code = "import os, smb; daemon = smb.serve(); os.kill(os.getpid(), 9)"
    with Program("-c", code) as program:
        assert program.ended() == -signal.SIGKILL
    assert (folder / "smb/daemon.sock").exists()
    with smb.connect() as box:
        assert box.transport == "local"


def test_the_environment_names_the_daemon(
    served_elsewhere: smb.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMB_ADDRESS", served_elsewhere.addresses[0])
    with smb.connect() as box:
        assert box.address == served_elsewhere.addresses[0]


def test_a_named_daemon_that_is_not_there_is_an_error_not_another_box(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMB_ADDRESS", f"unix:{folder}/none.sock")
    with smb.serve(), pytest.raises(smb.TransportError, match=r"no daemon answers at .*/none\.sock"):
        smb.connect()


def test_a_daemon_without_the_rdma_device_that_it_should_use_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMB_RDMA", "nobody_has_this")
    with pytest.raises(smb.NotSupported, match="no active RDMA port"):
        smb.serve(rdma="localhost:0")


@pytest.mark.parametrize("options", [{"lease": 0}, {"memory_limit": 0}])
def test_limits_of_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        smb.serve(**options)  # type: ignore[arg-type]


# Fork ----------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that runs ``work``: 0 when it returned true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except smb.Closed as error:
        return "connect again after a fork" in str(error)
    return False


# Not by rdma: what a process has registered is gone in its child, and here it is the daemon's process too.
@pytest.mark.parametrize("connect", ON_HOST, indirect=True)
def test_a_forked_child_is_told_to_connect_for_itself(connect: Connect) -> None:
    box = connect()
    segment = box.create("c", 10)
    x = np.zeros(10, np.float32)
    assert in_child(lambda: refused(box.list)) == 0
    assert in_child(lambda: refused(lambda: segment.exchange(x, 0.5))) == 0
    assert in_child(lambda: refused(lambda: box.attach("c"))) == 0
    assert in_child(lambda: (box.close(), segment.detach(), True)) == 0
    assert segment.exchange(x, 0.5) == 1  # the child's end took nothing from the parent
    assert box.list() == ["c"]
    assert len(box.sessions()) == 1


def test_a_forked_child_can_connect_again(served: smb.Daemon) -> None:
    box = smb.connect(served.addresses[0])
    segment = box.create("c", 10, initial=np.ones(10, np.float32))

    def work() -> bool:
        with smb.connect(served.addresses[0]) as mine:
            return bool(mine.attach("c").accumulate(np.ones(10, np.float32)) == 1)

    assert in_child(work) == 0
    np.testing.assert_array_equal(segment.read(), 2)
    box.close()


def test_a_child_forked_while_other_threads_use_the_box_is_not_stuck(served: smb.Daemon) -> None:
    box, stop = smb.connect(served.addresses[0]), threading.Event()

    def busy() -> None:
        while not stop.is_set():
            box.list()

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert in_child(lambda: refused(box.list)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    box.close()


def test_a_forked_child_gets_an_inner_box_of_its_own() -> None:
    with smb.connect() as box:
        box.create("c", 10)

        def work() -> bool:
            with smb.connect() as mine:
                return mine.list() == [] and mine.create("c", 10).created

        assert in_child(work) == 0
        assert box.list() == ["c"]


@pytest.mark.parametrize(
    "given", [{"token": b"a token that nobody asks"}, {"tls": smb.Tls("no.pem")}, {"insecure": True}]
)
def test_what_is_for_a_network_is_refused_where_none_is_listened_at(
    folder: Path, given: dict[str, Any]
) -> None:
    said = f"^{next(iter(given))} is for a daemon that listens on a network: give tcp or rdma"
    with pytest.raises(smb.RequestError, match=said):
        smb.serve(unix=folder / "box.sock", **given)
