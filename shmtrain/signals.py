"""SIGINT and SIGHUP as the original takes them: the loop asks between iterations what was requested."""

from __future__ import annotations

import signal
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any, Literal

Effect = Literal["stop", "snapshot", "none"]


def before_training(sighup: str) -> None:
    """Until it trains, a SIGHUP that asks for a snapshot does not end this process: there is none to make."""
    if sighup != "stop" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Signals:
    """While entered, SIGINT and SIGHUP only leave a request. Does nothing outside the main thread.

    A second SIGINT after a requested stop raises KeyboardInterrupt: it must always be possible to get out.
    """

    def __init__(self, sigint: str = "stop", sighup: str = "snapshot") -> None:
        self._effects = {signal.SIGINT: sigint, signal.SIGHUP: sighup}
        self._requests: deque[str] = deque()
        self._before: dict[int, Any] = {}
        self._stopping = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self._effects}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def request(self, effect: str) -> None:
        """Ask as a signal would; from any thread."""
        if effect != "none":
            self._requests.append(effect)

    def next(self) -> str | None:
        """The oldest request not asked for yet, "stop", "leave" or "snapshot"; None without one."""
        return self._requests.popleft() if self._requests else None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        effect = self._effects[signal.Signals(number)]
        if number == signal.SIGINT and self._stopping:
            raise KeyboardInterrupt
        self._stopping = self._stopping or effect == "stop"
        self.request(effect)
