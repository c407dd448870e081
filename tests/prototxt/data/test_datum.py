"""Records are bytes from a file that anyone may have written: nothing is read outside of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prototxt import schema
from prototxt._native import Transform, datum_head

ROOT = Path(__file__).resolve().parents[3]

# Each mutated record ends where an unreadable page begins: one byte too far is a SIGSEGV.
FUZZ = """
import ctypes, mmap, random
from prototxt import schema
from prototxt._native import Transform, datum_head
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
view = memoryview(memory)
rng = random.Random(1)
seeds = [
    schema.Datum(channels=1, height=4, width=5, data=bytes(range(20)), label=7),
    schema.Datum(channels=2, height=1, width=3, float_data=[1, 2, 3, 4, 5, 6], label=-1),
    schema.Datum(encoded=True, data=b"not an image", label=1 << 30),
]
seeds = [s.SerializeToString() for s in seeds] + [b"\\x32\\x08" + bytes(8)]
transform = Transform(crop=2, mirror=True, random_crop=True, mean_values=[1, 2])
out = memoryview(bytearray(4 * 64)).cast("f")
good = bad = 0
for _ in range(30000):
    record = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(4)):
        record[rng.randrange(len(record))] = rng.choice((0, 1, 0x7f, 0x80, 0xff, rng.randrange(256)))
    del record[rng.randrange(len(record) + 1) if rng.random() < 0.3 else len(record):]
    start = page - len(record)
    view[start:page] = bytes(record)
    try:
        sides, label, encoded, offset, size, floats = datum_head(view[start:page])
        assert offset + size <= len(record) and floats * 4 <= len(record)
        shape = (sides[0] if 0 < sides[0] < 5 else 1, 2, 2)
        transform.records([view[start:page]], 0, out, None, shape)
        good += 1
    except ValueError:
        bad += 1
assert good > 2500 and bad > 2500, (good, bad)
"""


def test_no_record_however_broken_is_read_beyond_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr or f"ended by signal {-done.returncode}"


def test_the_head_of_a_record() -> None:
    record = schema.Datum(channels=3, height=2, width=4, data=bytes(24), label=-5).SerializeToString()
    sides, label, encoded, offset, size, floats = datum_head(record)
    assert (sides, label, encoded, size, floats) == ((3, 2, 4), -5, False, 24, 0)
    assert record[offset : offset + size] == bytes(24)
    assert datum_head(b"") == ((0, 0, 0), 0, False, 0, 0, 0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2**31 - 1, 2**31 - 1, 2), "impossible shape"),
        ((0, 3, 3), "impossible shape 0x3x3"),
        ((-1, 3, 3), "impossible shape -1x3x3"),
        ((1, 46341, 46341), "impossible shape"),
    ],
)
def test_a_shape_that_overflows_is_refused(shape: tuple[int, int, int], message: str) -> None:
    channels, height, width = shape
    record = schema.Datum(channels=channels, height=height, width=width, data=b"x").SerializeToString()
    with pytest.raises(ValueError, match=message):
        Transform(crop=1).records([record], 0, memoryview(bytearray(64)).cast("f"), None, (1, 1, 1))


def test_an_output_that_is_too_small_or_of_another_type_is_refused() -> None:
    record = schema.Datum(channels=1, height=2, width=2, data=bytes(4)).SerializeToString()
    for out in (bytearray(16), memoryview(bytearray(12)).cast("f"), memoryview(bytearray(32)).cast("d")):
        with pytest.raises(ValueError, match="out must be 4 writable float32 values"):
            Transform().records([record], 0, out, None, (1, 2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean image's values do not fill its shape 1x2x2"):
        Transform(mean_image=bytes(12), mean_shape=(1, 2, 2))
