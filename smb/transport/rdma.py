"""RDMA verbs: registered memory and queue pairs. The only file that knows pyverbs.

An Adapter is one opened device with its protection domain; it registers memory as Regions. A Pair is a queue
pair (RC) with its completion queue; one thread at a time uses it. Waits hold the GIL in no blocking call and
are bounded by the caller.

pyverbs is imported when it is first needed; enums are where its release has them (44: enums, 59:
libibverbs_enums).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib
import ipaddress
import mmap
import os
import secrets
import select
import threading
import time
import weakref
from typing import Any, NamedTuple

import numpy as np

from smb.errors import NotSupported, TransportError
from smb.transport.ports import Port, choose

RETRIES = 6  # 7 means for ever on soft-RoCE: a request to a dead peer would never end
TIMEOUT = 14  # 4.096 us * 2^14 = 67 ms for an acknowledgement, so a dead peer is noticed within seconds
READS = 16  # READs under way at most, which is what most adapters can do
DEPTH = 128  # requests posted and not completed at most
CURE = (
    "install Debian's python3-pyverbs and put a folder with a link to its `pyverbs` package on PYTHONPATH "
    "(/usr/lib/python3/dist-packages/pyverbs), or pip install pyverbs beside a rdma-core of the same release"
)


# Registered memory ---------------------------------------------------------------------------------------


@functools.cache
def _verbs() -> Any:
    """pyverbs' names in one object. Raises NotSupported saying how to get it."""

    class Verbs:
        pass

    def load(*names: str) -> Any:
        for name in names[:-1]:
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(f"pyverbs.{name}")
        return importlib.import_module(f"pyverbs.{names[-1]}")

    try:
        # The enums first: a name of a class is never hidden by them.
        modules = [load("enums", "libibverbs_enums")]
        modules += map(load, ("addr", "cq", "device", "mr", "pd", "qp", "wr", "pyverbs_error"))
    except ImportError as error:
        raise NotSupported(f"RDMA needs pyverbs, which does not load ({error}): {CURE}") from error
    for module in modules:
        for name in (n for n in dir(module) if not n.startswith("_")):
            setattr(Verbs, name, getattr(module, name))
    return Verbs


def available(wanted: str = "") -> None:
    """Raises NotSupported, which says why, when this process cannot use RDMA by this port."""
    choose(wanted=wanted)
    _verbs()


class Span(NamedTuple):
    """A piece of our own registered memory."""

    address: int
    lkey: int
    nbytes: int


class Place(NamedTuple):
    """Where in the peer's registered memory."""

    address: int
    rkey: int


NOTHING = Span(0, 0, 0)


def _element(span: Span) -> Any:
    return _verbs().SGE(span.address, span.nbytes, span.lkey)


class Region:
    """Memory that the adapter may reach. Closing twice is fine; whoever owns the memory closes it first.

    lkey, rkey  name it in requests of this side, and of the peer
    """

    def __init__(self, adapter: Adapter, address: int, nbytes: int, mr: Any) -> None:
        self.address, self.nbytes = address, nbytes
        self.lkey, self.rkey = int(mr.lkey), int(mr.rkey)
        self._adapter, self._mr = adapter, mr
        adapter.regions.add(self)

    def span(self, offset: int, nbytes: int) -> Span:
        """Bytes [offset, offset + nbytes) of it."""
        return Span(self.address + offset, self.lkey, nbytes)

    def close(self) -> None:
        mr, self._mr = self._mr, None
        if mr is not None:
            mr.close()


class Buffer:
    """Fresh memory of our own, registered. Closing twice is fine."""

    def __init__(self, adapter: Adapter, nbytes: int, *, writable: bool = False) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.bytes = np.frombuffer(self._memory, np.uint8)
        try:
            address = self.bytes.ctypes.data
            self.region = adapter.register(address, nbytes, local=True, writable=writable)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        region = getattr(self, "region", None)
        if region:
            region.close()
        # The memory goes with the last view of it, and with this object.


