"""Soft Memory Box: named memory segments that outlive the processes that share them.

    box = smb.connect()
    center = box.create("job/center", count=1000, or_attach=True)
    center.exchange(local, alpha=0.2)

Names are loaded when they are first used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from smb.errors import (
    Away,
    Closed,
    KeyExists,
    NonFinite,
    NotPermitted,
    NotSupported,
    OutOfMemory,
    ProtocolError,
    RangeError,
    RequestError,
    Restarted,
    SmbError,
    TransportError,
    TypeMismatch,
    UnknownKey,
    WaitTimeout,
)

if TYPE_CHECKING:
    from smb.client import Box, Segment
    from smb.embedded import connect, serve
    from smb.limits import Limits
    from smb.options import ServeOptions
    from smb.protocol import Stat
    from smb.server import Daemon
    from smb.tls import Tls
    from smb.transport.arrays import DeviceMemory
    from smb.waiting import Counter, Lock

__version__ = "0.1.0"
__all__ = [
    "Away",
    "Box",
    "Closed",
    "Counter",
    "Daemon",
    "DeviceMemory",
    "KeyExists",
    "Limits",
    "Lock",
    "NonFinite",
    "NotPermitted",
    "NotSupported",
    "OutOfMemory",
    "ProtocolError",
    "RangeError",
    "RequestError",
    "Restarted",
    "Segment",
    "ServeOptions",
    "SmbError",
    "Stat",
    "Tls",
    "TransportError",
    "TypeMismatch",
    "UnknownKey",
    "WaitTimeout",
    "connect",
    "serve",
]

_LAZY = {
    "Box": "smb.client",
    "Counter": "smb.waiting",
    "Lock": "smb.waiting",
    "Segment": "smb.client",
    "Daemon": "smb.server",
    "DeviceMemory": "smb.transport.arrays",
    "Stat": "smb.protocol",
    "Limits": "smb.limits",
    "ServeOptions": "smb.options",
    "Tls": "smb.tls",
    "connect": "smb.embedded",
    "serve": "smb.embedded",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'smb' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
