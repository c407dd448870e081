"""The socket between the conductor and a rank: lines of JSON; a rank sleeps when it has nothing to do.

    rank -> conductor   {"group": .., "rank": .., "pid": ..}                     once
    conductor -> rank   {"job": ..}   rank -> conductor  {"ready": true}         prepared and warmed up
    conductor -> rank   {"go": true}  rank -> conductor  {"began": .., "ended": ..}
    conductor -> rank   {"go": true}  rank -> conductor  {"held": ..}            where the job is a check
    conductor -> rank   {"end": true}

Times are time.monotonic(), which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import socket
from typing import IO, Any

from shmtrain.bench.job import Job


class Line:
    """A rank's end."""

    def __init__(self, path: str, group: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._file: IO[str] = self._socket.makefile("r")
        self.say(group=group, rank=rank, pid=os.getpid())

    def say(self, **words: Any) -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def job(self) -> Job | None:
        """The next job; None when there is no more, or no conductor."""
        words = self._hear()
        return Job.of(words["job"]) if "job" in words else None

    def go(self) -> None:
        if "go" not in self._hear():
            raise ConnectionAbortedError("the conductor of the comparison has ended")

    def _hear(self) -> dict[str, Any]:
        line = self._file.readline()
        return dict(json.loads(line)) if line else {}
