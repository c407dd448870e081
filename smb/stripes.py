"""One box of several daemons: a transport over transports that deals a segment's chunks to all of them.

Chunk k of a segment lies at daemon k % n, which packs its chunks into one plain segment (a stripe). A segment
of fewer chunks than daemons has that many stripes. What only one can decide, the first daemon does: who
creates, counters, barriers, locks, and the version, which counts an update when all stripes have done it.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from smb import layout, protocol
from smb.crew import Crew
from smb.errors import KeyExists, NotSupported, RequestError, SmbError, UnknownKey
from smb.pieces import before, pieces
from smb.protocol import Stripe
from smb.segment import CHUNK_BYTES
from smb.store import difference, meta_difference
from smb.striped import StripedAttachment
from smb.transport import base
from smb.transport.base import Array, Opening, Options, Part, Transport

RETRY = 0.02  # seconds between two looks at whether an earlier segment's stripes are gone


def daemons(address: str) -> tuple[str, ...]:
    """The addresses in a list of them with commas; the address alone when it is none."""
    parts = tuple(address.split(","))
    try:
        for part in parts:
            base.split(part)
    except RequestError:
        return (address,)
    return parts


def connect(addresses: Sequence[str], options: Options) -> StripedTransport:
    """A box over the daemons at ``addresses``, whose order counts. TransportError names the missing one."""
    if len(addresses) > protocol.MAX_STRIPES:
        raise RequestError(f"{len(addresses)} daemons, at most {protocol.MAX_STRIPES} make one box")
    if len(set(addresses)) < len(addresses):
        raise RequestError(f"{','.join(addresses)}: a daemon is named twice")
    with contextlib.ExitStack() as stack:
        transports: list[Transport] = []
        known: dict[int, str] = {}
        for address in addresses:
            transport = base.connect(address, options)
            stack.callback(transport.close)
            transports.append(transport)
            number: int = getattr(transport, "daemon", len(known))
            if known.setdefault(number, address) != address:
                raise RequestError(f"{address} is the same daemon as {known[number]}")
        stack.pop_all()
    return StripedTransport(transports, addresses, options.timeout)


class StripedTransport:
    """One client of several daemons."""

    def __init__(self, transports: Sequence[Transport], addresses: Sequence[str], timeout: float) -> None:
        self._transports, self._timeout = transports, timeout
        self._addresses = tuple(addresses)
        self.crew = Crew(addresses)
        self.name = "+".join(dict.fromkeys(transport.name for transport in transports))
        self._segments: dict[int, list[int]] = {}  # our number -> the stripes' numbers
        self._numbers = itertools.count(1)

    @property
    def patient(self) -> bool:
        return all(transport.patient for transport in self._transports)

    @patient.setter
    def patient(self, wait: bool) -> None:
        for transport in self._transports:
            transport.patient = wait

    # Requests

    def call(self, request: object, timeout: float) -> Any:
        if isinstance(request, protocol.Detach):
            return self._detach(request.segment)
        if isinstance(request, protocol.Free):
            return self._free(request.key)
        if isinstance(request, protocol.StatOf):
            return self._stat(request.key)
        if isinstance(request, (protocol.SnapshotNow, protocol.RestoreFrom)):
            raise NotSupported("each daemon has snapshots of its own: ask one of them, not the list")
        reply = self._ask(0, request, timeout)
        if isinstance(reply, protocol.Listing):
            return protocol.Listing(tuple(_whole(row) for row in reply.segments))
        return reply

    def _ask(self, daemon: int, request: object, timeout: float = 0.0) -> Any:
        return self.crew.at(daemon, lambda: self._transports[daemon].call(request, timeout))

    def _ask_others(self, request: object) -> list[Any]:
        """What the daemons but the first answer, None for one that does not know the key."""

        def one(daemon: int) -> Any:
            with contextlib.suppress(UnknownKey):
                return self._transports[daemon].call(request, 0.0)

        return self.crew.all(range(1, len(self._transports)), one)

    def _stat(self, key: str) -> protocol.Stat:
        row: protocol.Stat = self._ask(0, protocol.StatOf(key))
        stripe = protocol.stripe_of(row.meta)
        if stripe is None:
            return row
        for i, other in enumerate(self._ask_others(protocol.StatOf(key)), 1):
            if i < self._parts(stripe.count, row.dtype) and not (other and _same(stripe, i, other.meta)):
                raise UnknownKey(f"segment {key!r}: its stripe {i} is not at {self._addresses[i]}")
        return _whole(row)

    def _free(self, key: str) -> protocol.Done:
        """The first stripe goes first: from then on nobody attaches."""
        first: Stripe | None = None
        missing: UnknownKey | None = None
        try:
            row: protocol.Stat = self._ask(0, protocol.StatOf(key))
            first = self._mine(key, row.meta)
            self._ask(0, protocol.Free(key))
        except UnknownKey as error:
            missing = error  # a creator that died may have left others
        for i, other in enumerate(self._ask_others(protocol.StatOf(key)), 1):
            stripe = protocol.stripe_of(other.meta) if other else None
            if stripe is None or (stripe.stripe, stripe.stripes) != (i, len(self._transports)):
                continue
            if first is None or stripe.made == first.made:
                missing = None
                with contextlib.suppress(UnknownKey):
                    self._ask(i, protocol.Free(key))
        if missing:
            raise missing
        return protocol.Done()

    def _detach(self, number: int) -> protocol.Done:
        numbers = self._segments.pop(number, [])
        return self._leave(list(enumerate(numbers)))

    def _leave(self, stripes: Sequence[tuple[int, int]]) -> protocol.Done:
        """Detach from stripes, (daemon, number): the first one first, so that nobody finds half a segment."""
        for daemon, number in stripes[:1]:
            self._ask(daemon, protocol.Detach(number))
        rest = dict(stripes[1:])
        self.crew.all(rest, lambda i: self._transports[i].call(protocol.Detach(rest[i]), 0.0))
        return protocol.Done()

    # Creation and attachment

    def _parts(self, count: int, dtype: str) -> int:
        """How many stripes a segment has."""
        return min(len(self._transports), -(-count * protocol.DTYPES[dtype] // CHUNK_BYTES))

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None = None) -> Opening:
        if isinstance(request, protocol.Attach):
            return self._attach(request)
        deadline = time.monotonic() + self._timeout
        while True:
            first = self._claim(request)
            if first:
                return self._make(request, first, initial, deadline)
            try:
                return self._join(request)
            except UnknownKey:  # it went between the two
                if time.monotonic() > deadline:
                    raise

    def _stripe(self, wanted: protocol.Create, stripe: int, made: int) -> protocol.Create:
        """The request for one stripe, which stays unknown to all others until it is published."""
        stripes = len(self._transports)
        per_chunk = CHUNK_BYTES // protocol.DTYPES[wanted.dtype]
        count = before(wanted.count, per_chunk, stripe, stripes)
        meta = Stripe(stripe, stripes, made, wanted.count, ",".join(self._addresses), wanted.meta)
        return replace(
            wanted, count=count, meta=protocol.pack_stripe(meta), publish=False, or_attach=stripe == 0
        )

    def _claim(self, wanted: protocol.Create) -> Opening | None:
        """The first stripe if nobody was before us. Whoever has it, published or not, makes the segment."""
        layout.put(wanted, bytearray())  # refused for its own fields, not for those of a stripe
        request = self._stripe(wanted, 0, secrets.randbits(63))
        if not wanted.or_attach:
            request = replace(request, or_attach=False)
        try:
            return self.crew.at(0, lambda: self._transports[0].open(request))
        except KeyExists:  # another one's, since ``made`` is like no other
            if not wanted.or_attach:
                raise
            return None

    def _make(
        self, wanted: protocol.Create, first: Opening, initial: Array | None, deadline: float
    ) -> Opening:
        key, made = wanted.key, _made(first)
        opened: dict[int, Opening] = {0: first}
        published: list[int] = []
        try:
            others = range(1, self._parts(wanted.count, wanted.dtype))

            def make(i: int) -> None:
                opened[i] = self._open(i, self._stripe(wanted, i, made), deadline)

            self.crew.all(others, make)
            if initial is not None:
                self.crew.all((0, *others), lambda i: self._fill(i, opened[i], wanted, initial))
            for i in (*others, 0):  # the first last: who finds it finds all
                self._ask(i, protocol.Publish(opened[i].reply.segment))
                published.append(i)
        except BaseException:
            for i in published:
                with contextlib.suppress(SmbError):
                    self._ask(i, protocol.Free(key))
            self._drop(opened)
            raise
        return self._opening(wanted, opened, True)

    def _open(self, daemon: int, request: protocol.Create, deadline: float) -> Opening:
        """Another stripe. What is left of an earlier segment goes with its last client's session."""
        while True:
            try:
                return self._transports[daemon].open(request)
            except KeyExists:
                late = time.monotonic() > deadline
                self._examine(daemon, request.key, late)
                if late:  # somebody makes it, and does not come to an end
                    raise
                time.sleep(RETRY)

    def _examine(self, daemon: int, key: str, late: bool) -> None:
        """Why a stripe is there already. Raises where waiting is in vain."""
        address = self._addresses[daemon]
        try:
            row: protocol.Stat = self._transports[daemon].call(protocol.StatOf(key), 0.0)
        except UnknownKey:
            return
        stripe = protocol.stripe_of(row.meta)
        if not stripe or (stripe.stripe, stripe.stripes) != (daemon, len(self._transports)):
            raise KeyExists(f"segment {key!r}: the daemon at {address} holds another one of this key")
        if late:
            raise KeyExists(
                f"segment {key!r}: the daemon at {address} holds a stripe that a creator left (free the key)"
            )

    def _fill(self, daemon: int, opening: Opening, wanted: protocol.Create, initial: Array) -> None:
        per_chunk = CHUNK_BYTES // protocol.DTYPES[wanted.dtype]
        share = pieces(0, wanted.count, per_chunk, daemon, len(self._transports))
        cast(Part, opening.attachment).initialise(
            np.concatenate([initial[p.at : p.at + p.count] for p in share])
        )

    def _join(self, wanted: protocol.Create) -> Opening:
        """The segment that another client made. Raises KeyExists when it is another one than wanted."""
        opening = self._attach(protocol.Attach(wanted.key, False, False, b""))
        unlike = difference(opening.reply, wanted)
        if unlike:
            opening.attachment.close()
            self._detach(opening.reply.segment)
            raise KeyExists(f"segment {wanted.key!r} exists with {unlike}")
        return opening

    def _attach(self, request: protocol.Attach) -> Opening:
        plain = replace(request, compare=False, meta=b"")
        opened: dict[int, Opening] = {0: self.crew.at(0, lambda: self._transports[0].open(plain))}
        try:
            reply = opened[0].reply
            stripe = self._mine(request.key, reply.meta)
            if request.compare and stripe.meta != request.meta:
                what = meta_difference(stripe.meta, request.meta)
                raise KeyExists(f"segment {request.key!r} exists with {what}")
            others = range(1, self._parts(stripe.count, reply.dtype))

            def attach(i: int) -> None:
                opened[i] = self._attach_one(i, plain, stripe)

            self.crew.all(others, attach)
        except BaseException:
            self._drop(opened)
            raise
        return self._opening(replace(reply, count=stripe.count, meta=stripe.meta), opened, False)

    def _attach_one(self, daemon: int, request: protocol.Attach, first: Stripe) -> Opening:
        address = self._addresses[daemon]
        try:
            opening = self._transports[daemon].open(request)
        except UnknownKey as error:
            raise UnknownKey(
                f"segment {request.key!r}: its stripe {daemon} is not at {address} "
                f"(it was made over {first.addresses})"
            ) from error
        if not _same(first, daemon, opening.reply.meta):
            opening.attachment.close()
            self._transports[daemon].call(protocol.Detach(opening.reply.segment), 0.0)
            raise KeyExists(
                f"segment {request.key!r}: the daemon at {address} does not hold its stripe {daemon}, "
                f"but another segment (it was made over {first.addresses})"
            )
        return opening

    def _mine(self, key: str, meta: bytes) -> Stripe:
        """What the first stripe's meta says. Raises KeyExists when it is not of this list of daemons."""
        stripe, n = protocol.stripe_of(meta), len(self._transports)
        mine = ",".join(self._addresses)
        if stripe is None:
            raise KeyExists(f"segment {key!r} lies at {self._addresses[0]} alone, not over {mine}")
        if stripe.stripes != n or stripe.stripe:
            raise KeyExists(
                f"segment {key!r} lies over {stripe.stripes} daemons ({stripe.addresses}), of which "
                f"{self._addresses[0]} holds stripe {stripe.stripe}; this box is {n} ({mine})"
            )
        return stripe

    def _drop(self, opened: dict[int, Opening]) -> None:
        """Let go of stripes after a failure; those not yet published are taken back."""
        for i, opening in sorted(opened.items()):
            opening.attachment.close()
            with contextlib.suppress(SmbError):
                self._transports[i].call(protocol.Detach(opening.reply.segment), 0.0)

    def _opening(
        self, about: protocol.Create | protocol.Opened, opened: dict[int, Opening], created: bool
    ) -> Opening:
        stripes = [opening for _, opening in sorted(opened.items())]
        number = next(self._numbers)
        self._segments[number] = [opening.reply.segment for opening in stripes]
        reply = protocol.Opened(number, created, about.count, about.dtype, about.lifetime, about.meta)
        parts = [cast(Part, opening.attachment) for opening in stripes]
        return Opening(
            StripedAttachment(self.crew, parts, len(self._transports), about.count, about.dtype), reply
        )

    # The end

    def orphan(self) -> None:
        for transport in self._transports:
            transport.orphan()

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self.crew.close()


def _made(opening: Opening) -> int:
    stripe = protocol.stripe_of(opening.reply.meta)
    assert stripe is not None  # we asked for it
    return stripe.made


def _same(first: Stripe, number: int, meta: bytes) -> bool:
    """Whether ``meta`` is that of stripe ``number`` of the same segment."""
    stripe = protocol.stripe_of(meta)
    return stripe is not None and (stripe.made, stripe.stripe) == (first.made, number)


def _whole(row: protocol.Stat) -> protocol.Stat:
    """The figures of the segment whose first stripe has these."""
    stripe = protocol.stripe_of(row.meta)
    if stripe is None:
        return row
    nbytes = stripe.count * protocol.DTYPES[row.dtype]
    return replace(row, count=stripe.count, meta=stripe.meta, nbytes=nbytes)
