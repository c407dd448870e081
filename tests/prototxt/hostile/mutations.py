"""Mutations of files: of bytes, of text, and some that know the format, so that they get past its checks."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from random import Random

from prototxt import schema

Mutation = Callable[[bytes, Random], bytes]
EDGES = (0, 1, 0x7F, 0x80, 0xFF)
NUMBERS = (
    "0", "1", "-1", "2", "3", "7", "32", "255", "65536", "1000000", "1000000000", "2147483647", "2147483648",
    "-2147483648", "4294967295", "9223372036854775807", "-9223372036854775808", "18446744073709551616",
    "1e9", "1e38", "1e-45", "-1e38", "nan", "inf", "-inf", "0x7fffffff", "0.5", "1" * 400,
)  # fmt: skip


# Bytes ---------------------------------------------------------------------------------------------------


def flipped(data: bytes, rng: Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def edged(data: bytes, rng: Random) -> bytes:
    """Bytes set to the values that lengths, counts and signs break at."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 8))):
        out[rng.randrange(len(out))] = rng.choice(EDGES)
    return bytes(out)


def widened(data: bytes, rng: Random) -> bytes:
    """A number of 4 or 8 bytes set to an extreme, in either order of bytes."""
    out = bytearray(data)
    width = rng.choice((2, 4, 8))
    value = rng.choice((0, 1, -1, 2**15, 2**31 - 1, 2**31, 10**9, 2**62, len(data), len(data) * 1000))
    at = rng.randrange(max(1, len(out) - width))
    order = rng.choice(("little", "big"))
    out[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, order)  # type: ignore[arg-type]
    return bytes(out)


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def hollowed(data: bytes, rng: Random) -> bytes:
    """A part left out, doubled, zeroed or taken from elsewhere."""
    start = rng.randrange(len(data))
    size = min(len(data) - start, rng.choice((1, 4, 16, 200, 4096)))
    part = data[start : start + size]
    elsewhere = rng.randrange(len(data))
    new = rng.choice((b"", part * 2, bytes(size), data[elsewhere : elsewhere + size], rng.randbytes(size)))
    return data[:start] + new + data[start + size :]


def grown(data: bytes, rng: Random) -> bytes:
    return data + rng.choice((data, b"\0" * 1000, rng.randbytes(100)))


def replaced(data: bytes, rng: Random) -> bytes:
    """Nothing of it is left."""
    return rng.choice((b"", b"\0", rng.randbytes(rng.randrange(1, 2000)), data[::-1], b"\xff" * 64))


BYTES: tuple[Mutation, ...] = (
    flipped,
    flipped,
    edged,
    widened,
    widened,
    cut,
    hollowed,
    hollowed,
    grown,
    replaced,
)


# Text ----------------------------------------------------------------------------------------------------

_NUMBER = re.compile(rb"(?<![\w.\"])-?\d+(\.\d+)?")
_WORD = re.compile(rb"[A-Za-z_]\w*")


def renumbered(data: bytes, rng: Random) -> bytes:
    """Numbers become extreme ones."""
    return _exchanged(data, rng, _NUMBER, lambda: rng.choice(NUMBERS).encode())


def renamed(data: bytes, rng: Random) -> bytes:
    """Fields, enums and names become others that occur in the text or in the schema."""
    words = _WORD.findall(data)
    known = [field.name for kind in schema.file_descriptor().message_type for field in kind.field]
    return _exchanged(data, rng, _WORD, lambda: rng.choice((rng.choice(words), rng.choice(known).encode())))


def _exchanged(data: bytes, rng: Random, pattern: re.Pattern[bytes], new: Callable[[], bytes]) -> bytes:
    found = list(pattern.finditer(data))
    for match in sorted(
        rng.sample(found, min(len(found), rng.choice((1, 1, 1, 2, 4)))), key=lambda m: -m.start()
    ):
        data = data[: match.start()] + new() + data[match.end() :]
    return data


def reordered(data: bytes, rng: Random) -> bytes:
    """Lines left out, doubled or moved."""
    lines = data.splitlines(keepends=True)
    line = lines.pop(rng.randrange(len(lines)))
    for _ in range(rng.choice((0, 1, 2))):
        lines.insert(rng.randrange(len(lines) + 1), line)
    return b"".join(lines)


def nested(data: bytes, rng: Random) -> bytes:
    """Blocks in blocks in blocks, closed or not, of a field that may hold itself or not."""
    depth = rng.choice((10, 99, 101, 400, 3000, 20000))
    name = rng.choice((b"layer", b"net_param", b"layers", b"layer_param", b"a", b"train_state"))
    opened = rng.choice((name + b" { ", name + b" < ", b"{", b"["))
    closed = (
        b"" if rng.random() < 0.3 else (b">" if b"<" in opened else b"]" if b"[" in opened else b"}") * depth
    )
    at = rng.choice((0, len(data), rng.randrange(len(data))))
    return data[:at] + opened * depth + closed + data[at:]


def repeated(data: bytes, rng: Random) -> bytes:
    """One repeated field very many times."""
    parts = (
        b'top: "t" ', b'bottom: "data" ', b"dim: 3 ", b"kernel_size: 3 ", b"stepvalue: 5 ", b"test_iter: 1 ",
        b'stage: "s" ', b"param { } ", b"loss_weight: 1 ", b"slice_point: 1 ", b"include { } ",
        b"dim: 1000000000 ", b'layer { name: "x" type: "ReLU" bottom: "data" top: "data" } ',
    )  # fmt: skip
    part = rng.choice(parts) * rng.choice((3, 33, 1000, 5000))
    braces = [match.end() for match in re.finditer(rb"\{", data)] or [0]
    at = rng.choice((0, rng.choice(braces)))
    return data[:at] + part + data[at:]


