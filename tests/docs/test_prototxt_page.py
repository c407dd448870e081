"""docs/prototxt.md is what the layer registry, the schema and the table of differences say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from prototxt import schema
from prototxt.registry import layer_types

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "prototxt.md"


def make(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "prototxt-page"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_page_is_current_and_a_stale_one_is_noticed(tmp_path: Path) -> None:
    done = make("--check")
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "prototxt.md"
    copy.write_text(
        PAGE.read_text().replace("| negative_slope | float | 0 |", "| negative_slope | float | 1 |")
    )
    assert copy.read_text() != PAGE.read_text()
    done = make("--check", str(copy))
    assert done.returncode == 1
    assert done.stderr == f"{copy} is stale: run scripts/prototxt-page\n"


def test_every_layer_has_its_section_and_every_field_its_row() -> None:
    text = PAGE.read_text()
    assert (
        re.findall(r"^### (\w+)$", text.split("\n## Layers")[1].split("\n## ")[0], re.MULTILINE)
        == layer_types()
    )
    rows = set(re.findall(r"^\| (\w+) \|.*\| (?:supported|differs|refused) \|", text, re.MULTILINE))
    layer = schema.LayerParameter.DESCRIPTOR
    messages = [field.message_type for field in layer.fields if field.name.endswith("_param")]
    for message in [schema.NetParameter.DESCRIPTOR, schema.SolverParameter.DESCRIPTOR, *messages]:
        assert {field.name for field in message.fields} <= rows, message.name
