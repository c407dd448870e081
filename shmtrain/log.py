"""The training log in the original's format, so that the tools that people have for it go on reading it.

A line is ``I1129 22:12:06.302839  6740 trainer.py:239] text``: severity, month and day, time, thread, place.
The date has no year: the year that newer logging libraries add makes the original's own parse_log.py fail.
Numbers have six significant digits (``number``), as C++ streams print them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO

import numpy as np


def number(value: float) -> str:
    """``value`` as a C++ stream shows a float by default: six significant digits, no trailing zeros."""
    return f"{np.float32(value):g}"


class Log:
    """Writes whole lines to its streams at once; any thread may call it. Owns the streams it opened itself.

    A stream that fails (full disk, closed pipe) is dropped after one line about it on stderr: a training is
    worth more than its log.
    """

    def __init__(self, streams: Sequence[TextIO] = (), path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = threading.Lock()
        self._own: list[TextIO] = []
        self._streams = list(streams)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._own.append(self.path.open("a", encoding="utf-8"))
            self._streams += self._own

    def info(self, text: str) -> None:
        self._write("I", text)

    def warning(self, text: str) -> None:
        self._write("W", text)

    def error(self, text: str) -> None:
        self._write("E", text)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            for stream in self._own:
                with suppress(OSError):  # what a full disk did not take; _send has said so
                    stream.close()
            self._streams = [s for s in self._streams if s not in self._own]
            self._own = []

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, severity: str, text: str) -> None:
        if not self._streams:
            return
        frame = sys._getframe(2)  # the line that called info(), warning() or error()
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        line = f"{severity}{datetime.now():%m%d %H:%M:%S.%f} {threading.get_native_id():5d} {place}] {text}\n"
        with self._lock:
            for stream in list(self._streams):
                self._send(stream, line)

    def _send(self, stream: TextIO, line: str) -> None:
        try:
            stream.write(line)
            stream.flush()
        except (OSError, ValueError) as e:
            self._streams.remove(stream)
            tell(f"the log stops here: {getattr(stream, 'name', stream)}: {e}")


def tell(text: str) -> None:
    """One line on stderr. Where that is gone (a closed terminal, a pipe to ``head``) a training goes on."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        with open(os.devnull, "wb") as nowhere:  # so that what is still buffered does not fail at the exit
            os.dup2(nowhere.fileno(), 2)


def outputs(names: Sequence[str], values: Sequence[float], weights: Sequence[float]) -> list[str]:
    """``#k: name = v (* w = wv loss)`` for each output value; a weight of 0 leaves the bracket out."""
    lines = []
    for index, (name, value, weight) in enumerate(zip(names, values, weights, strict=True)):
        loss = f" (* {number(weight)} = {number(weight * value)} loss)" if weight else ""
        lines.append(f"#{index}: {name} = {number(value)}{loss}")
    return lines
