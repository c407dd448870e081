"""The reader process that several nets of one machine share: a thread for each, every store opened once.

Each net gets the batches that a reader of its own would give it. The process ends when the last net is gone.
"""

from __future__ import annotations

import os
import socket
import struct
import threading

from prototxt.data.reader import answer, give_way
from prototxt.data.store import Stores

FIRST_SECONDS = 30.0  # until somebody comes
TICK_SECONDS = 0.2


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, user id) of the other end."""
    size = struct.calcsize("iII")
    pid, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


class _Nets:
    """Those that are served now."""

    def __init__(self) -> None:
        self._stores = Stores()
        self._lock = threading.Lock()
        self.count = 0

    def take(self, sock: socket.socket) -> None:
        with self._lock:
            self.count += 1
        threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            pid, user = peer(sock)
            if user == os.getuid():  # anybody may connect to an abstract socket
                parent = os.pidfd_open(pid)
                try:
                    answer(sock, parent, self._stores)
                finally:
                    os.close(parent)
        except ProcessLookupError:
            pass  # it died at once
        finally:
            sock.close()
            with self._lock:
                self.count -= 1


def main(listening_fd: int) -> None:
    """Serve whoever connects to the listening socket; never returns."""
    give_way()  # its threads inherit it
    listening = socket.socket(fileno=listening_fd)
    listening.settimeout(FIRST_SECONDS)
    nets = _Nets()
    while True:
        try:
            sock, _ = listening.accept()
        except TimeoutError:
            if not nets.count:
                os._exit(0)
            continue
        sock.settimeout(None)
        nets.take(sock)
        listening.settimeout(TICK_SECONDS)
