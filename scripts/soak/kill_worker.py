"""kill -9 of workers in the middle of exchanges, until enough of them held a chunk's lock when they died.

After each kill: every chunk of the center can be locked, each element is its value before or after the dead
worker's operation with at most one chunk half done, the dead worker's segments are freed, the daemon and the
other workers go on; at the end nothing is left in /dev/shm and no process stays.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import smb  # noqa: E402
from tests.smb.processes import ServeProcess, client, state, wait_for  # noqa: E402
from tests.smb.test_promises import SWAPPER, mixed_chunks  # noqa: E402

COUNT = 4_000_000


def one_kill(process: ServeProcess, box: smb.Box, center: smb.Segment, seed: random.Random) -> bool:
    """Whether the killed worker held a lock."""
    bystanders_first = center.version
    with (
        client(process.address, SWAPPER, "victim") as victim,
        client(process.address, SWAPPER, "other") as other,
    ):
        assert victim.line() == other.line() == "ready"
        time.sleep(seed.uniform(0.0, 0.05))
        victim.stop()  # so that what it holds can be looked at before it dies
        held = any(tid == victim.pid for _, tid in center._attachment.holders())
        victim.kill()
        version = center.version
        assert wait_for(lambda: center.version > version + 3, 10), "the other worker does not go on"
        other.kill()
    reader = box.attach("center", readonly=True)
    assert mixed_chunks(reader.read()) <= 2  # one for each of the two that were killed
    reader.detach()
    before = time.monotonic()
    center.write(np.zeros(COUNT, np.float32))
    assert time.monotonic() - before < 5
    assert wait_for(lambda: [row["name"] for row in box.sessions()] == ["parent"], 5)
    assert box.list() == ["center"]
    assert center.version > bystanders_first
    assert state(process.pid) in set("SRD")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held", type=int, default=20, help="kills that must find a lock held (default: 20)")
    parser.add_argument("--most", type=int, default=400, help="kills at most (default: 400)")
    options = parser.parse_args()
    seed, held, kills = random.Random(time.time()), 0, 0
    files = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="smb-soak-") as folder:
        with ServeProcess(Path(folder) / "box.sock") as process:
            with smb.connect(process.address, name="parent") as box:
                center = box.create("center", COUNT)
                while held < options.held and kills < options.most:
                    kills += 1
                    held += one_kill(process, box, center, seed)
                    print(f"kill {kills}: {held} found a lock held", flush=True)
            process.process.terminate()
            assert process.ended() == 0
        assert os.listdir(folder) == []
    left = set(os.listdir("/dev/shm")) - files
    assert not any("smb" in name for name in left), left
    print(f"{kills} kills, {held} of them found a lock held: the center and the others stayed whole")
    return 0 if held >= options.held else 1


if __name__ == "__main__":
    sys.exit(main())
