"""What a daemon is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from smb.limits import Limits


@dataclass(frozen=True)
class ServeOptions:
    """The choices of one daemon.

    memory_limit  bytes that all segments together may take; None: what the machine has
    lease         seconds after which a stuck holder of a chunk lock is killed, and a client without
                  shared memory that is not heard from is gone
    limits        what all clients together, and one alone, may take beside memory
    """

    memory_limit: int | None = None
    lease: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise ValueError(f"lease must be above 0 seconds, not {self.lease}")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise ValueError(f"memory_limit must be above 0 bytes, not {self.memory_limit}")
