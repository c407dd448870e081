"""Vector kernels, and segments as mapped into this process (see smb/segment.py).

Arrays are C-contiguous buffers (numpy) or CPU torch tensors of float32 unless said otherwise; n is their
length. threads is an upper bound: helpers run on the processors that are free of the caller, and short
vectors take none. Results are the same bits whatever the machine and the thread count. Raises TypeMismatch
for an array that does not fit, ValueError for lengths that differ or an alpha outside (0, 1].
"""

from collections.abc import Callable
from typing import Any

CHUNK_BYTES: int
DTYPES: tuple[str, ...]

def accumulate(dst: Any, src: Any, scale: float = 1.0, threads: int = 1) -> None:
    """dst += scale * src."""

def axpy(a: float, x: Any, y: Any, threads: int = 1) -> None:
    """y += a * x."""

def exchange(local: Any, center: Any, alpha: float, threads: int = 1, check: bool = True) -> int:
    """d = alpha (local - center); local -= d; center += d, in one pass over private memory.

    Returns -1, or the index of a NaN or Inf in local: the block of 65,536 elements that holds it was not
    moved (with one thread nothing behind it either). check=False moves whatever comes.
    Source: Zhang, Choromanska, LeCun 2015, equations 2 and 3.
    """

def elastic_pull(local: Any, center: Any, alpha: float, out: Any | None = None, threads: int = 1) -> Any:
    """Move ``local`` towards ``center``; return the increment the center is owed.

    local   (n,) changed in place: x <- x - d, with d = alpha (x - c)
    center  (n,) a snapshot c of the global weights; may be stale
    alpha   moving rate, 0 < alpha <= 1
    out     (n,) takes d; a new numpy array otherwise

    Returns d. x + c is unchanged once d is accumulated into c.
    Source: Zhang, Choromanska, LeCun 2015, Algorithm 1.
    """

def dot(x: Any, y: Any, threads: int = 1) -> float:
    """Sum of x[i] y[i], summed in float64."""

def scale(x: Any, a: float, threads: int = 1) -> None:
    """x *= a."""

def fill(x: Any, value: float, threads: int = 1) -> None:
    """x[:] = value."""

def copy(dst: Any, src: Any, threads: int = 1) -> None:
    """dst[:] = src; from 8 MiB on past the caches, by non-temporal stores."""

def adagrad(sums: Any, gradient: Any, rate: float, scale: float = 1.0, epsilon: float = 1e-8) -> None:
    """q = scale gradient: sums += q^2; gradient becomes the step rate q / (sqrt(sums) + epsilon)."""

def first_nonfinite(x: Any) -> int:
    """Index of the first NaN or Inf, or -1."""

def to_bfloat16(dst: Any, src: Any, threads: int = 1) -> None:
    """float32 to bfloat16 bits (dst holds uint16): round to nearest even, NaN stays NaN."""

def from_bfloat16(dst: Any, src: Any, threads: int = 1) -> None:
    """bfloat16 bits (src holds uint16) to float32, exact."""

def to_float16(dst: Any, src: Any, threads: int = 1) -> None:
    """float32 to float16 (dst holds float16 or its bits as uint16): nearest even, overflow to Inf."""

def from_float16(dst: Any, src: Any, threads: int = 1) -> None:
    """float16 (or its bits as uint16) to float32, exact."""

def control_bytes(payload_bytes: int) -> int:
    """Bytes of the control file of a segment of so many payload bytes, before rounding to pages."""

def thread_id() -> int:
    """The calling thread's id as the kernel and the locks know it."""

class Life:
    def __init__(self, fd: int, keep: bool) -> None: ...
    @property
    def alive(self) -> bool: ...
    def close(self) -> None: ...

