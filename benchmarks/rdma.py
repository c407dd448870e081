#!/usr/bin/env python3
"""One-sided reads and writes of the box against perftest, and what they cost the daemon: benchmarks/rdma.py

Each round runs `ib_write_bw`, `Segment.write`, `ib_read_bw` and `Segment.read` on the same bytes (16 MiB, in
pieces of 1 MiB), one after the other; the ratio is that of the medians. Both servers, perftest's and the
box's, are processes of their own on this machine. On a machine without an RDMA device all of it runs in the
guest of tests/rdma_guest, which emulates one: the ratio means something there, the bandwidth does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import smb  # noqa: E402
from smb.transport.ports import Port, ports  # noqa: E402
from tests.rdma_guest.boot import boot  # noqa: E402
from tests.rdma_guest.image import image  # noqa: E402
from tests.rdma_guest.items import device_here  # noqa: E402

MIB = 1 << 20
TOKEN = "a token for this benchmark alone"
SERVE = """
import sys, time, smb
daemon = smb.serve(unix=sys.argv[1], rdma=sys.argv[2] + ":0", token=sys.argv[3].encode())
print(daemon.addresses[1], flush=True)
time.sleep(3600)
"""


def perftest(tool: str, port: Port, nbytes: int) -> float:
    """MiB a second of ``tool`` over ``nbytes``."""
    options = ["-d", port.device, "-i", str(port.number), "-x", str(port.index), "-F", "-s", str(MIB)]
    words = [tool, *options, "-n", str(nbytes // MIB)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(40):  # until the server listens
                time.sleep(0.5)
                done = subprocess.run(
                    [*words, port.address], check=False, capture_output=True, text=True, timeout=120
                )
                found = re.search(rf"^ *{MIB} +\d+ +[\d.]+ +([\d.]+)", done.stdout, re.MULTILINE)
                if found:
                    server.wait(30)
                    return float(found[1])
        finally:
            server.kill()
    raise RuntimeError(f"{' '.join(words)}: {done.stdout[-500:]}{done.stderr[-500:]}")


def timed(action: Callable[[], object], nbytes: int) -> float:
    """MiB a second."""
    began = time.perf_counter()
    action()
    return nbytes / MIB / (time.perf_counter() - began)


def processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int, nbytes: int) -> dict[str, float]:
    """Medians in MiB a second, their ratios, and the daemon's processor time during the reads."""
    port = ports()[0]
    speeds: dict[str, list[float]] = {name: [] for name in ("ib_write_bw", "write", "ib_read_bw", "read")}
    used = 0.0
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", SERVE, f"{folder}/s", port.address, TOKEN]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as daemon:
            try:
                assert daemon.stdout is not None
                box = smb.connect(daemon.stdout.readline().strip(), token=TOKEN.encode())
                x = np.ones(nbytes // 4, np.float32)
                segment = box.create("x", x.size, initial=x)
                segment.read(x)  # x is registered
                for _ in range(rounds):
                    speeds["ib_write_bw"].append(perftest("ib_write_bw", port, nbytes))
                    speeds["write"].append(timed(lambda: segment.write(x), nbytes))
                    speeds["ib_read_bw"].append(perftest("ib_read_bw", port, nbytes))
                    before = processor(daemon.pid)
                    speeds["read"].append(timed(lambda: segment.read(x), nbytes))
                    used += processor(daemon.pid) - before
                box.close()
            finally:
                daemon.kill()
    found = {name: statistics.median(values) for name, values in speeds.items()}
    found["write ratio"] = found["write"] / found["ib_write_bw"]
    found["read ratio"] = found["read"] / found["ib_read_bw"]
    found["daemon's seconds during the reads"] = used
    return found


def in_guest(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        outcome = boot(image(), shlex.join(words), Path(folder), 1200.0)
    print(outcome.said, end="")
    return 1 if outcome.status is None else outcome.status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    if not device_here():
        return in_guest([sys.executable, __file__, *sys.argv[1:]])
    found = measure(arguments.rounds, arguments.mib * MIB)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:36} {value:8.2f}{' MiB/s' if name in ('write', 'read') or 'bw' in name else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
