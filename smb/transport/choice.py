"""``HOST:PORT`` without a scheme: the best transport that both ends have, and why it was taken."""

from __future__ import annotations

import logging
import os
import resource
import stat

from smb import network, protocol
from smb.errors import SmbError
from smb.transport import onesided, tcp
from smb.transport.base import Options, Transport
from smb.transport.shm import mapped

log = logging.getLogger(__name__)

LOCKED = 1 << 30  # bytes of locked memory below which arrays that a client will use may not be registered


def connect(where: str, options: Options) -> Transport:
    """Shared memory when the daemon is on this host and has passed its descriptors, else RDMA when both ends
    have a device and the one has reached the other, else TCP.
    """
    remote = tcp.connect(where, options)
    why: list[str] = []
    for name, attempt in (("shared memory", _shared), ("RDMA", _onesided)):
        try:
            better, how = attempt(where, remote.welcome, options)
        except (OSError, SmbError) as error:
            why.append(f"{name} does not work: {error}")
            continue
        log.info("%s: by %s, since %s", where, name, "; ".join([how, *why]))
        remote.close()
        return better
    log.info("%s: by tcp, since %s", where, "; ".join(why))
    return remote


def _shared(where: str, welcome: protocol.Welcome, options: Options) -> tuple[Transport, str]:
    """Shared memory of the very daemon that answered. Raises OSError or SmbError: why there is none."""
    if not welcome.unix:
        raise SmbError("the daemon has no Unix socket")
    found = os.stat(welcome.unix)
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in (os.getuid(), 0):
        raise SmbError(f"{welcome.unix} is no socket of this user's on this host")
    shared = mapped(welcome.unix, options)  # outlives the daemon, where that is asked for
    if shared.daemon != welcome.daemon:
        shared.close()
        raise SmbError(f"another daemon listens at {welcome.unix} on this host")
    return shared, f"the daemon's socket {welcome.unix} passed it"


def _onesided(where: str, welcome: protocol.Welcome, options: Options) -> tuple[Transport, str]:
    """RDMA with the very daemon that answered. Raises OSError or SmbError: why there is none."""
    if not welcome.rdma:
        raise SmbError("the daemon serves none")
    if options.tls:
        raise SmbError("TLS was asked for, and its data are not encrypted")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() and limit != resource.RLIM_INFINITY and limit < LOCKED:
        raise SmbError(f"{limit} bytes may be locked (`ulimit -l`), it needs {LOCKED}")
    host, port = network.parse(welcome.rdma)
    if host in network.EVERYWHERE:
        host = network.parse(where)[0]
    there = network.show(host, port)
    near = onesided.connect(there, options)
    if near.daemon != welcome.daemon:
        near.close()
        raise SmbError(f"another daemon listens at {there}")
    return near, f"{near.adapter.port} has reached the daemon's at {there}"
