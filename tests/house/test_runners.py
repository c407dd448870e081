"""The runners of mutants and soaks, and the list of named skips, tell good from bad."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GUARDED = "LIMIT = 3\n\n\ndef take(n):\n    if n > LIMIT:\n        raise ValueError\n    return n\n"
TEST = """\
import pytest
from guarded import take

def test_limit():
    with pytest.raises(ValueError):
        take(4)

def test_other():
    assert take(1) == 1
"""
PATCH = """\
# test: tests/test_guarded.py::{test}
# takes out: the limit
--- a/guarded.py
+++ b/guarded.py
@@ -2,6 +2,4 @@
{blank}
{blank}
 def take(n):
-    if n > LIMIT:
-        raise ValueError
     return n
"""


def mutant(test: str) -> str:
    return PATCH.format(test=test, blank=" ")


@pytest.fixture
def project(root: Path, tmp_path: Path) -> Path:
    """A tiny project with the runner of mutants in it."""
    (tmp_path / "scripts" / "mutants").mkdir(parents=True)
    shutil.copy2(root / "scripts" / "mutants" / "run", tmp_path / "scripts" / "mutants" / "run")
    (tmp_path / "guarded.py").write_text(GUARDED)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_guarded.py").write_text(TEST)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def mutants(project: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, project / "scripts" / "mutants" / "run", *names]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100)


def add_mutant(project: Path, name: str, text: str) -> None:
    (project / "scripts" / "mutants" / f"{name}.patch").write_text(text)


def test_a_mutant_that_its_test_notices_passes(project: Path) -> None:
    add_mutant(project, "limit", mutant(test="test_limit"))
    done = mutants(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "red" in done.stdout
    assert (project / "guarded.py").read_text() == GUARDED


def test_a_mutant_that_nobody_notices_fails(project: Path) -> None:
    add_mutant(project, "limit", mutant(test="test_other"))
    add_mutant(project, "other", mutant(test="test_limit").replace("LIMIT:", "MAX:"))
    done = mutants(project)
    assert done.returncode == 1
    assert "STILL GREEN" in done.stdout
    assert "does not apply" in done.stdout
    assert "0 of 2 mutants were noticed" in done.stdout


def test_a_test_that_does_not_load_is_not_taken_for_red(project: Path) -> None:
    add_mutant(project, "gone", mutant(test="test_of_another_name"))
    done = mutants(project, "go*")
    assert done.returncode == 1
    assert "not green before" in done.stdout


@pytest.mark.parametrize(("code", "verdict"), [(0, "held"), (3, "FAILED (3)")])
def test_a_soak_is_judged_by_its_exit_code(root: Path, tmp_path: Path, code: int, verdict: str) -> None:
    shutil.copy2(root / "scripts" / "soak" / "run", tmp_path / "run")
    (tmp_path / "long.py").write_text(f"import sys\nprint('12 rounds of', sys.argv[1])\nsys.exit({code})\n")
    done = subprocess.run(
        [sys.executable, tmp_path / "run", "--", "thing"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == bool(code)
    assert done.stdout.splitlines()[-1].split("s  ")[-1] == "12 rounds of thing"
    assert verdict in done.stdout


@pytest.mark.parametrize(("named", "code"), [("^needs a moon", 0), ("^needs a sun", 1)])
def test_a_skip_must_be_named(root: Path, tmp_path: Path, named: str, code: int) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy2(root / "tests" / "conftest.py", tmp_path / "tests" / "conftest.py")
    (tmp_path / "skips.txt").write_text(f"# why\n{named}\n")
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\ndef test_a():\n    pytest.skip('needs a moon')\ndef test_b():\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "--rootdir", ".", "--named-skips", "skips.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout
    assert ("NOT NAMED" in done.stdout) == bool(code)
    assert "needs a moon" in done.stdout
