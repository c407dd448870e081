"""Builds what the soft-RoCE guest boots from: a stock Debian kernel and a ramdisk with its modules.

The guest has no disk of its own, it works on the host's files (boot.py). So all that is made here is about
70 MB in the user's cache folder, once. Needs root and apt; the packages it installs are PACKAGES.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

INIT = Path(__file__).with_name("init.sh")
MODULES = (
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    *("dummy", "veth", "crc32_generic", "rdma_rxe", "rdma_ucm"),
)
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "depmod": "kmod",
    "rdma": "iproute2",
    "ibv_devices": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "/bin/busybox": "busybox-static",
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}  # what shows that a package is there -> its name
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # sbin is not on every user's


@dataclass(frozen=True)
class Image:
    """The files that QEMU boots."""

    kernel: Path
    initrd: Path


def cache_folder() -> Path:
    """The user's own, by the content of what is built in it, so that another recipe builds anew."""
    recipe = INIT.read_bytes() + Path(__file__).read_bytes()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shmtrain" / f"rdma-guest-{hashlib.sha256(recipe).hexdigest()[:12]}"


def image() -> Image:
    """The image, built when it is not there yet. Raises RuntimeError with what a tool said."""
    folder = cache_folder()
    made = Image(folder / "vmlinux", folder / "initrd")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once build once
        install_missing()
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                _build(Path(scratch))
                (Path(scratch) / "made").rename(folder)
    return made


def missing_packages() -> list[str]:
    return [name for proof, name in PACKAGES.items() if not _there(proof)]


def _there(proof: str) -> bool:
    return os.path.exists(proof) if proof.startswith("/") else shutil.which(proof, path=PATH) is not None


def install_missing() -> None:
    missing = missing_packages()
    if missing:
        _run("apt-get", "update", "-qq")
        words = ("-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq", "--no-install-recommends")
        _run("apt-get", *words, *missing)


def _run(*words: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": PATH, "LC_ALL": "C"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _build(scratch: Path) -> None:
    made = scratch / "made"
    made.mkdir()
    tree = _kernel_package(scratch)
    (version,) = (p.name for p in (tree / "lib" / "modules").iterdir())
    _run("depmod", "-b", str(tree), version)
    files = [*_folders(), ("init", INIT.read_bytes(), 0o100755), ("bin/sh", b"busybox", 0o120777)]
    files.append(("bin/busybox", Path("/bin/busybox").read_bytes(), 0o100755))
    files += _modules(tree, version)
    (made / "initrd").write_bytes(archive(files))
    (made / "vmlinux").write_bytes(_plain_kernel((tree / "boot" / f"vmlinuz-{version}").read_bytes()))


def _kernel_package(scratch: Path) -> Path:
    """Debian's current kernel, unpacked; the cloud variant has no rdma_rxe."""
    depends = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", "linux-image-amd64"))
    if depends is None:
        _run("apt-get", "update", "-qq")
        depends = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", "linux-image-amd64"))
        assert depends, "apt knows no linux-image-amd64"
    _run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", depends[1], cwd=scratch)
    (package,) = scratch.glob("*.deb")
    _run("dpkg", "-x", str(package), "kernel", cwd=scratch)
    package.unlink()
    return scratch / "kernel"


def _folders() -> Iterator[tuple[str, bytes, int]]:
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "scratch", "merged"):
        yield name, b"", 0o040755


def _modules(tree: Path, version: str) -> Iterator[tuple[str, bytes, int]]:
    """Each module once, what it needs before it, and the list of them in that order."""
    order: dict[str, Path] = {}
    for module in MODULES:
        shown = _run("modprobe", "-n", "-d", str(tree), "-S", version, "--show-depends", module)
        paths = [Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod")]
        order.update({path.name: path for path in paths if path.name not in order})
    for name, path in order.items():
        yield f"modules/{name}", path.read_bytes(), 0o100644
    yield "modules/order", "".join(f"{name}\n" for name in order).encode(), 0o100644


def _plain_kernel(compressed: bytes) -> bytes:
    """The ELF kernel inside a bzImage: QEMU boots it twice as fast."""
    for start in re.finditer(re.escape(b"\xfd7zXZ\0"), compressed):
        try:
            kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(compressed[start.start() :])
        except lzma.LZMAError:
            continue
        if kernel.startswith(b"\x7fELF"):
            return kernel
    raise RuntimeError("no xz-compressed ELF kernel in the image")


def archive(files: Iterable[tuple[str, bytes, int]]) -> bytes:
    """A cpio archive (newc) of (name, content, mode); the kernel unpacks several that follow one another."""
    return b"".join(_entry(*file) for file in (*files, ("TRAILER!!!", b"", 0)))


def _entry(name: str, content: bytes, mode: int) -> bytes:
    encoded = name.encode() + b"\0"
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + encoded
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
