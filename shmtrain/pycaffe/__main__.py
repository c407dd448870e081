"""``python -m shmtrain.pycaffe SCRIPT.py ARGUMENTS``: run a script written for the original, unchanged."""

from __future__ import annotations

import os
import runpy
import sys

from shmtrain.pycaffe import alias

USAGE = "usage: python -m shmtrain.pycaffe SCRIPT.py [ARGUMENTS]   (its `import caffe` gets shmtrain.pycaffe)"


def main(arguments: list[str]) -> int:
    """Run ``arguments[0]`` as a program with the others as its own; 2 for wrong usage."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"shmtrain.pycaffe: no such script: {os.path.abspath(script)}", file=sys.stderr)
        return 2
    alias.install()
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
