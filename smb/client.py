"""What users import: a Box is one client's standing with a daemon, a Segment is memory they share."""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from smb import protocol
from smb.errors import (
    Closed,
    KeyExists,
    NonFinite,
    NotSupported,
    RangeError,
    RequestError,
    SmbError,
    TypeMismatch,
    WaitTimeout,
)
from smb.layout import check_key
from smb.protocol import Stat
from smb.transport.base import Array, Attachment, Opening, Options, Transport, connect, named
from smb.transport.stream import refuse_wire, wire_code
from smb.vectors import Vectors, check_threads
from smb.waiting import FOREVER, Counter, Lock, seconds

if TYPE_CHECKING:
    from smb.transport.stream import WireStats

SLICE = 1.0  # seconds that one native wait takes before it looks around


class Segment(Vectors):
    """Named memory of ``count`` elements of ``dtype`` that every client of the box may attach to.

    Arrays are C-contiguous numpy arrays or CPU torch tensors of the segment's dtype; offsets and lengths
    are in elements. Any thread may use it. ``threads`` is how many cores one operation may use.

    key, count, dtype, lifetime, meta   as created
    created     whether this create call made it, not somebody before
    readonly    whether writing is refused
    transport   "local", "shm", "tcp" or "rdma"
    staleness   updates by others since my previous exchange (or since I attached), as of my last exchange
    """

    def __init__(self, box: Box, key: str, opening: Opening, readonly: bool = False) -> None:
        reply = opening.reply
        self.key, self.created, self.readonly = key, reply.created, readonly
        self.count, self.dtype, self.lifetime, self.meta = (
            reply.count,
            reply.dtype,
            reply.lifetime,
            reply.meta,
        )
        self.transport = box.transport
        self.staleness = 0
        self._box, self._number = box, reply.segment
        self._attachment = opening.attachment
        self._seen = opening.attachment.version
        self._bind(opening.attachment)
        self._finalize = weakref.finalize(self, opening.attachment.close)  # dropped without detach
        self._finalize.atexit = False

    def _bind(self, attachment: Attachment) -> None:
        # bound once: looking the methods up at each call would cost a tenth of a small exchange
        self._read, self._write = attachment.read, attachment.write
        self._accumulate, self._exchange = attachment.accumulate, attachment.exchange
        self._wait, self._rescue = attachment.wait, attachment.rescue

    def __repr__(self) -> str:
        return f"<Segment {self.key!r}: {self.count} x {self.dtype}, {self.transport}>"

    def _named(self, error: SmbError) -> SmbError:
        who = f" by {self._box.name} (pid {os.getpid()})" if isinstance(error, NonFinite) else ""
        mine = named(error, f"segment {self.key!r}{who}")
        mine.__dict__.update(error.__dict__)  # NonFinite's chunk and element
        return mine

    def read(self, out: Array = None, offset: int = 0, threads: int = 1) -> Array:
        """Copy elements from ``offset`` on into ``out``, as many as it has; by default a new array.

        May mix two updates at chunk borders (256 KiB), never inside a chunk. Returns ``out``.
        """
        if out is None:
            if not 0 <= offset <= self.count:
                raise RangeError(f"segment {self.key!r}: offset {offset} is not in 0..{self.count}")
            out = np.empty(self.count - offset, self.dtype)
        try:
            check_threads(threads)
            self._read(out, offset, threads)
        except SmbError as error:
            raise self._named(error) from error
        return out

    def write(self, array: Array, offset: int = 0, threads: int = 1) -> int:
        """Copy ``array`` into the segment from ``offset`` on; returns the version after it."""
        try:
            check_threads(threads)
            version = self._write(array, offset, threads)
        except SmbError as error:
            raise self._named(error) from error
        self._seen += 1  # mine, so that it counts in nobody's staleness
        return version

    def descriptor(self) -> int:
        """A duplicate of the memory's descriptor, for another process of this host to map; yours to close.

        What goes past the box is neither locked nor counted. Raises NotSupported where it lies elsewhere.
        """
        own = int(getattr(self._attachment, "payload_fd", -1))
        if own < 0:
            raise NotSupported(f"segment {self.key!r}: its memory is not on this host ({self.transport})")
        return os.dup(own)

    def accumulate(
        self, source: Any, scale: float = 1.0, offset: int = 0, threads: int = 1, *, wire: str = "float32"
    ) -> int:
        """Add ``scale`` times ``source``, a segment or an array, from ``offset`` on; float32.

        wire  how an array travels where it has to: "float32", "bfloat16", "float16" or "int8" (a scale for
              each 256 elements). What rounding takes away is added to this thread's next accumulate

        Returns the version after it. NonFinite names the first chunk with NaN or Inf: chunks before it were
        added, it and later ones were not.
        """
        if isinstance(source, Segment):
            source = source._attachment
        try:
            check_threads(threads)
            version = self._accumulate(source, scale, offset, threads, **self._by(wire))
        except SmbError as error:
            raise self._named(error) from error
        self._seen += 1
        return version

    def exchange(
        self, local: Array, alpha: float, offset: int = 0, threads: int = 1, *, wire: str = "float32"
    ) -> int:
        """The elastic move: d = alpha (local - segment); local -= d; segment += d. Returns the new version.

        local  (n,) float32, changed in place
        alpha  moving rate, 0 < alpha <= 1
        wire   as in accumulate, for what both ends then apply, so that nothing is lost by rounding: over tcp
               the differences to what was sent before, both ways; over rdma d, after a read in float32

        local + segment is unchanged. NonFinite names the first chunk of ``local`` with NaN or Inf: chunks
        before it have moved on both sides, it and later ones on neither.
        Source: Zhang, Choromanska, LeCun 2015, Algorithm 1.
        """
        try:
            check_threads(threads)
            if wire == "float32":
                version = self._exchange(local, alpha, offset, threads)
            else:
                version = self._exchange(local, alpha, offset, threads, **self._by(wire))
        except SmbError as error:
            raise self._named(error) from error
        others = version - self._seen - 1
        self.staleness = others if others > 0 else 0  # a restarted daemon may count from less
        self._seen = version
        return version

    def _by(self, wire: str) -> dict[str, str]:
        """The argument that asks for a wire type, where it is one that the transport moves."""
        if wire == "float32":
            return {}
        wire_code(wire)  # also where the source is a segment, of which nothing travels
        if not getattr(self._attachment, "wires", False):
            refuse_wire(wire, self.transport)
        return {"wire": wire}

    @property
    def wire_stats(self) -> WireStats | None:
        """Bytes moved and what quantising cost at this end, over tcp and rdma; else None."""
        told: Callable[[], WireStats] | None = getattr(self._attachment, "wire_stats", None)
        return told() if told else None

    @property
    def version(self) -> int:
        """Updates (write, accumulate, exchange) that are completed."""
        try:
            return self._attachment.version
        except SmbError as error:
            raise self._named(error) from error

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until the version is at least ``version``; returns what it then is. Raises WaitTimeout."""
        deadline = time.monotonic() + seconds(timeout)
        try:
            while not self._wait(version, max(0.0, min(SLICE, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    now = self._attachment.version
                    raise WaitTimeout(f"version is {now}, not yet {version}, after {timeout:g} s")
            return self._attachment.version
        except SmbError as error:
            raise self._named(error) from error

    def rescue(self, out: Array = None) -> Array:
        """Read the segment though the daemon is dead; every element is its value before or after an update.

        Returns ``out``, a new array by default.
        """
        out = np.empty(self.count, self.dtype) if out is None else out
        try:
            self._rescue(out)
        except SmbError as error:
            raise self._named(error) from error
        return out

    def detach(self) -> None:
        """Let go of the segment; twice is fine. Nothing but detach may be called afterwards."""
        if self._box._forget(self):
            self._end("it was detached")
            with contextlib.suppress(SmbError):  # a dead daemon has nothing to be told
                self._box._call(protocol.Detach(self._number))

    def _end(self, why: str) -> None:
        """Refuse every further operation with ``why``."""

        def refuse(*_: object, **__: object) -> Any:
            raise Closed(why)

        self._read = self._write = self._accumulate = self._exchange = self._wait = self._rescue = refuse
        self._finalize()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


class Box:
    """One client's standing with one daemon. Threads may share it; a forked child must connect for itself.

    transport  "local", "shm", "tcp" or "rdma"
    address    where the daemon listens; "local" for one in this process
    """

    def __init__(self, transport: Transport, address: str, options: Options) -> None:
        self.address, self.name, self.transport = address, options.name, transport.name
        self.timeout = options.timeout
        self._transport = transport
        self._lock = threading.Lock()
        self._segments = weakref.WeakSet[Segment]()  # weak: a box that nobody uses any more must go at once
        self._tokens = 0
        self._forked = self._closed = False
        self._finalize = weakref.finalize(self, transport.close)
        _boxes.add(self)

    def __repr__(self) -> str:
        return f"<Box at {self.address}>"

    @property
    def patient(self) -> bool:
        """Whether an operation waits while the daemon is away (``connect(reconnect=S)``), or raises Away."""
        return self._transport.patient

    @patient.setter
    def patient(self, wait: bool) -> None:
        self._transport.patient = wait

    def _call(self, request: object, timeout: float = 0.0) -> Any:
        self._check()
        return self._transport.call(request, timeout)

    def _check(self) -> None:
        if self._forked:
            raise Closed("this box belongs to the parent process: connect again after a fork")
        if self._closed:
            raise Closed("this box is closed")

    def _token(self) -> int:
        with self._lock:
            self._tokens += 1
            return self._tokens

    def _open(self, key: str, request: protocol.Create | protocol.Attach, initial: Array = None) -> Segment:
        self._check()
        opening = self._transport.open(request, initial)
        part = protocol.stripe_of(opening.reply.meta)
        if part:
            opening.attachment.close()
            self._call(protocol.Detach(opening.reply.segment))
            raise KeyExists(f"segment {key!r} is {part}")
        readonly = isinstance(request, protocol.Attach) and request.readonly
        segment = Segment(self, key, opening, readonly)
        with self._lock:
            self._segments.add(segment)
        return segment

    def _forget(self, segment: Segment) -> bool:
        with self._lock:
            known = segment in self._segments
            self._segments.discard(segment)
            return known

    def create(
        self,
        key: str,
        count: int,
        dtype: str = "float32",
        *,
        lifetime: str = "attached",
        initial: Array = None,
        or_attach: bool = False,
        meta: bytes = b"",
    ) -> Segment:
        """Make a segment of ``count`` elements, zeros or ``initial``; others see name and values at once.

        lifetime   "owner": until this box is closed or its process dies; "attached": as long as any session
                   is attached; "stay": until freed
        initial    array of ``count`` elements of ``dtype``; used only when this call makes the segment
        or_attach  join a segment that exists with the same count, dtype, lifetime and meta
        meta       up to 64 KiB that say what it is, such as a fingerprint of the job

        Segment.created tells who was first. Raises KeyExists, OutOfMemory, RequestError.
        """
        check_key(key)
        dtype = self._dtype(key, dtype)
        if initial is not None:
            initial = _initial(key, initial, count, dtype)
        wait = self.timeout if or_attach else 0.0
        request = protocol.Create(key, count, dtype, lifetime, meta, or_attach, initial is None, wait)
        try:
            return self._open(key, request, initial)
        except RequestError as error:
            raise _about(key, error) from error

    @staticmethod
    def _dtype(key: str, dtype: Any) -> str:
        name = dtype if isinstance(dtype, str) else getattr(np.dtype(dtype), "name", str(dtype))
        if name not in protocol.DTYPES:
            raise TypeMismatch(f"segment {key!r}: dtype {name!r} is none of {', '.join(protocol.DTYPES)}")
        return name

    def attach(self, key: str, readonly: bool = False, meta: bytes | None = None) -> Segment:
        """Join a segment. ``meta`` is compared when given. Raises UnknownKey, KeyExists for another meta."""
        request = protocol.Attach(check_key(key), readonly, meta is not None, meta or b"")
        return self._open(key, request)

    def counter(self, key: str) -> Counter:
        """The counter of this name; it starts at 0."""
        self._check()
        return Counter(self, key)

    def lock(self, name: str, timeout: float | None = None) -> Lock:
        """The lock of this name, for ``with box.lock(name):``."""
        self._check()
        return Lock(self, name, timeout)

    def barrier(self, name: str, n: int, timeout: float | None = None) -> None:
        """Wait until ``n`` clients (threads count each) have come. Raises WaitTimeout saying who came.

        A client that dies while it waits frees its place.
        """
        limit = seconds(timeout)
        self._call(protocol.Barrier(check_key(name), n, limit), limit)

    def list(self, prefix: str = "") -> list[str]:
        """The keys of all segments, sorted."""
        return [row.key for row in self.stats(prefix)]

    def stats(self, prefix: str = "") -> tuple[Stat, ...]:
        """The figures of all segments."""
        listing: protocol.Listing = self._call(protocol.ListOf(prefix))
        return listing.segments

    def stat(self, key: str) -> Stat:
        """One segment's figures. Raises UnknownKey."""
        stat: Stat = self._call(protocol.StatOf(check_key(key)))
        return stat

    def status(self) -> protocol.Report:
        """The daemon's figures: what each client did to segments, waits for and has counted."""
        report: protocol.Report = self._call(protocol.Status())
        return report

    def free(self, key: str) -> None:
        """Take the key away. Those attached keep the memory until they detach. Raises UnknownKey."""
        self._call(protocol.Free(check_key(key)))

    def snapshot(self, folder: str | os.PathLike[str] | None = None) -> str:
        """Have the daemon write a snapshot now; the file's path there.

        folder  on the daemon's host; by default the one it was started with. Raises SmbError when it fails.
        """
        named = _folder("snapshot", folder) if folder is not None else ""
        done: protocol.SnapshotDone = self._call(protocol.SnapshotNow(named), FOREVER)
        return done.path

    def restore(self, folder: str | os.PathLike[str]) -> int:
        """Load the newest whole snapshot of a folder on the daemon's host; how many segments it had.

        Nothing of it may exist in the box: else KeyExists, and nothing is loaded. Segments that live as long
        as clients do ("owner", "attached") go after a lease unless somebody attaches.
        """
        done: protocol.SnapshotDone = self._call(protocol.RestoreFrom(_folder("restore", folder)), FOREVER)
        return done.segments

    def sessions(self) -> builtins.list[dict[str, Any]]:
        """The daemon's clients: pid, name, and the keys of the segments they are attached to."""
        reply: protocol.SessionList = self._call(protocol.Sessions())
        return [
            {"pid": row.pid, "name": row.name, "segments": [key.key for key in row.segments]}
            for row in reply.sessions
        ]

    def close(self) -> None:
        """End the session: what it owns is freed, what it holds released. Twice is fine."""
        if self._closed or self._forked:
            return
        self._closed = True
        self._end("the box is closed")
        self._finalize()

    def _end(self, why: str) -> None:
        with self._lock:
            segments, self._segments = list(self._segments), weakref.WeakSet()
        for segment in segments:
            segment._end(why)

    def _orphan(self) -> None:
        """In a forked child."""
        self._lock = threading.Lock()  # may have been copied locked
        self._forked = True
        self._finalize.detach()
        self._transport.orphan()
        self._end("it belongs to the parent process: connect again after a fork")

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _folder(what: str, folder: str | os.PathLike[str]) -> str:
    """Its absolute path. An empty one, such as a variable that was not set, does not mean this folder."""
    if not os.fspath(folder):
        raise RequestError(f"{what}: the folder's name is empty")
    return os.path.abspath(folder)


def _about(key: str, error: RequestError) -> SmbError:
    return error if repr(key) in str(error) else named(error, f"segment {key!r}")


def _initial(key: str, initial: Array, count: int, dtype: str) -> Array:
    values = np.asarray(initial)
    if values.dtype != dtype:
        raise TypeMismatch(f"segment {key!r}: initial values are {values.dtype}, the segment is {dtype}")
    if values.size != count:
        raise RangeError(f"segment {key!r}: {values.size} initial values for {count} elements")
    return np.ascontiguousarray(values).reshape(-1)


def open_box(address: str, options: Options) -> Box:
    """A Box at ``address``, which names a transport."""
    return Box(connect(address, options), address, options)


_boxes: weakref.WeakSet[Box] = weakref.WeakSet()


def _orphan_all() -> None:
    for box in list(_boxes):
        box._orphan()


os.register_at_fork(after_in_child=_orphan_all)
