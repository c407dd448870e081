"""Clients of one daemon by RDMA, TCP and shared memory at once: nothing is lost, whoever dies, and when.

First all exchange with one segment at once, fresh noise each round, two by RDMA in narrow types; held when
what all the local weights lost is what the center got, element by element. Then workers add ones to all of a
segment and say what they do: begun, done. One after the other is killed (kill -9) at a random moment, and
another takes its place; those by RDMA break their own queue pair in every fifth update. Now and then the
daemon is killed, and the next one takes over the memory from a client on this host. Held when

- no chunk is half of an update because a client by RDMA or TCP died: the daemon adds a piece or does not. Who
  is killed while it adds, a client on this host or the daemon, may leave one chunk half a thread;
- at the end each element and the version have every acknowledged update once, and above that only those that
  were unsure: a worker's last before it was killed, and what raised Restarted;
- no session is left, the daemon's descriptors are as before, it ends when asked.

Where there is no RDMA device it runs in the guest of tests/rdma_guest (root, apt, QEMU), which is slow.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
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
from smb.transport.ports import ports  # noqa: E402
from tests.rdma_guest import boot, image  # noqa: E402
from tests.rdma_guest.items import device_here, obstacle  # noqa: E402
from tests.smb.processes import Program, ServeProcess, wait_for  # noqa: E402

CHUNKS = 4
COUNT = CHUNKS * CHUNK_BYTES // 4
LEASE = 20  # seconds: a guest is so slow that living clients are silent for some
SCHEMES = ("rdma:", "rdma:", "tcp:", "unix:")  # of the workers that live at one time
MIX = (
    ("rdma:", "float32"),
    ("rdma:", "bfloat16"),
    ("rdma:", "int8"),
    ("tcp:", "float32"),
    ("unix:", "float32"),
)

EXCHANGER = """
import sys, numpy as np, smb
address, token, rank, rounds, clients, wire, out = sys.argv[1:]
box = smb.connect(address, token=token, timeout=120)
center = box.attach("sum")
local, steps = np.zeros(center.count, np.float32), np.zeros(center.count)
box.barrier("begin", int(clients), timeout=600)
for step in range(int(rounds)):
    change = np.random.default_rng([int(rank), step]).standard_normal(center.count).astype(np.float32)
    local += change
    steps += change
    center.exchange(local, 0.2, wire=wire)
np.save(out, local - steps)
print("done", flush=True)
"""

WORKER = """
import os, sys, numpy as np, smb
box = smb.connect(sys.argv[1], token=sys.argv[2], timeout=120, reconnect=120)
center, ones = box.attach("center"), np.ones(int(sys.argv[3]), np.float32)
print("ready", flush=True)
step = 0
while True:
    step += 1
    os.write(1, b"begun\\n")
    try:
        if box.transport == "rdma" and step % 5 == 0:
            box._transport.channel().pair().fail()
        center.accumulate(ones)
    except smb.Restarted:
        os.write(1, b"unsure\\n")
    else:
        os.write(1, b"done\\n")
