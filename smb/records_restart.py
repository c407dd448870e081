"""The records of snapshots and of a daemon that follows a dead one. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from smb.records import I64, U32, U64, Count, Dtype, Flag, Key, Lifetime, Message, Meta


@dataclass(frozen=True)
class HandBack:
    """A client that maps a segment gives its memory to the daemon that follows the dead one.

    One byte follows the body; the descriptors of control and payload file travel beside it (SCM_RIGHTS).
    """

    key: Key
    segment: U64  # the dead daemon's number for it: tells which of two memories is the newer
    count: Count
    dtype: Dtype
    lifetime: Lifetime
    meta: Meta
    owned: Flag  # whether this client made it


@dataclass(frozen=True)
class HandCounter:
    """The last that a client knows of a counter."""

    key: Key
    value: I64
    updates: U64  # as Value had it: of two values the one with more is the newer


@dataclass(frozen=True)
class Inherit:
    """This session goes on for one that the dead daemon had."""

    session: U64  # 0: for none, but it will hand its memory to the next daemon when this one dies
    secret: U64
    done: Flag  # True: everything is handed back


@dataclass(frozen=True)
class SnapshotNow:
    """Write a snapshot now."""

    folder: Message  # at the daemon; "" for its own; only a client on this host may name one


@dataclass(frozen=True)
class RestoreFrom:
    """Load the newest whole snapshot of a folder at the daemon; none of its keys may exist."""

    folder: Message


@dataclass(frozen=True)
class SnapshotDone:
    path: Message
    segments: U32
    nbytes: U64  # of the segments
