"""Sizes that a file claims, looked at before memory is taken for them. No torch."""

from __future__ import annotations

from math import prod

MOST_VALUES = 2**31 - 1  # of one blob, as in the original
MAX_AXES = 32  # likewise
LARGE = 64 << 20  # bytes from which on the memory that is left is looked at
UNPACKED = 32  # times a file's size: what is packed in it may be so much larger
FREE_BYTES = 16 << 20  # that any file's content may take


def available_memory() -> int:
    """Bytes that the system can still give without swapping."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def too_large(shape: tuple[int, ...], *, taken: bool = False) -> str:
    """Why a float32 blob of this shape is impossible; "" when it is not.

    taken  memory is taken for it now
    """
    count = prod(shape)
    if count > MOST_VALUES:
        return f"a blob of shape {shape} has {count} values, above {MOST_VALUES}"
    if taken and 4 * count > LARGE and 4 * count > (left := available_memory()):
        return (
            f"a blob of shape {shape} takes {4 * count >> 20} MiB of memory, {left >> 20} MiB are available"
        )
    return ""


def unpacked_limit(file_bytes: int) -> int:
    """Bytes that one piece of a file's content may take in memory."""
    return FREE_BYTES + UNPACKED * file_bytes
