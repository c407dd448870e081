"""What client and daemon say to each other: one table of operations, their layouts, the framing. No I/O.

A frame is a header and a body. The header (20 bytes, little endian) holds the magic ``SMB1``, the operation's
code, a status (0 in requests and in good replies, else a code of ERRORS), the request's number, which the
reply repeats, and the length of the body. The body is the operation's fields, one after the other, as the
dataclasses of records.py lay them out. A reply of status != 0 has a ``Failure`` as its body. Descriptors
travel beside a reply's first byte (SCM_RIGHTS), to a client that asked for them in its Hello ("mapped").

A client without descriptors moves data by the operations 18 to 25. The heads of these are numbers only; the
elements follow behind the head (``Operation.payload``), and the header's length counts both. A *stream* is
what one client thread says to the daemon; it belongs to a session and outlives its connections. Frames
that have no reply when a connection breaks are sent again on the next one: the daemon applies each update
once, by its ``sequence``, and answers a control request that it has answered already by the same frame,
found by the header's number. So a stream's request numbers rise over all its connections.

A body that breaks its layout is answered by ProtocolError and the connection stays usable; a header that
breaks the framing ends the connection, since nobody knows where the next frame starts.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from smb import errors
from smb.errors import NotSupported, ProtocolError, SmbError
from smb.layout import put, unpack
from smb.records import *  # users write protocol.Create
from smb.records_rdma import *
from smb.records_restart import *
from smb.records_status import *
from smb.records_vectors import *

VERSION = 3  # the first two bytes of Hello, in every version
HELLO = 1
MAGIC = b"SMB1"
HEADER = struct.Struct("<4sHHQI")
MAX_REQUEST = 1 << 20  # bytes of a request's body
MAX_REPLY = 1 << 26  # bytes of a reply's body: a list of all segments is the longest

ERRORS: dict[int, type[SmbError]] = {
    1: errors.RequestError,
    2: errors.RangeError,
    3: errors.UnknownKey,
    4: errors.KeyExists,
    5: errors.TypeMismatch,
    6: errors.NonFinite,
    7: errors.OutOfMemory,
    8: errors.NotPermitted,
    9: errors.NotSupported,
    10: errors.WaitTimeout,
    11: errors.ProtocolError,
    12: errors.Closed,
    13: errors.Restarted,
    14: errors.Away,
    100: errors.TransportError,
    101: errors.SmbError,
}
_CODES = {kind: code for code, kind in ERRORS.items()}

# The table -----------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    code: int
    request: type
    reply: type
    descriptors: int  # how many travel with a good reply to a mapped client
    about: str
    payload: str = ""  # where elements follow a record: "request", "reply" or "both"
    once: bool = (
        False  # a control request that changes something: sent again, it is answered by the same frame
    )
    brings: int = 0  # descriptors that come with the request, beside one byte that follows its body


def _table(*rows: Operation) -> dict[int, Operation]:
    return {row.code: row for row in rows}


OPERATIONS = _table(
    Operation(HELLO, Hello, Welcome, 1, "open or join a session; the descriptor is the daemon's life word"),
    Operation(2, Bye, Done, 0, "end the session: owned segments are freed, locks and places released"),
    Operation(3, Create, Opened, 2, "make a segment; descriptors: control and payload", once=True),
    Operation(
        4, Publish, Done, 0, "give the created segment its name; its initial values are in place", once=True
    ),
    Operation(5, Attach, Opened, 2, "join a segment; descriptors: control and payload", once=True),
    Operation(6, Detach, Done, 0, "leave a segment", once=True),
    Operation(
        7, Free, Done, 0, "take the key away; the memory goes when the last session detaches", once=True
    ),
    Operation(8, StatOf, Stat, 0, "one segment's figures"),
    Operation(9, ListOf, Listing, 0, "the figures of all segments whose key starts with a prefix"),
    Operation(10, Sessions, SessionList, 0, "the sessions and what they are attached to"),
    Operation(11, Add, Value, 0, "add to a counter, which starts at 0; gives the value before", once=True),
    Operation(12, Await, Value, 0, "wait for a counter"),
    Operation(13, Barrier, Done, 0, "wait until that many have come", once=True),
    Operation(14, Lock, Done, 0, "take a named lock; its holder's death releases it", once=True),
    Operation(15, Unlock, Done, 0, "release a named lock, or withdraw from waiting for it", once=True),
    Operation(16, Stuck, Verdict, 0, "report the holder of a chunk lock that lets others wait"),
    Operation(17, Mend, Done, 0, "ask for chunks that dead writers left to be made whole"),
    Operation(18, Read, Done, 0, "copy a range out of a segment", "reply"),
    Operation(19, Write, Applied, 0, "copy into a range of a segment", "request"),
    Operation(20, Accumulate, Applied, 0, "add to a range of a segment", "request"),
    Operation(21, Exchange, Applied, 0, "the elastic move with a range of a segment", "both"),
    Operation(22, AccumulateFrom, Applied, 0, "add one segment to another"),
    Operation(23, VersionOf, Applied, 0, "a segment's completed updates"),
    Operation(24, WaitVersion, Applied, 0, "wait until a segment has had so many updates"),
    Operation(25, Acknowledge, Done, 0, "forget remembered replies; keep the lease"),
    Operation(30, Challenge, Challenged, 0, "exchange nonces, where a token is asked for; before Hello"),
    Operation(31, Prove, Proved, 0, "prove to have the token; the daemon then proves the same; before Hello"),
    Operation(40, Combine, Applied, 0, "a vector operation on a segment where it lies", once=True),
    Operation(42, Adagrad, Applied, 0, "Adagrad's step on a segment, its sums beside it", once=True),
    Operation(41, Reduce, Scalar, 0, "a scalar product or sum of segments where they lie"),
    Operation(35, HandBack, Opened, 0, "give a segment's memory to a daemon that was restarted", brings=2),
    Operation(36, SnapshotNow, SnapshotDone, 0, "write a snapshot of the box into a folder"),
    Operation(37, Inherit, Done, 0, "go on for a session of the dead daemon: own what it owned"),
    Operation(38, RestoreFrom, SnapshotDone, 0, "load a snapshot into the box"),
    Operation(39, HandCounter, Done, 0, "tell a daemon that was restarted what a counter was"),
    Operation(45, Pair, Paired, 0, "connect an RDMA queue pair", once=True),
    Operation(46, Unpair, Done, 0, "destroy an RDMA queue pair", once=True),
    Operation(47, RegionOf, Region, 0, "where a segment lies, for one-sided READ and WRITE"),
    Operation(48, SlotsOf, Region, 0, "where the elements of a queue pair's requests are to be written"),
    Operation(55, Status, Report, 0, "the daemon's figures, and what each client did"),
)
BY_REQUEST = {row.request: row for row in OPERATIONS.values()}
DATA = frozenset({18, 19, 20, 21, 22, 25})  # answered by a stream's native loop, not by the service


class Header(NamedTuple):
    operation: int
    status: int
    number: int
    length: int


def unpack_header(data: bytes, limit: int) -> Header:
    """The header; ProtocolError means that the framing is lost."""
    magic, operation, status, number, length = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"frame starts with {magic!r}, not {MAGIC!r}")
    if length > limit:
        raise ProtocolError(f"frame of {length} bytes, at most {limit} are allowed")
    return Header(operation, status, number, length)


def pack(operation: int, number: int, record: object) -> bytes:
    """A request's or a good reply's frame; RequestError names the field that cannot be sent."""
    return _frame(operation, 0, number, record)


def pack_error(operation: int, number: int, error: SmbError) -> bytes:
    """The frame that answers a request by ``error``."""
    status = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    return _frame(operation, status, number, Failure(str(error)[:4096]))


def _frame(operation: int, status: int, number: int, record: object) -> bytes:
    out = bytearray(HEADER.size)
    put(record, out)
    length = len(out) - HEADER.size
    HEADER.pack_into(out, 0, MAGIC, operation, status, number, length)
    return bytes(out)


def unpack_request(header: Header, body: bytes) -> object:
    """The request of a frame; ProtocolError (the connection stays usable) when it breaks its layout."""
    if header.operation not in OPERATIONS:
        raise ProtocolError(f"unknown operation {header.operation} (known: 1 to {max(OPERATIONS)})")
    if header.status:
        raise ProtocolError(f"a request's status is 0, not {header.status}")
    return unpack(OPERATIONS[header.operation].request, body)


def check_version(header: Header, body: bytes) -> None:
    """Refuse the Hello of another version, before it is unpacked: it may have another layout."""
    version = int.from_bytes(body[:2], "little")
    if header.operation == HELLO and len(body) >= 2 and version != VERSION:
        raise NotSupported(
            f"the client speaks protocol version {version}, the daemon version {VERSION}: install the same"
            " version of shmtrain for both"
        )


def raise_failure(header: Header, body: bytes) -> None:
    """Raise the error that a reply of status != 0 carries."""
    kind: Callable[[str], SmbError] = ERRORS.get(header.status, SmbError)
    raise kind(unpack(Failure, body).message)


def pack_stripe(stripe: Stripe) -> bytes:
    """The meta of a stripe of a larger segment."""
    out = bytearray(STRIPE_MAGIC)
    put(stripe, out)
    return bytes(out)


def stripe_of(meta: bytes) -> Stripe | None:
    """What a stripe's meta says; None for the meta of a segment by itself."""
    if not meta.startswith(STRIPE_MAGIC):
        return None
    try:
        return unpack(Stripe, meta[len(STRIPE_MAGIC) :])
    except ProtocolError:
        return None
