"""10,000 random frames at a daemon's socket; prints the branch coverage of what reads them.

The frames are made from the protocol's own table, half of them or more valid up to one field. The daemon runs
in this process, so that its coverage is seen; one innocent client beside the attacker must never notice. The
extension runs under the address sanitizer, which ends the process at the first wrong access.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
READERS = ["protocol", "layout", "server", "service", "store", "rendezvous", "transport/frames"]


def attack(path: Path, count: int, seed: int) -> Counter[str]:
    import numpy as np

    import smb
    from tests.smb.frames import Attacker, Frames

    kinds = Counter[str]()
    with smb.serve(unix=path, memory_limit=64 << 20) as daemon, smb.connect(daemon.addresses[0]) as box:
        center = box.create("center", 1000, initial=np.ones(1000, np.float32))
        frames, attacker = Frames(seed), Attacker(str(path))
        for number in range(count):
            frame = frames.next()
            record = attacker.attack(frame)
            frames.learn(record)
            kinds[frame.kind] += 1
            kinds[f"answered by {type(record).__name__}"] += 1
            if number % 100 == 0:
                assert center.read().sum() == 1000
                assert "center" in box.list()
        attacker.close()
        with smb.connect(daemon.addresses[0]) as late:
            assert late.attach("center").read().sum() == 1000
        kinds["streams reopened"], kinds["without an answer"] = attacker.reopened, attacker.unanswered
    return kinds


def sanitized() -> Path:
    """The extension, built once more with the address sanitizer."""
    target = ROOT / "build" / "asan"
    flags = "-fsanitize=address -fno-omit-frame-pointer -O1 -g"
    environment = {**os.environ, "CFLAGS": flags, "LDFLAGS": "-fsanitize=address"}
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "-b",
        str(target),
        "-t",
        str(target / "objects"),
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (built,) = target.glob("smb/_native*.so")
    return built


def again_with(extension: Path) -> int:
    """Run this program anew, on ``extension``, with the sanitizer's library loaded first."""
    library = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    environment = {**os.environ, "LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    environment["SMB_SOAK_EXTENSION"] = str(extension)
    return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def take(extension: str) -> None:
    """Import ``smb._native`` from this file instead of the package's own."""
    spec = importlib.util.spec_from_file_location("smb._native", extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["smb._native"] = module
    print("under the address sanitizer", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--plain", action="store_true", help="without the address sanitizer")
    options = parser.parse_args()
    extension = os.environ.get("SMB_SOAK_EXTENSION")
    if extension is not None:
        take(extension)
    elif not options.plain:
        return again_with(sanitized())
    print(f"seed {options.seed}", flush=True)
    watch = coverage.Coverage(branch=True, data_file=None, include=[f"{ROOT}/smb/*"])
    watch.start()
    with tempfile.TemporaryDirectory(prefix="smb-soak-") as folder:
        kinds = attack(Path(folder) / "box.sock", options.frames, options.seed)
    watch.stop()
    for name, number in sorted(kinds.items()):
        print(f"{number:7} {name}")
    files = [str(ROOT / "smb" / f"{name}.py") for name in READERS]
    watch.report(morfs=files, show_missing=True)
    nearly = kinds["good"] + kinds["field"]
    assert nearly >= options.frames / 2
    print(f"{options.frames} frames, {nearly} valid up to one field: the daemon served on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
