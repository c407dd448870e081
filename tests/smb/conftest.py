"""Boxes over every transport, daemons in this process and daemons of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smb
from smb.client import Box
from smb.server import Daemon
from smb.transport.base import Options
from smb.transport.local import LocalTransport
from tests.smb.processes import ServeProcess

Connect = Callable[..., Box]
TRANSPORTS = ["local", "shm", "tcp"]
TOKEN = b"a token for the tests alone"


@pytest.fixture(autouse=True)
def _no_foreign_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMB_ADDRESS", raising=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, since a socket's has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="smb-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def served(folder: Path) -> Iterator[Daemon]:
    """A daemon in this process."""
    with smb.serve(unix=folder / "box.sock", tcp="127.0.0.1:0", token=TOKEN, lease=2.0) as daemon:
        yield daemon


@pytest.fixture(params=TRANSPORTS)
def connect(request: pytest.FixtureRequest, served: Daemon) -> Iterator[Connect]:
    """Makes clients of one box over the transport under test."""
    boxes: list[Box] = []

    def make(name: str = "test", timeout: float = 10.0) -> Box:
        options = Options(name, timeout)
        if request.param == "local":
            boxes.append(Box(LocalTransport(served.service, options), "local", options))
        else:
            address = served.addresses[TRANSPORTS.index(request.param) - 1]
            boxes.append(smb.connect(address, token=TOKEN, timeout=timeout, name=name))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()


@pytest.fixture
def box(connect: Connect) -> Box:
    return connect()


@pytest.fixture
def process(folder: Path) -> Iterator[ServeProcess]:
    """A daemon in a process of its own, as `smb serve` runs it."""
    with ServeProcess(folder / "box.sock", "--lease", "2") as daemon:
        yield daemon
