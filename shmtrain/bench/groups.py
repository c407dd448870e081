"""The conductor's side: groups of processes that do jobs, bounded in time and not outliving the conductor."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shmtrain.bench.errors import BenchError
from shmtrain.bench.job import Job
from shmtrain.bench.mpi import Mpi, bare, environment

START = 90.0  # seconds until all ranks of a group have said who they are
LIMIT = 120.0  # seconds for one job's warm-up, and again for its exchanges
END = 10.0
RANK = bare("rank")


@dataclass
class Peer:
    """One rank as the conductor knows it."""

    rank: int
    pid: int
    connection: socket.socket
    pending: bytes = b""
    answers: list[dict[str, Any]] = field(default_factory=list)

    def say(self, **words: object) -> None:
        with contextlib.suppress(OSError):  # a dead rank is named by who waits for its answer
            self.connection.sendall(json.dumps(words).encode() + b"\n")

    def heard(self) -> bool:
        """Take what has come; False when the rank has closed the line."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self.pending = (self.pending + data).split(b"\n")
        self.answers += [json.loads(line) for line in lines]
        return bool(data)


@dataclass
class Group:
    """Processes of one library; ``workers`` of its ranks exchange."""

    name: str
    workers: int
    processes: list[subprocess.Popen[bytes]]
    errors: IO[bytes]
    peers: dict[int, Peer] = field(default_factory=dict)

    def run(self, job: Job) -> tuple[float, list[float]]:
        """Do a job: seconds from the first rank's beginning to the last one's end; what they held (check).

        Raises BenchError with the rank that died or gave no answer in time.
        """
        self._say(job=job.text())
        self._answers(job, "warming up")
        self._say(go=True)
        answers = self._answers(job, "exchanging")
        began = [a["began"] for a in answers if "began" in a]
        ended = [a["ended"] for a in answers if "ended" in a]
        held: list[float] = []
        if job.check:  # only now: a rank that had nothing to do was done before the others
            self._say(go=True)
            held = [mean for a in self._answers(job, "telling its weights") for mean in a["held"]]
        return max(ended) - min(began), held

    def _say(self, **words: object) -> None:
        for peer in self.peers.values():
            peer.say(**words)

    def _answers(self, job: Job, doing: str) -> list[dict[str, Any]]:
        end = time.monotonic() + LIMIT
        with selectors.DefaultSelector() as selector:
            for peer in self.peers.values():
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            while waiting := [peer for peer in self.peers.values() if not peer.answers]:
                left = end - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    names = ", ".join(f"{peer.rank} (pid {peer.pid})" for peer in waiting)
                    raise BenchError(
                        f"{self.name}: no answer of rank {names} within {LIMIT:g} s while {doing}: {job}"
                    )
                for key, _ in ready:
                    if not key.data.heard():
                        self._died(key.data, f"while {doing}: {job}")
        return [peer.answers.pop(0) for peer in self.peers.values()]

    def _died(self, peer: Peer, when: str) -> None:
        raise BenchError(f"{self.name}: rank {peer.rank} (pid {peer.pid}) died {when}{self.said()}")

    def said(self) -> str:
        """The last words of the group's standard error."""
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - 1500))
        text = self.errors.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""

    def close(self) -> None:
        self._say(end=True)
        end = time.monotonic() + END
        for process in self.processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for peer in self.peers.values():
            peer.connection.close()
        self.errors.close()


class Hall:
    """Where groups are started and meet the conductor; closing it ends them all."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shmtrain-bench-")
        self.path = str(Path(self._folder.name) / "control")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(256)
        self._groups: list[Group] = []

    def box(self, workers: int, address: str) -> Group:
        commands = [
            [sys.executable, *RANK, "box", self.path, "box", str(rank), address] for rank in range(workers)
        ]
        return self._start("box", workers, workers, commands)

    def gloo(self, workers: int) -> Group:
        store = str(Path(self._folder.name) / f"gloo-{len(self._groups)}")
        words = [sys.executable, *RANK, "gloo", self.path, "gloo"]
        commands = [[*words, str(rank), str(workers), store] for rank in range(workers)]
        return self._start("gloo", workers, workers, commands, {"GLOO_SOCKET_IFNAME": "lo"})

    def mpi(self, mpi: Mpi, workers: int, more: Mapping[str, str] | None = None) -> Group:
        """A server rank and the workers; each stays where a job says, so that the launcher binds none."""
        words = [*mpi.command(workers + 1, bind=False), mpi.python, *RANK, "mpi", self.path, mpi.name]
        return self._start(mpi.name, workers, workers + 1, [words], more)

    def _start(
        self,
        name: str,
        workers: int,
        ranks: int,
        commands: list[list[str]],
        more: Mapping[str, str] | None = None,
    ) -> Group:
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the group)
        group = Group(name, workers, [], errors)
        self._groups.append(group)
        for command in commands:
            group.processes.append(
                subprocess.Popen(
                    command,
                    env=environment(more),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,
                )
            )
        for _ in range(ranks):
            peer = self._arrival(group, ranks)
            group.peers[peer.rank] = peer
        group.peers = dict(sorted(group.peers.items()))
        return group

    def _arrival(self, group: Group, ranks: int) -> Peer:
        end = time.monotonic() + START
        self._socket.settimeout(0.2)
        while True:
            try:
                connection, _ = self._socket.accept()
                break
            except TimeoutError:
                failed = [p.returncode for p in group.processes if p.poll() is not None]
                if failed or time.monotonic() > end:
                    here = sorted(group.peers)
                    why = f"ended with code {failed[0]}" if failed else f"took over {START:g} s"
                    raise BenchError(
                        f"{group.name}: start of {ranks} ranks {why}; there are {here}{group.said()}"
                    ) from None
        connection.settimeout(START)
        peer = Peer(-1, -1, connection)
        while not peer.answers:
            if not peer.heard():
                raise BenchError(f"{group.name}: a rank ended at its start{group.said()}")
        hello = peer.answers.pop()
        peer.rank, peer.pid = hello["rank"], hello["pid"]
        return peer

    def close(self) -> None:
        for group in self._groups:
            group.close()
        self._socket.close()
        self._folder.cleanup()


@contextlib.contextmanager
def hall() -> Iterator[Hall]:
    opened = Hall()
    try:
        yield opened
    finally:
        opened.close()
