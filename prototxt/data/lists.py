"""Lists of images and their labels, as ImageData and convert-imageset take them: ``path label`` a line."""

from __future__ import annotations

import os

from prototxt.errors import DataError

Line = tuple[str, int]  # path as written, label


def read_list(source: str) -> list[Line]:
    """The lines of a list file; a path may hold blanks, a line without a label has label 0.

    Raises DataError when it cannot be read, is empty, or has a label that is no whole number.
    """
    path = os.path.abspath(source)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            texts = [line.strip() for line in file]
    except OSError as error:
        raise DataError(f"cannot read the list of images {path}: {error.strerror}") from error
    lines = [_line(path, number, text) for number, text in enumerate(texts, 1) if text]
    if not lines:
        raise DataError(f"{path} lists no image")
    return lines


def _line(path: str, number: int, text: str) -> Line:
    name, *label = text.rsplit(None, 1)
    if not label:
        return name, 0
    try:
        value = int(label[0])
    except ValueError as error:
        raise DataError(f"{path}:{number}: the label {label[0]!r} is no whole number") from error
    if not -(2**31) <= value < 2**31:
        raise DataError(f"{path}:{number}: the label {value} does not fit 32 bits")
    return name, value
