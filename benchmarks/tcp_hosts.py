"""Network namespaces as hosts for benchmarks/tcp.py: one by itself, or two on a held link. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LINK = "smb0"  # the same interface name at both ends, as MPI libraries want it
SETTLE = 2.0  # seconds after link-up before traffic flows at full rate

# What MPI starts in place of ssh: the options, then a host, then a command line for its shell.
AGENT = """\
#!/usr/bin/env bash
while [[ "$1" == -* ]]; do case "$1" in -x|-T|-n|-q) shift;; *) shift 2;; esac; done
host=$1; shift
case "$host" in {cases} *) echo "no host $host" >&2; exit 1;; esac
exec ip netns exec "$name" unshare --uts bash -c "hostname $name; $*"
"""


@dataclass(frozen=True)
class Host:
    """A network namespace, its hostname the same."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as run there."""
        inner = f'hostname {self.name}; exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "bash", "-c", inner, "bash", *words]

    def ip(self, *words: str) -> None:
        run("ip", "-n", self.name, *words)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _namespace(name: str, address: str) -> Iterator[Host]:
    host = Host(name, address)
    run("ip", "netns", "add", name)
    try:
        host.ip("link", "set", "lo", "up")
        yield host
    finally:
        run("ip", "netns", "del", name)


def _cubic(host: Host, where: str, interface: str) -> None:
    """Connections to ``where`` use cubic, whatever the machine's default is."""
    host.ip("route", "replace", "local", where, "dev", interface, "table", "local", "congctl", "cubic")


@contextlib.contextmanager
def loopback() -> Iterator[Host]:
    """A host by itself."""
    with _namespace(f"smb-{os.getpid()}", "127.0.0.1") as host:
        _cubic(host, "127.0.0.0/8", "lo")
        _cubic(host, "127.0.0.1", "lo")
        yield host


@contextlib.contextmanager
def link(rate: str) -> Iterator[tuple[list[Host], Path]]:
    """Two hosts on a link of ``rate`` both ways, and the program that MPI starts its ranks by."""
    names = [f"smb-{os.getpid()}-{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(_namespace(name, f"10.77.0.{number}")) for number, name in enumerate(names, 1)
        ]
        ends = [f"v{os.getpid()}{end}" for end in "ab"]
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            run("ip", "link", "set", end, "netns", host.name)
            host.ip("link", "set", end, "name", LINK)
            host.ip("addr", "add", f"{host.address}/24", "dev", LINK)
            host.ip("link", "set", LINK, "up")
            host.ip("route", "replace", "10.77.0.0/24", "dev", LINK, "src", host.address, "congctl", "cubic")
            shape = ["rate", rate, "burst", "128kb", "latency", "50ms"]
            run("tc", "-n", host.name, "qdisc", "add", "dev", LINK, "root", "tbf", *shape)
        agent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smb-bench-"))) / "agent"
        cases = " ".join(f"{host.address}) name={host.name};;" for host in hosts)
        agent.write_text(AGENT.format(cases=cases))
        agent.chmod(0o755)
        time.sleep(SETTLE)
        yield hosts, agent
