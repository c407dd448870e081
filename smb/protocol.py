"""What client and daemon say to each other: one table of operations, their layouts, the framing. No I/O.

A frame is a header and a body. The header (20 bytes, little endian) holds the magic ``SMB1``, the operation's
code, a status (0 in requests and in good replies, else a code of ERRORS), the request's number, which the
reply repeats, and the length of the body. The body is the operation's fields, one after the other, as the
dataclasses below lay them out. A reply of status != 0 has a ``Failure`` as its body. Descriptors travel
beside a reply's first byte (SCM_RIGHTS).

A body that breaks its layout is answered by ProtocolError and the connection stays usable; a header that
breaks the framing ends the connection, since nobody knows where the next frame starts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from smb import errors
from smb.errors import ProtocolError, SmbError
from smb.layout import Blob, Choice, Number, Rows, Text, Truth, put, unpack

VERSION = 1
MAGIC = b"SMB1"
HEADER = struct.Struct("<4sHHQI")
MAX_REQUEST = 1 << 20  # bytes of a request's body
MAX_REPLY = 1 << 26  # bytes of a reply's body: a list of all segments is the longest
MAX_META = 1 << 16
MAX_SECONDS = 1e9
MAX_PARTIES = 1 << 16

DTYPES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
}  # name -> bytes of an element; the order is the wire's
LIFETIMES = ("owner", "attached", "stay")

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
    100: errors.TransportError,
    101: errors.SmbError,
}
_CODES = {kind: code for code, kind in ERRORS.items()}

U16 = Annotated[int, Number("H", 0, 2**16 - 1)]
U32 = Annotated[int, Number("I", 0, 2**32 - 1)]
U64 = Annotated[int, Number("Q", 0, 2**64 - 1)]
I64 = Annotated[int, Number("q", -(2**63), 2**63 - 1)]
Count = Annotated[int, Number("Q", 1, 2**48)]
Parties = Annotated[int, Number("I", 1, MAX_PARTIES)]
Seconds = Annotated[float, Number("d", 0.0, MAX_SECONDS)]
Flag = Annotated[bool, Truth()]
Key = Annotated[str, Text(255, key=True)]
Name = Annotated[str, Text(255)]
Message = Annotated[str, Text(1 << 16)]
Meta = Annotated[bytes, Blob(MAX_META)]
Dtype = Annotated[str, Choice(tuple(DTYPES))]
Lifetime = Annotated[str, Choice(LIFETIMES)]


# Layouts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """Nothing to say."""


@dataclass(frozen=True)
class Bye:
    """Ends the session."""


@dataclass(frozen=True)
class Failure:
    """Why a request was refused; the header's status names the error's class."""

    message: Message


@dataclass(frozen=True)
class Hello:
    """Opens a session, or joins one with another connection of the same process."""

    version: U16
    session: U64  # 0 asks for a new one
    secret: U64  # what Welcome gave; 0 for a new session
    name: Name  # for messages and `smb ls -v`


@dataclass(frozen=True)
class Welcome:
    session: U64
    secret: U64
    pid: U32  # the daemon's
    lease: Seconds


@dataclass(frozen=True)
class Create:
    """Makes a segment, or with or_attach joins an equal one."""

    key: Key
    count: Count
    dtype: Dtype
    lifetime: Lifetime
    meta: Meta
    or_attach: Flag
    publish: Flag  # False: the creator fills the payload first and then sends Publish
    timeout: Seconds  # how long to wait for another creator's Publish


@dataclass(frozen=True)
class Opened:
    segment: U64  # the number that Publish, Detach and Stuck name
    created: Flag
    count: Count
    dtype: Dtype
    lifetime: Lifetime
    meta: Meta


@dataclass(frozen=True)
class Publish:
    segment: U64


@dataclass(frozen=True)
class Attach:
    key: Key
    readonly: Flag
    compare: Flag  # True: refuse unless the segment's meta equals this one's
    meta: Meta


@dataclass(frozen=True)
class Detach:
    segment: U64


@dataclass(frozen=True)
class Free:
    key: Key


@dataclass(frozen=True)
class StatOf:
    key: Key


@dataclass(frozen=True)
class Stat:
    """One segment as the daemon knows it."""

    key: Key
    count: Count  # elements
    dtype: Dtype
    lifetime: Lifetime
    meta: Meta
    version: U64  # completed updates
    nbytes: U64
    sessions: U32  # attached now
    owner: U32  # pid of the creator, 0 when its session is over
    age: Seconds  # since it was made


@dataclass(frozen=True)
class ListOf:
    prefix: Name


@dataclass(frozen=True)
class Listing:
    segments: Annotated[tuple[Stat, ...], Rows(Stat)]


@dataclass(frozen=True)
class Sessions:
    """Asks for the sessions."""


@dataclass(frozen=True)
class KeyRow:
    key: Key


@dataclass(frozen=True)
class SessionRow:
    pid: U32
    name: Name
    segments: Annotated[tuple[KeyRow, ...], Rows(KeyRow)]


@dataclass(frozen=True)
class SessionList:
    sessions: Annotated[tuple[SessionRow, ...], Rows(SessionRow)]


@dataclass(frozen=True)
class Add:
    key: Key
    amount: I64  # 0 reads the counter


@dataclass(frozen=True)
class Value:
    value: I64  # before the addition; after the wait


@dataclass(frozen=True)
class Await:
    """Waits until the counter is at least ``value``."""

    key: Key
    value: I64
    timeout: Seconds


@dataclass(frozen=True)
class Barrier:
    name: Key
    parties: Parties
    timeout: Seconds


@dataclass(frozen=True)
class Lock:
    name: Key
    token: U64  # one acquisition; Unlock names it again
    timeout: Seconds


@dataclass(frozen=True)
class Unlock:
    name: Key
    token: U64


@dataclass(frozen=True)
class Stuck:
    """A client waits for a chunk lock; sent again each second while it does."""

    segment: U64
    chunk: U64
    thread: U32  # the holder's thread id, as the lock word has it


@dataclass(frozen=True)
class Mend:
    """A reader found a chunk that a dead writer left half-written."""

    segment: U64


@dataclass(frozen=True)
class Verdict:
    killed: Flag
    seconds: Seconds  # for how long the daemon knows the holder to be stuck
    holder: Name


# The table -----------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    code: int
    request: type
    reply: type
    descriptors: int  # how many travel with a good reply
    about: str


def _table(*rows: Operation) -> dict[int, Operation]:
    return {row.code: row for row in rows}


OPERATIONS = _table(
    Operation(1, Hello, Welcome, 1, "open or join a session; the descriptor is the daemon's life word"),
    Operation(2, Bye, Done, 0, "end the session: owned segments are freed, locks and places released"),
    Operation(3, Create, Opened, 2, "make a segment; descriptors: control and payload"),
    Operation(4, Publish, Done, 0, "give the created segment its name; its initial values are in place"),
    Operation(5, Attach, Opened, 2, "join a segment; descriptors: control and payload"),
    Operation(6, Detach, Done, 0, "leave a segment"),
    Operation(7, Free, Done, 0, "take the key away; the memory goes when the last session detaches"),
    Operation(8, StatOf, Stat, 0, "one segment's figures"),
    Operation(9, ListOf, Listing, 0, "the figures of all segments whose key starts with a prefix"),
    Operation(10, Sessions, SessionList, 0, "the sessions and what they are attached to"),
    Operation(11, Add, Value, 0, "add to a counter, which starts at 0; gives the value before"),
    Operation(12, Await, Value, 0, "wait for a counter"),
    Operation(13, Barrier, Done, 0, "wait until that many have come"),
    Operation(14, Lock, Done, 0, "take a named lock; its holder's death releases it"),
    Operation(15, Unlock, Done, 0, "release a named lock, or withdraw from waiting for it"),
    Operation(16, Stuck, Verdict, 0, "report the holder of a chunk lock that lets others wait"),
    Operation(17, Mend, Done, 0, "ask for chunks that dead writers left to be made whole"),
)
BY_REQUEST = {row.request: row for row in OPERATIONS.values()}


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


def raise_failure(header: Header, body: bytes) -> None:
    """Raise the error that a reply of status != 0 carries."""
    kind: Callable[[str], SmbError] = ERRORS.get(header.status, SmbError)
    raise kind(unpack(Failure, body).message)
