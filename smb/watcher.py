"""Learns at once that a process or a connection has ended, also while its thread waits for something else."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watcher:
    """Calls back once, from one thread of its own, when a descriptor reports its end."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._epoll.register(self._stop_read, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="smb-watcher", daemon=True)
        self._thread.start()

    def process(self, pidfd: int, call: Callable[[], None]) -> None:
        self._add(pidfd, select.EPOLLIN, call)

    def stream(self, number: int, call: Callable[[], None]) -> None:
        self._add(number, select.EPOLLRDHUP, call)

    def _add(self, number: int, events: int, call: Callable[[], None]) -> None:
        self._calls[number] = call
        self._epoll.register(number, events | select.EPOLLONESHOT)

    def forget(self, number: int) -> None:
        """Before the descriptor is closed."""
        self._calls.pop(number, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(number)

    def _run(self) -> None:
        while True:
            for number, _ in self._epoll.poll():
                if number == self._stop_read:
                    return
                call = self._calls.get(number)
                try:
                    if call:
                        call()
                except Exception:
                    log.exception("watching descriptor %d", number)
                call = None  # its connection must not live until the next report

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        self._epoll.close()
        os.close(self._stop_read)
        os.close(self._stop_write)
