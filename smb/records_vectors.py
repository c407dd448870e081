"""The records of vector operations on segments where they lie. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from smb.layout import Choice, Number, Real
from smb.records import U64, Flag

COMBINATIONS = ("copy", "scale", "axpy", "fill")
REDUCTIONS = ("dot", "sum")
FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True)
class Combine:
    """A vector operation on x, elements [offset, offset + count) of a segment, where they lie.

    copy x = y, scale x = a x, axpy x = x + a y, fill x = a; all but copy need float32. y is the source from
    its element 0 on. axpy refuses NaN and Inf as Accumulate does.
    """

    how: Annotated[str, Choice(COMBINATIONS)]
    segment: U64
    source: U64  # 0 where there is none
    scalar: Annotated[float, Number("d", -FLOAT32, FLOAT32)]
    offset: U64
    count: U64
    counts: Flag  # False: the update does not count in the version


@dataclass(frozen=True)
class Adagrad:
    """Adagrad's step on x, elements [offset, offset + count) of a segment, with the same ones of two others.

    q = scale g; s = s + q^2; x = x - rate q / (sqrt(s) + epsilon); all float32. NaN and Inf in q^2 are
    refused before anything moves.
    """

    segment: U64
    sums: U64
    gradient: U64
    rate: Annotated[float, Number("d", -FLOAT32, FLOAT32)]
    scale: Annotated[float, Number("d", -FLOAT32, FLOAT32)]
    epsilon: Annotated[float, Number("d", 0.0, FLOAT32)]  # above 0
    offset: U64
    count: U64
    counts: Flag  # False: the update does not count in the version


@dataclass(frozen=True)
class Reduce:
    """The sum over two whole segments of x[i] y[i], or over one of x[i], in float64; float32 segments."""

    how: Annotated[str, Choice(REDUCTIONS)]
    segment: U64
    other: U64  # 0 where there is none; may be the segment itself


@dataclass(frozen=True)
class Scalar:
    value: Annotated[float, Real()]
