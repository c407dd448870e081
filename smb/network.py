"""TCP addresses and the options of every TCP socket of ours."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from smb.errors import RequestError, TransportError

BUFFER = 1 << 20  # bytes of a socket's buffers, where the default is smaller
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3))
EVERYWHERE = ("", "*")


def parse(where: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises RequestError."""
    host, colon, port = where.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise RequestError(f"bad address {where!r}: HOST:PORT is expected, with a port of 0 to 65535")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and bare == host:
        raise RequestError(f"bad address {where!r}: write an IPv6 host in brackets, such as [::1]:{port}")
    return bare, int(port)


def show(host: str, port: int) -> str:
    """``HOST:PORT``, which parse() reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock: socket.socket) -> None:
    """Answers at once, cubic, large buffers, a dead peer noticed within 20 s. Before listen or connect."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # the system's own choice then; bbr is three times slower on loopback
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        if sock.getsockopt(socket.SOL_SOCKET, option) < BUFFER:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def tick(sock: socket.socket, seconds: float) -> None:
    """Let calls block, but come back with BlockingIOError every so many seconds; no poll before each."""
    sock.settimeout(None)
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # struct timeval
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def resolve(
    host: str, port: int, passive: bool = False
) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """The addresses behind a name, in the order to try them. Raises TransportError."""
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"host {host!r} is not known: {getattr(error, 'strerror', error)}") from error
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """A connected socket; every address of the host is tried. Raises TransportError, which says why."""
    end, why, cause = time.monotonic() + timeout, "", None
    places = resolve("" if host in EVERYWHERE else host, port)
    for index, (family, place) in enumerate(places):
        share = (end - time.monotonic()) / (
            len(places) - index
        )  # one that answers nothing leaves the others time
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(sock)
            sock.settimeout(max(0.001, share))
            sock.connect(place)
            sock.settimeout(None)
            return sock
        except OSError as error:
            sock.close()
            why, cause = error.strerror or f"no answer in {timeout:g} s", error
        except BaseException:
            sock.close()
            raise
    raise TransportError(f"no daemon answers at {show(host, port)}: {why}") from cause
