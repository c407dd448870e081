"""``smb doctor``: which transports work on this machine, and what to do about those that don't.

Everything is looked up through a Host, so that tests can show it a machine that they made up.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from smb.memory import HUGE_CURE, NO_HUGE, RESERVE, available, cgroup_left, huge_page_mode, show

TRANSPORTS = ("shm", "tcp", "rdma")
PORT = 7100  # what the examples listen at
LOCKED = 1 << 30  # bytes of locked memory below which registering segments soon fails
FILES = 1024  # open files with which a daemon soon refuses clients
INITIAL = {"pid": 4026531836, "user": 4026531837}  # inodes of the namespaces that the machine starts with
DEBIAN = "usr/lib/python3/dist-packages"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``verdict``: ok; note (works, could be better); fails."""

    topic: str  # "shm", "tcp", "rdma" or "machine"
    what: str
    verdict: str
    says: str
    cure: str = ""


def _run_python(code: str) -> str:
    """ "" when a new interpreter runs ``code``; else the last line of what it says.

    It looks where this one does: -c alone would find a checkout's folder that one happens to stand in.
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return last if done.returncode else ""


def _bind(family: int, where: str, port: int) -> str:
    """ "" when a TCP port can be listened at; else why not."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((where, port))
            probe.listen(1)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "") or str(error)
    return ""


def _memory_file() -> str:
    """ "" when sealed memory files work here; else why not."""
    from smb.segment import Mapping as Segment

    try:
        Segment.create(1024, "float32").close()
    except Exception as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Host:
    """The machine as the checks see it."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    release: str = field(default_factory=platform.release)
    python: Callable[[str], str] = _run_python
    bind: Callable[[int, str, int], str] = _bind
    memory_file: Callable[[], str] = _memory_file
    access: Callable[[Path, int], bool] = os.access

    def text(self, path: str) -> str:
        """The file's text without its line end; "" when it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def folder(self, path: str) -> list[Path]:
        try:
            return sorted((self.root / path).iterdir())
        except OSError:
            return []

    def limit(self, name: str) -> int | None:
        """The soft limit of /proc/self/limits; None when it is unlimited or not told."""
        for line in self.text("proc/self/limits").splitlines():
            if line.startswith(name):
                first = line[len(name) :].split()[0]
                return int(first) if first.isdigit() else None
        return None

    def namespace(self, kind: str) -> int | None:
        """The inode of this process's namespace."""
        try:
            link = os.readlink(self.root / "proc/self/ns" / kind)
        except OSError:
            return None
        found = re.fullmatch(r"\w+:\[(\d+)\]", link)
        return int(found[1]) if found else None


# The machine ---------------------------------------------------------------------------------------------


def kernel(host: Host) -> Iterator[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)", host.release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version < (5, 4):
        cure = "a kernel of at least 5.4, better 5.14 (fills pages faster)"
        yield Finding("machine", "kernel", "fails", f"{host.release} has no pidfd", cure)
    elif version < (5, 14):
        cure = "a kernel of 5.14 or later fills a new segment's pages in one call"
        yield Finding("machine", "kernel", "note", host.release, cure)
    else:
        yield Finding("machine", "kernel", "ok", host.release)


def memory(host: Host) -> Iterator[Finding]:
    machine = available(host.root / "proc")
    left = cgroup_left(host.root / "proc", host.root / "sys/fs/cgroup")
    says = f"MemAvailable {'unknown' if machine is None else show(machine)}"
    if machine is None:
        yield Finding("machine", "memory", "note", says, "mount /proc, so that a daemon can see what is free")
    elif machine < 2 * RESERVE:
        cure = "end what uses it; a daemon refuses segments that would leave less than 64 MiB"
        yield Finding("machine", "memory", "fails", says, cure)
    else:
        yield Finding("machine", "memory", "ok", says)
    if left is None:
        yield Finding("machine", "cgroup", "ok", "no limit of its own")
    elif left < (machine or left + 1):
        cure = (
            "raise memory.max of the cgroup (systemd: MemoryMax=, Slurm: --mem, containers: --memory) or "
            "keep the segments below what it leaves"
        )
        verdict = "fails" if left < 2 * RESERVE else "note"
        yield Finding("machine", "cgroup", verdict, f"leaves {show(left)}, less than the machine has", cure)
    else:
        yield Finding("machine", "cgroup", "ok", f"leaves {show(left)}")


