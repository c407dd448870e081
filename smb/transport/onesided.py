"""The transport by RDMA: segments are read and written without the daemon, updates travel behind their data.

Sessions, keys and waits go over a TCP connection to the same daemon (tcp.py), as does the set-up of the queue
pairs, one for each thread.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from smb import network, protocol, tls
from smb.errors import RequestError, TransportError, TypeMismatch
from smb.pieces import before, pieces
from smb.segment import CHUNK_BYTES
from smb.transport import ports, rdma
from smb.transport.arrays import Arrays, Flat, check_range, flat
from smb.transport.base import Array, Options
from smb.transport.channel import PIECE, Channel, Move
from smb.transport.narrow import Ledger, NarrowAccumulation, NarrowMove, Quantiser
from smb.transport.pipeline import F32, Accumulation, ElasticMove, Job, Piece, Pipeline, update
from smb.transport.remote import Carrier, RemoteAttachment
from smb.transport.stream import WireStats, wire_code
from smb.transport.tcp import TcpTransport
from smb.transport.threads import PerThread

BY_COPY = 1 << 16  # bytes up to which an array goes through memory that is registered already
ENDURANCE = 5.0  # seconds for which a daemon may be out of reach before it counts as dead
PORT = "SMB_RDMA"  # the environment variable that says which port to use: DEVICE[/PORT[/GID_INDEX]]


class Cut(NamedTuple):
    """Part of a one-sided transfer, in bytes: where in the array, where in the segment, how many."""

    at: int
    there: int
    nbytes: int


class RdmaAttachment(RemoteAttachment):
    """A segment whose elements are reached one-sidedly.

    A read may see part of an update within a chunk, and a write takes no lock: one that meets another update
    of the same elements may mix with it. Updates among themselves are whole, over every transport.
    """

    _carrier: RdmaTransport
    _known: tuple[int, protocol.Region] | None = None  # with the session that it holds for

    def __init__(
        self,
        carrier: Carrier,
        request: protocol.Create | protocol.Attach,
        opened: protocol.Opened,
        generation: int,
    ) -> None:
        super().__init__(carrier, request, opened, generation)
        self._ledger = Ledger()
        self._threads = threading.local()  # .owed: what rounding took away from this thread's accumulates

    def _place(self, offset: int) -> rdma.Place:
        """Where element ``offset`` lies."""
        generation = self._carrier.generation
        if self._known is None or self._known[0] != generation:
            self._known = generation, self._carrier.call(protocol.RegionOf(self.named), 0.0)
        region = self._known[1]
        return rdma.Place(region.address + offset * self._itemsize, region.key)

    @property
    def _itemsize(self) -> int:
        return protocol.DTYPES[self._dtype]

    @property
    def _per_chunk(self) -> int:
        return CHUNK_BYTES // self._itemsize

    def _flat(
        self, array: Array, verb: str, offset: int, stripe: int, stripes: int, *, writable: bool = False
    ) -> Flat:
        """The array; what lies here of its range from ``offset`` on is within the segment."""
        given = flat(array, self._dtype, verb, writable=writable)
        begin, end = (before(e, self._per_chunk, stripe, stripes) for e in (offset, offset + given.count))
        check_range(verb, begin, end - begin, self._count)
        return given

    # One-sided

    def _cut(self, array: Flat, offset: int, stripe: int, stripes: int) -> list[Cut]:
        size = self._itemsize
        if stripes == 1:
            ats = range(0, array.nbytes, PIECE)
            return [Cut(at, offset * size + at, min(PIECE, array.nbytes - at)) for at in ats]
        share = pieces(offset, array.count, self._per_chunk, stripe, stripes)
        return [Cut(one.at * size, one.begin * size, one.count * size) for one in share]

    def _move(self, verb: str, array: Flat, cuts: list[Cut], *, write: bool) -> None:
        if not cuts:
            return
        channel = self._carrier.channel()
        if array.values is not None and array.nbytes <= BY_COPY:
            self._copy(verb, channel, array, cuts, write)
        else:
            with self._carrier.arrays.lend(array, self.first) as region:
                channel.move(verb, lambda: self._moves(region, cuts), write=write)
        moved = sum(one.nbytes for one in cuts)
        self._ledger.enter(WireStats(moved * write, moved * (not write), 0.0, 0.0))

    def _moves(self, region: rdma.Region, cuts: list[Cut]) -> list[Move]:
        start = self._place(0)
        return [
            Move(region.span(one.at, one.nbytes), start._replace(address=start.address + one.there))
            for one in cuts
        ]

    def _copy(self, verb: str, channel: Channel, array: Flat, cuts: list[Cut], write: bool) -> None:
        scratch, own = channel.scratch, array.host.view(np.uint8)
        if write:
            scratch.bytes[: array.nbytes] = own
        channel.move(verb, lambda: self._moves(scratch.region, cuts), write=write)
        for one in () if write else cuts:  # the rest of the array may be others' who read at the same time
            own[one.at : one.at + one.nbytes] = scratch.bytes[one.at : one.at + one.nbytes]

    def read(self, out: Array, offset: int = 0, threads: int = 1, stripe: int = 0, stripes: int = 1) -> None:
        into = self._flat(out, "read", offset, stripe, stripes, writable=True)
        self._move("read", into, self._cut(into, offset, stripe, stripes), write=False)

    def write(
        self, array: Array, offset: int = 0, threads: int = 1, stripe: int = 0, stripes: int = 1
    ) -> int:
        self._write_to()
        values = self._flat(array, "write", offset, stripe, stripes)
        self._move("write", values, self._cut(values, offset, stripe, stripes), write=True)
        if stripes == 1:
            return self.count_update()
        self._carrier.channel().ready()  # answered behind the data: they are there before it is counted
        return 0

    def initialise(self, values: Array) -> None:
        given = self._flat(values, "initial", 0, 0, 1)
        self._move("initial values", given, self._cut(given, 0, 0, 1), write=True)
        self._carrier.channel().ready()  # they are there before others are told, which goes another way

    # Behind their data

    def count_update(self) -> int:
        return self._carrier.channel().update(
            lambda sequence, acknowledged: protocol.Write(self._write_to(), sequence, acknowledged, 0, 0, 1)
        )

    def _floats(self, verb: str) -> None:
        self._write_to()
        if self._dtype != "float32":
            raise TypeMismatch(f"{verb}: needs a segment of float32, this one holds {self._dtype}")

    def _run(self, verb: str, job: Callable[[Channel], Job], cut: list[Piece]) -> int:
        if not cut:
            return self.version
        channel = self._carrier.channel()
        pipeline: Pipeline | None = None

        def attempt() -> None:
            nonlocal pipeline
            if pipeline is None:
                pipeline = Pipeline(channel, job(channel), cut)
            pipeline.run()

        channel.mending(verb, attempt)
        assert pipeline is not None
        self._ledger.enter(pipeline.moved)
        return pipeline.version

    def accumulate(
        self,
        source: Any,
        scale: float = 1.0,
        offset: int = 0,
        threads: int = 1,
        *,
        wire: str = "float32",
        stripe: int = 0,
        stripes: int = 1,
    ) -> int:
        narrow = bool(wire_code(wire))
        if not math.isfinite(np.float32(scale)):
            raise RequestError(f"accumulate: scale is {scale!r}: must be a finite float32")
        self._floats("accumulate")
        if isinstance(source, RemoteAttachment):
            return self._accumulate_from(source, scale, offset)
        values = self._flat(source, "accumulate", offset, stripe, stripes)
        cut = update(offset, values.count, stripe, stripes)
        if narrow:
            return self._accumulate_narrow(scale, values, wire, cut)
        if values.nbytes <= BY_COPY:
            return self._accumulate(scale, values, None, cut)
        with self._carrier.arrays.lend(values, self.first) as region:
            return self._accumulate(scale, values, region, cut)

    def _accumulate(self, scale: float, values: Flat, region: rdma.Region | None, cut: list[Piece]) -> int:
        def job(channel: Channel) -> Job:
            return Accumulation(self._write_to(), scale, values.host, region, channel.scratch)

        return self._run("accumulate", job, cut)

    def _accumulate_narrow(self, scale: float, values: Flat, wire: str, cut: list[Piece]) -> int:
        owed: F32 | None = getattr(self._threads, "owed", None)
        if owed is None:
            owed = self._threads.owed = np.zeros(self._count, np.float32)

        def job(channel: Channel) -> Job:
            by = Quantiser(wire, channel.scratch)
            return NarrowAccumulation(self._write_to(), scale, values.host, owed, by)

        return self._run("accumulate", job, cut)

    def _accumulate_from(self, source: RemoteAttachment, scale: float, offset: int) -> int:
        if not isinstance(source, RdmaAttachment) or source._carrier is not self._carrier:
            raise TypeMismatch("accumulate: the source is a segment of another box")
        if source.first == self.first:
            raise RequestError("accumulate: source and target are the same segment")
        return self._carrier.channel().update(
            lambda sequence, acknowledged: protocol.AccumulateFrom(
                self._write_to(), sequence, acknowledged, source.number, offset, scale
            )
        )

    def exchange(
        self,
        local: Array,
        alpha: float,
        offset: int = 0,
        threads: int = 1,
        *,
        wire: str = "float32",
        stripe: int = 0,
        stripes: int = 1,
    ) -> int:
        narrow = bool(wire_code(wire))
        if not 0 < alpha <= 1:
            raise RequestError(f"exchange: alpha is {alpha!r}: must be above 0 and at most 1")
        self._floats("exchange")
        values = self._flat(local, "exchange", offset, stripe, stripes, writable=True)

        def job(channel: Channel) -> Job:
            number, center, scratch = self._write_to(), self._place(0), channel.scratch
            if narrow:
                return NarrowMove(number, alpha, values.host, center, Quantiser(wire, scratch))
            return ElasticMove(number, alpha, values.host, center, scratch)

        return self._run("exchange", job, update(offset, values.count, stripe, stripes))

    def wire_stats(self) -> WireStats:
        """What this client moved, and what quantising cost."""
        return self._ledger.sum

    def close(self) -> None:
        self._threads = threading.local()
        self._carrier.arrays.detach(self.first)


class RdmaTransport(TcpTransport):
    """One client of a daemon that it reaches by RDMA.

    wanted  which port to use (ports.choose); "": the one whose address the TCP connection comes from
    """

    name = "rdma"
    attachment = RdmaAttachment

    def __init__(
        self, peer: str, dial: Callable[[float], socket.socket], options: Options, wanted: str = ""
    ) -> None:
        self._channels = PerThread(lambda: Channel(self))
        super().__init__(peer, dial, options)
        self._adapter: rdma.Adapter | None = None
        try:
            port = ports.choose(self.local_host(), wanted)
            self.adapter = self._adapter = rdma.Adapter(port)
            self.arrays = Arrays(self.adapter)
            self.channel().ready()
        except BaseException:
            if self._failed:  # by the queue pair alone: the daemon can be told, and need not wait for a lease
                self._failed = ""
                self._lines.get().cut()
            self.close()
            raise

    # As the channels need it

    @property
    def timeout(self) -> float:
        return self._options.timeout

    @property
    def generation(self) -> int:
        return self._generation

    def check(self) -> None:
        self._check()

    def fail(self, error: Exception) -> TransportError:
        return self._fail(error)

    def channel(self) -> Channel:
        """This thread's own."""
        self._check()
        return self._channels.get()

    def endurance(self) -> float:
        return max(min(ENDURANCE, self.welcome.lease), self._options.reconnect)

    # As the box needs it

    def call(self, request: object, timeout: float) -> Any:
        if isinstance(request, protocol.Add):
            return self.channel().ask(lambda: request)
        return super().call(request, timeout)

    def orphan(self) -> None:
        if self._adapter:
            self._adapter.orphan()  # first: what is dropped here must not be destroyed
        super().orphan()
        self._channels.each(Channel.orphan)

    def close(self) -> None:
        channels = self._channels.all()
        super().close()
        for channel in channels:
            channel.close()
        if self._adapter and all(channel.closed for channel in channels):
            self.arrays.close()
            self._adapter.close()


def connect(where: str, options: Options) -> RdmaTransport:
    """Connect to the daemon whose TCP port is ``HOST:PORT``, by RDMA or not at all."""
    wanted = os.environ.get(PORT, "")
    rdma.available(wanted)
    host, port = network.parse(where)

    def dial(timeout: float) -> socket.socket:
        sock = network.dial(host, port, min(timeout, ENDURANCE))
        secured = options.tls
        return tls.wrap_client(sock, host, secured, timeout) if secured else sock

    return RdmaTransport(where, dial, options, wanted)
