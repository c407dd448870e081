"""Reading prototxt: strict protobuf text, with errors that say where, which field, and what it may hold.

No torch here: the launcher and the command line parse a solver without it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from prototxt import schema, upgrade
from prototxt.errors import ParseError
from prototxt.faults import explain
from prototxt.scan import Lines, scan_fields

_LAYERS = frozenset({"layer", "layers"})


@dataclass
class NetSource:
    """A net's message, the file it came from, and the line of each of its layers (None: not in the text)."""

    message: Any
    path: str
    lines: list[int | None] = field(default_factory=list)


def parse_net(path: str | os.PathLike[str]) -> Any:
    """The NetParameter of a prototxt file, upgraded to the current format; ParseError when it is wrong."""
    return load_net(path).message


def load_net(path: str | os.PathLike[str]) -> NetSource:
    """As parse_net, with the lines of the layers."""
    return net_from_text(read_text(path), os.fspath(path))


def net_from_text(text: str, path: str = "<text>") -> NetSource:
    """Parse and upgrade a net; ``path`` is for messages."""
    message = parse_text(text, "NetParameter", path)
    lines = Lines(text)
    starts = [
        lines.place(found.offset)[0]
        for found in scan_fields(text)
        if not found.inside and found.name in _LAYERS
    ]
    try:
        origins = upgrade.upgrade_net(message)
    except ValueError as error:
        raise ParseError(f"{path}: {error}") from error
    placed = [None if origin is None else starts[origin] for origin in origins]
    return NetSource(message, path, placed)


def parse_solver(path: str | os.PathLike[str]) -> Any:
    """The SolverParameter of a file, solver_type upgraded and snapshot_prefix completed as in Caffe."""
    name = os.fspath(path)
    message = parse_text(read_text(path), "SolverParameter", name)
    try:
        upgrade.upgrade_solver(message, name)
    except ValueError as error:
        raise ParseError(f"{name}: {error}") from error
    return message


def read_text(path: str | os.PathLike[str]) -> str:
    """The file's text without its byte order mark. What is no UTF-8 is let through: comments have it."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        tried = os.path.abspath(path)
        hint = " (paths are relative to the working directory)" if not os.path.isabs(path) else ""
        raise ParseError(f"cannot read {os.fspath(path)!r}: {error.strerror}: {tried}{hint}") from error
    if not raw.strip():
        raise ParseError(f"{os.fspath(path)}: the file is empty")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ParseError(f"{os.fspath(path)}: the file is UTF-16; save it as UTF-8")
    return raw.decode("utf-8", "surrogateescape").removeprefix("\ufeff")


def parse_text(text: str, name: str, path: str = "<text>") -> Any:
    """Parse ``text`` as message ``name``; ParseError ``path:line:col: what is wrong, what is right``."""
    message = getattr(schema, name)()
    text = text.removeprefix("\ufeff")
    try:
        text_format.Parse(text, message, descriptor_pool=message.DESCRIPTOR.file.pool)
    except text_format.ParseError as error:
        raise explain(error, text, message.DESCRIPTOR, path) from None
    except RecursionError as error:
        raise ParseError(f"{path}: messages are nested too deeply") from error
    if not message.IsInitialized():
        raise ParseError(_missing(message, text, path))
    return message


def _missing(message: Any, text: str, path: str) -> str:
    """Which required field is missing, and in which layer."""
    missing: str = message.FindInitializationErrors()[0]
    inside, name = missing.rsplit(".", 1)
    index = re.match(r"layer\[(\d+)\]", inside)
    place = ""
    if index:
        starts = [found.offset for found in scan_fields(text) if not found.inside and found.name == "layer"]
        place = f":{Lines(text).place(starts[int(index[1])])[0]}"
    return f"{path}{place}: {inside.rsplit('.', 1)[-1]} has no {name!r}, which must be set"
