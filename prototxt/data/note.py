"""What a reader is reading just now, in memory that its net can still read when the reader has died of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIZE = 4096


class Note:
    """The writing side; several threads may read files at once. Without a descriptor nothing is noted."""

    def __init__(self, fd: int = -1) -> None:
        self._fd = fd
        self._files: dict[int, str] = {}
        self._lock = threading.Lock()

    def reading(self, path: str) -> None:
        """This thread reads ``path`` from now on; "" when it is done."""
        if self._fd < 0:
            return
        with self._lock:
            self._files[threading.get_ident()] = path
            text = ", ".join(filter(None, self._files.values())).encode(errors="replace")
            os.pwrite(self._fd, text[:SIZE].ljust(SIZE, b"\0"), 0)

    @contextmanager
    def during(self, path: str) -> Iterator[None]:
        self.reading(path)
        try:
            yield
        finally:
            self.reading("")


def read_note(fd: int) -> str:
    """The files that were being read; "" when none was noted."""
    return os.pread(fd, SIZE, 0).rstrip(b"\0").decode(errors="replace")
