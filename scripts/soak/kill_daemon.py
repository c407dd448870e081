"""kill -9 of the daemon, or of a client, at random moments of a run with snapshots, over TCP or shm.

Three clients add ones to a third of one segment each and say what they do: begun, done (acknowledged) or
dropped (smb.Restarted). Before and after each kill they are stopped and the segment is read, so that it can
be told how often each client's additions are in each chunk. Held against what the clients know:

- over TCP nothing that was acknowledged before the last snapshot is lost, over shared memory nothing at all;
- nothing is applied twice: there is no more than was acknowledged or is unsure;
- nothing is half: every chunk has one value; chunks of one segment differ by no more than what was under way,
  or in a daemon's restart by what was done while the snapshot was written (it is consistent by chunks);
- no process, socket, file, memory or descriptor is left, and the daemon's do not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import smb  # noqa: E402
from smb.segment import CHUNK_BYTES  # noqa: E402
from tests.smb.processes import Program, ServeProcess, wait_for  # noqa: E402

CLIENTS, CHUNKS = 3, 3
PART = CHUNKS * CHUNK_BYTES // 4  # elements of one client
COUNT = CLIENTS * PART
MAX_FILES, MAX_MEMORY = 200, 400 << 20

WORKER = """
import os, sys, numpy as np, smb
address, token, index, part = sys.argv[1], sys.argv[2] or None, int(sys.argv[3]), int(sys.argv[4])
box = smb.connect(address, token=token, name=f"client {index}", reconnect=60, timeout=20)
center, ones = box.attach("center"), np.ones(part, np.float32)
print("ready", flush=True)
while True:
    os.write(1, b"begun\\n")
    try:
        center.accumulate(ones, offset=index * part)
    except smb.Restarted:
        os.write(1, b"dropped\\n")
    else:
        os.write(1, b"done\\n")
