"""Files that appear whole or not at all. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Unwritten(OSError):
    """``filename`` cannot be written, for the reason ``strerror``."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


@contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """The name of an empty file beside ``path`` that takes its place when the block ends well; else it goes.

    Raises Unwritten when it cannot be made or take its place.
    """
    target = Path(path)
    try:
        number, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
        os.close(number)
    except OSError as error:
        raise Unwritten(error.errno, error.strerror, os.fspath(path)) from error
    try:
        yield beside
        try:
            with open(beside, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(beside, _file_mode())
            os.replace(beside, target)
        except OSError as error:  # a full disk, a folder of that name
            raise Unwritten(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _file_mode() -> int:
    """The mode that a new file gets: temporary ones are made for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
