"""100,000 random frames at a daemon's TCP port, and a tenth of that at its Unix socket.

The frames are made from the protocol's own table, half of them or more valid up to one field; over TCP the
native loop reads those of the data operations. The daemon runs in this process, so that its branch coverage
is seen and printed, Python's and the native loop's; one innocent client beside the attacker must never
notice, and memory must stay where it was. The extension runs under the address sanitizer, which ends the
process at the first wrong access.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import coverage

if TYPE_CHECKING:
    from tests.smb.frames import Attacker

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
READERS = [
    "protocol",
    "layout",
    "server",
    "connection",
    "remote",
    "gate",
    "auth",
    "service",
    "store",
    "rendezvous",
]
READERS.append("transport/frames")
TOKEN = b"the token of this soak"
PATIENCE = 0.1  # seconds to wait for an answer
GROWTH = 64 << 20  # bytes: what the segments may take


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def knock(attacker: Attacker, data: bytes) -> None:
    """The same frame from somebody who has proved nothing: refused, or nothing is said."""
    with attacker.connect() as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        answer = attacker.reply(sock)
        assert answer is None or answer[0].status or answer[0].operation == 30


def attack(path: Path, over: str, count: int, seed: int) -> Counter[str]:
    import numpy as np

    import smb
    from tests.smb.frames import Attacker, Frames

    kinds = Counter[str]()
    with smb.serve(unix=path, tcp="127.0.0.1:0", token=TOKEN, memory_limit=GROWTH) as daemon:
        with smb.connect(daemon.addresses[over == "tcp"], token=TOKEN) as box:
            center = box.create("center", 1000, initial=np.ones(1000, np.float32))
            where = daemon.addresses[1] if over == "tcp" else str(path)
            frames, attacker = (
                Frames(seed, over == "tcp"),
                Attacker(where, TOKEN if over == "tcp" else b"", PATIENCE),
            )
            for number in range(count):
                frame = frames.next()
                record = attacker.attack(frame)
                frames.learn(record)
                if over == "tcp" and number % 20 == 0:
                    knock(attacker, frame.data)
                kinds[frame.kind] += 1
                kinds[f"answered by {type(record).__name__}"] += 1
                if number % 100 == 0:
                    assert center.read().sum() == 1000
                    assert "center" in box.list()
                if number == min(2000, count // 2):
                    before = resident()
            attacker.close()
            grown = resident() - before
            kinds["streams reopened"], kinds["without an answer"] = attacker.reopened, attacker.unanswered
            kinds["KiB more resident"] = grown >> 10
        with smb.connect(daemon.addresses[0]) as late:
            assert late.list("center") == []  # its last session has ended
    assert grown < 2 * GROWTH, f"{grown} bytes more"
    return kinds


def sanitized() -> Path:
    """The extension, built once more with the address sanitizer."""
    target = ROOT / "build" / "asan"
    flags = "-fsanitize=address -fno-omit-frame-pointer -O1 -g --coverage"
    environment = {**os.environ, "LDFLAGS": "-fsanitize=address --coverage"}
    environment |= {"CFLAGS": flags, "CXXFLAGS": flags}  # setuptools takes one or the other
    for old in target.rglob("*.gcda"):
        old.unlink()
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--force",
        "-b",
        str(target),
        "-t",
        str(target / "objects"),
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (built,) = target.glob("smb/_native*.so")
    if b"__asan_report" not in built.read_bytes():
        raise SystemExit(f"{built} was built without the sanitizer")
    return built


def shared_library(name: str) -> str:
    """Both go in first: the sanitizer looks for C++'s throw as soon as it is loaded."""
    words = ["gcc", f"-print-file-name=lib{name}.so"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def again_with(extension: Path) -> int:
    """Run this program anew, on ``extension``, with the sanitizer's library loaded first."""
    environment = {**os.environ, "LD_PRELOAD": " ".join(map(shared_library, ("asan", "stdc++")))}
    # What it keeps of freed memory, 256 MiB by default, would pass for a leak.
    environment["ASAN_OPTIONS"] = "detect_leaks=0:quarantine_size_mb=16"
    environment["SMB_SOAK_EXTENSION"] = str(extension)
    return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def native_coverage() -> None:
    """Lines and branches of the native loop that the run has been through, by gcov."""
    for data in sorted((ROOT / "build" / "asan").rglob("native/net/*.gcda")):
        command = ["gcov", "--branch-probabilities", "--no-output", "--demangled-names", str(data)]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found = re.search(rf"File '[^']*{data.stem}\.cpp'\n(.*?)(\nFile |\Z)", told, re.DOTALL)
        if found:
            figures = re.findall(r"(Lines executed|Taken at least once):([\d.]+%) of (\d+)", found[1])[:2]
            shown = ", ".join(f"{what.lower()} {part} of {all_}" for what, part, all_ in figures)
            print(f"native/net/{data.stem}.cpp: {shown}")


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
    parser.add_argument("--frames", type=int, default=100_000, help="over TCP; a tenth over a Unix socket")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--plain", action="store_true", help="without the address sanitizer")
    options = parser.parse_args()
    extension = os.environ.get("SMB_SOAK_EXTENSION")
    if extension is not None:
        take(extension)
    elif not options.plain:
        code = again_with(sanitized())
        native_coverage()
        return code
    print(f"seed {options.seed}", flush=True)
    watch = coverage.Coverage(branch=True, data_file=None, include=[f"{ROOT}/smb/*"])
    watch.start()
    kinds = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="smb-soak-") as folder:
        for over, count in (("unix", options.frames // 10), ("tcp", options.frames)):
            found = attack(Path(folder) / "box.sock", over, count, options.seed)
            print(f"over {over}:")
            for name, number in sorted(found.items()):
                print(f"{number:7} {name}")
            kinds += found
    watch.stop()
    files = [str(ROOT / "smb" / f"{name}.py") for name in READERS]
    watch.report(morfs=files, show_missing=True)
    nearly = kinds["good"] + kinds["field"]
    frames = options.frames + options.frames // 10
    assert nearly >= frames / 2
    print(f"{frames} frames, {nearly} valid up to one field: the daemon served on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