class Mapping:
    def __init__(
        self,
        control_fd: int,
        payload_fd: int,
        count: int,
        dtype: str,
        readonly: bool,
        life: Life | None = None,
    ) -> None: ...
    @property
    def count(self) -> int:
        """Elements."""

    @property
    def dtype(self) -> str: ...
    @property
    def version(self) -> int:
        """Completed updates: writes, accumulates and exchanges, counted when they end."""

    def read(self, out: Any, offset: int = 0, threads: int = 1, stripe: int = 0, stripes: int = 1) -> None:
        """stripes above 1, here and in the next three: one stripe of a larger segment, which offset and array
        are of; what lies here is done and not counted (smb/pieces.py)."""

    def write(
        self, array: Any, offset: int = 0, threads: int = 1, stripe: int = 0, stripes: int = 1
    ) -> int: ...
    def accumulate(
        self,
        source: Any,
        scale: float = 1.0,
        offset: int = 0,
        threads: int = 1,
        stripe: int = 0,
        stripes: int = 1,
    ) -> int: ...
    def exchange(
        self, local: Any, alpha: float, offset: int = 0, threads: int = 1, stripe: int = 0, stripes: int = 1
    ) -> int: ...
    def count_update(self) -> int:
        """Count an update of the larger segment, done in all its stripes; returns the version after it."""

    def combine(
        self,
        how: str,
        scalar: float,
        source: Mapping | None,
        offset: int,
        count: int,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """ "scale", "fill" (by scalar), "copy", "axpy" (of source from element 0 on); float32 but for copy.

        counts=False does not count the update. Returns the version.
        """

    def adagrad(
        self,
        sums: Mapping,
        gradient: Mapping,
        rate: float,
        scale: float,
        epsilon: float,
        offset: int,
        count: int,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """sums += (scale gradient)^2; this -= rate scale gradient / (sqrt(sums) + epsilon), chunk by chunk.

        Elements [offset, offset + count) of three float32 segments. counts as in combine. Returns the
        version. NonFinite before anything has moved.
        """

    def reduce(self, how: str, other: Mapping | None = None, threads: int = 1) -> float:
        """ "dot" with a segment of the same count, itself allowed, or "sum"; in float64, chunks in order."""

    def initialise(self, values: Any, threads: int = 1) -> None:
        """Write all values without counting an update."""

    def prefault(self, threads: int = 1, huge: bool = False) -> None:
        """Make all pages present, huge ones where asked for and as far as they are filled. Raises OSError."""

    def rescue(self, out: Any, offset: int = 0) -> int:
        """read() that does not ask whether the daemon lives; returns how many chunks were half-written."""

    def wait(self, version: int, timeout: float) -> bool:
        """Whether the version reached this value within so many seconds."""

    def repair(self, tid_alive: Callable[[int], bool] | None = None) -> int:
        """Free the locks of dead threads and make what they left half-written readable.

        Returns how many chunks needed it. tid_alive decides about an owner (default: ask the kernel).
        """

    def holders(self) -> list[tuple[int, int]]:
        """(chunk, thread id) of the locks held now."""

    def follow(self, life: Life) -> None:
        """The next daemon has taken this memory over."""

    def replace(self, control_fd: int, payload_fd: int, life: Life) -> None:
        """The next daemon has other memory of this size under the name. Raises OSError."""

    def tally(self, session: int) -> bool:
        """Count this client's operations in the segment's line of this session; False when it has no room."""

    def tallies(self) -> dict[int, tuple[int, int, int, int]]:
        """Session -> (operations, bytes in, bytes out, staleness or -1), as the clients themselves say."""

    def forget_tally(self, session: int) -> None:
        """The daemon's: the line of a session that is over is free again."""

    def hold_chunk(self, chunk: int, half_written: bool = True) -> None:
        """For tests: be a writer in the middle of a chunk, from the calling thread."""

    def release_chunk(self, chunk: int) -> None:
        """For tests: end what hold_chunk began."""

    def close(self) -> None: ...

# Data operations over sockets (native/net): the daemon's side

MAX_DATA_BODY: int
"""The longest body of a data request, in bytes."""
DATA_HEADS: dict[int, int]
"""Operations that Stream answers, with the bytes of their heads."""

def stream_memory() -> int:
    """Bytes that all streams of this process hold for pieces under way, kept replies and shadows."""

def limit_stream_memory(bytes: int) -> None:
    """Let there be no more of it: what needs more is refused with OutOfMemory. Without a limit at first."""

class Table:
    """What one session may reach over its sockets. Any thread may call any method."""

    def __init__(self) -> None: ...
    def add(self, number: int, mapping: Mapping, writable: bool) -> None:
        """Let the session reach the segment as ``number``; again for another ``writable``. Raises Closed."""

    def remove(self, number: int) -> None:
        """Take it away; an operation under way ends normally. Unknown numbers are fine."""

    def revoke(self) -> None:
        """Fencing: returns when no operation of the session is under way, and none will be. Twice is fine."""

    @property
    def revoked(self) -> bool: ...

class Stream:
    """The daemon's end of what one client thread asks for; belongs to a session, outlives its connections.

    Each update is applied once, by its sequence; the last ``window`` replies are kept until the client
    acknowledges them.

    rate, burst    requests a second and at once; more are slowed down, not refused (rate 0: no limit)
    shadow_limit   bytes of shadows (for narrow wires) it may keep
    patience       seconds that an operation waits for one chunk's lock
    on_stuck       called about each second of such a wait: (segment, chunk, holder's thread id, seconds)
    """

    def __init__(
        self,
        table: Table,
        *,
        rate: float = 0.0,
        burst: float = 0.0,
        window: int = 16,
        shadow_limit: int = 1 << 30,
        patience: float = 60.0,
        on_stuck: Callable[[int, int, int, float], None] | None = None,
    ) -> None: ...
    def serve(self, fd: int, idle_seconds: float) -> bytes | None:
        """Answer data requests until another frame comes: its 20 header bytes, unchecked, its body unread.

        None when the peer ended the stream between frames, also after a shutdown() by another thread. Raises
        TimeoutError when nothing came for so long, or when a frame that has begun (a reply) takes more than
        10 s (30 s) and a second for each 64 KiB; ConnectionError in the middle of a frame, OSError, Closed
        when the table is revoked. fd may block, which is faster; its timeouts are then set.
        """

    def handle(self, header: bytes, body: Any) -> bytes:
        """The reply frame to one data request. ``body`` is a contiguous buffer of header.length bytes.

        Raises ProtocolError when the header is no data request's, Closed when the table is revoked.
        """

    @property
    def applied(self) -> int:
        """The sequence of the last update."""

    @property
    def acknowledged(self) -> int: ...
    @property
    def held(self) -> int:
        """Replies kept for being sent again."""

    @property
    def bytes_in(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...
    @property
    def operations(self) -> int:
        """Data frames answered."""

    @property
    def throttled(self) -> int:
        """Requests that were slowed down."""

    @property
    def shadow_bytes(self) -> int: ...
    @property
    def staleness(self) -> int:
        """Updates by others between the last exchange and this stream's update before it; else -1."""

    @property
    def last_seen(self) -> float:
        """time.monotonic() of the last data frame; 0 before the first."""

# and the client's, see smb/transport/stream.py

class ClientStream:
    def __init__(self, window: int = 8) -> None: ...
    def reset(self) -> None: ...
    def forget(self, segment: int) -> None: ...
    def next_number(self) -> int: ...
    def stats(self, segment: int) -> tuple[int, int, float, float]:
        """bytes sent, bytes received, squared error, squared sum."""

    @property
    def sequence(self) -> int:
        """The last update's that was begun."""

    @property
    def acknowledged(self) -> int: ...

class Transfer:
    """One operation: drive() does it all over a plain socket; the other methods are for a loop in Python."""

    def __init__(
        self,
        stream: ClientStream,
        verb: str,
        segment: int,
        array: Any = None,
        offset: int = 0,
        scalar: float = 1.0,
        count: int = 0,
        dtype: str = "float32",
        wire: int = 0,
        counts: bool = True,
        stripe: int = 0,
        stripes: int = 1,
        source: int = 0,
    ) -> None: ...
    def drive(self, fd: int, timeout: float, peer: str, ticking: bool = False) -> int: ...
    def restart(self) -> None:
        """A new connection: what has no reply is sent again."""

    def give_up(self) -> None:
        """Begin no more pieces; those begun still have their replies coming."""

    def outgoing(self) -> memoryview:
        """What to send next; empty when nothing is to be sent now. Valid until sent()."""

    def sent(self, bytes: int) -> None: ...
    def incoming(self) -> memoryview:
        """Where to receive to. Valid until received()."""

    def received(self, bytes: int) -> None: ...
    def absorb(self, data: bytes) -> None:
        """What was received elsewhere, of any length."""

    @property
    def in_place(self) -> bool:
        """Whether the next bytes replace the user's values: whole elements alone, or through absorb()."""

    def outcome(self) -> int:
        """The version, once finished; raises what the operation came to."""

    @property
    def expecting(self) -> bool: ...
    @property
    def finished(self) -> bool: ...

def wire_bytes(wire: int, count: int) -> int:
    """Bytes that so many elements take; wire as in smb.transport.stream.WIRES."""

def to_wire(data: Any, values: Any, wire: int) -> None:
    """float32 values, which hold no NaN, as they travel: into ``data``, of wire_bytes() single bytes."""

def from_wire(values: Any, data: Any, wire: int) -> None:
    """Back. The peer decides what is in there: NaN and Inf may come out."""
