"""One reader feeds all workers of a machine: the memory that it fills for each of them lies in the box."""

from __future__ import annotations

import os
from typing import Any

import smb
from prototxt.data.share import Share


class SharedData:
    """This worker's segments for batches, one a data layer; each lives as long as the worker.

    Where the box is on another host, or is striped, the memory is this worker's own.
    """

    def __init__(self, box: smb.Box, job: str, rank: int) -> None:
        self._box, self._job, self._rank = box, job, rank
        self._segments: list[smb.Segment] = []
        self._descriptors: list[int] = []

    def options(self) -> dict[str, Any]:
        """What the nets' data layers are told."""
        return {"share": Share(self._job, self._memory)}

    def _memory(self, key: str, size: int) -> int:
        """The descriptor of so many bytes; ours. Raises what the box raises when it has no room."""
        name = f"{self._job}/data/{self._rank}/{len(self._descriptors)}"
        segment = self._box.create(name, count=size, dtype="uint8", lifetime="owner")
        try:
            descriptor = segment.descriptor()
        except smb.NotSupported:
            segment.detach()
            self._box.free(name)
            descriptor = os.memfd_create(name)
            os.posix_fallocate(descriptor, 0, size)
        else:
            self._segments.append(segment)
        self._descriptors.append(descriptor)
        return descriptor

    def close(self) -> None:
        """Let the memory go; twice is fine."""
        for segment in self._segments:
            segment.detach()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._segments, self._descriptors = [], []
