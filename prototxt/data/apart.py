"""Work on files that may kill a C library, done in a process of its own: its death is an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib import import_module
from typing import Any

from prototxt.errors import DataError

# With this process's search path: a new interpreter would look in the working directory first.
_BOOT = (
    "import sys; _, module, name, values, *sys.path = sys.argv; "
    "from prototxt.data.apart import main; main(module, name, values)"
)
REFUSED = 2  # exit code of a process that has written why to its output


def run_apart(module: str, name: str, what: str, **values: Any) -> Any:
    """``module.name(**values)`` in a process of its own; arguments and result travel as JSON.

    what  is read, for the message when the process dies of it. What it writes to stderr is shown.
    Raises DataError.
    """
    words = [sys.executable, "-c", _BOOT, module, name, json.dumps(values), *sys.path]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == REFUSED:
        raise DataError(done.stdout)
    if done.returncode < 0:
        raise DataError(f"reading {what} ended in {signal.Signals(-done.returncode).name} (is it corrupt?)")
    if done.returncode:
        raise DataError(f"reading {what} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def main(module: str, name: str, values: str) -> None:
    """The process's part: print the result; exit code 2 with the error's text instead, whatever it is."""
    try:
        print(json.dumps(getattr(import_module(module), name)(**json.loads(values))), end="")
    except Exception as error:
        print(error if isinstance(error, DataError) else f"{type(error).__name__}: {error}", end="")
        sys.exit(REFUSED)
