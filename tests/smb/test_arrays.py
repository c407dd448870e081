"""A client's arrays under RDMA: what is registered when, without an adapter."""

from __future__ import annotations

import gc
from typing import Any, cast

import numpy as np
import pytest

import smb
from smb.transport import rdma
from smb.transport.arrays import Arrays, DeviceMemory, flat


class Registered:
    """Stands for a region of an adapter."""

    def __init__(self, adapter: Adapter, nbytes: int, local: bool) -> None:
        self._adapter, self.nbytes, self.local = adapter, nbytes, local
        adapter.open.append(self)

    def close(self) -> None:
        self._adapter.open.remove(self)


class Adapter:
    """Stands for one; ``open`` is what is registered now, ``made`` how many regions there were."""

    def __init__(self) -> None:
        self.open: list[Registered] = []
        self.made = 0

    def register(self, address: int, nbytes: int, *, local: bool) -> Registered:
        self.made += 1
        return Registered(self, nbytes, local)


@pytest.fixture
def adapter() -> Adapter:
    return Adapter()


@pytest.fixture
def arrays(adapter: Adapter) -> Arrays:
    return Arrays(cast(rdma.Adapter, adapter), most=3, most_bytes=10_000)


def use(arrays: Arrays, array: Any, segment: int = 1) -> None:
    with arrays.lend(flat(array, "float32", "read"), segment):
        pass


def test_an_array_is_registered_once(arrays: Arrays, adapter: Adapter) -> None:
    x = np.zeros(100, np.float32)
    for _ in range(3):
        use(arrays, x)
        use(arrays, x.reshape(10, 10))  # another view of the same memory
    assert (adapter.made, len(adapter.open)) == (1, 1)


def test_memory_that_is_gone_is_registered_no_more(arrays: Arrays, adapter: Adapter) -> None:
    x = np.zeros(100, np.float32)
    use(arrays, x[:50])
    del x
    gc.collect()
    assert not adapter.open


def test_an_array_at_the_place_of_an_earlier_one_is_registered_anew(arrays: Arrays, adapter: Adapter) -> None:
    memory = bytearray(400)
    one, other = np.frombuffer(memory, np.float32), np.frombuffer(memory, np.float32)
    use(arrays, one)
    use(arrays, other)
    assert adapter.made == 2


def test_no_more_is_kept_than_the_limits_allow(arrays: Arrays, adapter: Adapter) -> None:
    kept = [np.zeros(100, np.float32) for _ in range(5)]
    for x in kept:
        use(arrays, x)
    assert len(adapter.open) == 3
    big = np.zeros(2500, np.float32)
    use(arrays, big)
    assert sum(region.nbytes for region in adapter.open) <= 10_000
    use(arrays, big)
    assert adapter.made == 6


def test_one_in_use_is_not_let_go(arrays: Arrays, adapter: Adapter) -> None:
    first = np.zeros(100, np.float32)
    others = [np.zeros(100, np.float32) for _ in range(5)]
    with arrays.lend(flat(first, "float32", "read"), 1):
        for x in others:
            use(arrays, x)
        arrays.detach(1)
        assert len(adapter.open) == 1
    arrays.detach(1)
    assert not adapter.open


def test_detaching_lets_go_of_what_no_other_segment_used(arrays: Arrays, adapter: Adapter) -> None:
    both, one = np.zeros(100, np.float32), np.zeros(100, np.float32)
    use(arrays, both, 1)
    use(arrays, both, 2)
    use(arrays, one, 1)
    arrays.detach(1)
    assert len(adapter.open) == 1
    arrays.close()
    assert not adapter.open


def test_tensors_are_registered_as_long_as_they_live(arrays: Arrays, adapter: Adapter) -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(100)
    use(arrays, x)
    use(arrays, x)
    assert adapter.made == 1
    del x
    gc.collect()
    assert not adapter.open


def test_memory_that_the_adapter_may_not_write_is_registered_so(arrays: Arrays, adapter: Adapter) -> None:
    frozen = np.zeros(100, np.float32)
    frozen.flags.writeable = False
    use(arrays, frozen)
    assert not adapter.open[0].local


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 4), np.float32)[:, 1], "must be a C-contiguous array"),
        (np.zeros(4), "the segment holds float32, the array float64"),
        ([1.0], "must be a numpy array or a CPU torch tensor, got list"),
        (DeviceMemory(0, 4, "int8"), "the segment holds float32, the array int8"),
    ],
)
def test_what_does_not_fit_is_named(array: Any, message: str) -> None:
    with pytest.raises(smb.TypeMismatch, match=message):
        flat(array, "float32", "read")
