"""``python -m shmtrain.pycaffe SCRIPT.py ARGUMENTS``: run a script written for the original, unchanged."""

from __future__ import annotations

import os
import runpy
import sys

from shmtrain.pycaffe import alias
from shmtrain.pycaffe.settings import gpu_calls_mean_cpu

USAGE = """usage: python -m shmtrain.pycaffe [--cpu] SCRIPT.py [ARGUMENTS]

Runs the script with an `import caffe` that gives shmtrain.pycaffe.
--cpu   its calls of set_mode_gpu and set_device do nothing, instead of failing"""


def main(arguments: list[str]) -> int:
    """Run the script as a program with the arguments after it as its own; 2 for wrong usage."""
    if arguments[:1] == ["--cpu"]:
        gpu_calls_mean_cpu()
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        asked = arguments[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"shmtrain.pycaffe: no such script: {os.path.abspath(script)}", file=sys.stderr)
        return 2
    alias.install(always=True)
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
