"""What an operator sees: the daemon's figures, `smb top`, the metrics, the log."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import metrics, protocol, top
from smb.client import Box
from smb.report import report
from smb.server import Daemon
from tests.smb.conftest import TOKEN
from tests.smb.processes import ROOT, ServeProcess, client, wait_for

COUNT = 1000
NBYTES = 4 * COUNT


def row_of(box: Box, name: str) -> protocol.ClientRow:
    (row,) = [row for row in box.status().clients if row.name == name]
    return row


def address(daemon: Daemon, scheme: str) -> str:
    return next(one for one in daemon.addresses if one.startswith(scheme))


@pytest.fixture
def watcher(served: Daemon) -> Iterator[Box]:
    with smb.connect(address(served, "unix:"), name="watcher") as box:
        yield box


def worker(served: Daemon, scheme: str) -> Box:
    return smb.connect(address(served, scheme), token=TOKEN, name="worker", timeout=10)


# Figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["unix:", "tcp:"])
def test_a_client_is_shown_with_what_it_did(served: Daemon, watcher: Box, scheme: str) -> None:
    local = np.ones(COUNT, np.float32)
    with worker(served, scheme) as box:
        center = box.create("c", COUNT)
        center.write(local)
        center.accumulate(local)
        center.exchange(local, 0.5)
        center.read(local)
        # the daemon counts a reply once it is sent, and the client may have it by then
        assert wait_for(lambda: row_of(watcher, "worker").bytes_out >= 2 * NBYTES)
        row = row_of(watcher, "worker")
        assert (row.pid, row.segments, row.counted) == (os.getpid(), 1, True)
        assert row.transport == {"unix:": "shm", "tcp:": "tcp"}[scheme]
        assert row.where.startswith("127.0.0.1:") == (scheme == "tcp:")
        assert row.operations == 4 or (scheme == "tcp:" and row.operations <= 6)  # acknowledgements count
        beyond = 200 * 4 if scheme == "tcp:" else 0  # the frames' heads
        assert 3 * NBYTES <= row.bytes_in <= 3 * NBYTES + beyond
        assert 2 * NBYTES <= row.bytes_out <= 2 * NBYTES + beyond
        assert row.requests >= 1


def test_sums_do_not_go_back_when_a_client_detaches_or_goes(served: Daemon, watcher: Box) -> None:
    local = np.ones(COUNT, np.float32)
    with worker(served, "unix:") as box:
        with box.create("c", COUNT) as center:
            center.write(local)
        assert row_of(watcher, "worker").operations == 1
        box.create("d", COUNT).write(local)
        assert row_of(watcher, "worker").operations == 2
    with worker(served, "tcp:") as box:
        box.create("c", COUNT).write(local)
    assert wait_for(lambda: watcher.status().past_sessions == 2)
    sums = watcher.status()
    assert 3 <= sums.operations <= 5  # acknowledgements count
    assert 3 * NBYTES <= sums.bytes_in <= 3 * NBYTES + 600
    assert [row.name for row in sums.clients] == ["watcher"]


def test_a_network_client_that_left_is_forgotten(served: Daemon) -> None:
    with worker(served, "tcp:") as box:
        box.create("c", COUNT).write(np.ones(COUNT, np.float32))
        (session,) = served.store.sessions()
        left = weakref.ref(session)
        del session
    with worker(served, "tcp:"):  # what was last to happen is held by the thread that saw it
        pass
    assert wait_for(lambda: gc.collect() >= 0 and left() is None)


def test_what_a_readonly_mapping_does_is_said_to_be_unknown(served: Daemon, watcher: Box) -> None:
    watcher.create("c", COUNT)
    with worker(served, "unix:") as box:
        box.attach("c", readonly=True).read()
        assert not row_of(watcher, "worker").counted
        assert row_of(watcher, "watcher").counted
        text = "\n".join(top.lines(top.take(watcher), None))
        assert top.NOTE in text


def test_a_client_over_rdma_is_not_said_to_be_counted_in_full(served: Daemon, watcher: Box) -> None:
    with worker(served, "tcp:"):
        (session,) = [one for one in served.store.sessions() if one.name == "worker"]
        session.paired = True
        row = row_of(watcher, "worker")
        assert (row.transport, row.counted) == ("rdma", False)


def test_staleness_counts_the_updates_of_others(served: Daemon, watcher: Box) -> None:
    local = np.ones(COUNT, np.float32)
    mine = watcher.create("c", COUNT)
    with worker(served, "unix:") as box:
        center = box.attach("c")
        assert row_of(watcher, "worker").staleness == -1
        center.exchange(local, 0.5)
        mine.write(local)
        mine.write(local)
        center.exchange(local, 0.5)
        assert row_of(watcher, "worker").staleness == center.staleness == 2


@pytest.mark.parametrize("scheme", ["unix:", "tcp:"])
def test_who_waits_is_shown_with_what_for(served: Daemon, watcher: Box, scheme: str) -> None:
    with worker(served, scheme) as box:
        thread = threading.Thread(target=box.barrier, args=("start", 2, 30))
        thread.start()
        assert wait_for(lambda: row_of(watcher, "worker").waiting == "barrier start")
        before = row_of(watcher, "worker").waited
        assert wait_for(lambda: row_of(watcher, "worker").waited > before)
        assert any("barrier start (0 s)" in line for line in top.lines(top.take(watcher), None))
        watcher.barrier("start", 2, 30)
        thread.join(30)
        assert row_of(watcher, "worker").waiting == ""


def test_progress_is_what_each_client_added_to_its_busiest_counter(served: Daemon, watcher: Box) -> None:
    watcher.counter("job/iterations").add(7)
    with worker(served, "tcp:") as box:
        box.counter("other").add(2)
        for _ in range(3):
            box.counter("job/iterations").add(4)
        row = row_of(watcher, "worker")
        assert (row.counter, row.progress) == ("job/iterations", 12)
        assert row_of(watcher, "watcher").progress == 7


def test_a_report_can_be_sent_whatever_the_counts_are(served: Daemon, watcher: Box) -> None:
    most = 2**63 - 1
    with worker(served, "unix:") as box:
        for amount in (most, -most, most):
            (watcher if amount < 0 else box).counter("n").add(amount)
        assert row_of(watcher, "worker").progress == most


# smb top -------------------------------------------------------------------------------------------------


def test_top_shows_rates_of_a_worker_in_another_process(process: ServeProcess) -> None:
    code = (
        "c = box.create('job/center', 1000)\na = np.ones(1000, np.float32)\nprint('go', flush=True)\n"
        "while True:\n    c.exchange(a, 0.1); box.counter('job/iterations').add(1); time.sleep(0.001)\n"
    )
    with client(process.address, code) as program:
        assert program.line() == "go"
        command = [sys.executable, "-m", "smb.cli", "top", "--once", "-i", "0.5", "-a", process.address]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    row = re.search(
        rf"^{program.pid} +worker +shm +(\S+) +(\S+ \S+) +(\S+ \S+) +0 +(\d+) +(\S+)$", done.stdout, re.M
    )
    assert row, done.stdout
    assert float(row[1]) > 1
    assert int(row[4]) > 0
    assert re.search(r"^job/center +3\.9 KiB +1 +\d+ +\d", done.stdout, re.MULTILINE)


def test_top_ends_by_enter_and_draws_anew_until_then(served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter([True, True, False])
    monkeypatch.setattr(top, "_pause", lambda seconds: next(pauses))
    shown: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: shown.append(text))
    with worker(served, "unix:") as box:
        top.live(box, 0.01)
    assert len(shown) == 3
    assert all(text.startswith(top.CLEAR) for text in shown)


@pytest.mark.parametrize(
    ("now", "before", "seconds", "shown"),
    [
        (10, 0, 2, "5"),
        (10, None, 2, "-"),  # the first look
        (10, 20, 2, "-"),  # another daemon by now
        (10, 10, 0, "-"),
        (3e6, 0, 2, "1.5M"),
        (2e4, 0, 2, "10k"),
    ],
)
def test_a_rate_without_two_looks_is_not_known(now: float, before: float, seconds: float, shown: str) -> None:
    assert top.count(top.rate(now, before, seconds)) == shown


# Metrics -------------------------------------------------------------------------------------------------


@pytest.fixture
def scraped(served: Daemon) -> Iterator[metrics.Metrics]:
    store = served.store
    with metrics.Metrics("127.0.0.1:0", lambda: metrics.render(report(store), store.list(""))) as server:
        yield server


def ask(server: metrics.Metrics, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def answers(server: metrics.Metrics) -> tuple[int, str] | None:
    try:
        return ask(server)
    except (OSError, http.client.HTTPException):
        return None


def test_metrics_are_prometheus_text_of_the_daemons_figures(
    served: Daemon, watcher: Box, scraped: metrics.Metrics
) -> None:
    watcher.create("job/center", COUNT).write(np.ones(COUNT, np.float32))
    status, text = ask(scraped)
    assert status == 200
    assert "# TYPE smb_operations_total counter\nsmb_operations_total 1\n" in text
    assert 'smb_segment_updates_total{key="job/center"} 1\n' in text
    labels = rf'session="\d+",pid="{os.getpid()}",name="watcher",transport="shm"'
    assert re.search(rf"^smb_client_bytes_in_total{{{labels}}} {NBYTES}$", text, re.MULTILINE)
    name = r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? -?[0-9.e+]+'
    assert [line for line in text.splitlines() if not re.fullmatch(rf"# (HELP|TYPE) .+|{name}", line)] == []


def test_a_name_with_quotes_stays_one_label(served: Daemon, scraped: metrics.Metrics) -> None:
    with smb.connect(address(served, "unix:"), name='a"} 1\nevil{x="\\') as box:
        box.list()
        text = ask(scraped)[1]
    assert 'name="a\\"} 1\\nevil{x=\\"\\\\",' in text
    assert "\nevil" not in text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 501)])
def test_metrics_answer_nothing_else(scraped: metrics.Metrics, method: str, path: str, status: int) -> None:
    assert ask(scraped, path, method)[0] == status


def drips_in_vain(visitor: socket.socket) -> bool:
    time.sleep(0.2)
    try:
        visitor.sendall(b"x")
    except OSError:
        return True
    return False


def test_idle_visitors_of_the_metrics_are_turned_away_and_ended(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 2.0)
    with metrics.Metrics("127.0.0.1:0", lambda: "fine 1\n") as server:
        place = server.server_address[:2]
        idle = [socket.create_connection(place, timeout=10) for _ in range(metrics.AT_ONCE)]
        for one in idle:
            one.sendall(b"GET /met")
        start = time.monotonic()
        late = socket.create_connection(place, timeout=10)
        assert late.recv(1) == b""
        assert time.monotonic() - start < 1.5  # turned away, not only ended
        assert wait_for(lambda: drips_in_vain(idle[0]), 6)  # each byte begins a new wait, but not a new limit
        assert [one.recv(1) for one in idle[1:]] == [b""] * (len(idle) - 1)
        for one in (*idle, late):
            one.close()
        assert wait_for(lambda: answers(server) == (200, "fine 1\n"))


def test_a_taken_port_for_the_metrics_is_named(scraped: metrics.Metrics) -> None:
    where = "{}:{}".format(*scraped.server_address[:2])
    with pytest.raises(smb.SmbError, match=f"cannot serve metrics at {where}: Address already in use"):
        metrics.Metrics(where, str)


# The log -------------------------------------------------------------------------------------------------


def test_the_log_is_one_json_object_a_line_and_metrics_are_announced(folder: Path) -> None:
    words = ["--unix", str(folder / "s"), "--log", "json", "-v", "--lease", "0.5", "--metrics", "127.0.0.1:0"]
    command = [sys.executable, "-u", "-m", "smb.cli", "serve", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as daemon:
        assert daemon.stdout
        assert daemon.stdout.readline() == f"listening at unix:{folder}/s\n"
        where = re.fullmatch(r"metrics at http://(127\.0\.0\.1):(\d+)/metrics\n", daemon.stdout.readline())
        assert where
        socket.create_connection((where[1], int(where[2])), timeout=10).close()
        with client(f"unix:{folder}/s", "print('hi', flush=True); time.sleep(60)") as program:
            assert program.line() == "hi"
            program.kill()
            time.sleep(0.3)
        daemon.terminate()
        lines = [json.loads(line) for line in daemon.communicate(timeout=30)[1].splitlines()]
    died = [line for line in lines if "died" in line["message"]]
    assert died
    assert {"time", "level", "logger", "message"} <= set(died[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", died[0]["time"])
    assert died[0]["level"] == "info"
