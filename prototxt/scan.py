"""A light scan of a text message: where each field stands and what encloses it, whether or not it parses."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>[\s,;]+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<open>[{<])
      | (?P<close>[}>])
      | (?P<mark>[:\[\]])
      | (?P<other>[^\s,;{}<>:\[\]\#"']+)""",
    re.VERBOSE,
)


DEEPEST = 100  # enclosing fields that are named; no message holds so many, but a hostile text may


class Field(NamedTuple):
    """A field's name in the text: its offset, and the names of the enclosing fields, outermost first."""

    offset: int
    name: str
    inside: tuple[str, ...]


def scan_fields(text: str) -> Iterator[Field]:
    """Every field name in order. Wrong text is scanned as far as it makes sense; nothing raises."""
    stack: list[tuple[str, bool]] = []  # the enclosing field, and whether its value stands in a list
    inside: tuple[str, ...] = ()
    name = ""
    value = listed = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "space":
            continue
        if kind == "word" and not value:
            name = match.group()
            yield Field(match.start(), name, inside)
        elif kind == "open":
            stack.append((name, listed))
            if len(stack) <= DEEPEST:
                inside = (*inside, name)
            value = listed = False
        elif kind == "close":
            if len(stack) <= DEEPEST:
                inside = inside[:-1]
            name, listed = stack.pop() if stack else ("", False)
            value = listed
        elif kind == "mark":
            listed = match.group() == "["
            value = listed or match.group() == ":"
        elif not listed:
            value = False


class Lines:
    """Turns offsets of a text into lines and columns, both counted from 1."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def offset(self, line: int, column: int) -> int:
        return self._starts[min(line, len(self._starts)) - 1] + column - 1


def field_at(text: str, offset: int) -> Field | None:
    """The last field whose name begins at or before ``offset``."""
    fields = list(scan_fields(text))
    place = bisect_right(fields, offset, key=lambda field: field.offset)
    return fields[place - 1] if place else None


def open_field(text: str) -> Field | None:
    """The innermost field whose block the text never closes."""
    fields = list(scan_fields(text))
    stack: list[int] = []
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "open":
            stack.append(bisect_right(fields, match.start(), key=lambda field: field.offset))
        elif match.lastgroup == "close" and stack:
            stack.pop()
    return fields[stack[-1] - 1] if stack and stack[-1] else None
