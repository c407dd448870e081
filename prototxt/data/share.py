"""How the workers of one machine share a reader: what a training program hands to its nets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Net(options={"share": Share(...)}): the TRAIN layers read through a process that all workers share.

    name    of the job: the same for its workers, and no other job's on this machine
    memory  memory(key, size): the descriptor of so many bytes of shared memory, zeros or not, that this
            worker alone asks for under this key; the reader writes batches there. It stays the program's
    """

    name: str
    memory: Callable[[str, int], int]

    def address(self, kind: str, source: str) -> str:
        """Of the reader of one source, among the machine's abstract sockets."""
        words = "\0".join([self.name, kind, os.path.abspath(source)])
        digest = hashlib.sha256(words.encode(errors="surrogateescape")).hexdigest()[:32]
        return f"\0prototxt-reader/{os.getuid()}/{digest}"
