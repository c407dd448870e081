"""Who is at the other end of a connection, as far as the kernel says."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

from smb.errors import NotPermitted, NotSupported, OutOfMemory, RequestError

SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module yet
_CREDENTIALS = struct.Struct("iII")


class Peer:
    """The process at the other end of a Unix socket, by the kernel's word."""

    def __init__(self, sock: socket.socket) -> None:
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(data)

    def refusal(self) -> RequestError | None:
        """Why this process may not map our memory."""
        if self.uid not in (os.getuid(), 0):
            return NotPermitted(f"user id {self.uid} is not the daemon's, {os.getuid()}")
        try:
            status = Path(f"/proc/{self.pid}/status").read_text() if self.pid else ""
        except OSError:
            return NotPermitted(f"pid {self.pid} is gone")
        nested = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [""])
        if not self.pid or len(nested) != 1:
            return NotSupported("shared memory needs client and daemon in one PID namespace")
        return None

    def pidfd(self, sock: socket.socket) -> int:
        """A descriptor of the process itself; its number may already belong to another."""
        try:
            return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise self._gone(error) from error
        try:
            return os.pidfd_open(self.pid)
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> RequestError:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return OutOfMemory("the daemon has no descriptors left (is its `ulimit -n` too low?)")
        return NotPermitted(f"pid {self.pid} is gone")
