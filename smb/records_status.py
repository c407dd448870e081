"""The records of Status: a daemon's figures. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from smb.layout import Rows
from smb.records import I64, U32, U64, Flag, Name, Seconds


@dataclass(frozen=True)
class Status:
    """Asks for the daemon's figures, which `smb top` shows."""


@dataclass(frozen=True)
class ClientRow:
    """One session. Where ``counted`` is 0, it did more to segments than the figures say."""

    number: U64  # the session's
    pid: U32
    name: Name
    transport: Name  # local, shm, unix, tcp or rdma
    where: Name  # its host; empty on the daemon's own
    age: Seconds
    silent: Seconds  # since its last frame; 0 for local and shm
    segments: U32  # that it is attached to
    requests: U64  # control requests
    counted: Flag
    operations: U64  # reads, writes, accumulates and exchanges (of tcp: their pieces)
    bytes_in: U64  # into segments
    bytes_out: U64
    staleness: I64  # at its last exchange; -1: not known
    waiting: Name  # for what one of its requests waits
    waited: Seconds
    counter: Name  # to which it added most
    progress: I64  # what it added there


@dataclass(frozen=True)
class Report:
    pid: U32  # the daemon's
    uptime: Seconds
    memory: U64  # bytes of all segments
    limit: U64  # bytes that they may take; 0: what the machine has
    segments: U32
    past_sessions: U64  # that are over
    requests: U64  # these four since the daemon's start, all sessions
    operations: U64
    bytes_in: U64
    bytes_out: U64
    clients: Annotated[tuple[ClientRow, ...], Rows(ClientRow)]
