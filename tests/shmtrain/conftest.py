"""A box for the tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import smb


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where a box of this test's own listens."""
    with smb.serve(unix=str(tmp_path / "box.sock")) as daemon:
        yield daemon.addresses[0]


@pytest.fixture
def box(address: str) -> Iterator[smb.Box]:
    with smb.connect(address) as connected:
        yield connected
