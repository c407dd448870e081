"""Increments in narrow wire types over a queue pair, without one: what is sent, owed and kept."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

import smb
from smb import _native
from smb.segment import CHUNK_BYTES
from smb.transport import rdma
from smb.transport.narrow import NarrowAccumulation, NarrowMove, Quantiser
from smb.transport.pipeline import Piece
from smb.transport.stream import WIRES

F32 = np.float32
N = 1000
PIECE = Piece(offset=20, begin=0, count=N, last=1, whole=20)
SLOT = 1
LARGEST = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 127}  # error of an element, of the largest


class Scratch:
    """Stands for registered memory."""

    def __init__(self) -> None:
        self.bytes = np.zeros(2 * CHUNK_BYTES, np.uint8)
        self.region = self

    def span(self, at: int, nbytes: int) -> rdma.Span:
        return rdma.Span(at, 0, nbytes)

    def values(self, span: rdma.Span, wire: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """As the daemon reads what was sent."""
        out = np.empty(N, F32)
        _native.from_wire(out, self.bytes[span.address : span.address + span.nbytes], WIRES.index(wire))
        return out


def drawn(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(N).astype(F32)


@pytest.fixture
def scratch() -> Scratch:
    return Scratch()


def quantiser(wire: str, scratch: Scratch) -> Quantiser:
    return Quantiser(wire, cast(rdma.Buffer, scratch))


@pytest.mark.parametrize("wire", LARGEST)
def test_both_sides_of_an_exchange_move_by_what_was_sent(scratch: Scratch, wire: str) -> None:
    local, center = drawn(0), drawn(1)
    before, d = local.copy(), F32(0.25) * (local - center)
    move = NarrowMove(7, 0.25, local, rdma.Place(0, 0), quantiser(wire, scratch))
    scratch.bytes[CHUNK_BYTES : CHUNK_BYTES + 4 * N] = center.view(np.uint8)  # as read
    span = move.make(PIECE, SLOT)
    assert (move.wire, move.scale, span.address) == (wire, 1, CHUNK_BYTES)
    assert span.nbytes == {"bfloat16": 2 * N, "float16": 2 * N, "int8": N + 4 * 4}[wire]
    sent = scratch.values(span, wire)
    np.testing.assert_array_equal(local, before - sent)
    np.testing.assert_allclose(sent, d, atol=LARGEST[wire] * np.abs(d).max())
    assert 0 < move.error == pytest.approx(np.sum((d - sent).astype(float) ** 2), rel=1e-3)
    assert move.squares == pytest.approx(np.sum(d.astype(float) ** 2), rel=1e-6)
    move.refused(PIECE, SLOT)
    np.testing.assert_allclose(local, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wire", LARGEST)
def test_what_rounding_takes_from_an_accumulate_goes_with_the_next(scratch: Scratch, wire: str) -> None:
    source, owed, rounds = drawn(2), np.zeros(2 * N, F32), 20
    total = np.zeros(N)
    for _ in range(rounds):
        job = NarrowAccumulation(7, 0.5, source, owed, quantiser(wire, scratch))
        total += scratch.values(job.make(PIECE, SLOT), wire)
    np.testing.assert_allclose(total, rounds * 0.5 * source, atol=LARGEST[wire] * np.abs(source).max())
    np.testing.assert_allclose(total + owed[20 : 20 + N], rounds * 0.5 * source, rtol=1e-5, atol=1e-5)
    assert not owed[:20].any()
    job.refused(PIECE, SLOT)
    assert not owed.any()


@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_what_is_no_number_is_sent_by_neither(scratch: Scratch, scale: float) -> None:
    source = np.full(N, 100, F32)
    source[5] = np.nan if scale == 1 else 100
    owed = np.zeros(2 * N, F32)
    with pytest.raises(smb.NonFinite, match=r"accumulate: element \d of the .*source is NaN or Inf"):
        NarrowAccumulation(7, scale, source, owed, quantiser("int8", scratch)).make(PIECE, SLOT)
    assert not owed.any()
    if scale == 1:
        before = source.copy()
        with pytest.raises(smb.NonFinite, match="exchange: element 5 of the local array"):
            NarrowMove(7, 0.5, source, rdma.Place(0, 0), quantiser("int8", scratch)).make(PIECE, SLOT)
        np.testing.assert_array_equal(source, before)


def test_increments_need_as_many_bytes_as_they_take() -> None:
    values = np.zeros(300, F32)
    for wire, nbytes in enumerate((1200, 600, 600, 308)):
        assert _native.wire_bytes(wire, 300) == nbytes
        _native.to_wire(np.empty(nbytes, np.uint8), values, wire)
        for wrong in (nbytes - 1, nbytes + 1):
            with pytest.raises(ValueError, match=f"{wrong} bytes for 300 elements, they take {nbytes}"):
                _native.to_wire(np.empty(wrong, np.uint8), values, wire)
            with pytest.raises(ValueError, match=f"{wrong} bytes for 300 elements, they take {nbytes}"):
                _native.from_wire(values, np.empty(wrong, np.uint8), wire)
    with pytest.raises(ValueError, match="the wire type must be a known one"):
        _native.to_wire(np.empty(1200, np.uint8), values, 4)
    with pytest.raises(smb.TypeMismatch):
        _native.from_wire(values[::2], np.empty(600, np.uint8), 0)
