"""What a daemon is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from smb.limits import Limits


@dataclass(frozen=True)
class ServeOptions:
    """The choices of one daemon.

    memory_limit  bytes that all segments together may take; None: what the machine has
    lease         seconds after which a stuck holder of a chunk lock is killed, and a client without
                  shared memory that is not heard from is gone
    limits        what all clients together, and one alone, may take beside memory
    snapshot_dir  where snapshots of the box lie: it begins with the newest whole one, and ends with one
    snapshot_every  seconds between two; None: only on request and at the end
    huge_pages    segments of 2 MiB and more take huge pages; a daemon that can get none does not start
    rdma          None: clients get no RDMA; else by which port, DEVICE[/PORT[/GID_INDEX]], "" for any
    """

    memory_limit: int | None = None
    lease: float = 30.0
    limits: Limits = field(default_factory=Limits)
    snapshot_dir: Path | None = None
    snapshot_every: float | None = None
    rdma: str | None = None
    huge_pages: bool = False

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise ValueError(f"lease must be above 0 seconds, not {self.lease}")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise ValueError(f"memory_limit must be above 0 bytes, not {self.memory_limit}")
        if self.snapshot_every is not None and not self.snapshot_every > 0:
            raise ValueError(f"snapshot_every must be above 0 seconds, not {self.snapshot_every}")
        if self.snapshot_every is not None and self.snapshot_dir is None:
            raise ValueError("snapshot_every needs a snapshot_dir")
