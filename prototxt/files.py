"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prototxt.caffemodel import file_mode


@contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """The name of an empty file beside ``path`` that takes its place when the block ends well; else it goes.

    Raises OSError that names ``path``.
    """
    target = Path(path)
    try:
        number, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
        os.close(number)
    except OSError as error:
        raise OSError(f"cannot write {os.fspath(path)}: {error.strerror}") from error
    try:
        yield beside
        os.chmod(beside, file_mode())
        try:
            os.replace(beside, target)
        except OSError as error:  # a folder of that name
            raise OSError(f"cannot write {os.fspath(path)}: {error.strerror}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)
