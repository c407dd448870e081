"""``HOST:PORT`` without a scheme: the best transport that both ends have, and why it was taken."""

from __future__ import annotations

import logging
import os
import stat

from smb import protocol
from smb.errors import SmbError
from smb.transport import tcp
from smb.transport.base import Options, Transport
from smb.transport.shm import mapped

log = logging.getLogger(__name__)


def connect(where: str, options: Options) -> Transport:
    """Shared memory when the daemon is on this host and has passed its descriptors, else TCP."""
    remote = tcp.connect(where, options)
    try:
        shared = _shared(remote.welcome, options)
    except (OSError, SmbError) as error:
        log.info("%s: by tcp, since shared memory does not work: %s", where, error)
        return remote
    log.info("%s: by shared memory, since the daemon's socket %s passed it", where, remote.welcome.unix)
    remote.close()
    return shared


def _shared(welcome: protocol.Welcome, options: Options) -> Transport:
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
    return shared