def huge_pages(host: Host) -> Iterator[Finding]:
    mode = huge_page_mode(host.root)
    if mode in NO_HUGE:
        cure = f"large segments gain a little from: {HUGE_CURE} (as root), and `smb serve --huge-pages`"
        yield Finding("machine", "huge pages", "note", f"for shared memory: {mode}", cure)
    else:
        yield Finding("machine", "huge pages", "ok", f"for shared memory: {mode}")


def files(host: Host) -> Iterator[Finding]:
    limit = host.limit("Max open files")
    says = "unlimited" if limit is None else str(limit)
    if limit is not None and limit < FILES:
        cure = (
            f"`ulimit -n {4 * FILES}` before the daemon (systemd: LimitNOFILE=); it needs two a segment "
            "and one a connection"
        )
        yield Finding("machine", "open files", "fails", says, cure)
    else:
        yield Finding("machine", "open files", "ok", says)


def namespaces(host: Host) -> Iterator[Finding]:
    pid = host.namespace("pid")
    if pid not in (None, INITIAL["pid"]):
        cure = (
            "shared memory needs daemon and clients in one PID namespace: run them in one container, or "
            "start the container with --pid=host; other clients come in by tcp"
        )
        yield Finding("shm", "PID namespace", "note", "one of its own (a container)", cure)
    else:
        yield Finding("shm", "PID namespace", "ok", "the machine's")
    owner = host.text("proc/self/uid_map").split()
    if owner and owner != ["0", "0", "4294967295"]:
        cure = "a daemon outside sees another user id and shares no memory: run both inside, or use tcp"
        says = (
            f"one of its own (user id {owner[0]} here is {owner[1]} outside)" if len(owner) > 1 else "unknown"
        )
        yield Finding("shm", "user namespace", "note", says, cure)
    else:
        yield Finding("shm", "user namespace", "ok", "the machine's")


def other_packages(host: Host) -> Iterator[Finding]:
    """Another package of our name, such as pysmb's, can hide this one or be hidden by it."""
    own = Path(__file__).resolve().parent
    found = []
    for entry in map(Path, host.path):
        package, module = entry / "smb" / "__init__.py", entry / "smb.py"
        if package.is_file() and package.resolve().parent != own:
            found.append(str(package.parent))
        if module.is_file():
            found.append(str(module))
    if found:
        cure = (
            "one of the two is never seen: take the other away (`pip uninstall pysmb` is the usual one; a "
            "folder smb/ where you start Python is another), or give this one an environment of its own"
        )
        yield Finding("machine", "package name", "fails", f"also called smb: {', '.join(found)}", cure)
    else:
        yield Finding("machine", "package name", "ok", "no other package is called smb")


def extension(host: Host) -> Iterator[Finding]:
    trouble = host.python("import smb._native")
    cure = "build it: `pip install .` in the checkout (scripts/build after a change); it needs a C++ compiler"
    if trouble:
        yield Finding("machine", "extension", "fails", f"smb._native: {trouble}", cure)
    else:
        yield Finding("machine", "extension", "ok", "smb._native loads")


# Transports ----------------------------------------------------------------------------------------------


def shared_memory(host: Host) -> Iterator[Finding]:
    trouble = host.memory_file()
    if trouble:
        cure = (
            "memory files (memfd_create) with seals are needed: a sandbox or seccomp filter may forbid them, "
            "or memory is short"
        )
        yield Finding("shm", "memory files", "fails", trouble, cure)
    else:
        yield Finding("shm", "memory files", "ok", "made, sealed and mapped")
    runtime = host.environment.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path("/tmp")
    if not host.access(folder, os.W_OK | os.X_OK):
        cure = "give the socket a place: `smb serve --unix PATH` and SMB_ADDRESS=unix:PATH"
        yield Finding("shm", "socket", "fails", f"{folder} cannot be written to", cure)
    elif len(os.fsencode(folder / "smb" / "daemon.sock")) > 107:
        cure = "a socket's path has at most 107 bytes: use --unix with a shorter one"
        yield Finding("shm", "socket", "fails", f"{folder} is too long", cure)
    else:
        yield Finding("shm", "socket", "ok", f"in {folder}")


