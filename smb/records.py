"""The records of protocol.py's operations: what a request and its reply hold, field by field. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from smb.layout import Blob, Choice, Number, Rows, Text, Truth

MAX_PIECE = 1 << 20  # bytes of elements that one data frame carries
MAX_HEAD = 64  # bytes of a data operation's head
MAX_META = 1 << 16
MAX_SECONDS = 1e9
MAX_PARTIES = 1 << 16
NONCE = 32  # bytes of a nonce and of a proof

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
WIRES = ("float32", "bfloat16", "float16", "int8", "anew", "moved")
# anew: float32 that also starts the shadow; moved: float32 answered by the values after the move, not by d

U16 = Annotated[int, Number("H", 0, 2**16 - 1)]
U32 = Annotated[int, Number("I", 0, 2**32 - 1)]
U64 = Annotated[int, Number("Q", 0, 2**64 - 1)]
I64 = Annotated[int, Number("q", -(2**63), 2**63 - 1)]
Count = Annotated[int, Number("Q", 1, 2**48)]
Piece = Annotated[int, Number("Q", 0, MAX_PIECE)]
Last = Annotated[int, Number("B", 0, 2)]
Parties = Annotated[int, Number("I", 1, MAX_PARTIES)]
Seconds = Annotated[float, Number("d", 0.0, MAX_SECONDS)]
Factor = Annotated[float, Number("d", -1.7976931348623157e308, 1.7976931348623157e308)]
Rate = Annotated[float, Number("d", 0.0, 1.0)]
Flag = Annotated[bool, Truth()]
Key = Annotated[str, Text(255, key=True)]
Name = Annotated[str, Text(255)]
Message = Annotated[str, Text(1 << 16)]
Meta = Annotated[bytes, Blob(MAX_META)]
Nonce = Annotated[bytes, Blob(NONCE)]
Dtype = Annotated[str, Choice(tuple(DTYPES))]
Lifetime = Annotated[str, Choice(LIFETIMES)]
Wire = Annotated[str, Choice(WIRES)]


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
    """Opens a session, or joins one with another connection of the same client.

    A stream that is given is taken over from its earlier connection, which the daemon ends. Closed: no such
    session or stream (the daemon restarted, or the lease ended), and the client begins anew.
    """

    version: U16
    session: U64  # 0 asks for a new one
    secret: U64  # what Welcome gave; 0 for a new session
    stream: U64  # 0 asks for a new one; only without "mapped"
    mapped: Flag  # True: the client maps segments itself and wants descriptors; refused where it cannot
    pid: U32  # the client's own word, for messages; over a Unix socket the kernel's counts
    name: Name  # for messages and `smb ls -v`


@dataclass(frozen=True)
class Welcome:
    session: U64
    secret: U64
    stream: U64  # 0 for a mapped client
    pid: U32  # the daemon's
    lease: Seconds
    daemon: U64  # a number that no other daemon has
    unix: Name  # where it listens on its own host, or ""
    rdma: Name  # HOST:PORT where RDMA is set up, "*" for the host that the client came to; or ""


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
    updates: U64  # how often the counter was changed, after it


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
class Read:
    """The reply is the elements alone. A piece lies within MAX_PIECE; never torn inside a chunk."""

    segment: U64
    offset: U64  # elements
    count: Piece  # elements


@dataclass(frozen=True)
class Write:
    """One piece of an update: ``count`` elements follow. A user's operation is one piece or several.

    The pieces of all updates of a stream are numbered 1, 2, 3, .. without gaps. One that was applied already
    is answered by its remembered reply. After an error the pieces that follow are refused unapplied until one
    that ends the operation has passed. A piece lies within one chunk (256 KiB of the segment).
    """

    segment: U64
    sequence: U64  # of this stream
    acknowledged: U64  # the highest sequence up to which every reply has arrived: the daemon forgets these
    offset: U64  # elements
    count: Piece  # elements
    last: Last  # 0 more pieces follow, 1 ends the operation and counts it, 2 ends it uncounted


@dataclass(frozen=True)
class Accumulate:
    """One piece of segment += scale * source, as in Write; float32 segments. ``count`` elements follow."""

    segment: U64
    sequence: U64
    acknowledged: U64
    offset: U64
    count: Piece
    last: Last
    wire: Wire  # how the elements travel
    scale: Factor


@dataclass(frozen=True)
class Exchange:
    """One piece of the elastic move, as in Write: W_x follows; d = alpha (W_x - W_g) behind the reply."""

    segment: U64
    sequence: U64
    acknowledged: U64
    offset: U64
    count: Piece
    last: Last
    wire: Wire
    alpha: Rate


@dataclass(frozen=True)
class AccumulateFrom:
    """segment += scale * source from ``offset`` on, both at the daemon; a whole operation."""

    segment: U64
    sequence: U64
    acknowledged: U64
    source: U64  # the segment that is added, from its element 0 on, to its end
    offset: U64
    scale: Factor


@dataclass(frozen=True)
class Applied:
    """An update's piece was applied."""

    version: U64  # the segment's after it


@dataclass(frozen=True)
class VersionOf:
    segment: U64


@dataclass(frozen=True)
class WaitVersion:
    """Waits until the segment's version is at least ``version``; WaitTimeout otherwise."""

    segment: U64
    version: U64
    timeout: Seconds


@dataclass(frozen=True)
class Acknowledge:
    """The replies up to this sequence have arrived; also a sign of life, which keeps the lease."""

    acknowledged: U64


@dataclass(frozen=True)
class Verdict:
    killed: Flag
    seconds: Seconds  # for how long the daemon knows the holder to be stuck
    holder: Name


@dataclass(frozen=True)
class Challenge:
    """The client's nonce, before Hello, to a daemon that asks for a token."""

    nonce: Nonce


@dataclass(frozen=True)
class Challenged:
    nonce: Nonce


@dataclass(frozen=True)
class Prove:
    """HMAC-SHA256 under the token of these, one after the other: "smb 1 client" and a zero byte, the client's
    nonce, the daemon's nonce, the SHA-256 of the daemon's certificate (DER), or of nothing without TLS.
    """

    proof: Nonce


@dataclass(frozen=True)
class Proved:
    """The same with "daemon" in place of "client"."""

    proof: Nonce


# Segments over several daemons ----------------------------------------------------------------------------

MAX_STRIPES = 256


@dataclass(frozen=True)
class Stripe:
    """What the meta of a stripe of a larger segment holds, behind STRIPE_MAGIC.

    Chunk k of the larger segment lies at daemon k % stripes, as its chunk k // stripes.
    """

    stripe: U16  # which one this is
    stripes: U16  # daemons of the box
    made: U64  # drawn by chance: the same in all stripes of one segment
    count: Count  # elements of the larger segment
    addresses: Message  # of the daemons, as the creator named them, with commas
    meta: Meta  # the user's

    def __str__(self) -> str:
        return f"stripe {self.stripe} of {self.stripes}: connect to {self.addresses}"


STRIPE_MAGIC = b"\x00smb\xd1striped\x01"  # what the meta of a stripe begins with
