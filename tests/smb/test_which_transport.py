"""Which transport an address takes, from where it is taken, and as what the elements travel."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.client import Box
from tests.smb.conftest import TOKEN
from tests.smb.processes import ROOT, wait_for

F32 = np.float32
COUNT = 400_000  # seven chunks, so that an exchange is several pieces
BYTES = 4 * COUNT


def test_an_address_without_a_scheme_takes_shared_memory_where_it_works(
    served: smb.Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "smb")
    where = served.addresses[1].removeprefix("tcp://")
    with smb.connect(where, token=TOKEN) as box:
        assert box.transport == box.create("c", 10).transport == "shm"
        assert len(box.sessions()) == 1  # the first one, by TCP, is over
    assert f"{where}: by shared memory, since the daemon's socket" in caplog.text
    with smb.connect(served.addresses[1], token=TOKEN) as box:
        assert box.transport == box.create("c", 10).transport == "tcp"  # a named transport is not replaced


def test_a_client_that_named_a_port_and_took_shared_memory_outlives_its_daemon(folder: Path) -> None:
    def serve() -> smb.Daemon:
        return smb.serve(unix=folder / "a.sock", tcp="127.0.0.1:0", token=TOKEN)

    first = serve()
    with smb.connect(first.addresses[1].removeprefix("tcp://"), token=TOKEN, reconnect=20) as box:
        center = box.create("center", COUNT, initial=np.ones(COUNT, F32))
        assert center.transport == "shm"
        first.close()  # to its clients the same as its death
        with serve():
            center.accumulate(np.ones(COUNT, F32))
            np.testing.assert_array_equal(center.read(), 2)
            assert box.list() == ["center"]


def test_an_address_without_a_scheme_takes_tcp_elsewhere_and_says_why(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "smb")
    with smb.serve(tcp="localhost:0", token=TOKEN) as daemon:
        (address,) = daemon.addresses
        with smb.connect(address.removeprefix("tcp://"), token=TOKEN) as box:
            assert box.transport == "tcp"
    assert (
        "by tcp, since shared memory does not work: the daemon has no Unix socket; "
        "RDMA does not work: the daemon serves none"
    ) in caplog.text


def no_device(patch: pytest.MonkeyPatch) -> str:
    patch.setenv("SMB_RDMA", "nobody_has_this")
    return "no active RDMA port"


def little_to_lock(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(os, "geteuid", lambda: 1000)
    patch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    return "8388608 bytes may be locked (`ulimit -l`), it needs 1073741824"


@pytest.mark.parametrize("obstacle", [no_device, little_to_lock])
def test_a_client_that_cannot_use_the_daemons_rdma_says_why(
    obstacle: Callable[[pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "smb")
    with smb.serve(tcp="127.0.0.1:0", token=TOKEN) as daemon:
        port = daemon.addresses[0].removeprefix("tcp://")
        daemon.rdma = port  # as a daemon with a device tells
        why = obstacle(monkeypatch)
        with smb.connect(port, token=TOKEN) as box:
            assert box.transport == box.create("c", 10).transport == "tcp"
    assert f"RDMA does not work: {why}" in caplog.text


def test_rdma_that_was_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with smb.serve(tcp="127.0.0.1:0", token=TOKEN) as daemon:
        port = daemon.addresses[0].removeprefix("tcp://")
        why = no_device(monkeypatch)
        with pytest.raises(smb.NotSupported, match=why):
            smb.connect(f"rdma://{port}", token=TOKEN)
        assert not daemon.store.sessions()


def test_who_asks_for_tls_is_not_given_rdma_which_is_in_the_clear(
    certified: tuple[smb.Tls, smb.Tls], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "smb")
    with smb.serve(tcp="127.0.0.1:0", tls=certified[0]) as daemon:
        port = daemon.addresses[0].removeprefix("tcp://")
        daemon.rdma = port
        with smb.connect(port, tls=certified[1]) as box:
            assert box.transport == "tcp"
    assert "RDMA does not work: TLS was asked for, and its data are not encrypted" in caplog.text


def test_another_daemons_socket_on_this_host_is_not_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the daemon is on another host whose socket has the same path as one of this host's."""
    caplog.set_level("INFO", "smb")
    path = folder / "a.sock"
    with smb.serve(unix=path, tcp="127.0.0.1:0", token=TOKEN) as meant:
        path.unlink()
        with smb.serve(unix=path) as other, smb.connect(other.addresses[0]) as wrong:
            wrong.create("wrong", 10)
            with smb.connect(meant.addresses[1].removeprefix("tcp://"), token=TOKEN) as box:
                assert box.transport == "tcp"
                assert box.list() == []
    assert f"another daemon listens at {path} on this host" in caplog.text


