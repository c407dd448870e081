"""The seam between a client and whatever carries its bytes to a daemon.

A transport is one module that offers ``connect(where, options) -> Transport`` and a line in TRANSPORTS.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Protocol

from smb import protocol
from smb.errors import NotSupported, RequestError, SmbError
from smb.tls import Tls

Array = Any  # a C-contiguous numpy array or CPU torch tensor

BEST = ""  # what an address without a scheme asks for
# scheme of an address -> module
TRANSPORTS = {
    "unix": "smb.transport.shm",
    "tcp": "smb.transport.tcp",
    "rdma": "smb.transport.onesided",
    BEST: "smb.transport.choice",
}


@dataclass(frozen=True)
class Options:
    """What a connection needs besides its address."""

    name: str  # for messages and `smb ls -v`
    timeout: float = 30.0  # seconds that one answer of the daemon may take
    token: str | os.PathLike[str] | bytes | None = None  # for tcp and rdma: a file, or the bytes
    tls: Tls | None = None  # for tcp; None: in the clear
    reconnect: float = 0.0  # seconds for which a daemon may be away at least before the client gives up


class Attachment(Protocol):
    """A segment as one transport reaches it. Offsets and lengths in elements; ``threads`` is a hint.

    Any thread may call; operations of one thread happen in the order in which they are called, and an
    accumulate or exchange is applied exactly once when it returns. Errors do not know the segment's key.
    After the daemon's death every method but rescue and close raises TransportError.
    """

    @property
    def version(self) -> int:
        """Updates of the segment that are completed."""

    def read(self, out: Array, offset: int = 0, threads: int = 1) -> None: ...
    def write(self, array: Array, offset: int = 0, threads: int = 1) -> int: ...
    def accumulate(self, source: Any, scale: float = 1.0, offset: int = 0, threads: int = 1) -> int:
        """``source`` is an array or another Attachment of the same transport."""

    def exchange(self, local: Array, alpha: float, offset: int = 0, threads: int = 1) -> int: ...
    def combine(
        self, how: str, scalar: float, source: Any, offset: int, count: int, *, threads: int = 1
    ) -> int:
        """protocol.Combine; ``source`` is another Attachment of the same transport, or None."""

    def adagrad(
        self,
        sums: Any,
        gradient: Any,
        rate: float,
        *,
        scale: float,
        epsilon: float,
        offset: int,
        count: int,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """protocol.Adagrad; ``sums`` and ``gradient`` are other Attachments of the same transport."""

    def reduce(self, how: str, other: Any = None, *, threads: int = 1) -> float:
        """protocol.Reduce, with another Attachment of the same transport or None."""

    def wait(self, version: int, timeout: float) -> bool: ...
    def rescue(self, out: Array, offset: int = 0) -> int:
        """Read though the daemon is dead; NotSupported where nothing is left. Returns the torn chunks."""

    def close(self) -> None: ...


class Part(Attachment, Protocol):
    """An Attachment to one daemon, which may be one stripe of a larger segment.

    stripes  above 1: offset and array are those of the larger segment (smb/pieces.py), and what lies here is
             done and not counted: count_update does that once all stripes have done it
    """

    def initialise(self, values: Array) -> None:
        """The first values, of all elements, before the segment is published; not counted."""

    def read(
        self, out: Array, offset: int = 0, threads: int = 1, *, stripe: int = 0, stripes: int = 1
    ) -> None: ...
    def write(
        self, array: Array, offset: int = 0, threads: int = 1, *, stripe: int = 0, stripes: int = 1
    ) -> int: ...
    def accumulate(
        self,
        source: Any,
        scale: float = 1.0,
        offset: int = 0,
        threads: int = 1,
        *,
        stripe: int = 0,
        stripes: int = 1,
    ) -> int: ...
    def exchange(
        self,
        local: Array,
        alpha: float,
        offset: int = 0,
        threads: int = 1,
        *,
        stripe: int = 0,
        stripes: int = 1,
    ) -> int: ...
    def count_update(self) -> int:
        """Count an update that all stripes have done; returns the version after it."""

    def combine(
        self,
        how: str,
        scalar: float,
        source: Any,
        offset: int,
        count: int,
        *,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """counts=False: an update of a stripe, as above."""


@dataclass(frozen=True)
class Opening:
    """What create or attach gave."""

    attachment: Attachment
    reply: protocol.Opened


class Transport(Protocol):
    """One client's way to one daemon.

    Any thread may call; each thread gets a connection of its own, so that one that waits in ``call`` holds
    nobody up. ``call`` sees every earlier operation of its thread. Not to be used in a forked child.
    RequestError leaves everything usable; after TransportError only close() is allowed.

    patient  whether an operation waits while the daemon is away (``Options.reconnect``); else it raises Away
    """

    patient: bool

    @property
    def name(self) -> str:
        """ "local", "shm", "tcp" or "rdma"."""

    def call(self, request: object, timeout: float) -> Any:
        """Send a request of protocol.py's table, give its reply. The daemon may wait ``timeout`` seconds."""

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None = None) -> Opening:
        """Create or attach. ``initial`` is in place before anybody else can attach."""

    def orphan(self) -> None:
        """Called in a forked child: let go of what belongs to the parent, without a word to the daemon."""

    def close(self) -> None:
        """End the session. Twice is fine."""


def split(address: str) -> tuple[str, str]:
    """Scheme and the rest of ``unix:PATH``, ``tcp://HOST:PORT``, ``rdma://HOST:PORT`` or ``HOST:PORT``."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme and scheme in TRANSPORTS:
        return scheme, rest.removeprefix("//")
    port = address.rpartition(":")[2]
    if colon and port.isdigit() and "/" not in address and len(port) < len(address) - 1:
        return BEST, address
    raise RequestError(
        f"bad address {address!r}: unix:PATH, tcp://HOST:PORT, HOST:PORT or rdma://HOST:PORT is expected"
    )


def connect(address: str, options: Options) -> Transport:
    """The transport for ``address``, connected. Raises TransportError when nobody answers there."""
    scheme, where = split(address)
    if scheme not in TRANSPORTS:
        known = ", ".join(filter(None, TRANSPORTS))
        raise NotSupported(f"{address}: this version has no {scheme} transport (known: {known})")
    if not where:
        raise RequestError(f"bad address {address!r}: nothing behind {scheme}:")
    module = importlib.import_module(TRANSPORTS[scheme])
    transport: Transport = module.connect(where, options)
    return transport


def named(error: SmbError, what: str) -> SmbError:
    """The same kind of error, naming the object that it is about."""
    return type(error)(f"{what}: {error}")
