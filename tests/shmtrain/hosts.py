"""Two hosts on one machine, made of network, UTS, IPC and mount namespaces, for tests of launches over hosts.

Each host has a name, an address on a link between them, and a folder that the other cannot see: a Unix socket
there is reached from its own host alone, so shared memory is taken where it is possible and nowhere else.
Everything else of the file system is shared. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

LINK = "smb0"  # the same interface name at both ends, as MPI libraries and gloo want it
UP = 10.0  # seconds until the link carries a packet

# What MPI starts in place of ssh: its options, then a host, then a command line for a shell there.
AGENT = """\
#!/usr/bin/env bash
while [[ "$1" == -* ]]; do case "$1" in -x|-T|-n|-q) shift;; *) shift 2;; esac; done
host=$1; shift
case "$host" in {cases} *) echo "no host $host" >&2; exit 1;; esac
exec nsenter -t "$pid" -n -u -i -m bash -c "cd {folder}; $*"
"""
HOLD = 'hostname "$0"; mount -t tmpfs none "$1"; echo up; exec sleep infinity'


@dataclass(frozen=True)
class Host:
    """``pid`` holds the namespaces; ``own`` is the folder that only this host sees the inside of."""

    name: str
    address: str
    pid: int
    own: Path

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """``words`` as run there, in ``folder``."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m"]
        return [*enter, "bash", "-c", f'cd {folder}; exec "$@"', "bash", *words]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _host(name: str, address: str, own: Path) -> Iterator[Host]:
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        hold = ["ip", "netns", "exec", name, "unshare", "--uts", "--ipc", "--mount"]
        words = [*hold, "bash", "-c", HOLD, name, str(own)]
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with holder:
            try:
                assert holder.stdout is not None
                if holder.stdout.readline() != "up\n":
                    raise OSError(f"no namespaces: {holder.communicate(timeout=5)[1]}")
                yield Host(name, address, holder.pid, own)
            finally:
                holder.kill()
    finally:
        _run("ip", "netns", "del", name)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Skips the test where they cannot be made. ``folder`` is seen by both."""
    own = folder / "own"
    own.mkdir()
    names = [f"t{os.getpid()}{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            pair = [stack.enter_context(_host(name, f"10.78.0.{n}", own)) for n, name in enumerate(names, 1)]
            ends = [f"v{name}" for name in names]
            _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for host, end in zip(pair, ends, strict=True):
                _run("ip", "link", "set", end, "netns", host.name)
                for words in (
                    ["link", "set", end, "name", LINK],
                    ["addr", "add", f"{host.address}/24", "dev", LINK],
                    ["link", "set", LINK, "up"],
                ):
                    _run("ip", "-n", host.name, *words)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root and namespaces: {error}")
        _wait_for_the_link(*pair)
        yield pair[0], pair[1]


def _wait_for_the_link(near: Host, far: Host) -> None:
    ping = f"exec 3<>/dev/tcp/{far.address}/9"  # refused is an answer
    until = time.monotonic() + UP
    while time.monotonic() < until:
        told = subprocess.run(
            near.command(["timeout", "1", "bash", "-c", ping], Path("/")), capture_output=True, text=True
        )
        if "refused" in told.stderr:
            return
        time.sleep(0.1)
    raise AssertionError(f"the link is not up: {told.stderr}")


def agent(folder: Path, hosts: Sequence[Host]) -> Path:
    """The program that MPI starts its ranks' daemons by."""
    path = folder / "agent"
    cases = " ".join(f"{host.address}) pid={host.pid};;" for host in hosts)
    path.write_text(AGENT.format(cases=cases, folder=folder))
    path.chmod(0o755)
    return path
