"""The C++ stress programs under the sanitizers, for long, and kill -9 in live traffic, many times.

scripts/soak/native.py [--seconds 120] [--kills 200]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from smb.segment import Mapping

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZERS = (
    ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    ["-O1", "-g", "-fsanitize=thread"],
)
COUNT = 1_000_000


def stress(seconds: float) -> None:
    for flags in SANITIZERS:
        build = [sys.executable, str(ROOT / "native" / "stress" / "build.py"), "segment_stress", *flags]
        program = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()
        done = subprocess.run([program, str(seconds)], capture_output=True, text=True, check=False)
        print(f"{flags[2]}: {done.stdout.strip()}")
        if done.returncode:
            raise SystemExit(done.stderr[-8000:])


def worker(mapping: Mapping) -> int:
    pid = os.fork()
    if pid == 0:
        x = np.random.default_rng().random(COUNT, np.float32)
        while True:
            mapping.exchange(x, 0.3, threads=1 + os.getpid() % 2)
    return pid


def kills(wanted: int) -> tuple[int, int, float]:
    """Kills workers among three until so many were caught with a lock; kills, those caught, longest wait."""
    mapping = Mapping.create(COUNT, "float32")
    x, values = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    workers = [worker(mapping) for _ in range(3)]
    dice, number, caught, longest = random.Random(1), 0, 0, 0.0
    while caught < wanted:
        time.sleep(0.002 + dice.random() * 0.005)
        victim = workers.pop(0)
        os.kill(victim, signal.SIGSTOP)
        os.waitid(os.P_PID, victim, os.WSTOPPED)
        tasks = {int(task) for task in os.listdir(f"/proc/{victim}/task")}
        caught += any(tid in tasks for _, tid in mapping.holders())
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        mapping.exchange(x, 0.1)
        longest = max(longest, time.monotonic() - began)
        mapping.read(values)
        if not np.isfinite(values).all():
            raise SystemExit(f"kill {number}: the center holds NaN or Inf")
        os.waitpid(victim, 0)
        workers.append(worker(mapping))
        number += 1
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if mapping.holders():
        raise SystemExit(f"locks left: {mapping.holders()}")
    mapping.close()
    return number, caught, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="for each sanitizer")
    parser.add_argument("--kills", type=int, default=200, help="that find a lock held")
    given, _ = parser.parse_known_args()
    number, caught, longest = kills(given.kills)
    print(f"{number} kills, {caught} of a lock's holder, next exchange after {longest * 1e3:.0f} ms at most")
    stress(given.seconds)
    print(f"{caught} killed holders passed their locks on; the stress programs are clean")


if __name__ == "__main__":
    main()
