"""Real verbs: what only the RDMA transport promises."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.rdma


@pytest.mark.parametrize("n", [1])
def test_guest_has_a_device(n: int) -> None:
    from pyverbs.device import get_device_list

    assert len(get_device_list()) == n
