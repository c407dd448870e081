"""Whether torch will find what it compiles nets with. Loads no torch."""

from __future__ import annotations

import os
import shlex
import shutil

from prototxt.errors import NetError

WITHOUT = "without --compile (compile=True in Python) it runs as it is"


def cpp_compiler() -> str:
    """The C++ compiler that torch will call. Raises NetError when it is not there."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    found = shutil.which(words[0])
    if found is None:
        raise NetError(
            f"to compile a net torch needs a C++ compiler, and there is no {words[0]!r} here: install g++, or"
            f" name another in the environment variable CXX; {WITHOUT}"
        )
    return found
