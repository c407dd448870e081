"""The RDMA ports of this machine, and which of them to use. Reads sysfs; needs no library.

RoCE v2 ports are found by the IP address behind their GID, InfiniBand ports are numbered by LID.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smb.errors import NotSupported

SYSFS = Path("/sys/class/infiniband")
GAP = 16  # empty entries after which a GID table is taken to have ended; some have 1,024


@dataclass(frozen=True)
class Port:
    """One entry in the GID table of one active port."""

    device: str
    number: int
    index: int  # of the GID
    gid: ipaddress.IPv6Address
    lid: int
    ethernet: bool  # RoCE v2; else InfiniBand

    @property
    def address(self) -> str:
        """The IP address that stands behind a RoCE GID."""
        return str(self.gid.ipv4_mapped or self.gid)

    def __str__(self) -> str:
        return f"{self.device}/{self.number}/{self.index} ({self.address})"


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """The usable entries of all active ports: RoCE v2, and InfiniBand's first; IPv4 before IPv6."""
    found = [one for port in sorted(sysfs.glob("*/ports/*")) for one in _entries(port)]
    return sorted(found, key=lambda p: (p.gid.ipv4_mapped is None, p.gid.is_link_local))


def _entries(port: Path) -> Iterator[Port]:
    def said(name: str) -> str:
        try:
            return (port / name).read_text().strip()
        except OSError:  # no such entry, or an empty one
            return ""

    if "ACTIVE" not in said("state"):
        return
    ethernet = said("link_layer") == "Ethernet"
    device, number, lid = port.parent.parent.name, int(port.name), int(said("lid") or "0", 16)
    empty = 0
    for index in itertools.count():
        text = said(f"gids/{index}")
        empty = 0 if text.replace(":", "").strip("0") else empty + 1
        if empty > GAP:
            return
        if not empty and (said(f"gid_attrs/types/{index}") == "RoCE v2" if ethernet else index == 0):
            yield Port(device, number, index, ipaddress.IPv6Address(text), lid, ethernet)


def choose(host: str = "", wanted: str = "", sysfs: Path = SYSFS) -> Port:
    """The port for traffic of the local address ``host``, or the one that ``wanted`` names.

    wanted  "DEVICE", "DEVICE/PORT" or "DEVICE/PORT/GID_INDEX"

    Without ``wanted``, and when ``host`` is no address of an RDMA port (a loopback address, say, or an
    Ethernet card's beside InfiniBand), it is the first active port. Raises NotSupported, which says what
    there is.
    """
    have = ports(sysfs)
    if not have:
        raise NotSupported(f"no active RDMA port on this machine ({_inactive(sysfs)})")
    if wanted:
        fitting = [
            p for p in have if f"{p.device}/{p.number}/{p.index}/".startswith(wanted.rstrip("/") + "/")
        ]
        if not fitting:
            known = ", ".join(map(str, have))
            raise NotSupported(
                f"no active RDMA port {wanted!r} (DEVICE[/PORT[/GID_INDEX]]; there are {known})"
            )
        have = fitting
    return next((p for p in have if host and p.address == _plain(host)), have[0])


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def _inactive(sysfs: Path) -> str:
    devices = sorted(path.name for path in sysfs.glob("*"))
    return f"{', '.join(devices)} not active" if devices else "no RDMA device"
