"""docs/prototxt.md is what the layer registry, the schema and the table of differences say."""

from __future__ import annotations

import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from prototxt import schema
from prototxt.registry import layer_types

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "prototxt.md"


@pytest.fixture(scope="module")
def script() -> Any:
    """scripts/prototxt-page as a module."""
    loader = SourceFileLoader("prototxt_page", str(ROOT / "scripts" / "prototxt-page"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def check(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prototxt-page", "--check", *words])
    return int(script.main())


def test_the_page_is_current_and_a_stale_one_is_noticed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(script, monkeypatch) == 0, capsys.readouterr().err
    copy = tmp_path / "prototxt.md"
    copy.write_text(
        PAGE.read_text().replace("| negative_slope | float | 0 |", "| negative_slope | float | 1 |")
    )
    assert copy.read_text() != PAGE.read_text()
    assert check(script, monkeypatch, str(copy)) == 1
    assert capsys.readouterr().err == f"{copy} is stale: run scripts/prototxt-page\n"


def test_a_field_that_nothing_reads_has_to_be_explained(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(script.EXPLAINED, "SolverParameter.layer_wise_reduce")
    with pytest.raises(SystemExit, match=r"no code reads SolverParameter\.layer_wise_reduce"):
        script.page()


def test_every_layer_has_its_section_and_every_field_its_row() -> None:
    text = PAGE.read_text()
    layers = text.split("\n## Layers")[1].split("\n## ")[0]
    assert re.findall(r"^### (\w+)$", layers, re.MULTILINE) == layer_types()
    rows = set(re.findall(r"^\| (\w+) \|.*\| (?:supported|differs|refused) \|", text, re.MULTILINE))
    layer = schema.LayerParameter.DESCRIPTOR
    messages = [field.message_type for field in layer.fields if field.name.endswith("_param")]
    for message in [schema.NetParameter.DESCRIPTOR, schema.SolverParameter.DESCRIPTOR, *messages]:
        assert {field.name for field in message.fields} <= rows, message.name
