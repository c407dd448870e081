"""What several daemons give together, each behind a link of its own that is held to a rate.

    sudo python benchmarks/striping.py [--daemons 4] [--rate 200] [--mib 16] [--rounds 7] [--json FILE]

Makes a network namespace for each daemon, tied to this one by a veth pair whose two ends are held to --rate
Mbit/s by tbf, starts `smb serve --tcp` in each, and moves a segment of --mib MiB by read, write and exchange
over the first daemon alone and over all of them, in an order drawn by chance. Figures are medians over the
rounds. Needs root, ip and tc; takes its namespaces away at the end. An exchange moves its bytes both ways.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import smb

ROOT = Path(__file__).resolve().parent.parent
BAR = 3.4 / 4  # of the number of daemons
PORT = 7100
SETTLE = 2.0  # seconds until a link that was just made carries all it should


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def link(number: int, mbit: float) -> Iterator[tuple[str, str]]:
    """A namespace behind a link of so many Mbit/s both ways: its name and its address."""
    name, here, there = f"smbstripe{number}", f"smbs{number}h", f"smbs{number}n"
    base = f"10.211.{number}"
    tbf = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "50ms")
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        run("ip", "addr", "add", f"{base}.1/24", "dev", here)
        run("ip", "link", "set", here, "up")
        inside = ("ip", "netns", "exec", name)
        run(*inside, "ip", "addr", "add", f"{base}.2/24", "dev", there)
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "link", "set", there, "up")
        run("tc", "qdisc", "add", "dev", here, *tbf)
        run(*inside, "tc", "qdisc", "add", "dev", there, *tbf)
        yield name, f"{base}.2"
    finally:
        run("ip", "netns", "delete", name)  # and the links with it


@contextlib.contextmanager
def daemon(namespace: str, host: str) -> Iterator[str]:
    """A daemon in a namespace; its address."""
    serve = (sys.executable, "-m", "smb.cli", "serve", "--tcp", f"{host}:{PORT}", "--insecure")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ("ip", "netns", "exec", namespace, *serve), stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        if not line.startswith("listening"):
            raise SystemExit(f"the daemon in {namespace} did not start: {line!r}")
        yield f"tcp://{host}:{PORT}"
    finally:
        process.terminate()
        process.wait(30)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(boxes: dict[int, smb.Box], mib: float, rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of each operation over each number of daemons."""
    count = int(mib * (1 << 20)) // 4
    values = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    work: dict[tuple[str, int], Callable[[], object]] = {}
    for n, box in boxes.items():
        segment = box.create(f"bench/{n}", count)
        segment.write(values)
        work["read", n] = lambda s=segment: s.read(values)
        work["write", n] = lambda s=segment: s.write(values)
        work["exchange", n] = lambda s=segment: s.exchange(values, 0.1)
    taken = defaultdict[tuple[str, int], list[float]](list)
    for _ in range(rounds):
        for key in random.sample(sorted(work), len(work)):
            taken[key].append(seconds(work[key]))
    return taken


def report(taken: dict[tuple[str, int], list[float]], most: int, mib: float) -> dict[str, float]:
    """Print the table; how many times one daemon's bandwidth all of them have."""
    ratios = {}
    print(f"{'':10}{'1 daemon':>14}{f'{most} daemons':>14}{'times':>8}   bar {BAR * most:.1f}")
    for name in ("read", "write", "exchange"):
        one, all_ = (statistics.median(taken[name, n]) for n in (1, most))
        ratios[name] = one / all_
        speeds = "".join(f"{mib / t:>9.1f} MiB/s"[-14:].rjust(14) for t in (one, all_))
        print(f"{name:10}{speeds}{ratios[name]:8.2f}   {'PASS' if ratios[name] >= BAR * most else 'short'}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--daemons", type=int, default=4)
    parser.add_argument("--rate", type=float, default=200.0, metavar="MBIT", help="of each link, both ways")
    parser.add_argument("--mib", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(link(i, options.rate)) for i in range(options.daemons)]
        addresses = [stack.enter_context(daemon(*one)) for one in links]
        time.sleep(SETTLE)
        boxes = {
            n: stack.enter_context(smb.connect(",".join(addresses[:n]), timeout=60))
            for n in (1, options.daemons)
        }
        print(f"{options.mib:g} MiB, links of {options.rate:g} Mbit/s, load {os.getloadavg()[0]:.1f}")
        taken = measure(boxes, options.mib, options.rounds)
        ratios = report(taken, options.daemons, options.mib)
    if options.json:
        rows = [{"op": op, "daemons": n, "seconds": took} for (op, n), took in taken.items()]
        options.json.write_text(
            json.dumps({"mib": options.mib, "rate": options.rate, "rows": rows}, indent=1)
        )
    return 0 if min(ratios.values()) >= BAR * options.daemons else 1


if __name__ == "__main__":
    sys.exit(main())
