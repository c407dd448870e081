"""Trains what the suite finds too slow: Inception-ResNet-v2 for three steps, on one thread.

    python scripts/soak/models.py

Prints the losses and whether every layer moved; ends with 1 otherwise.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.prototxt.test_models import BIG, CASES, dummy, small_solver, train  # noqa: E402


def main() -> int:
    bad = 0
    for name in BIG:
        net_file, solver_file, _, _, side = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            net = dummy(ROOT, net_file, 2, side)
            losses, still = train(small_solver(ROOT, solver_file, net, Path(folder)))
        bad += bool(still) or not all(map(math.isfinite, losses))
        print(f"{name}: losses {losses}, layers that did not move: {', '.join(still) or 'none'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
