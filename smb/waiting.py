"""What clients wait for together: counters and named locks."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from smb import protocol
from smb.errors import RequestError, SmbError
from smb.layout import check_key

if TYPE_CHECKING:
    from smb.client import Box

FOREVER = protocol.MAX_SECONDS


def seconds(timeout: float | None) -> float:
    """``timeout`` for the daemon; None waits as long as the daemon lives."""
    if timeout is None:
        return FOREVER
    if not 0 <= timeout <= FOREVER:
        raise RequestError(f"timeout {timeout} is not in 0..{FOREVER:g} seconds")
    return float(timeout)


class Counter:
    """A whole number of 64 bits that all clients share; starts at 0, lives as long as any of its users."""

    def __init__(self, box: Box, key: str) -> None:
        self.key = check_key(key)
        self._box = box

    def add(self, amount: int = 1) -> int:
        """Add ``amount``; the value before, so that n claims of 1 give n different numbers."""
        value: protocol.Value = self._box._call(protocol.Add(self.key, amount))
        return value.value

    @property
    def value(self) -> int:
        return self.add(0)

    def wait(self, value: int, timeout: float | None = None) -> int:
        """Wait until it is at least ``value``; returns what it then is. Raises WaitTimeout."""
        limit = seconds(timeout)
        reached: protocol.Value = self._box._call(protocol.Await(self.key, value, limit), limit)
        return reached.value


class Lock:
    """A named lock among all clients; the death of its holder's process releases it. Not reentrant.

    Two Lock objects exclude one another, in whatever threads or processes. As a context manager it waits for
    ever, or for the timeout that box.lock was given.
    """

    def __init__(self, box: Box, name: str, timeout: float | None) -> None:
        self.name = check_key(name)
        self._box, self._timeout = box, timeout
        self._token = 0  # of what is held now

    @property
    def held(self) -> bool:
        return bool(self._token)

    def acquire(self, timeout: float | None = None) -> None:
        """Take it. Raises WaitTimeout naming the holder, RequestError when this object holds it already."""
        if self._token:
            raise RequestError(f"lock {self.name!r} is held by this object already")
        limit = seconds(self._timeout if timeout is None else timeout)
        token = self._box._token()
        try:
            self._box._call(protocol.Lock(self.name, token, limit), limit)
        except SmbError:
            raise
        except BaseException:  # interrupted: it may or may not have been granted
            with contextlib.suppress(SmbError):
                self._box._call(protocol.Unlock(self.name, token))
            raise
        self._token = token

    def release(self) -> None:
        """Give it to the next in the queue."""
        token, self._token = self._token, 0
        if not token:
            raise RequestError(f"lock {self.name!r} is not held by this object")
        self._box._call(protocol.Unlock(self.name, token))

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except SmbError:
            if error is None:  # do not hide why the block ended
                raise