def ports(host: Host) -> Iterator[Finding]:
    for name, family, where in (("IPv4", socket.AF_INET, "127.0.0.1"), ("IPv6", socket.AF_INET6, "::1")):
        trouble = host.bind(family, where, 0)
        if not trouble:
            yield Finding("tcp", name, "ok", f"listens at {where}")
        elif name == "IPv6":
            yield Finding("tcp", name, "note", f"{where}: {trouble}", "only IPv4 addresses will work")
        else:
            cure = "bring up the loopback interface: `ip link set lo up`"
            yield Finding("tcp", name, "fails", f"{where}: {trouble}", cure)
    trouble = host.bind(socket.AF_INET, "127.0.0.1", PORT)
    if trouble:
        cure = f"`ss -ltnp 'sport = :{PORT}'` says who has it: perhaps your daemon; else choose another port"
        yield Finding("tcp", f"port {PORT}", "note", f"taken: {trouble}", cure)
    else:
        yield Finding("tcp", f"port {PORT}", "ok", "free")


def network(host: Host) -> Iterator[Finding]:
    control = "proc/sys/net/ipv4/tcp_available_congestion_control"
    known = host.text(control).split()
    if known and "cubic" not in known:
        cure = "`modprobe tcp_cubic`; others, bbr above all, are slower between neighbours"
        yield Finding("tcp", "cubic", "note", f"kernel has {', '.join(known)}", cure)
    else:
        yield Finding("tcp", "cubic", "ok", "is taken for every connection" if known else "not told")
    for name in ("rmem_max", "wmem_max"):
        value = host.text(f"proc/sys/net/core/{name}")
        if value.isdigit() and int(value) < 1 << 20:
            cure = f"`sysctl -w net.core.{name}=4194304`, so that a connection gets buffers of 1 MiB"
            yield Finding("tcp", name, "note", show(int(value)), cure)
        elif value:
            yield Finding("tcp", name, "ok", show(int(value)) if value.isdigit() else value)


# RDMA ----------------------------------------------------------------------------------------------------


def verbs(host: Host) -> Iterator[Finding]:
    """Devices, their ports and GIDs, and the rights to use them."""
    devices = host.folder("sys/class/infiniband")
    if not devices:
        cure = (
            "install the adapter's driver; without an adapter, soft-RoCE does for tests: `modprobe rdma_rxe` "
            "and `rdma link add rxe0 type rxe netdev DEV` (not every kernel has it); else use tcp"
        )
        yield Finding("rdma", "device", "fails", "no verbs device", cure)
        return
    for device in devices:
        yield from _ports(host, device)
    for node in [p for p in host.folder("dev/infiniband") if p.name.startswith("uverbs")]:
        if host.access(node, os.R_OK | os.W_OK):
            yield Finding("rdma", node.name, "ok", "may be opened")
        else:
            cure = f'`chmod 666 {node}`; for good by a udev rule: KERNEL=="uverbs*", MODE="0666"'
            yield Finding("rdma", node.name, "fails", f"no right to open {node}", cure)
    if not any(p.name.startswith("uverbs") for p in host.folder("dev/infiniband")):
        cure = (
            "`modprobe ib_uverbs`; in a container pass the devices in: --device /dev/infiniband (and "
            "--ulimit memlock=-1)"
        )
        yield Finding("rdma", "/dev/infiniband", "fails", "no uverbs node", cure)


def _ports(host: Host, device: Path) -> Iterator[Finding]:
    base = f"sys/class/infiniband/{device.name}/ports"
    for port in host.folder(base):
        name = f"{device.name} port {port.name}"
        here = f"{base}/{port.name}"
        state = host.text(f"{here}/state")
        if "ACTIVE" not in state:
            cure = "RoCE: `ip link set DEV up`; InfiniBand: a cable, and a subnet manager (opensm) somewhere"
            yield Finding("rdma", name, "fails", f"state {state or 'unknown'}", cure)
            continue
        gids = list(_gids(host, here))
        best = next((g for g in gids if "v2" in g[2]), gids[0] if gids else None)
        if best is None:
            cure = "RoCE needs an IP address on its network interface: `ip addr add 10.0.0.1/24 dev DEV`"
            yield Finding("rdma", name, "fails", "active, but it has no GID", cure)
        else:
            yield Finding(
                "rdma", name, "ok", f"active, GID index {best[0]}: {best[1]} ({best[2] or 'InfiniBand'})"
            )


