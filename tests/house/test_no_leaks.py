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
        "def test_it():\n    open('/dev/shm/shmtrain-leak-check', 'w').close()\n",
        "left in /dev/shm: ['shmtrain-leak-check']",
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_its_test(kind: str, root: Path, tmp_path: Path) -> None:
    code, message = LEAKS[kind]
    (tmp_path / "conftest.py").write_text(
        (root / "tests" / "conftest.py").read_text().replace("GRACE = 5.0", "GRACE = 0.3")
    )
    (tmp_path / "test_leak.py").write_text(code)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        Path("/dev/shm/shmtrain-leak-check").unlink(missing_ok=True)
    assert done.returncode == 1, done.stdout
    assert message in done.stdout
