"""Every command and every Python block of the README and docs/ runs as it stands there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, commands, script

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs" / "adr").glob("*.md")})
LIMIT = 240  # seconds a page may take

# Those two lines make environments: .ci/run runs one of them as it stands, and here their commands run.
SETUP = {
    line.strip()
    for line in (ROOT / "README.md").read_text().splitlines()
    if line.startswith("python3 -m venv")
}
# What is long gets an argument that ends it soon. Everything else runs to the letter.
SHORTER: dict[str, str] = {
    "--workers 1,2,4 --seeds 3": "--workers 2 --seeds 1 --max-iter 20",
    "lenet_small_solver.prototxt": "lenet_small_solver.prototxt --max-iter 20",
}


def environment(home: Path) -> dict[str, str]:
    """A reader's shell: the commands on the path, and nothing of this user's own."""
    keep = {k: v for k, v in os.environ.items() if k not in {"SMB_ADDRESS", "XDG_RUNTIME_DIR", "PYTHONPATH"}}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**keep, "PATH": path, "HOME": str(home), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}


def run_page(page: Path, folder: Path) -> tuple[int, str]:
    """Run a page's script among copies of the examples; stop whatever it leaves running."""
    (folder / "home").mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*_lmdb", "*.log"))
    text = script(page, SHORTER, SETUP)
    with subprocess.Popen(
        ["bash", "-c", text],
        cwd=folder,
        env=environment(folder / "home"),
        stdin=subprocess.DEVNULL,
        stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    return code, (folder / "output").read_text(errors="replace")


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_commands_of_a_page_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    if not re.search(r"^```(sh|python)$", page.read_text(), re.MULTILINE):
        return
    code, output = run_page(page, tmp_path)
    assert code == 0, f"{page.name} ended with {code}:\n{output[-4000:]}"


def test_no_shortening_is_stale() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [key for key in SHORTER if key not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_fence_says_what_it_holds(page: Path) -> None:
    """A block marked bash or console would be shown but never run."""
    assert {language for language, _ in blocks(page.read_text())} <= {"", "sh", "python", "prototxt", "text"}


@pytest.mark.parametrize("page", LINKED, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_has_its_two_set_up_lines() -> None:
    for which, word in (("train", "--workers 2"), ("test", "pytest")):
        line = subprocess.run(
            [ROOT / "scripts" / "readme-line", which], check=True, capture_output=True, text=True
        )
        assert word in line.stdout
        assert line.stdout.strip() in SETUP
    assert len(SETUP) == 2


def test_the_readme_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in text] == []


def test_a_failing_command_in_the_middle_of_a_page_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\n```\nthen\n```sh\nfalse\necho fine\n```\n")
    folder = tmp_path / "run"
    folder.mkdir()
    code, output = run_page(page, folder)
    assert code != 0
    assert "failed in page.md: false" in output


def test_shell_blocks_hold_commands_alone() -> None:
    """No prompt signs: a block can be copied as a whole."""
    for page in PAGES:
        for language, code in blocks(page.read_text()):
            if language == "sh":
                assert [c for c in commands(code) if c.startswith(("$ ", "> "))] == []
