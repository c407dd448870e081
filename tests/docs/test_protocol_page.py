"""docs/protocol.md is what the table of operations says, and enough to lay out a request by."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from smb import layout, protocol

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "protocol.md"
NUMBERS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q", "f64": "d"}


def make(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "protocol-page"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_page_is_current() -> None:
    done = make("--check")
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "protocol.md"
    copy.write_text(PAGE.read_text().replace("| 2 | session | u64 |", "| 2 | session | u32 |"))
    done = make("--check", str(copy))
    assert done.returncode == 1
    assert done.stderr == f"{copy} is stale: run scripts/protocol-page\n"
    assert make(str(copy)).returncode == 0
    assert copy.read_text() == PAGE.read_text()


def fields(name: str) -> list[tuple[str, str, str]]:
    """(at, name, type) of one record's table."""
    section = PAGE.read_text().partition(f"\n#### {name}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| (\d+|behind it) \| (\w+) \| (.+?) \|", section, re.MULTILINE)


@pytest.mark.parametrize("row", protocol.OPERATIONS.values(), ids=lambda row: row.request.__name__)
def test_a_request_made_by_the_page_alone_is_understood(row: protocol.Operation) -> None:
    body = b""
    for at, _, kind in fields(row.request.__name__):
        assert at in (str(len(body)), "behind it")
        number = re.match(r"[uif]\d+", kind)
        assert number
        if "length" in kind:
            text = b"k" * (32 if kind.endswith("at most 32 bytes") else 1)
            body += struct.pack("<I", len(text)) + text
        else:
            body += struct.pack("<" + NUMBERS[number[0]], 1)
    record = layout.unpack(row.request, body)
    packed = bytearray()
    layout.put(record, packed)
    assert bytes(packed) == body


def test_the_example_is_what_is_sent() -> None:
    frame = protocol.pack(11, 7, protocol.Add("steps", 5))
    lines = PAGE.read_text().split("(header, then body):\n\n")[1].splitlines()[:2]
    assert bytes.fromhex("".join(lines)) == frame
