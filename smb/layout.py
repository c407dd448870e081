"""How the records of protocol.py lie in a frame's body: kinds of fields, packing, unpacking. No I/O.

A record is a frozen dataclass whose fields are ``Annotated[type, kind]``; its fields follow one another
without padding, little endian.
"""

from __future__ import annotations

import re
import struct
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from smb.errors import ProtocolError, RequestError

_KEY = re.compile(r"[A-Za-z0-9._:@+=,/-]{1,255}")


def check_key(key: object) -> str:
    """``key`` when it can name a segment, counter, barrier or lock; else RequestError."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        shown = repr(key) if len(repr(key)) <= 80 else f"{repr(key)[:77]}..."
        raise RequestError(f"bad key {shown}: 1 to 255 letters, digits or any of . _ - / : @ + = ,")
    return key


# Kinds of fields -----------------------------------------------------------------------------------------


class Kind(Protocol):
    """How one field lies in a body. ``get`` raises ProtocolError; ``put`` raises RequestError."""

    @property
    def layout(self) -> str: ...
    def put(self, value: Any, out: bytearray) -> None: ...
    def get(self, body: memoryview, at: int) -> tuple[Any, int]: ...


def _take(body: memoryview, at: int, count: int) -> memoryview:
    part = body[at : at + count]
    if len(part) < count:
        raise ProtocolError(f"{count} bytes expected at {at}, the body ends at {len(body)}")
    return part


class Number:
    """A whole number or a float in [low, high]; ``code`` is struct's."""

    def __init__(self, code: str, low: float, high: float) -> None:
        self.packed = struct.Struct("<" + code)
        self.low, self.high = low, high
        self.names = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64", "d": "f64"}
        self.layout = self.names[code]

    def put(self, value: Any, out: bytearray) -> None:
        if not self.low <= value <= self.high:
            raise RequestError(f"{value} is not in {self.low}..{self.high}")
        out += self.packed.pack(value)

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        (value,) = self.packed.unpack(_take(body, at, self.packed.size))
        if not self.low <= value <= self.high:  # refuses NaN too
            raise ProtocolError(f"{value} is not in {self.low}..{self.high}")
        return value, at + self.packed.size


class Real:
    """Any float, NaN and the infinities too."""

    packed = struct.Struct("<d")
    layout = "f64, NaN and infinities too"

    def put(self, value: Any, out: bytearray) -> None:
        out += self.packed.pack(value)

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        (value,) = self.packed.unpack(_take(body, at, self.packed.size))
        return value, at + self.packed.size


class Choice:
    """One of a few names, sent as its index in one byte."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.layout = "u8: " + ", ".join(f"{i} {name}" for i, name in enumerate(names))

    def put(self, value: Any, out: bytearray) -> None:
        if value not in self.names:
            raise RequestError(f"{value!r} is none of {', '.join(self.names)}")
        out.append(self.names.index(value))

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        index = _take(body, at, 1)[0]
        if index >= len(self.names):
            raise ProtocolError(f"{index} is no code of {', '.join(self.names)}")
        return self.names[index], at + 1


class Truth:
    """A bool in one byte, 0 or 1."""

    layout = "u8: 0 or 1"

    def put(self, value: Any, out: bytearray) -> None:
        out.append(bool(value))

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        value = _take(body, at, 1)[0]
        if value > 1:
            raise ProtocolError(f"{value} is neither 0 nor 1")
        return bool(value), at + 1


class Blob:
    """Up to ``limit`` bytes behind their number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.layout = f"u32 length, at most {limit} bytes"

    def put(self, value: Any, out: bytearray) -> None:
        if len(value) > self.limit:
            raise RequestError(f"{len(value)} bytes, at most {self.limit} are allowed")
        out += struct.pack("<I", len(value))
        out += value

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        (length,) = struct.unpack("<I", _take(body, at, 4))
        if length > self.limit:
            raise ProtocolError(f"{length} bytes, at most {self.limit} are allowed")
        return bytes(_take(body, at + 4, length)), at + 4 + length


class Text(Blob):
    """UTF-8 text; ``key`` asks for what check_key allows."""

    def __init__(self, limit: int, key: bool = False) -> None:
        super().__init__(limit)
        self.key = key
        self.layout = f"u32 length, {'a key' if key else 'UTF-8'} of at most {limit} bytes"

    def put(self, value: Any, out: bytearray) -> None:
        text = check_key(value) if self.key else value
        super().put(text.encode(errors="replace"), out)

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        data, at = super().get(body, at)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"not UTF-8: {error}") from error
        return (check_key(text) if self.key else text), at


class Rows:
    """Any number of records of one layout behind their number."""

    def __init__(self, row: type) -> None:
        self.row = row
        self.layout = f"u32 number of rows, then rows of {row.__name__}"

    def put(self, value: Any, out: bytearray) -> None:
        out += struct.pack("<I", len(value))
        for row in value:
            put(row, out)

    def get(self, body: memoryview, at: int) -> tuple[Any, int]:
        (number,) = struct.unpack("<I", _take(body, at, 4))
        at, rows = at + 4, []
        for _ in range(number):  # every row takes a byte at least, so the body's end bounds this loop
            row, at = get(self.row, body, at)
            rows.append(row)
        return tuple(rows), at


# Records -------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    name: str
    kind: Kind


_layouts: dict[type, tuple[Field, ...]] = {}


def layout(record: type) -> tuple[Field, ...]:
    """The fields of a record in the order in which they are sent."""
    if record not in _layouts:
        hints = get_type_hints(record, include_extras=True)
        assert all(get_origin(hints[f.name]) is Annotated for f in fields(record))
        _layouts[record] = tuple(Field(f.name, get_args(hints[f.name])[1]) for f in fields(record))
    return _layouts[record]


def put(record: object, out: bytearray) -> None:
    for name, kind in layout(type(record)):
        try:
            kind.put(getattr(record, name), out)
        except (TypeError, AttributeError, struct.error) as error:
            raise RequestError(f"{name}: {getattr(record, name)!r} is no {kind.layout}") from error
        except RequestError as error:
            raise type(error)(f"{name}: {error}") from None


def get(record: type, body: memoryview, at: int) -> tuple[Any, int]:
    values = []
    for name, kind in layout(record):
        try:
            value, at = kind.get(body, at)
        except RequestError as error:
            raise ProtocolError(f"{record.__name__}.{name}: {error}") from None
        values.append(value)
    return record(*values), at


R = TypeVar("R")


def unpack(record: type[R], body: bytes) -> R:
    """The record that fills ``body`` exactly; ProtocolError names the first field that is wrong."""
    value, end = get(record, memoryview(body), 0)
    if end != len(body):
        raise ProtocolError(f"{record.__name__}: {len(body) - end} bytes too many")
    return cast(R, value)