"""


@dataclass
class Account:
    """What one client has said since the segment was read last.

    before, after  additions acknowledged before and after the last drop; mark: of those before, when the last
                   snapshot was begun
    unsure         additions that may be there or not, wholly or by chunks
    """

    base: Any = None  # of each chunk, how many were there
    before: int = 0
    after: int = 0
    unsure: int = 0
    mark: int = 0
    late: int = 0  # 1 when an addition was under way as the segment was read
    last: str = ""
    rest: bytes = field(default=b"", repr=False)

    def hear(self, program: Program) -> None:
        """All that it has printed so far."""
        assert program.process.stdout
        number = program.process.stdout.fileno()
        os.set_blocking(number, False)
        while True:
            try:
                part = os.read(number, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                return
            *lines, self.rest = (self.rest + part).split(b"\n")
            for line in lines:
                self._take(line.decode())

    def _take(self, word: str) -> None:
        self.last = word
        self.after += word == "done"
        if word == "dropped":
            self.before, self.after = self.before + self.after, 0
            self.unsure += 1

    def cut(self) -> None:
        """Its client was killed."""
        self.unsure += self.last == "begun"
        self.last, self.rest = "", b""

    @property
    def done(self) -> int:
        return self.before + self.after

    def start(self, chunks: Any) -> None:
        """The segment was read: begin anew from there."""
        self.base = chunks
        self.before = self.after = self.unsure = self.mark = 0
        self.late = int(self.last == "begun")

    def check(self, chunks: Any, forgets: bool) -> int:
        """Hold the chunks against what is known; how many acknowledged additions a crash has cost.

        forgets  whether the daemon was killed and what came after the last snapshot may be gone
        """
        open_ = int(self.last == "begun")
        most = self.base + self.done + self.unsure + open_
        sure = self.mark + self.after if forgets else self.done
        least = self.base + sure - self.late
        assert (chunks <= most).all(), f"applied twice: {chunks}, at most {most}: {self}"
        assert (chunks >= least).all(), f"lost: {chunks}, at least {least}: {self}"
        spread = np.ptp(self.base) + self.unsure + self.late + open_
        assert forgets or np.ptp(chunks) <= spread, f"half an addition: {chunks}: {self}"
        return max(0, int((self.base + self.done - self.late - chunks).max()))


class Client(Program):
    """A worker. One that follows a killed one goes on with its account."""

    def __init__(self, address: str, token: str, index: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", WORKER, address, token, str(index), str(PART)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=ROOT,
        )
        self.pid, self._printed = self.process.pid, b""
        assert self.line() == "ready"

    def early(self) -> bytes:
        """What came with the first line."""
        early, self._printed = self._printed, b""
        return early


class Run:
    """One daemon that is killed again and again, and its clients."""

    def __init__(self, folder: Path, transport: str, every: float, chance: random.Random) -> None:
        self.folder, self.transport, self.chance = folder, transport, chance
        self.snaps, self.token, self.address = folder / "snaps", "", f"unix:{folder / 'box.sock'}"
        self.options = [
            *("--snapshot-dir", str(self.snaps), "--snapshot-every", str(every), "--lease", "5"),
            *(self._listen() if transport == "tcp" else []),
        ]
        self.daemon = self._serve()
        with smb.connect(self.daemon.address) as box:
            box.create("center", COUNT, lifetime="stay")
        self.accounts = [Account() for _ in range(CLIENTS)]
        self.clients = [self._client(index) for index in range(CLIENTS)]
        self.cost = self.files = self.memory = 0

    def _listen(self) -> list[str]:
        token = self.folder / "token"
        token.write_text("ab" * 32)
        token.chmod(0o600)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.token, self.address = str(token), f"tcp://127.0.0.1:{port}"
        return ["--tcp", f"127.0.0.1:{port}", "--token", str(token)]

    def _serve(self) -> ServeProcess:
        return ServeProcess(self.folder / "box.sock", *self.options).__enter__()

    def _client(self, index: int) -> Client:
        client = Client(self.address, self.token, index)
        self.accounts[index].rest = client.early()
        return client

    def hear(self) -> None:
        for account, client in zip(self.accounts, self.clients, strict=True):
            account.hear(client)

    def chunks(self, box: smb.Box) -> list[Any]:
        """How many additions each client has in each of its chunks; its clients are stopped."""
        with box.attach("center", readonly=True) as center:
            values = center.read().reshape(CLIENTS, CHUNKS, -1)
        low, high = values.min(axis=2), values.max(axis=2)
        assert (low == high).all(), f"a chunk is half added: {low} {high}"
        return list(low.astype(int))

    def pause(self) -> None:
        """Stop the clients, none of them in the middle of a chunk: a reader would wait for that one."""
        with smb.connect(self.daemon.address, timeout=60) as box:
            center = box.attach("center")
            for client in self.clients:
                client.stop()
                mapping: Any = center._attachment
                while any(thread == client.pid for _, thread in mapping.holders()):
                    client.signal(signal.SIGCONT)
                    client.stop()
        self.hear()

    def go_on(self) -> None:
        for client in self.clients:
            client.signal(signal.SIGCONT)

    def begin(self) -> None:
        """Read the segment, and have it kept as it is."""
        self.pause()
        with smb.connect(self.daemon.address, timeout=60) as box:
            for account, chunks in zip(self.accounts, self.chunks(box), strict=True):
                account.start(chunks)
            box.snapshot()
        self.go_on()

    def snapshot(self) -> None:
        """One whose beginning the accounts know."""
        self.hear()
        marks = [account.done for account in self.accounts]
        with smb.connect(self.daemon.address, timeout=60) as box:
            box.snapshot()
        for account, mark in zip(self.accounts, marks, strict=True):
            account.mark = mark

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.__exit__(None, None, None)
        time.sleep(self.chance.uniform(0.0, 0.1))
        self.daemon = self._serve()

    def kill_client(self) -> None:
        index = self.chance.randrange(CLIENTS)
        self.clients[index].kill()
        self.hear()
        self.accounts[index].cut()
        self.clients[index].__exit__(None, None, None)
        self.clients[index] = self._client(index)

    def round(self) -> str:
        """One kill; what was killed."""
        self.begin()
        time.sleep(self.chance.uniform(0.0, 0.2))
        if self.chance.random() < 0.5:
            self.snapshot()
            time.sleep(self.chance.uniform(0.0, 0.1))
        # a killed client that maps the segment may leave a chunk half added: kill_worker.py holds that
        killed = "daemon" if self.transport == "shm" or self.chance.random() < 0.7 else "client"
        self.kill_daemon() if killed == "daemon" else self.kill_client()
        self.hear()
        goal = [account.done + account.unsure + 2 for account in self.accounts]
        assert wait_for(lambda: self._reached(goal), 60), f"a client does not go on: {self.accounts}"
        self.pause()
        forgets = killed == "daemon" and self.transport == "tcp"
        with smb.connect(self.daemon.address, timeout=60) as box:
            for account, chunks in zip(self.accounts, self.chunks(box), strict=True):
                self.cost += account.check(chunks, forgets)
        self.go_on()
        self.measure()
        return killed

    def _reached(self, goal: list[int]) -> bool:
        self.hear()
        return all(a.done + a.unsure >= g for a, g in zip(self.accounts, goal, strict=True))

    def measure(self) -> None:
        """What the daemon takes."""
        self.files = max(self.files, len(os.listdir(f"/proc/{self.daemon.pid}/fd")))
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        self.memory = max(self.memory, int(resident.split()[1]) * 1024)
        assert self.files < MAX_FILES, f"{self.files} descriptors are open"
        assert self.memory < MAX_MEMORY, f"the daemon takes {self.memory} bytes"

    def end(self) -> None:
        for client in self.clients:
            client.__exit__(None, None, None)
        self.daemon.signal(signal.SIGTERM)
        assert self.daemon.ended() == 0
        self.daemon.__exit__(None, None, None)
        left = {path.name for path in self.folder.iterdir()} - {"snaps", "token"}
        assert not left, f"left behind: {left}"
        assert {path.suffix for path in self.snaps.iterdir()} == {".snapshot"}


def report(path: Path, options: argparse.Namespace, kills: dict[str, int], run: Run, seconds: float) -> None:
    """The result as a page."""
    rows = [
        ("transport", options.transport),
        ("kills of the daemon / of a client", f"{kills['daemon']} / {kills['client']}"),
        ("a snapshot every", f"{options.every:g} s, and some between"),
        ("acknowledged additions that crashes cost (all after the last snapshot)", run.cost),
        ("acknowledged before the last snapshot and lost", 0),
        ("applied twice, or by half", 0),
        ("most descriptors / memory of the daemon", f"{run.files} / {run.memory >> 20} MiB"),
        ("seed", options.seed),
        ("time", f"{seconds:.0f} s"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    command = f"scripts/soak/kill_daemon.py --kills {sum(kills.values())} --transport {options.transport}"
    text = ["# kill -9 of the daemon and of clients", "", f"`{command}`", "", "| | |", "|---|---|", *lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="(default: 200)")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="between snapshots (0.5)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the result there")
    options = parser.parse_args()
    began, kills, shm = time.monotonic(), {"daemon": 0, "client": 0}, set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="smb-soak-") as folder:
        run = Run(Path(folder), options.transport, options.every, random.Random(options.seed))
        try:
            while sum(kills.values()) < options.kills:
                kills[run.round()] += 1
                print(f"{kills}: {run.cost} additions after the last snapshots lost", flush=True)
            run.end()
        finally:
            for program in (*run.clients, run.daemon):
                program.__exit__(None, None, None)
    assert not {name for name in set(os.listdir("/dev/shm")) - shm if "smb" in name}
    if options.report:
        report(options.report, options, kills, run, time.monotonic() - began)
    print(f"{kills} kills over {options.transport}: nothing kept was lost, nothing done twice or by half")
    return 0


if __name__ == "__main__":
    sys.exit(main())
