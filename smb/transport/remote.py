"""A segment that lies at the daemon alone: every operation travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from smb import protocol
from smb.errors import NotPermitted, NotSupported, RequestError, TypeMismatch, UnknownKey, WaitTimeout
from smb.transport.base import Array
from smb.transport.line import Line
from smb.transport.stream import Transfer, WireStats


class Carrier(Protocol):
    """The transport, as its segments need it."""

    def carry(self, what: str, make: Callable[[Line], Transfer]) -> int: ...
    def call(self, request: object, timeout: float) -> Any: ...
    def lines(self) -> list[Line]:
        """Those of all threads."""


class RemoteAttachment:
    """One segment over a transport that carries frames.

    first       the daemon's number for it when it was opened, which requests name; ``number`` is today's
    generation  of the session in which it is attached
    wires       whether increments may travel in another type than float32
    """

    wires = True

    def __init__(
        self,
        carrier: Carrier,
        request: protocol.Create | protocol.Attach,
        opened: protocol.Opened,
        generation: int,
    ) -> None:
        self._carrier = carrier
        self.key = request.key
        self.readonly = isinstance(request, protocol.Attach) and request.readonly
        self.first = self._number = opened.segment
        self.generation = generation
        self._count, self._dtype, self._meta = opened.count, opened.dtype, opened.meta
        self._lost = ""

    # After a lost session

    def again(self) -> protocol.Attach:
        """The request that attaches to the same segment in a new session."""
        return protocol.Attach(self.key, self.readonly, True, self._meta)

    def renew(self, opened: protocol.Opened, generation: int) -> None:
        """It is attached again. A segment that only has the same name is not the same."""
        self.generation, self._number = generation, opened.segment
        if (opened.count, opened.dtype) != (self._count, self._dtype):
            self._lost = f"the daemon now has {opened.count} x {opened.dtype} under this key"

    def lose(self, why: str, generation: int) -> None:
        """It is gone: every operation raises UnknownKey from now on."""
        self.generation, self._lost = generation, why

    @property
    def number(self) -> int:
        """The daemon's number for it. Raises UnknownKey when the daemon lost it."""
        self._check()
        return self._number

    @property
    def named(self) -> int:
        """What requests call it; the carrier puts the session's number there. Raises as number does."""
        self._check()
        return self.first

    def _check(self) -> None:
        if self._lost:
            raise UnknownKey(f"lost with the daemon's restart: {self._lost}")

    # Operations

    def _write_to(self) -> int:
        if self.readonly:
            raise NotPermitted("the segment is attached read-only")
        return self.number

    def _shape(self) -> dict[str, Any]:
        return {"count": self._count, "dtype": self._dtype}

    @property
    def version(self) -> int:
        applied: protocol.Applied = self._carrier.call(protocol.VersionOf(self.named), 0.0)
        return applied.version

    def wait(self, version: int, timeout: float) -> bool:
        try:
            self._carrier.call(protocol.WaitVersion(self.named, version, timeout), timeout)
        except WaitTimeout:
            return False
        return True

    def read(
        self, out: Array, offset: int = 0, threads: int = 1, *, stripe: int = 0, stripes: int = 1
    ) -> None:
        self._carrier.carry(
            "read",
            lambda line: line.stream.read(
                self.number, out, offset, stripe=stripe, stripes=stripes, count=self._count, dtype=self._dtype
            ),
        )

    def write(
        self, array: Array, offset: int = 0, threads: int = 1, *, stripe: int = 0, stripes: int = 1
    ) -> int:
        return self._carrier.carry(
            "write",
            lambda line: line.stream.write(
                self._write_to(), array, offset, stripe=stripe, stripes=stripes, **self._shape()
            ),
        )

    def initialise(self, values: Array) -> None:
        """Write all values without counting an update."""
        self._carrier.carry(
            "initial values",
            lambda line: line.stream.write(self.number, values, 0, counts=False, **self._shape()),
        )

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
        if isinstance(source, RemoteAttachment):
            return self._accumulate_from(source, scale, offset)
        return self._carrier.carry(
            "accumulate",
            lambda line: line.stream.accumulate(
                self._write_to(),
                source,
                scale,
                offset,
                wire=wire,
                stripe=stripe,
                stripes=stripes,
                **self._shape(),
            ),
        )

    def _accumulate_from(self, source: RemoteAttachment, scale: float, offset: int) -> int:
        if source._carrier is not self._carrier:
            raise TypeMismatch("accumulate: the source is a segment of another box")
        if source.first == self.first:
            raise RequestError("accumulate: the source is the segment itself")
        return self._carrier.carry(
            "accumulate",
            lambda line: line.stream.accumulate_from(self._write_to(), source.number, scale, offset),
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
        return self._carrier.carry(
            "exchange",
            lambda line: line.stream.exchange(
                self._write_to(),
                local,
                alpha,
                offset,
                wire=wire,
                stripe=stripe,
                stripes=stripes,
                **self._shape(),
            ),
        )

    def count_update(self) -> int:
        """Count one update, made in pieces that did not count; the version after it."""
        return self._carrier.carry("update", lambda line: line.stream.count_update(self._write_to()))

    def combine(
        self,
        how: str,
        scalar: float,
        source: RemoteAttachment | None,
        offset: int,
        count: int,
        *,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """A vector operation where the segment lies (protocol.Combine); the version after it."""
        self._write_to()
        request = protocol.Combine(
            how, self.named, self._number_of(how, source), scalar, offset, count, counts
        )
        applied: protocol.Applied = self._carrier.call(request, 0.0)
        return applied.version

    def adagrad(
        self,
        sums: object,
        gradient: object,
        rate: float,
        *,
        scale: float,
        epsilon: float,
        offset: int,
        count: int,
        counts: bool = True,
        threads: int = 1,
    ) -> int:
        """Adagrad's step where the segments lie (protocol.Adagrad); the version after it."""
        self._write_to()
        squares, pushed = self._number_of("adagrad", sums), self._number_of("adagrad", gradient)
        request = protocol.Adagrad(self.named, squares, pushed, rate, scale, epsilon, offset, count, counts)
        applied: protocol.Applied = self._carrier.call(request, 0.0)
        return applied.version

    def reduce(self, how: str, other: RemoteAttachment | None = None, threads: int = 1) -> float:
        """A sum over the segment where it lies (protocol.Reduce)."""
        request = protocol.Reduce(how, self.named, self._number_of(how, other))
        scalar: protocol.Scalar = self._carrier.call(request, 0.0)
        return scalar.value

    def _number_of(self, how: str, other: object) -> int:
        """The daemon's number for the other segment of an operation; 0 where there is none."""
        if other is None:
            return 0
        if not isinstance(other, RemoteAttachment) or other._carrier is not self._carrier:
            raise RequestError(f"{how}: needs a segment of the same box")
        return other.named

    def rescue(self, out: Array, offset: int = 0) -> int:
        raise NotSupported("the segment lay in the daemon's memory alone, and went with it")

    def wire_stats(self) -> WireStats:
        """What the living threads of this client moved for this segment, and what quantising cost."""
        figures = [line.stream.stats(self._number) for line in self._carrier.lines()]
        return WireStats(*(sum(column) for column in zip(*figures, strict=True)))

    def close(self) -> None:
        """Nothing is mapped here, but what rounding took away is kept for the next time."""
        for line in self._carrier.lines():
            if line.lock.acquire(
                blocking=False
            ):  # else it is in the middle of something: it will forget later
                try:
                    line.stream.forget(self._number)
                finally:
                    line.lock.release()
