"""Builds a stress program under a sanitizer and prints its path.

    python native/stress/build.py PROGRAM [COMPILER FLAGS...]

What was built of the same sources with the same flags before is taken again. $CXX names the compiler.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = ["smb/kernels", "smb/copy", "smb/convert"]
_BOX = ("robust", "pool", "region", "passes", "operations", "vectors")
OBJECTS = {
    "kernel_variants": KERNELS,
    "pooling_edges": ["layers/max_pool", "layers/parallel"],
    "segment_stress": [*KERNELS, *(f"smb/{name}" for name in _BOX)],
}
COMMON = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"]


def fingerprint(flags: list[str]) -> str:
    """Of all sources and headers, the compiler and the flags."""
    digest = hashlib.sha256(repr([os.environ.get("CXX", "g++"), flags]).encode())
    for folder in ("common", "layers", "smb", "stress"):
        for path in sorted((ROOT / "native" / folder).glob("*.[ch]pp")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(program: str, flags: list[str]) -> Path:
    """The program, compiled unless it is there. Raises subprocess.CalledProcessError."""
    folder = ROOT / "build" / "stress"
    target = folder / f"{program}-{fingerprint(flags)}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [os.environ.get("CXX", "g++"), *COMMON, *flags, f"-I{ROOT / 'native'}"]
    sources = [ROOT / "native" / f"{name}.cpp" for name in OBJECTS[program]]
    sources.append(ROOT / "native" / "stress" / f"{program}.cpp")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        objects = [str(Path(temporary) / f"{source.stem}.o") for source in sources]
        commands = [[*compiler, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: subprocess.run(command, check=True), commands))
        linked = Path(temporary) / program
        subprocess.run([*compiler, *objects, "-o", str(linked)], check=True)
        linked.rename(target)
    return target


if __name__ == "__main__":
    print(build(sys.argv[1], sys.argv[2:]))
