"""The leak checks of conftest.py see what they are there to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "process": ("import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '60'])\n", "sleep 60"),
    "orphan": (
        "import subprocess\ndef test_it():\n    subprocess.run('sleep 61 >/dev/null 2>&1 &', shell=True)\n",
        "sleep 61",
    ),
    "fork": (
        "import os, time\ndef test_it():\n"
        "    if os.fork() == 0:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        "        os._exit(0)\n"
        "    os.wait()\n",
        "outlived their tests",
    ),
    "file": (
        "def test_it():\n    open('shm/a-file', 'w').close()\n",
        "left in shm: ['a-file']",
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_its_test(kind: str, root: Path, tmp_path: Path) -> None:
    code, message = LEAKS[kind]
    text = (root / "tests" / "conftest.py").read_text()
    # Quicker, and in a folder of its own: the real one is watched by other runs on this machine too.
    changed = text.replace("GRACE = 5.0", "GRACE = 0.3").replace('SHM = "/dev/shm"', 'SHM = "shm"')
    (tmp_path / "conftest.py").write_text(changed)
    (tmp_path / "shm").mkdir()
    (tmp_path / "test_leak.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert message in done.stdout
