"""Where temporary files lie when sockets are among them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from smb.listen import short_folder

SOCKET = "box.sock"  # of a box that a job holds itself, in a folder shmtrain-* of this user alone


def keep_short() -> None:
    """Let this process's temporary files lie in /tmp where $TMPDIR is too long for a socket's path.

    A scheduler's scratch folder often is; multiprocessing puts its fork server's socket there, too.
    """
    tempfile.tempdir = short_folder()


def private(folder: Path) -> bool:
    """Whether this is a folder of this user's that nobody else can enter. Raises OSError where none is."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def sockets() -> list[Path]:
    """Of the boxes that this user's jobs hold on this machine, where they have this temporary folder, too."""
    return sorted(path for path in Path(tempfile.gettempdir()).glob(f"shmtrain-*/{SOCKET}") if _private(path))


def _private(path: Path) -> bool:
    try:
        return private(path.parent)
    except OSError:
        return False
