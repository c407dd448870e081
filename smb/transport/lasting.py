"""A client on this host that outlives its daemon: it waits for the next one and hands its memory back.

The memory is the client's as much as the daemon's: when the daemon dies nothing of it is lost as long as a
client has it mapped. A thread looks whether the daemon lives; when it does not, it tries to reach the next
one at the same address, tells it which session this was, hands back the memory of every segment, the last
values of its counters and the named locks that it holds, and then lets the operations go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

from smb import protocol
from smb.errors import Away, Closed, RequestError, Restarted, SmbError, TransportError
from smb.segment import Mapping
from smb.transport.base import Array, Opening, Options
from smb.transport.frames import close_all
from smb.transport.mapped import watched
from smb.transport.shm import Silent, Standing, Unsent

log = logging.getLogger(__name__)
GLANCE = 0.25  # seconds between two looks at whether the daemon lives, when no operation finds out before
RETRY = (0.05, 0.5)  # seconds between two tries to reach the next daemon, at first and at most
HARMLESS = (protocol.Attach, protocol.Inherit, protocol.HandBack, protocol.HandCounter)


@dataclass(eq=False)
class Kept:
    """One segment of this client, over the lives of daemons.

    number       what the daemon that is there now calls it
    replacement  descriptors of other memory that the key has now, for the next operation to take
    dropped      why its own memory is not the key's any more; raised by the next operation
    lost         whether the key is gone altogether
    """

    mapping: weakref.ref[Mapping]
    key: str
    reply: protocol.Opened
    number: int
    replacement: tuple[int, ...] = ()
    dropped: str = ""
    lost: bool = False

    def let_go(self) -> None:
        close_all(self.replacement)
        self.replacement = ()


class LastingTransport:
    """One client of whatever daemon is at a socket. Waits ``options.reconnect`` seconds for the next one.

    patient  whether an operation waits while no daemon is there; otherwise it raises Away at once
    """

    name = "shm"

    def __init__(self, path: str, options: Options) -> None:
        self.patient = True
        self._path, self._options = path, options
        self._standing = Standing(path, options)
        self._standing.ask(protocol.Inherit(0, 0, True))  # who will come back is waited for
        self._changed = threading.Condition()
        self._look = threading.Event()
        self._failed = ""  # the TransportError after which nothing works any more
        self._closed = False
        self._kept = set[Kept]()
        self._numbers: dict[int, Kept] = {}  # what the segments were first called
        self._counters: dict[str, tuple[int, int]] = {}  # number of updates and value, as last seen
        self._locks = set[tuple[str, int]]()
        self._taking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="smb-lasting", daemon=True)
        self._thread.start()

    @property
    def daemon(self) -> int:
        """The number that the daemon gave itself."""
        return self._standing.daemon

    # Operations ------------------------------------------------------------------------------------------

    def call(self, request: object, timeout: float) -> Any:
        if isinstance(request, protocol.Unlock):
            self._locks.discard((request.name, request.token))
        began = time.monotonic()
        while True:
            standing = self._ready()
            try:
                reply = standing.ask(self._as_numbered(request), timeout)
            except TransportError as error:
                self._broke(standing, request, error, began)
            else:
                self._note(request, reply)
                return reply

    def open(self, request: protocol.Create | protocol.Attach, initial: Array | None = None) -> Opening:
        began = time.monotonic()
        while True:
            standing = self._ready()
            try:
                mapping, reply = standing.open(request, initial)
                break
            except TransportError as error:
                self._broke(standing, request, error, began)
        kept = Kept(weakref.ref(mapping), request.key, reply, reply.segment)
        mapping.on_dead = lambda: self._revive(kept)
        with self._changed:
            if self._standing is not standing:
                mapping.close()
                raise Restarted(f"segment {request.key!r}: the daemon restarted while it was opened")
            self._kept = {k for k in self._kept if _open(k)} | {kept}
            self._numbers = {n: k for n, k in self._numbers.items() if _open(k)} | {reply.segment: kept}
        return watched(mapping, reply, self, standing.lease)

    def _ready(self) -> Standing:
        """The standing with a daemon that lives. Raises Away, Closed, TransportError."""
        standing = self._standing
        if standing.life.alive and not self._closed and not self._failed:
            return standing
        self._look.set()
        with self._changed:
            while True:
                if self._closed:
                    raise Closed("this box is closed")
                if self._failed:
                    raise TransportError(self._failed)
                if self._standing.life.alive:
                    return self._standing
                if not self.patient:
                    raise Away(f"daemon at {self._path}: it died, and the next is not there yet")
                self._changed.wait(GLANCE)

    def _broke(self, standing: Standing, request: object, error: TransportError, began: float) -> None:
        """Return when the request may be made again; raise Restarted when it may have been applied.

        began  when it was first made: a daemon that lives and lets nobody in is not tried for ever
        """
        if isinstance(error, Silent) and standing.life.alive:
            with self._changed:
                self._failed = str(error)
            raise error
        self._look.set()
        if isinstance(error, Unsent):
            if not self.patient:
                raise Away(str(error)) from error
            if standing.life.alive and time.monotonic() > began + self._options.timeout:
                raise error
            time.sleep(RETRY[0])  # it is about to end
            return
        row = protocol.BY_REQUEST[type(request)]
        again = isinstance(request, protocol.Create) and request.or_attach
        again = again or (isinstance(request, protocol.Add) and not request.amount)
        if row.once and not again and not isinstance(request, HARMLESS):
            raise Restarted(f"{error}; {row.request.__name__} was under way and may have been done or not")

    def _note(self, request: object, reply: Any) -> None:
        """Remember what the next daemon will have to be told."""
        if isinstance(request, (protocol.Add, protocol.Await)):
            value = reply.value + (request.amount if isinstance(request, protocol.Add) else 0)
            with self._changed:
                seen = self._counters.get(request.key, (-1, 0))
                self._counters[request.key] = max(seen, (reply.updates, value), key=lambda pair: pair[0])
        elif isinstance(request, protocol.Lock):
            self._locks.add((request.name, request.token))

    def _as_numbered(self, request: Any) -> Any:
        """The request with the number that the segment has at this daemon."""
        kept = self._numbers.get(getattr(request, "segment", 0))
        return replace(request, segment=kept.number) if kept and kept.number != request.segment else request

    def _revive(self, kept: Kept) -> None:
        """An operation found its daemon dead: wait for the next one; take the memory that the key has."""
        standing = self._ready()
        with self._taking:
            if kept.dropped and kept.replacement:
                mapping, fds = kept.mapping(), kept.replacement
                assert mapping is not None  # it is just being used
                mapping.take_over(fds[0], fds[1], standing.life)
                mapping.tally(standing.session)
                kept.let_go()
                raise Restarted(kept.dropped)
        if kept.lost:
            raise Restarted(kept.dropped)

    # The next daemon -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            self._look.wait(GLANCE)
            self._look.clear()
            if self._closed or (not self._standing.life.alive and not self._follow()):
                return

    def _follow(self) -> bool:
        """Reach the next daemon and hand over; False when it is given up."""
        limit, pause = self._options.reconnect, RETRY[0]
        deadline = time.monotonic() + limit
        log.warning("daemon at %s: it died; waiting %g s for the next one", self._path, limit)
        while not self._closed:
            try:
                standing = Standing(self._path, self._options)
            except (SmbError, OSError) as error:
                if time.monotonic() > deadline:
                    self._give_up(f"daemon at {self._path}: it died, and none came in {limit:g} s ({error})")
                    return False
                self._look.wait(pause)
                pause = min(2 * pause, RETRY[1])
                continue
            try:
                self._hand_over(standing)
                return True
            except (TransportError, OSError) as error:
                log.warning("daemon at %s: %s", self._path, error)
                standing.close()
        return False

    def _give_up(self, why: str) -> None:
        with self._changed:
            self._failed = why
            self._changed.notify_all()

    def _hand_over(self, new: Standing) -> None:
        old, done = self._standing, set[Kept]()
        new.ask(protocol.Inherit(old.session, old.secret, False))
        self._hand_names(new)
        while True:
            with self._changed:
                rest = {kept for kept in self._kept if _open(kept)} - done
            for kept in sorted(rest, key=lambda one: bool(one.replacement) or _readonly(one)):
                self._hand_back(new, kept)
            done |= rest
            if rest:
                continue
            new.ask(protocol.Inherit(old.session, old.secret, True))
            with self._changed:
                if all(kept in done or not _open(kept) for kept in self._kept):
                    self._standing = new
                    self._changed.notify_all()
                    break
        old.close()
        log.warning("daemon at %s: pid %d took over %d segments", self._path, new.pid, len(done))

    def _hand_names(self, new: Standing) -> None:
        """Counters, and named locks that this client holds."""
        for key, (updates, value) in list(self._counters.items()):
            if updates:
                try:
                    new.ask(protocol.HandCounter(key, value, updates))
                except RequestError as error:
                    log.warning("counter %r: its value %d is lost: %s", key, value, error)
        for name, token in list(self._locks):
            try:
                new.ask(protocol.Lock(name, token, 0.0))
            except RequestError as error:
                self._locks.discard((name, token))
                log.warning("lock %r is not held any more: %s", name, error)

    def _hand_back(self, new: Standing, kept: Kept) -> None:
        mapping = kept.mapping()
        if mapping is None or mapping.control_fd < 0:
            return
        obsolete, why = bool(kept.replacement) or kept.lost, "its memory could not be handed back"
        kept.let_go()
        if not obsolete and not mapping.readonly:
            r = kept.reply
            request = protocol.HandBack(
                kept.key, kept.number, r.count, r.dtype, r.lifetime, r.meta, r.created
            )
            try:
                opened = new.ask(request, 0.0, None, (mapping.control_fd, mapping.payload_fd))
            except RequestError as error:
                log.warning("daemon at %s: %s", self._path, error)
                why = str(error)
            else:
                kept.number = opened.segment
                mapping.tally(new.session)  # before operations go on
                mapping.follow(new.life.native)
                return
        self._attach_again(new, kept, mapping, why)

    def _attach_again(self, new: Standing, kept: Kept, mapping: Mapping, why: str) -> None:
        """Take what the key has now: the same memory, handed back by others, or other memory."""
        fds: list[int] = []
        r = kept.reply
        try:
            opened = new.ask(protocol.Attach(kept.key, mapping.readonly, True, r.meta), 0.0, fds)
            if (opened.count, opened.dtype) != (r.count, r.dtype):
                raise RequestError(f"it has {opened.count} x {opened.dtype} now")
        except RequestError as error:
            close_all(fds)
            kept.dropped = f"segment {kept.key!r} did not survive the daemon's restart: {error}"
            kept.lost = True
            log.warning("%s", kept.dropped)
            return
        kept.number, kept.lost = opened.segment, False
        here, there = os.fstat(mapping.payload_fd), os.fstat(fds[1])
        if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
            close_all(fds)
            mapping.tally(new.session)
            mapping.follow(new.life.native)
            return
        kept.replacement = tuple(fds)
        kept.dropped = f"segment {kept.key!r} went back with the daemon's restart: {why}"
        log.warning("%s", kept.dropped)

    # The end ---------------------------------------------------------------------------------------------

    def orphan(self) -> None:
        self._closed = True
        self._standing.orphan()

    def close(self) -> None:
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._look.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._options.timeout)
        self._standing.farewell()
        self._standing.close()
        for kept in self._kept:
            with contextlib.suppress(OSError):
                kept.let_go()


def _open(kept: Kept) -> bool:
    mapping = kept.mapping()
    return mapping is not None and mapping.control_fd >= 0


def _readonly(kept: Kept) -> bool:
    mapping = kept.mapping()
    return mapping is not None and mapping.readonly
