"""Many TCP clients on one daemon: 500 idle, 64 that read 4 KiB again and again; then 10,000 come and go.

Held when: 80,000 reads a second, p99 at most 3 ms, the daemon grows by at most 40 MiB and stays flat, no
error, and the comers and goers leave no session, thread, descriptor or memory. The clients are a program in C
(load.c beside this file), so that they are not the limit. ``--result FILE`` writes a page for docs/results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import smb  # noqa: E402
from smb import protocol  # noqa: E402
from smb.client import Box  # noqa: E402
from tests.smb.processes import wait_for  # noqa: E402

LEASE = 5
COUNT = 1 << 20  # elements of the segment that is read
READS, P99, GROWTH, SLOPE = (
    80_000,
    3.0,
    40.0,
    2.0,
)  # a second; ms; MiB; MiB from the run's second third to its last
LEFT = 6.0  # MiB more after clients that came and went than after as many before them
TIMES = 3  # that as many clients come and go, before and again


def compiled(folder: Path) -> Path:
    program = folder / "load"
    source = Path(__file__).with_suffix(".c")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2"]
    flags.append(f"-DVERSION={protocol.VERSION}")
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", program, source], check=True)
    return program


@dataclass
class Watched:
    """A daemon's memory, threads and descriptors, looked at each half second."""

    pid: int
    mib: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def memory(self) -> float:
        """MiB that it has resident, what segments take left out."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.mib.append(self.memory())

    def end(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        return self.mib


class Bars:
    """What was measured against what it must be."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.held = True

    def add(self, what: str, value: float, most: float | None = None, least: float | None = None) -> None:
        good = (most is None or value <= most) and (least is None or value >= least)
        bar = f"at most {most:g}" if most is not None else f"at least {least:g}"
        self.held &= good
        self.lines.append(f"| {what} | {value:,.10g} | {bar} | {'held' if good else 'SHORT'} |")
        print(f"{what:48} {value:12,.3f}   {bar:20} {'held' if good else 'SHORT'}", flush=True)


def load(program: Path, place: list[str], daemon: int, options: argparse.Namespace, bars: Bars) -> None:
    watched = Watched(daemon)
    before = watched.memory()
    words = [program, *place, "read", str(options.idle), str(options.active), str(options.seconds)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    mib, got = watched.end(), json.loads(done.stdout)
    third = len(mib) // 3
    middle, last = mib[third : 2 * third], mib[2 * third :]
    bars.add(f"4 KiB reads a second, {options.active} clients at once", got["per_second"], least=READS)
    bars.add("p50, ms", got["p50_ms"], most=P99)
    bars.add("p99, ms", got["p99_ms"], most=P99)
    bars.add("errors", got["errors"], most=0)
    bars.add(f"MiB more memory with {options.idle + options.active} clients", max(mib) - before, most=GROWTH)
    bars.add("MiB from the second third to the last", max(last) - max(middle), most=SLOPE)


def churn(program: Path, place: list[str], box: Box, count: int, bars: Bars) -> None:
    watched = Watched(box.status().pid)

    def alone() -> bool:
        return len(box.status().clients) == 1

    def settled() -> tuple[float, int, int]:
        assert wait_for(alone, 6 * LEASE), f"{len(box.status().clients)} clients are still there"
        time.sleep(1)
        return watched.memory(), watched.threads(), watched.descriptors()

    def come_and_go() -> int:
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        errors = int(json.loads(done.stdout)["errors"])
        at_rest.append(settled())
        return errors

    # What the allocator keeps of thousands of sessions at once differs by 5 MiB from time to time, and is no
    # leak: so the least of three times is held against the least of the three before.
    words = [program, *place, "churn", str(count)]
    at_rest: list[tuple[float, int, int]] = []
    errors = sum(come_and_go() for _ in range(2 * TIMES))
    memory, threads, descriptors = (
        min(one[what] for one in at_rest[TIMES:]) - min(one[what] for one in at_rest[:TIMES])
        for what in range(3)
    )
    watched.end()
    bars.add(f"errors of {2 * TIMES} x {count:,} clients that came and went", errors, most=0)
    bars.add("MiB that half of them left, after as many before them", memory, most=LEFT)
    bars.add("threads that they left", threads, most=0)
    bars.add("descriptors that they left", descriptors, most=0)
    bars.add("segment's clients besides this one", box.stat("load").sessions, most=0)


def page(bars: Bars, options: argparse.Namespace) -> str:
    return "\n".join(
        [
            "# Load on one daemon",
            "",
            f"`scripts/soak/load.py` on {os.cpu_count()} cores, Linux {platform.release()}, Python "
            f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}: {options.idle} idle and "
            f"{options.active} active clients for {options.seconds:g} s over TCP on loopback, all of them",
            "on the same cores as the daemon.",
            "",
            "| | measured | asked for | |",
            "|---|---|---|---|",
            *bars.lines,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--idle", type=int, default=500)
    parser.add_argument("--active", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--connects", type=int, default=10_000)
    parser.add_argument("--result", type=Path, help="write a page with the figures there")
    options = parser.parse_args()
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="smb-soak-") as name, (Path(name) / "log").open("w") as log:
        folder = Path(name)
        program = compiled(folder)
        words = ["--unix", f"{folder}/s", "--tcp", "127.0.0.1:0", "--insecure", "--lease", str(LEASE)]
        command = [sys.executable, "-u", "-m", "smb.cli", "serve", *words, "--max-clients", "20000"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        ) as daemon:
            assert daemon.stdout
            try:
                unix, tcp = daemon.stdout.readline().strip().removeprefix("listening at ").split()
                place = tcp.removeprefix("tcp://").rsplit(":", 1)
                with smb.connect(unix) as box:
                    box.create("load", COUNT, lifetime="stay").detach()
                    load(program, place, daemon.pid, options, bars)
                    churn(program, place, box, options.connects, bars)
            finally:
                daemon.terminate()
    if options.result:
        options.result.write_text(page(bars, options))
    print(
        f"{options.idle} idle and {options.active} active clients, {options.connects} comers: "
        f"{'all bars held' if bars.held else 'NOT all bars held'}"
    )
    return 0 if bars.held else 1


if __name__ == "__main__":
    sys.exit(main())
