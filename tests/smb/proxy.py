"""A TCP proxy that treats connections as a bad network does: cuts, delays, loses replies, goes one way."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from types import TracebackType

UP, DOWN = "up", "down"  # from the client to the daemon, and back
PART = 1 << 16


class Faults:
    """What happens to the bytes of one direction."""

    def __init__(self) -> None:
        self.passed = 0  # bytes
        self.cut_at: int | None = None  # the connection is cut when so many have passed
        self.most: int | None = None  # bytes after which each connection is cut
        self.stalled = False  # nothing passes, the connection stays
        self.lost = False  # everything is read and thrown away
        self.swallowed = 0  # bytes thrown away
        self.delay = 0.0  # seconds before each part


class Proxy:
    """Forwards every connection to ``target`` ("tcp://HOST:PORT"); a context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        self.faults = {UP: Faults(), DOWN: Faults()}
        self.connections = 0
        self.refuse = False
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End all connections now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def cut_after(self, direction: str, count: int) -> None:
        """Cut when ``count`` more bytes have gone in this direction, in the middle of whatever they are."""
        faults = self.faults[direction]
        faults.cut_at = faults.passed + count

    def heal(self) -> None:
        self.faults = {UP: Faults(), DOWN: Faults()}

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            try:
                daemon = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self.connections += 1
            for sock in (client, daemon):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, daemon))
            threading.Thread(target=self._forward, args=(client, daemon), daemon=True).start()

    def _forward(self, client: socket.socket, daemon: socket.socket) -> None:
        passed = {UP: 0, DOWN: 0}
        try:
            while True:
                open_ways = [
                    sock for sock, way in ((client, UP), (daemon, DOWN)) if not self.faults[way].stalled
                ]
                for sock in select.select(open_ways, [], [], 0.02)[0]:
                    way, to = (UP, daemon) if sock is client else (DOWN, client)
                    before = self.faults[way].passed
                    if not self._pass(sock, to, self.faults[way]):
                        return
                    passed[way] += self.faults[way].passed - before
                    most = self.faults[way].most
                    if most is not None and passed[way] > most:
                        return
        except (OSError, ValueError):
            pass
        finally:
            client.close()
            daemon.close()

    @staticmethod
    def _pass(source: socket.socket, to: socket.socket, faults: Faults) -> bool:
        """Forward one part; False at the end of the connection."""
        left = PART if faults.cut_at is None else max(0, min(PART, faults.cut_at - faults.passed))
        if not left:
            faults.cut_at = None
            return False
        data = source.recv(left)
        if not data:
            return False
        if faults.delay:
            time.sleep(faults.delay)
        if faults.lost:
            faults.swallowed += len(data)
            return True
        to.sendall(data)
        faults.passed += len(data)
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()
        self._thread.join(5)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