def _gids(host: Host, port: str) -> Iterator[tuple[str, str, str]]:
    """(index, GID, type) of those that are set."""
    for path in sorted(host.folder(f"{port}/gids"), key=lambda p: (len(p.name), p.name)):
        gid = host.text(f"{port}/gids/{path.name}")
        if gid.strip("0:"):
            yield path.name, gid, host.text(f"{port}/gid_attrs/types/{path.name}")


def pyverbs(host: Host) -> Iterator[Finding]:
    trouble = host.python("import pyverbs.device, pyverbs.qp")
    if not trouble:
        yield Finding("rdma", "pyverbs", "ok", "loads")
        return
    yield Finding("rdma", "pyverbs", "fails", trouble, _pyverbs_cure(host, trouble))


def _pyverbs_cure(host: Host, trouble: str) -> str:
    folder = "~/.local/lib/smb-pyverbs"
    link = (
        f"mkdir -p {folder} && ln -s /{DEBIAN}/pyverbs {folder}/ && export PYTHONPATH={folder} (a folder "
        f"that holds this one link: with all of /{DEBIAN} on the path its other packages would hide yours)"
    )
    built = [p.name for p in host.folder(f"{DEBIAN}/pyverbs") if ".cpython-" in p.name]
    tag = f".cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if built and not any(tag in name for name in built):
        other = built[0].partition(".cpython-")[2].partition("-")[0]
        return (
            f"the system's pyverbs is built for Python {other[0]}.{other[1:]}: make the environment with it, "
            f"then {link}"
        )
    if built:
        return f"the system's pyverbs is installed and fits this Python, but is not on its path: {link}"
    if "private" in trouble.lower() or "IBVERBS_PRIVATE" in trouble or "undefined symbol" in trouble:
        start = "this pyverbs was made for another libibverbs: `pip uninstall pyverbs`, then"
    else:
        start = "not from PyPI, whose pyverbs asks for a libibverbs of its own private version:"
    return f"{start} `apt-get install python3-pyverbs ibverbs-providers` and {link}"


def locked_memory(host: Host) -> Iterator[Finding]:
    limit = host.limit("Max locked memory")
    if limit is not None and limit < LOCKED:
        cure = (
            "registering a segment locks it: `ulimit -l unlimited`; for good `* - memlock unlimited` in "
            "/etc/security/limits.d/rdma.conf (systemd: LimitMEMLOCK=infinity, Slurm: "
            "PropagateResourceLimitsExcept=MEMLOCK)"
        )
        yield Finding("rdma", "locked memory", "fails", f"at most {show(limit)}", cure)
    else:
        yield Finding("rdma", "locked memory", "ok", "unlimited" if limit is None else show(limit))


CHECKS: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    kernel,
    extension,
    other_packages,
    memory,
    huge_pages,
    files,
    shared_memory,
    namespaces,
    ports,
    network,
    verbs,
    pyverbs,
    locked_memory,
)


def examine(host: Host) -> list[Finding]:
    """Everything that there is to say about ``host``."""
    return [finding for check in CHECKS for finding in check(host)]


def verdicts(findings: Sequence[Finding]) -> dict[str, str]:
    """Transport -> "" when it works here, else what is in its way."""
    broken = {
        t: [f.what for f in findings if f.verdict == "fails" and f.topic == t]
        for t in (*TRANSPORTS, "machine")
    }
    return {t: ", ".join(broken[t] + broken["machine"]) for t in TRANSPORTS}


def required(named: Sequence[str], findings: Sequence[Finding]) -> list[str]:
    """The transports that decide the exit code: those named, else shm, tcp, and rdma where a device is."""
    if named:
        return list(named)
    device = any(f.topic == "rdma" and f.what == "device" for f in findings)
    return [t for t in TRANSPORTS if t != "rdma" or not device]


def report(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.verdict:5}  {finding.topic:8} {finding.what:16} {finding.says}"
        if finding.cure:
            yield f"{'':7}{'':8} cure: {finding.cure}"
    yield ""
    for transport, trouble in verdicts(findings).items():
        yield f"{transport:5} {'works' if not trouble else f'does not work here: {trouble}'}"


def run(options: argparse.Namespace) -> int:
    """Exit code 0 when every transport asked for works here, else 1."""
    findings = examine(Host())
    works = verdicts(findings)
    if options.json:
        print(json.dumps({"transports": works, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print("\n".join(report(findings)))
    return int(any(works[t] for t in required(options.transport, findings)))
