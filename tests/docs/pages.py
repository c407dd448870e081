"""Turns a page of the documentation into one shell script that does what a reader of the page would do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PROLOGUE = """\
set -eEuo pipefail
trap 'echo "failed in {page}: $BASH_COMMAND" >&2' ERR
"""


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, code) of each fenced block; a fence without a language is a picture or an output."""
    yield from ((m[1], m[2]) for m in FENCE.finditer(text))


def commands(code: str) -> Iterator[str]:
    """The commands of a shell block, one a line; a backslash at the end of a line joins it with the next."""
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        command = re.sub(r"\s+#.*$", "", line).strip()
        if command and not command.startswith("#"):
            yield command


def shortened(command: str, shorter: dict[str, str]) -> str:
    """``command`` with each key of ``shorter`` that occurs in it replaced; the first that fits."""
    for text, instead in shorter.items():
        if text in command:
            return command.replace(text, instead)
    return command


def script(page: Path, shorter: dict[str, str], setup: set[str]) -> str:
    """All blocks of a page in order, as one bash script: what an early block starts, a later one can use.

    Of a set-up line only what follows the installation is run, with the environment that runs the test.
    """
    lines = [PROLOGUE.format(page=page.name)]
    for language, code in blocks(page.read_text()):
        if language == "sh":
            for command in commands(code):
                lines.append(shortened(after_install(command) if command in setup else command, shorter))
                if command.endswith("&"):
                    lines.append("sleep 2")  # what a reader's hands take before the next command
        elif language == "python":
            lines.append(f"echo 'python block: '{shlex.quote(code.splitlines()[0])}")
            lines.append(f"python - <<'END_OF_BLOCK'\n{code}END_OF_BLOCK")
    return "\n".join(lines) + "\n"


def after_install(line: str) -> str:
    """The training half of a set-up line; nothing of the one that runs these very tests."""
    parts = [part for part in line.replace(".venv/bin/", "").split(" && ") if part.startswith("shmtrain ")]
    return " && ".join(parts) or "true"
