"""How much memory a daemon may still use, so that a segment is refused before the OOM killer acts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from smb.errors import NotSupported, OutOfMemory

RESERVE = 64 << 20  # bytes that stay free on the machine and in the cgroup
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
SHMEM_HUGE = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
NO_HUGE = ("never", "deny")
HUGE_CURE = f"echo advise > /{SHMEM_HUGE}"


def show(count: float) -> str:
    """``count`` bytes as people read them."""
    for unit in UNITS:
        if abs(count) < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def parse(text: str) -> int:
    """Bytes from ``4G``, ``512M``, ``1.5GiB`` or a plain number; ValueError otherwise."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(number[-1:], 1)
    digits = number.rstrip("KMGT")
    if re.fullmatch(r"\d{1,18}(\.\d+)?", digits) and (count := int(float(digits) * scale)):
        return count
    raise ValueError(f"{text!r} is no size such as 4G or 512M")


def available(proc: Path = Path("/proc")) -> int | None:
    """MemAvailable in bytes."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def huge_page_mode(root: Path = Path("/")) -> str:
    """What the kernel does with huge pages for shared memory, such as ``advise``; ``never`` without them."""
    try:
        modes = (root / SHMEM_HUGE).read_text()
    except OSError:
        return "never"
    chosen = re.search(r"\[(\w+)\]", modes)
    return chosen[1] if chosen else "never"


def need_huge_pages(root: Path = Path("/")) -> None:
    """Raise NotSupported, with the cure, where the kernel gives shared memory no huge pages."""
    mode = huge_page_mode(root)
    if mode in NO_HUGE:
        raise NotSupported(
            f"huge pages for shared memory: the kernel's setting is {mode}; as root: {HUGE_CURE}"
        )


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path, name: str) -> int:
    """Bytes of file cache that the kernel drops before it kills anyone."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _cgroups(proc: Path, system: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The folders that may hold a limit, with the names of limit, usage and inactive cache."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = system, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = system / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield (root / folder, *names)


def cgroup_left(proc: Path = Path("/proc"), system: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the tightest of our cgroups still allows; None without a limit."""
    left = None
    for folder, limit_name, usage_name, cache in _cgroups(proc, system):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= 1 << 60:
            continue
        here = limit - usage + _reclaimable(folder, cache)
        left = here if left is None else min(left, here)
    return left


class Budget:
    """Decides whether ``wanted`` more bytes fit.

    limit   bytes that all segments together may take; None: what the machine has
    """

    def __init__(
        self,
        limit: int | None,
        machine: Callable[[], int | None] = available,
        cgroup: Callable[[], int | None] = cgroup_left,
    ) -> None:
        self.limit, self.machine, self.cgroup = limit, machine, cgroup

    def check(self, key: str, wanted: int, used: int, pending: int) -> None:
        """Raise OutOfMemory with the figures unless ``wanted`` bytes fit.

        used     bytes of all segments
        pending  those of them whose pages are not populated yet: the machine still counts them as free
        """
        machine, cgroup = self.machine(), self.cgroup()
        rooms = [
            None if self.limit is None else self.limit - used,
            None if machine is None else machine - pending - RESERVE,
            None if cgroup is None else cgroup - pending - RESERVE,
        ]
        if all(room is None or wanted <= room for room in rooms):
            return
        figures = [
            f"segments hold {show(used)}",
            f"memory limit {'none' if self.limit is None else show(self.limit)}",
            f"MemAvailable {'unknown' if machine is None else show(machine)}",
            f"cgroup leaves {'no limit' if cgroup is None else show(cgroup)}",
        ]
        raise OutOfMemory(f"segment {key!r} of {show(wanted)} does not fit: {', '.join(figures)}")