"""


@dataclass
class Account:
    """What the killed have said."""

    done: int = 0
    unsure: int = 0

    def close(self, worker: Program) -> None:
        """Kill it and count what it has done, and what may be there."""
        assert worker.process.poll() is None, "a worker ended by itself"
        worker.kill()
        last = ""
        while word := worker.line():
            self.done += word == "done"
            self.unsure += word == "unsure"
            last = word
        self.unsure += last == "begun"
        worker.__exit__(None, None, None)


@dataclass
class Place:
    """Where the daemons of one soak are, one after the other, and what their clients need."""

    folder: Path
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token = self.folder / "token"
        self.token.write_bytes(os.urandom(32).hex().encode())
        self.token.chmod(0o600)
        self.words = ["--lease", str(LEASE), "--token", str(self.token), "--tcp", "127.0.0.1:0"]
        self.words += ["--rdma", f"{ports()[0].address}:0"]
        self.process = self._start()
        tcp, rdma = (self.address(scheme).partition("://")[2] for scheme in ("tcp:", "rdma:"))
        self.words[-3:] = [tcp, "--rdma", rdma]  # where the next ones will be

    def _start(self) -> ServeProcess:
        return ServeProcess(self.folder / "box.sock", *self.words).__enter__()

    def address(self, scheme: str) -> str:
        (address,) = [one for one in self.process.addresses if one.startswith(scheme)]
        return address

    def restart(self) -> None:
        self.process.kill()
        self.process.__exit__(None, None, None)
        self.process = self._start()

    def hire(self) -> list[tuple[str, Program]]:
        return [(scheme, self.worker(scheme)) for scheme in SCHEMES]

    def worker(self, scheme: str) -> Program:
        worker = Program("-c", WORKER, self.address(scheme), str(self.token), str(COUNT))
        assert worker.line(240) == "ready"
        return worker

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def exchanges(place: Place, rounds: int) -> str:
    """All transports and wire types on one segment; what was done, in words."""
    with smb.connect(place.address("unix:")) as box:
        center = box.create("sum", COUNT)
        began, programs = time.monotonic(), list[Program]()
        for rank, (scheme, wire) in enumerate(MIX):
            out = place.folder / f"{rank}.npy"
            numbers = (str(rank), str(rounds), str(len(MIX)))
            words = [place.address(scheme), str(place.token), *numbers, wire, str(out)]
            programs.append(Program("-c", EXCHANGER, *words))
        for program in programs:
            assert program.line(1200) == "done"
            assert program.ended(60) == 0
            program.__exit__(None, None, None)
        lost = sum(np.load(place.folder / f"{rank}.npy") for rank in range(len(MIX)))
        worst = float(np.abs(center.read() + lost).max())
        assert center.version == rounds * len(MIX), center.version
        assert worst < 1e-6 * rounds * len(MIX) + 2e-5, f"the sum is off by {worst}"
    took, made = time.monotonic() - began, rounds * len(MIX)
    return f"{made} exchanges of {len(MIX)} clients, the sum off by {worst:.1e} at most, {took:.0f} s"


def whole(center: smb.Segment, halves: int) -> np.ndarray[Any, Any]:
    """Least and most value of each chunk, (CHUNKS, 2); ``halves`` updates may be there by half at most."""
    chunks: np.ndarray[Any, Any] = center.read().reshape(CHUNKS, -1)
    ends = np.stack([chunks.min(axis=1), chunks.max(axis=1)], axis=1)
    assert (ends[:, 1] - ends[:, 0] <= halves).all(), f"half an update in a chunk: {ends.tolist()}, {halves}"
    return ends


def kills(place: Place, count: int, restarts: int, seed: random.Random) -> str:
    """Workers and daemons killed; what was done, in words."""
    account, halves = Account(), 0
    with smb.connect(place.address("unix:"), name="parent", reconnect=120) as box:
        center, before = box.create("center", COUNT), place.files()
        workers = place.hire()
        again = set(seed.sample(range(2, count + 1), min(restarts, count - 1)))
        for kill in range(1, count + 1):
            time.sleep(seed.uniform(0.5, 3.0))
            if kill in again:
                place.restart()
                halves += sum(scheme != "unix:" for scheme, _ in workers)
                print("the daemon was killed; the next one is there", flush=True)
            scheme, worker = workers.pop(0)
            account.close(worker)
            halves += scheme == "unix:"
            workers.append((scheme, place.worker(scheme)))
            values = whole(center, halves)
            print(
                f"kill {kill}, by {scheme[:-1]}: {account.done} updates done, {values.tolist()}", flush=True
            )
        for scheme, worker in workers:
            account.close(worker)
            halves += scheme == "unix:"
        assert wait_for(lambda: len(box.sessions()) == 1, 3 * LEASE), "a session is left"
        values, most = whole(center, halves), account.done + account.unsure
        assert (values >= account.done).all(), f"lost: {values}, {account}"
        assert (values <= most).all(), f"applied twice: {values}, {account}"
        assert account.done <= center.version <= most, f"version {center.version}, {account}"
        assert wait_for(lambda: place.files() <= before + 4, 10), (
            f"{place.files()} descriptors, {before} before"
        )
    return (
        f"killed: clients {count + len(SCHEMES)}, daemons {len(again)}; {account.done} updates, each once; "
        f"{account.unsure} unsure"
    )


def here(options: argparse.Namespace) -> None:
    number = options.seed or int(time.time())
    with tempfile.TemporaryDirectory(prefix="smb-soak-") as folder:
        place = Place(Path(folder))
        try:
            began = time.monotonic()
            told = [exchanges(place, options.rounds)]
            print(told[0], flush=True)
            told.append(kills(place, options.kills, options.restarts, random.Random(number)))
            place.process.process.terminate()
            assert place.process.ended(60) == 0
        finally:
            place.process.__exit__(None, None, None)
    seconds = time.monotonic() - began
    if options.result:
        options.result.write_text(page(options, number, told, seconds))
    print("; ".join(told))


def page(options: argparse.Namespace, number: int, told: list[str], seconds: float) -> str:
    device = "soft-RoCE in the guest of tests/rdma_guest" if options.guest else str(ports()[0])
    command = f"scripts/soak/rdma.py --rounds {options.rounds} --kills {options.kills}"
    return (
        f"# RDMA, TCP and shared memory on one segment, and kill -9\n\n"
        f"`{command} --restarts {options.restarts}`, {time.strftime('%Y-%m-%d')}, Linux "
        f"{platform.release()}, Python "
        f"{platform.python_version()}\n\n| | |\n|---|---|\n"
        f"| device | {device} |\n"
        f"| at once, fresh noise each round, three by RDMA (one in bfloat16, one in int8) | {told[0]} |\n"
        f"| killed while they added ones to 1 MiB, by RDMA, TCP and shared memory | {told[1]} |\n"
        f"| lost, applied twice, half an update by a dead client over RDMA or TCP | 0 |\n"
        f"| seed | {number} |\n| time | {seconds:.0f} s |\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="exchanges of each client (default: 20)")
    parser.add_argument("--kills", type=int, default=12, help="beside those at the end (default: 12)")
    parser.add_argument("--restarts", type=int, default=2, help="kills of the daemon among them (default: 2)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit in a guest (default: 1800)")
    parser.add_argument("--seed", type=int, help="of the moments (default: the time)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write a page for docs/results")
    parser.add_argument("--guest", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if device_here():
        here(options)
        return 0
    if why := obstacle():
        print(why, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-u", "scripts/soak/rdma.py", "--guest", "--result", "/run/hostout/page"]
        for name in ("rounds", "kills", "restarts", "seed"):
            if (value := getattr(options, name)) is not None:
                words += [f"--{name}", str(value)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        outcome = boot.boot(image.image(), shlex.join(words), Path(out), options.seconds, environment)
        print(outcome.said.rstrip())
        if options.result and outcome.status == 0:
            options.result.write_text((Path(out) / "page").read_text())
    return 1 if outcome.status is None else outcome.status


if __name__ == "__main__":
    sys.exit(main())
