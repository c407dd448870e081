"""Where temporary files lie when sockets are among them."""

from __future__ import annotations

import os
import tempfile

ROOM = 60  # bytes of a folder whose sockets stay within the kernel's 107


def keep_short() -> None:
    """Let this process's temporary files lie in /tmp where $TMPDIR is too long for a socket's path.

    A scheduler's scratch folder often is; multiprocessing puts its fork server's socket there, too.
    """
    if len(os.fsencode(tempfile.gettempdir())) > ROOM and os.access("/tmp", os.W_OK | os.X_OK):
        tempfile.tempdir = "/tmp"
