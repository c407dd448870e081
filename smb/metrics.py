"""A daemon's figures for Prometheus, on a port of their own: ``smb serve --metrics HOST:PORT``.

Read-only and bounded: GET of /metrics alone, a few connections at a time, each with seconds to ask. There are
no secrets in it, but names of programs and keys of segments: bind it where those may be read.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from smb import protocol
from smb.errors import SmbError
from smb.network import parse, show

log = logging.getLogger(__name__)
AT_ONCE = 4  # requests that are answered at one time; others are turned away
PATIENCE = 5.0  # seconds that a client may take for anything
MOST = 1000  # clients and segments that get lines of their own
KIND = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, object], ...]
Sample = tuple[Labels, float]
Row = TypeVar("Row")
Figure = tuple[str, str, str, Callable[[Row], float]]  # name, kind, what it is, where it stands


def _quoted(value: object) -> str:
    return str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels)
        yield f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}"


def _client(row: protocol.ClientRow) -> Labels:
    return ("session", row.number), ("pid", row.pid), ("name", row.name), ("transport", row.transport)


def _daemon(report: protocol.Report) -> Iterator[str]:
    for name, kind, about, value in (
        ("smb_uptime_seconds", "gauge", "Since the daemon started.", report.uptime),
        ("smb_memory_bytes", "gauge", "Bytes of all segments.", report.memory),
        (
            "smb_memory_limit_bytes",
            "gauge",
            "Bytes that they may take; 0: what the machine has.",
            report.limit,
        ),
        ("smb_segments", "gauge", "Segments that the daemon holds.", report.segments),
        ("smb_sessions", "gauge", "Clients that are there now.", len(report.clients)),
        ("smb_sessions_ended_total", "counter", "Clients that are gone.", report.past_sessions),
        ("smb_requests_total", "counter", "Control requests.", report.requests),
        ("smb_operations_total", "counter", "Operations on segments that were counted.", report.operations),
        ("smb_bytes_in_total", "counter", "Bytes that they put into segments.", report.bytes_in),
        ("smb_bytes_out_total", "counter", "Bytes that they took out.", report.bytes_out),
    ):
        yield from _family(name, kind, about, [((), value)])
    waiting = sum(1 for row in report.clients if row.waiting)
    yield from _family("smb_sessions_waiting", "gauge", "Clients with a request that waits.", [((), waiting)])
    hidden = sum(1 for row in report.clients if not row.counted)
    about = "Clients that did more than was counted (read-only mappings)."
    yield from _family("smb_sessions_uncounted", "gauge", about, [((), hidden)])


_CLIENT: tuple[Figure[protocol.ClientRow], ...] = (
    ("smb_client_requests_total", "counter", "Control requests of one client.", lambda r: r.requests),
    ("smb_client_operations_total", "counter", "Its operations on segments.", lambda r: r.operations),
    ("smb_client_bytes_in_total", "counter", "Bytes that it put into segments.", lambda r: r.bytes_in),
    ("smb_client_bytes_out_total", "counter", "Bytes that it took out.", lambda r: r.bytes_out),
    ("smb_client_waited_seconds", "gauge", "How long a request of it has waited.", lambda r: r.waited),
    ("smb_client_silent_seconds", "gauge", "Since its last frame (tcp, rdma).", lambda r: r.silent),
)
_SEGMENT: tuple[Figure[protocol.Stat], ...] = (
    ("smb_segment_bytes", "gauge", "Size of one segment.", lambda r: r.nbytes),
    ("smb_segment_updates_total", "counter", "Its completed updates.", lambda r: r.version),
    ("smb_segment_sessions", "gauge", "Clients that are attached to it.", lambda r: r.sessions),
)


def _clients(rows: tuple[protocol.ClientRow, ...]) -> Iterator[str]:
    for name, kind, about, of in _CLIENT:
        yield from _family(name, kind, about, [(_client(row), of(row)) for row in rows])
    stale = [(_client(row), row.staleness) for row in rows if row.staleness >= 0]
    yield from _family(
        "smb_client_staleness", "gauge", "Updates by others between its last exchanges.", stale
    )
    done = [((*_client(row), ("counter", row.counter)), row.progress) for row in rows if row.counter]
    yield from _family("smb_client_progress_total", "counter", "What it added to its busiest counter.", done)


def _segments(rows: tuple[protocol.Stat, ...]) -> Iterator[str]:
    for name, kind, about, of in _SEGMENT:
        yield from _family(name, kind, about, [((("key", row.key),), of(row)) for row in rows])


def render(report: protocol.Report, listing: protocol.Listing) -> str:
    """Both in Prometheus' text format; of clients and segments the first MOST."""
    lines = (*_daemon(report), *_clients(report.clients[:MOST]), *_segments(listing.segments[:MOST]))
    return "\n".join(lines) + "\n"


class _Request(BaseHTTPRequestHandler):
    """One connection, one answer."""

    timeout = PATIENCE
    server: Metrics
    server_version, sys_version = "smb", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        try:
            body = self.server.text().encode()
        except SmbError as error:
            self.send_error(503, str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", KIND)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("metrics for %s: %s", self.client_address[0], format % args)


class Metrics(ThreadingHTTPServer):
    """Serves ``text()`` at http://HOST:PORT/metrics from threads of its own. A context manager."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, where: str, text: Callable[[], str]) -> None:
        host, port = parse(where)
        self.text = text
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Request)
        except OSError as error:
            raise SmbError(f"cannot serve metrics at {where}: {error.strerror or error}") from error
        self.address = f"http://{show(host, self.server_port)}/metrics"
        self._thread = threading.Thread(target=self.serve_forever, name="smb-metrics", daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limit = threading.Timer(PATIENCE, self._end, (request,))  # _Request.timeout bounds one wait, not all
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._room.release()

    @staticmethod
    def _end(request: socket.socket) -> None:
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics for %s", client_address, exc_info=True)

    def close(self) -> None:
        """Stop listening. Twice is fine."""
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()
