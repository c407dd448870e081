"""The records of the RDMA operations: how a queue pair is set up over a connection. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from smb.layout import Blob
from smb.records import U16, U32, U64

GID = 16  # bytes of an RDMA address


@dataclass(frozen=True)
class Pair:
    """Connects an RDMA queue pair (RC) of the client's; both sides choose their first packet numbers.

    A stream that is given is taken over from its earlier queue pair, which the daemon destroys. From then on
    the client's messages on the queue pair are requests: a u32 that names a slot, a u32 that says how many
    bytes of elements lie there, and a frame without its elements. Each is answered by a frame. The daemon
    takes Write, Accumulate, AccumulateFrom, VersionOf, Acknowledge and Add. It has room for 16 messages of
    1024 bytes, the client must have room for 16 of 8192.
    """

    session: U64  # to which the stream belongs
    stream: U64  # 0 asks for a new one, whose requests come by queue pair alone
    queue: U32  # the number of the client's queue pair
    packet: U32  # the number of its first packet
    gid: Annotated[bytes, Blob(GID)]  # RoCE, or InfiniBand in another subnet
    lid: U16  # InfiniBand
    mtu: U16  # as verbs number them: 5 is 4096


@dataclass(frozen=True)
class Paired:
    session: U64
    stream: U64
    queue: U32
    packet: U32
    gid: Annotated[bytes, Blob(GID)]
    lid: U16
    mtu: U16


@dataclass(frozen=True)
class Unpair:
    """The daemon destroys the stream's queue pair and forgets the stream."""

    stream: U64


@dataclass(frozen=True)
class RegionOf:
    """Where to READ a segment's elements, and WRITE them unless it is attached read-only.

    A WRITE takes no lock and is not counted: an empty Write with last=1 behind it does that.
    """

    segment: U64


@dataclass(frozen=True)
class SlotsOf:
    """Where to WRITE the elements of requests; from then on the queue pair may WRITE.

    Refused to a session that may write into no segment.
    """

    stream: U64


@dataclass(frozen=True)
class Region:
    address: U64
    key: U32
    nbytes: U64
