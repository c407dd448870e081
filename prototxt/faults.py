"""Turn the text parser's findings into messages that say where, which field, and what it may hold."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from prototxt import schema
from prototxt.errors import ParseError
from prototxt.forks import FORK_FIELDS, FORK_TYPES, origin
from prototxt.scan import Field, Lines, field_at, open_field

HEAD = 512  # characters that tell what a file is
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f]")
_TAKEN_FOR = {  # the message that was expected, the one that has the field: what is likely wrong
    ("SolverParameter", "NetParameter"): "is this a net? a solver names it by 'net:'",
    ("NetParameter", "SolverParameter"): "is this a solver? the net is the file that its 'net:' names",
}


def explain(error: text_format.ParseError, text: str, root: Descriptor, path: str) -> ParseError:
    """Say the parser's finding with the field it belongs to."""
    if _BINARY.search(text[:HEAD]):
        kind = "an HDF5 file" if "HDF\r\n" in text[:8] else "a weight file or an image"
        return ParseError(f"{path}: the file is binary ({kind}?); a {root.name} as text was expected")
    raw = re.sub(r"^\d+:\d+ : ('.*': )?", "", str(error), flags=re.DOTALL)
    lines = Lines(text)
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    offset = lines.offset(line, column)
    found = field_at(text, offset)
    reason, at = _reason(raw, text, offset, found, root)
    line, column = lines.place(at)
    return ParseError(f"{path}:{line}:{column}: {reason}")


def _reason(raw: str, text: str, offset: int, found: Field | None, root: Descriptor) -> tuple[str, int]:
    """The message, and the offset that it is about."""
    if text.startswith(("//", "/*"), offset):
        return "a comment begins with '#', not with '/'", offset
    block = open_field(text) if 'Expected "}"' in raw or 'Expected ">"' in raw else None
    if block is not None:
        line = Lines(text).place(block.offset)[0]
        return f"the block '{block.name} {{' that begins in line {line} is never closed", len(text.rstrip())
    unknown = re.match(r'Message type "\w+\.(?:\w+\.)*(\w+)" has no field named "([A-Za-z_]\w*)"', raw)
    if unknown:
        return _unknown_field(unknown[1], unknown[2], root), offset
    target = _descriptor(root, found)
    if found is None or target is None:
        return raw[:1].lower() + raw[1:].rstrip("."), offset
    repeated = re.search(r'should not have multiple "(\w+)" fields', raw)
    if repeated:
        return f'non-repeated field "{repeated[1]}" is specified multiple times', found.offset
    shown = _shown(text, offset)
    between = "identifier or number, got" in raw or "has no field named" in raw
    said = _not_a_field(shown, target) if between else _wrong_value(raw, shown, target)
    return said, offset


def _not_a_field(shown: str, target: FieldDescriptor) -> str:
    """Something after the value of ``target`` that is no field name."""
    if not _many(target) and re.fullmatch(r"[-+\d.]\S*|[\"'].*", shown):
        return f"{_owner(target)} takes one value; found another: {shown}"
    return f"expected the name of a field, found {shown}"


def _unknown_field(owner: str, name: str, root: Descriptor) -> str:
    """An unknown field: the fork or the message that has it, or the nearest known one."""
    text = f'{owner} has no field named "{name}"'
    fork = origin(f"{owner}.{name}", FORK_FIELDS) or origin(name, FORK_FIELDS)
    if fork:
        return f"{text}; {fork}"
    names = list(getattr(schema, owner).DESCRIPTOR.fields_by_name)
    for (expected, other), hint in _TAKEN_FOR.items():
        if owner == expected and name in getattr(schema, other).DESCRIPTOR.fields_by_name:
            return f"{text}; {hint}"
    near = _nearest(name, names)
    if near:
        return f'{text}; did you mean "{near}"?'
    homes = [
        kind.name
        for kind in root.file.message_types_by_name.values()
        if name in kind.fields_by_name and not kind.name.startswith(("V0", "V1"))
    ]
    if homes:
        return f"{text}; {' and '.join(homes[:3])} {'has' if len(homes) == 1 else 'have'} one"
    return f"{text} (known: {', '.join(sorted(names))})" if len(names) < 30 else text


def _nearest(name: str, names: list[str]) -> str | None:
    """The field most like ``name``; the ending that all layers' messages share makes none alike."""
    stems = {known.removesuffix("_param"): known for known in names}
    near = get_close_matches(name.removesuffix("_param"), stems, 1, 0.72)
    return stems[near[0]] if near else None


def _descriptor(root: Descriptor, found: Field | None) -> FieldDescriptor | None:
    """The schema's entry of a field in the text."""
    if found is None:
        return None
    message: Descriptor | None = root
    for name in found.inside:
        entry = message.fields_by_name.get(name) if message else None
        message = entry.message_type if entry else None
    return message.fields_by_name.get(found.name) if message else None


_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "a string in quotes",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_INT32: "a whole number from -2147483648 to 2147483647",
    FieldDescriptor.CPPTYPE_INT64: "a whole number",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 on",
    FieldDescriptor.CPPTYPE_MESSAGE: "a block in braces",
}


def _wrong_value(raw: str, shown: str, target: FieldDescriptor) -> str:
    """A value that the field cannot hold."""
    owner = _owner(target)
    if "missing ending quote" in raw:
        return f"the string that begins here for {owner} has no closing quote in its line"
    if "surrogates not allowed" in raw or "codec can't" in raw:
        return f"the string of {owner} is not valid UTF-8"
    if 'Expected ":"' in raw:
        return f"{owner}: expected ':' before its value, found {shown}"
    if shown.startswith("[") and not _many(target):
        return f"{owner} takes one value, not a list"
    said = f"{owner} takes {_kind(target)}; found {shown}"
    if _is_v1_type(target):
        return said + _v1_hint(shown)
    return said


def _kind(target: FieldDescriptor) -> str:
    if target.enum_type is None:
        return _KINDS[target.cpp_type]
    return f"one of {', '.join(target.enum_type.values_by_name)}"


def _is_v1_type(target: FieldDescriptor) -> bool:
    owner = target.containing_type
    return owner is not None and owner.name == "V1LayerParameter" and target.name == "type"


def _v1_hint(shown: str) -> str:
    if shown[0] in "\"'":
        return "; `layers` (the old format) takes an enum such as DATA: use `layer` for quoted types"
    plain = {name.lower(): name for name in FORK_TYPES}
    fork = origin(plain.get(shown.replace("_", "").lower(), ""), FORK_TYPES)
    return f"; {fork}" if fork else ""


def _shown(text: str, offset: int) -> str:
    """The token at ``offset``, for a message."""
    token = re.match(r"\"[^\"\n]*\"?|'[^'\n]*'?|[^\s{}:;,#]+|\S", text[offset:])
    return token[0] if token else "the end of the file"


def _owner(target: FieldDescriptor) -> str:
    return f"{target.name} of {target.containing_type.name}" if target.containing_type else target.name


def _many(target: Any) -> bool:
    """Whether the field is repeated; old protobuf says so by a label, new by is_repeated."""
    if hasattr(target, "is_repeated"):
        return bool(target.is_repeated)
    return bool(target.label == FieldDescriptor.LABEL_REPEATED)
