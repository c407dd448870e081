"""Every mutant names a test that exists, and what it takes out."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.house.tree import ROOT, definitions

PATCHES = sorted((ROOT / "scripts" / "mutants").glob("*.patch"))


def head(patch: Path) -> dict[str, str]:
    return dict(re.findall(r"^# ([a-z ]+): *(.+)$", patch.read_text(), re.MULTILINE))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_mutant_applies_and_names_its_test(patch: Path) -> None:
    assert {"test", "takes out"} <= head(patch).keys()
    done = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name} no longer applies: {done.stderr}"
    for name in head(patch)["test"].split():
        path, _, function = name.partition("::")
        if name.startswith("-") or not path.startswith("tests/"):
            continue
        names = {node.name for node in definitions(Path(path)) if not isinstance(node, ast.ClassDef)}
        assert not function or function.split("::")[-1].partition("[")[0] in names