def test_both_versions_of_ip_are_served(folder: Path) -> None:
    with smb.serve(tcp="*:0", token=TOKEN) as daemon:
        port = daemon.addresses[0].rpartition(":")[2]
        hosts = ["127.0.0.1", "localhost", "*"]
        if Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
            hosts.append("[::1]")
        for host in hosts:
            with smb.connect(f"tcp://{host}:{port}", token=TOKEN) as box:
                assert box.list() == []


NESTED = """
import sys
sys.path.insert(0, {root!r})
import numpy as np, smb
box = smb.connect({address!r}, name="nested")
center = box.attach("c")
x = np.full(1000, 4, np.float32)
center.exchange(x, 0.5)
print(box.transport, center.transport, x.sum(), box.counter("n").add(1))
"""


def test_another_pid_namespace_is_served_by_frames_over_the_unix_socket(
    served: smb.Daemon, near: Box
) -> None:
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("a PID namespace needs root and unshare")
    center = near.create("c", 1000)
    code = NESTED.format(root=str(ROOT), address=served.addresses[0])
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no PID namespace here: {done.stderr.strip()}")
    assert done.stdout.split() == ["tcp", "tcp", "2000.0", "0"], done.stderr
    assert "no shared memory, its data travel over the socket" in done.stderr
    np.testing.assert_array_equal(center.read(), 2)


def test_a_forked_child_connects_for_itself_and_does_not_disturb_its_parent(served: smb.Daemon) -> None:
    with smb.connect(served.addresses[1], token=TOKEN, name="parent") as box:
        center = box.create("c", 1000)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                center.read()
            except smb.Closed as error:
                status = 0 if "connect again after a fork" in str(error) else 2
            box.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert center.write(np.ones(1000, F32)) == 1
        assert [row["name"] for row in box.sessions()] == ["parent"]


def test_a_closed_box_leaves_no_thread_and_no_descriptor(served: smb.Daemon) -> None:
    def figures() -> tuple[int, int]:
        gc.collect()  # what other tests left would go in the midst of this one
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with smb.connect(served.addresses[1], token=TOKEN) as box:
        box.list()
    assert wait_for(lambda: not served.store.sessions())
    before = figures()
    for _ in range(5):
        box = smb.connect(served.addresses[1], token=TOKEN)
        box.create("c", 10)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: box.list(), range(3)))  # noqa: B023
        box.close()
    assert wait_for(lambda: figures() <= before), (figures(), before)
    assert not served.store.sessions()


# Wire types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_a_segment_exchanges_in_a_wire_type_and_keeps_the_sum(served: smb.Daemon, wire: str) -> None:
    rng = np.random.default_rng(5)
    with smb.connect(served.addresses[1], token=TOKEN) as box:
        center = box.create("c", COUNT)
        x = rng.standard_normal(COUNT).astype(F32)
        put_in = x.astype(np.float64)
        for _ in range(5):
            noise = (0.01 * rng.standard_normal(COUNT)).astype(F32)
            x += noise
            put_in += noise
            center.exchange(x, 0.25, wire=wire)
        np.testing.assert_allclose(x + center.read().astype(np.float64), put_in, atol=1e-5)
        stats = center.wire_stats
        assert stats is not None
        assert BYTES <= stats.bytes_sent < (1 + 4 * 0.55) * BYTES  # the first one is float32
        assert 0 < stats.squared_error < 1e-3 * stats.squared_sum


def test_values_that_overflow_do_not_spoil_later_exchanges(served: smb.Daemon) -> None:
    with smb.connect(served.addresses[1], token=TOKEN) as box:
        center = box.create("c", 300)
        refused = 0
        for value in (3e38, -3e38, 3e38):
            try:
                center.exchange(np.full(300, value, F32), 1.0, wire="int8")
            except smb.NonFinite:
                refused += 1
        assert refused
        center.write(np.zeros(300, F32))
        x = np.ones(300, F32)
        center.exchange(x, 0.5, wire="int8")
        np.testing.assert_array_equal(x, 0.5)


def test_a_wire_type_is_refused_where_nothing_travels(near: Box) -> None:
    center = near.create("c", 1000)
    with pytest.raises(
        smb.NotSupported, match="shm moves float32 alone, not int8: wire types are for tcp and rdma"
    ):
        center.exchange(np.ones(1000, F32), 0.5, wire="int8")
    with pytest.raises(smb.RequestError, match="unknown wire type 'int4' "):
        center.accumulate(np.ones(1000, F32), wire="int4")
    assert center.wire_stats is None