class Adapter:
    """One device, opened, with a protection domain. ``close`` after all that was made from it."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.pairs = weakref.WeakSet[Pair]()
        self.regions = weakref.WeakSet[Region]()
        v = _verbs()
        try:
            self.context = v.Context(name=port.device)
            self.domain = v.PD(self.context)
            self.attributes = self.context.query_port(port.number)
        except v.PyverbsRDMAError as error:
            raise NotSupported(f"RDMA device {port.device}: {_reason(error)}") from error
        _adapters.add(self)

    def register(
        self, address: int, nbytes: int, *, local: bool, readable: bool = False, writable: bool = False
    ) -> Region:
        """Let the adapter reach memory of this process, which stays where it is until the region is closed.

        local  the adapter may write it for us; readable, writable  the peer may, with the rkey
        """
        v = _verbs()
        try:
            return Region(
                self,
                address,
                nbytes,
                v.MR(self.domain, nbytes, self._access(local, readable, writable), address=address),
            )
        except v.PyverbsRDMAError as error:
            hint = "is `ulimit -l` too low?"
            raise TransportError(
                f"registering {nbytes} bytes with {self.port}: {_reason(error)} ({hint})"
            ) from error

    def register_dmabuf(
        self, descriptor: int, nbytes: int, offset: int = 0, *, writable: bool = False
    ) -> Region:
        """Let the adapter reach memory of a GPU, given as a dma-buf descriptor. Raises NotSupported.

        The region's address counts from the buffer's start: requests name ``offset`` and what follows.
        """
        v = _verbs()
        try:
            mr = v.DmaBufMR(
                self.domain, nbytes, self._access(True, True, writable), dmabuf=descriptor, offset=offset
            )
        except v.PyverbsRDMAError as error:
            raise NotSupported(f"{self.port.device} does not take a dma-buf: {_reason(error)}") from error
        return Region(self, offset, nbytes, mr)

    @staticmethod
    def _access(local: bool, readable: bool, writable: bool) -> int:
        v = _verbs()
        access = v.IBV_ACCESS_LOCAL_WRITE if local or writable else 0
        access |= v.IBV_ACCESS_REMOTE_READ if readable else 0
        return int(access | (v.IBV_ACCESS_REMOTE_WRITE if writable else 0))

    def close(self) -> None:
        for part in (self.domain, self.context):
            part.close()

    def orphan(self) -> None:
        """In a forked child: its copies would destroy the parent's queue pairs when they are collected.

        So they never are; and what is closed all the same does not reach the device.
        """
        ours = [self.context, self.domain, *(region._mr for region in self.regions)]
        ours += [part for pair in self.pairs for part in pair._parts]
        for one in ours:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        with open(os.devnull) as nothing, contextlib.suppress(OSError):
            os.dup2(nothing.fileno(), self.context.cmd_fd)


_adapters: weakref.WeakSet[Adapter] = weakref.WeakSet()


def _orphan_all() -> None:
    for adapter in list(_adapters):
        adapter.orphan()


os.register_at_fork(after_in_child=_orphan_all)


def _reason(error: Exception) -> str:
    number = getattr(error, "error_code", 0)
    return os.strerror(number) if number else str(error)


# Queue pairs ---------------------------------------------------------------------------------------------


class Endpoint(NamedTuple):
    """What one side tells the other about its queue pair."""

    number: int
    sequence: int  # of its first packet
    gid: bytes
    lid: int
    mtu: int  # as verbs number them: 5 is 4096


class Completion(NamedTuple):
    """One request's end. ``kind`` and ``nbytes`` hold for good ones only."""

    tag: int
    status: int
    received: bool
    nbytes: int


class Broken(Exception):
    """The queue pair failed and every request on it; it says why. Another one may work."""