TEXT: tuple[Mutation, ...] = (
    renumbered, renumbered, renumbered, renumbered, renamed, renamed, reordered, reordered, nested, repeated,
    *BYTES[:1], cut, hollowed,
)  # fmt: skip


# Formats -------------------------------------------------------------------------------------------------


def wired(kind: str) -> Mutation:
    """Mutations of a protobuf message's own fields: it still parses, but says something else."""

    def mutate(data: bytes, rng: Random) -> bytes:
        message = getattr(schema, kind)()
        try:
            message.ParseFromString(data)
        except Exception:
            return data
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change(message, rng)
        return bytes(message.SerializePartialToString())

    return mutate


def _change(message: object, rng: Random, depth: int = 0) -> None:
    fields = message.ListFields()  # type: ignore[attr-defined]
    if not fields:
        return
    field, value = rng.choice(fields)
    many = hasattr(value, "extend")
    if field.message_type is not None:
        if many and rng.random() < 0.1:
            value.extend([rng.choice(value)] * rng.choice((1, 3, 100)))
        elif many and rng.random() < 0.1:
            del value[rng.randrange(len(value)) :]
        else:
            _change(rng.choice(value) if many else value, rng, depth + 1)
    elif many:
        new = _value(field, rng)
        if rng.random() < 0.4:
            value.extend([new] * rng.choice((1, 1, 40, 3000)))
        elif rng.random() < 0.3:
            del value[rng.randrange(len(value)) :]
        else:
            value[rng.randrange(len(value))] = new
    else:
        setattr(message, field.name, _value(field, rng))


def _value(field: object, rng: Random) -> object:
    kind = field.cpp_type  # type: ignore[attr-defined]
    bits = {1: (31, True), 2: (63, True), 3: (32, False), 4: (64, False)}
    if kind in bits:
        width, signed = bits[kind]
        choices = [0, 1, 2, 3, 2**width - 1, 2 ** (width // 2), 10**6, 10**9]
        return rng.choice(choices + ([-1, -2, -(2**width)] if signed else []))
    if kind in (5, 6):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
    if kind == 7:
        return rng.random() < 0.5
    if kind == 8:
        return rng.choice([value.number for value in field.enum_type.values])  # type: ignore[attr-defined]
    text = rng.choice(("", "x", "conv", "fc", "a/b", "..", "/etc/passwd", "\0", "x" * 5000, "\u20ac"))
    return text if field.type == 9 else text.encode()  # type: ignore[attr-defined]


def checked_png(data: bytes, rng: Random) -> bytes:
    """A PNG whose head claims another size or depth, with a checksum that is right."""
    if not data.startswith(b"\x89PNG"):
        return flipped(data, rng)
    sides = [rng.choice((0, 1, 13, 1000, 20000, 2**20, 2**31 - 1, 2**32 - 1)) for _ in range(2)]
    head = struct.pack(
        ">IIBBBBB", *sides, rng.choice((1, 8, 16)), rng.choice((0, 2, 3, 4, 6)), 0, 0, rng.choice((0, 1))
    )
    body = b"IHDR" + head
    return data[:12] + body + struct.pack(">I", zlib.crc32(body)) + data[33:]


def bombed_png(data: bytes, rng: Random) -> bytes:
    """A PNG of many pixels that packs into few bytes."""
    side = rng.choice((500, 1500, 4000))
    body = zlib.compress(bytes((side + 1) * side), 9)

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def summed_leveldb(data: bytes, rng: Random) -> bytes:
    """A LevelDB table whose blocks are damaged, with checksums that are right again."""
    from prototxt._native import crc32c
    from prototxt.data.leveldb_store import FOOTER_BYTES, TRAILER_BYTES, Broken, masked, varint

    if len(data) < FOOTER_BYTES:
        return data
    mutated = bytearray(
        rng.choice((flipped, edged, widened))(data[:-FOOTER_BYTES], rng) + data[-FOOTER_BYTES:]
    )
    try:
        handle = bytes(data[-FOOTER_BYTES:])
        _, at = varint(handle, 0)
        _, at = varint(handle, at)
        blocks = [_handle(handle, at)]
    except Broken:
        return bytes(mutated)
    start, size = blocks[0]
    at = start
    while at < start + size - 8:  # the handles of the data blocks, as the writer lays them out
        try:
            _, skip = varint(data, at)
            key, skip = varint(data, skip)
            value, skip = varint(data, skip)
            blocks.append(_handle(data, skip + key))
            at = skip + key + value
        except (Broken, IndexError):
            break
    if rng.random() < 0.3 and len(blocks) > 1:  # a block that claims to unpack to very much
        place, length = rng.choice(blocks[1:])
        if place + length < len(mutated):
            mutated[place : place + 5] = b"\xff\xff\xff\xff\x03"
            mutated[place + length] = 1
    for place, length in blocks:
        if place + length + TRAILER_BYTES <= len(mutated):
            crc = masked(crc32c(bytes(mutated[place : place + length + 1])))
            mutated[place + length + 1 : place + length + TRAILER_BYTES] = crc.to_bytes(4, "little")
    return bytes(mutated)


def _handle(data: bytes, at: int) -> tuple[int, int]:
    from prototxt.data.leveldb_store import varint

    start, at = varint(data, at)
    size, _ = varint(data, at)
    return start, size


def bombed_gzip(data: bytes, rng: Random) -> bytes:
    """Zeros that pack a thousandfold."""
    import gzip

    return gzip.compress(bytes(rng.choice((10**6, 10**8))), 9)
