"""That what moves by RDMA is moved whole, by many clients, over one daemon and over two, in every wire type.

In the guest of tests/rdma_guest where no device is: keep segments at 1 MiB and rounds few.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import smb
from smb.client import Box
from smb.server import Daemon
from tests.smb.conftest import TOKEN, Connect

pytestmark = pytest.mark.rdma
N = 1 << 18  # 1 MiB of float32: four chunks


def noise(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(N).astype(np.float32)


def exchanges(box: Box, rank: int, rounds: int) -> np.ndarray:
    """Local weights after rounds of a step and an exchange, minus the steps: what the center got, negated."""
    center = box.attach("c")
    local = np.zeros(N, np.float32)
    steps = np.zeros(N)
    for step in range(rounds):
        change = noise(rank, step)
        local += change
        steps += change
        center.exchange(local, 0.3)
    return local - steps


def conserve(boxes: list[Box], rounds: int) -> None:
    """All exchange at once; what the locals lost is what the center got, element by element."""
    center = boxes[0].create("c", N)
    results: list[np.ndarray] = [np.zeros(N)] * len(boxes)

    def work(rank: int) -> None:
        results[rank] = exchanges(boxes[rank], rank, rounds)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(boxes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    np.testing.assert_allclose(center.read() + sum(results), 0, atol=2e-5)
    assert center.version == len(boxes) * rounds


@pytest.mark.parametrize(("connect", "rounds"), [("rdma", 6), ("rdma-over-2", 2)], indirect=["connect"])
def test_exchanges_of_two_clients_lose_nothing(connect: Connect, rounds: int) -> None:
    boxes = [connect(timeout=20), connect(timeout=20)]
    assert boxes[0].transport == "rdma"
    conserve(boxes, rounds)


@pytest.mark.parametrize("connect", ["rdma"], indirect=True)
def test_clients_of_three_transports_on_one_segment_lose_nothing(
    connect: Connect, served: Daemon, near: Box
) -> None:
    (remote,) = [one for one in served.addresses if one.startswith("tcp:")]
    with smb.connect(remote, token=TOKEN) as box:
        conserve([connect(timeout=20), box, near], 5)


@pytest.mark.parametrize("connect", ["rdma-over-2"], indirect=True)
def test_over_two_daemons_each_operation_reaches_its_elements_alone(connect: Connect) -> None:
    box, chunk = connect(timeout=20), N // 4
    count = 5 * chunk + 7  # three chunks at one daemon, two and the rest at the other
    expected = np.arange(count, dtype=np.float32)
    center = box.create("c", count, initial=expected)
    np.testing.assert_array_equal(center.read(), expected)
    for offset, length in ((chunk - 3, 6), (3, 2 * chunk), (5 * chunk - 1, 8), (chunk + 5, 9)):
        values = np.round(100 * noise(offset, 0)[:length])
        part = slice(offset, offset + length)
        center.write(values, offset)
        expected[part] = values
        center.accumulate(values, 0.5, offset)
        expected[part] += 0.5 * values
        local, x = values.copy(), expected[part].copy()
        center.exchange(local, 0.25, offset)
        np.testing.assert_allclose(local, values - 0.25 * (values - x), rtol=1e-6)
        expected[part] += 0.25 * (values - x)
        out = np.empty(length, np.float32)
        center.read(out, offset)
        np.testing.assert_allclose(out, expected[part], rtol=1e-6)
    np.testing.assert_allclose(center.read(), expected, rtol=1e-6)
    assert center.version == 4 * 3
    local = expected + 100
    center.exchange(local, 0.25, wire="bfloat16")
    np.testing.assert_allclose(center.read() + local, 2 * expected + 100, rtol=1e-6)
    np.testing.assert_allclose(local, expected + 75, atol=0.1)
    sick = np.ones(count, np.float32)
    sick[3 * chunk + 1] = np.nan
    with pytest.raises(smb.NonFinite, match=f"element {3 * chunk + 1} of the segment, chunk 3"):
        center.accumulate(sick)
    assert center.version == 4 * 3 + 1


@pytest.mark.parametrize("connect", ["rdma"], indirect=True)
def test_increments_may_travel_in_fewer_bytes(connect: Connect) -> None:
    box, half = connect(timeout=20), N // 2
    start, local = noise(0, 0)[:half], noise(0, 1)[:half]
    for wire, nbytes in (("bfloat16", 2 * half), ("float16", 2 * half), ("int8", half + half // 64)):
        center, x = box.create(wire, half, initial=start), local.copy()
        assert center.wire_stats
        sent, received = center.wire_stats[:2]
        assert center.exchange(x, 0.25, wire=wire) == 1
        stats = center.wire_stats
        assert (stats.bytes_sent - sent, stats.bytes_received - received) == (nbytes, 4 * half)
        assert 0 < stats.squared_error < 1e-3 * stats.squared_sum
        np.testing.assert_allclose(center.read() + x, start + local, atol=1e-6)
        np.testing.assert_allclose(x, local - 0.25 * (local - start), atol=0.02)
        before = center.read()
        for _ in range(3):
            center.accumulate(local, 0.5, wire=wire)
        np.testing.assert_allclose(center.read(), before + 1.5 * local, atol=0.02)  # one rounding, not three
        assert center.version == 4