class Pair:
    """A reliable connected queue pair. One thread at a time uses it; ``wake`` is for others.

    remote_writable  whether the peer may write into our regions (with a key that allows it)
    """

    def __init__(self, adapter: Adapter, *, remote_writable: bool) -> None:
        v = _verbs()
        self.adapter, self._writable = adapter, remote_writable
        self._closed = False
        self._changing = threading.Lock()  # its state, which other threads may end
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._parts: list[Any] = []
        try:
            channel, self._events = _channel(adapter.context)
            self._channel = self._keep(channel)
            self._queue = self._keep(v.CQ(adapter.context, 2 * DEPTH, None, channel, 0))
            room = v.QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
            asked = v.QPInitAttr(
                qp_type=v.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room, sq_sig_all=0
            )
            self._pair = self._keep(v.QP(adapter.domain, asked))
            first = v.QPAttr(port_num=adapter.port.number)
            first.qp_access_flags = Adapter._access(True, True, remote_writable)
            self._pair.to_init(first)
        except v.PyverbsRDMAError as error:
            self.close()
            raise TransportError(f"queue pair on {adapter.port}: {_reason(error)}") from error
        except BaseException:
            self.close()
            raise
        adapter.pairs.add(self)
        self.endpoint = Endpoint(
            int(self._pair.qp_num),
            secrets.randbelow(1 << 24),
            adapter.port.gid.packed,
            adapter.port.lid,
            int(adapter.attributes.active_mtu),
        )

    def _keep(self, part: Any) -> Any:
        self._parts.append(part)
        return part

    def connect(self, peer: Endpoint) -> None:
        """Ready to receive and to send. Raises TransportError when the peer cannot be addressed."""
        v = _verbs()
        port, own = self.adapter.port, self.endpoint
        ready = v.QPAttr(port_num=port.number)
        try:
            ready.ah_attr = _route(port, peer)
            ready.path_mtu = min(own.mtu, peer.mtu)
            ready.dest_qp_num, ready.rq_psn = peer.number, peer.sequence
            ready.max_dest_rd_atomic, ready.min_rnr_timer = READS, 12
            ready.qp_access_flags = Adapter._access(True, True, self._writable)
            self._pair.to_rtr(ready)
            ready.sq_psn, ready.max_rd_atomic = own.sequence, READS
            ready.timeout, ready.retry_cnt, ready.rnr_retry = TIMEOUT, RETRIES, RETRIES
            self._pair.to_rts(ready)
        except v.PyverbsError as error:
            where = ipaddress.IPv6Address(peer.gid)
            raise TransportError(
                f"{port} does not reach {where.ipv4_mapped or where}: {_reason(error)}"
            ) from error

    def read(self, tag: int, into: Span, source: Place) -> None:
        self._post(tag, _verbs().IBV_WR_RDMA_READ, into, source)

    def write(self, tag: int, data: Span, dest: Place) -> None:
        self._post(tag, _verbs().IBV_WR_RDMA_WRITE, data, dest)

    def send(self, tag: int, data: Span) -> None:
        """Every earlier write of this pair has landed when the peer receives this."""
        self._post(tag, _verbs().IBV_WR_SEND, data)

    def probe(self, tag: int) -> None:
        """A write of nothing: fails when the peer's queue pair is gone, though nothing else is under way."""
        self._post(tag, _verbs().IBV_WR_RDMA_WRITE, NOTHING, Place(0, 0))

    def _post(self, tag: int, kind: int, here: Span, there: Place | None = None) -> None:
        v = _verbs()
        request = v.SendWR(
            wr_id=tag, opcode=kind, num_sge=1, sg=[_element(here)], send_flags=v.IBV_SEND_SIGNALED
        )
        request.num_sge = 1 if here.nbytes else 0
        if there:
            request.set_wr_rdma(there.rkey, there.address)
        try:
            self._pair.post_send(request)
        except v.PyverbsError as error:
            raise Broken(f"posting a request: {_reason(error)}") from error

    def receive(self, tag: int, into: Span) -> None:
        """Have memory ready for one message of the peer."""
        v = _verbs()
        try:
            self._pair.post_recv(v.RecvWR(wr_id=tag, num_sge=1, sg=[_element(into)]))
        except v.PyverbsError as error:
            raise Broken(f"posting a receive: {_reason(error)}") from error

    def poll(self) -> list[Completion]:
        """What has ended meanwhile. Raises Broken at the first failure."""
        v = _verbs()
        count, found = self._queue.poll(16)
        ended = []
        for one in found[:count]:
            if one.status:  # its other fields mean nothing then
                raise Broken(f"{_status(one.status)} (status {one.status})")
            ended.append(Completion(one.wr_id, 0, bool(one.opcode & v.IBV_WC_RECV), one.byte_len))
        return ended

    def wait(self, until: float, busy: float = 0.0) -> list[Completion]:
        """What has ended; waits for it until time.monotonic() is ``until``. Empty then, or after ``wake``.

        busy  seconds of looking again and again before the thread sleeps, from which to wake takes long
        """
        sleep_at = time.monotonic() + busy
        while True:
            ended = self.poll()
            if ended:
                return ended
            if time.monotonic() >= sleep_at:
                break
            time.sleep(0)  # another thread may want the interpreter
        self._queue.req_notify()
        ended = self.poll()  # what ended before the queue was armed makes no event
        if ended:
            return ended
        left = max(0.0, until - time.monotonic())
        ready, _, _ = select.select([self._events, self._wake_read], [], [], left)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 64)
        if self._events in ready:
            with contextlib.suppress(_verbs().PyverbsRDMAError):  # EAGAIN: somebody was faster
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
        return self.poll()

    def wake(self) -> None:
        """Any thread: end the wait under way, or the next."""
        with self._changing:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"x")

    def allow_writes(self) -> None:
        """Any thread: let the peer write where a region's key allows it."""
        v = _verbs()
        change = v.QPAttr(port_num=self.adapter.port.number)
        change.qp_access_flags = Adapter._access(True, True, True)
        self._modify(change, v.IBV_QP_ACCESS_FLAGS)

    def fail(self) -> None:
        """Any thread: refuse the peer from now on, and end every request here. Its own thread closes it."""
        v = _verbs()
        self._modify(v.QPAttr(qp_state=v.IBV_QPS_ERR), v.IBV_QP_STATE)
        self.wake()

    def _modify(self, change: Any, mask: int) -> None:
        with self._changing:
            if self._closed:
                return
            try:
                self._pair.modify(change, mask)
            except _verbs().PyverbsError as error:
                raise TransportError(f"queue pair on {self.adapter.port}: {_reason(error)}") from error

    def close(self) -> None:
        """Destroy it: nothing of the peer lands any more. Twice is fine."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
        while self._parts:
            with contextlib.suppress(Exception):
                self._parts.pop().close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _route(port: Port, peer: Endpoint) -> Any:
    v = _verbs()
    there = ipaddress.IPv6Address(peer.gid)
    if port.ethernet or there.packed[:8] != port.gid.packed[:8]:
        path = v.GlobalRoute(dgid=v.GID(there.exploded), sgid_index=port.index, hop_limit=64)
        return v.AHAttr(gr=path, is_global=1, dlid=peer.lid, port_num=port.number)
    return v.AHAttr(dlid=peer.lid, port_num=port.number)


def _status(code: int) -> str:
    v = _verbs()
    known = {
        v.IBV_WC_RETRY_EXC_ERR: "the peer does not answer",
        v.IBV_WC_RNR_RETRY_EXC_ERR: "the peer has no room for a message",
        v.IBV_WC_REM_ACCESS_ERR: "the peer's memory does not allow it",
        v.IBV_WC_REM_INV_REQ_ERR: "the peer does not understand the request",
        v.IBV_WC_REM_OP_ERR: "the peer could not do it",
        v.IBV_WC_LOC_PROT_ERR: "our own memory does not allow it",
        v.IBV_WC_WR_FLUSH_ERR: "the queue pair has failed",
    }
    return known.get(code, "the adapter failed")


_opening = threading.Lock()


def _channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, which pyverbs 44 does not tell: it is the new one."""
    with _opening:
        before = _event_files()
        channel = _verbs().CompChannel(context)
        number = getattr(channel, "fd", None)
        if number is None:
            (number,) = _event_files() - before
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_NONBLOCK)
    return channel, int(number)


def _event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found
