"""Boxes over every transport, daemons in this process and daemons of their own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smb
from smb import auth, stripes
from smb.client import Box
from smb.options import ServeOptions
from smb.server import Daemon
from smb.tls import Tls
from smb.transport.base import Options
from smb.transport.local import LocalTransport
from smb.transport.ports import ports
from tests.smb import strangers
from tests.smb.certificates import Authority
from tests.smb.frames import Attacker
from tests.smb.processes import ServeProcess
from tests.smb.proxy import Proxy

Connect = Callable[..., Box]
TRANSPORTS = {"local": "", "shm": "unix:", "tcp": "tcp:", "tcp+tls": "tcp:", "rdma": "rdma:"}
STRIPED = {"shm-over-3": ("unix:", 3), "tcp-over-3": ("tcp:", 3), "tcp-over-1": ("tcp:", 1)}
RDMA_STRIPED = {"rdma-over-2": ("rdma:", 2)}
EVERYWHERE = [
    pytest.param(one, marks=pytest.mark.rdma) if "rdma" in one else one
    for one in (*TRANSPORTS, *STRIPED, *RDMA_STRIPED)
]  # for tests whose code is another one over stripes by RDMA; the rest does without these
# For tests whose code is the same over sockets and over RDMA: the emulated guest takes seconds a test.
ON_HOST = tuple(one for one in (*TRANSPORTS, *STRIPED) if one != "rdma")
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


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, Tls]:
    """TLS for a daemon that asks for certificates, and for a client that has one."""
    authority = Authority.make(tmp_path_factory.mktemp("certificates"))
    return authority.sign("daemon"), authority.sign("client")


@pytest.fixture
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon in this process, with TLS or RDMA where "tcp+tls" or "rdma" is under test."""
    callspec = getattr(request.node, "callspec", None)
    transport = callspec.params.get("connect") if callspec else None
    tls = request.getfixturevalue("certified")[0] if transport == "tcp+tls" else None
    rdma = f"{ports()[0].address}:0" if transport and transport.startswith("rdma") else None
    with smb.serve(
        unix=folder / "box.sock", tcp="127.0.0.1:0", rdma=rdma, token=TOKEN, tls=tls, lease=2.0
    ) as daemon:
        yield daemon


@pytest.fixture
def near(served: Daemon) -> Iterator[Box]:
    """A box by shared memory that looks at what the remote one does."""
    with smb.connect(served.addresses[0], name="near") as box:
        yield box


@pytest.fixture
def proxy(served: Daemon) -> Iterator[Proxy]:
    """Between a client and the TCP port of the served daemon."""
    with Proxy(served.addresses[1]) as proxy:
        yield proxy


@pytest.fixture
def remote(proxy: Proxy) -> Iterator[Box]:
    """A box behind the proxy."""
    with smb.connect(proxy.address, token=TOKEN, timeout=10.0, name="remote") as box:
        yield box


@pytest.fixture
def striped(served: Daemon, folder: Path) -> Iterator[Callable[[str, int], list[str]]]:
    """Addresses of one kind of several daemons in this process, the served one first."""
    with contextlib.ExitStack() as stack:

        def start(scheme: str, number: int) -> list[str]:
            daemons = [served]
            rdma = f"{ports()[0].address}:0" if scheme == "rdma:" else None
            for i in range(1, number):
                unix = folder / f"{i}.sock"
                one = smb.serve(unix=unix, tcp="127.0.0.1:0", rdma=rdma, token=TOKEN, lease=2.0)
                daemons.append(stack.enter_context(one))
            return [address for one in daemons for address in one.addresses if address.startswith(scheme)]

        yield start


@pytest.fixture(params=EVERYWHERE[:-1])
def connect(
    request: pytest.FixtureRequest, served: Daemon, striped: Callable[[str, int], list[str]]
) -> Iterator[Connect]:
    """Makes clients of one box over the transport under test."""
    boxes: list[Box] = []
    tls = request.getfixturevalue("certified")[1] if request.param == "tcp+tls" else None
    several = (STRIPED | RDMA_STRIPED).get(request.param)
    addresses = striped(*several) if several else []

    def make(name: str = "test", timeout: float = 10.0) -> Box:
        options = Options(name, timeout, TOKEN)
        if request.param == "local":
            boxes.append(Box(LocalTransport(served.service, options), "local", options))
        elif addresses:
            boxes.append(Box(stripes.connect(addresses, options), ",".join(addresses), options))
        else:
            (address,) = [one for one in served.addresses if one.startswith(TRANSPORTS[request.param])]
            boxes.append(smb.connect(address, token=TOKEN, timeout=timeout, name=name, tls=tls))
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
    token = folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    words = ["--lease", "2", "--tcp", "127.0.0.1:0", "--token", str(token)]
    with ServeProcess(folder / "box.sock", *words) as daemon:
        daemon.more = {"SMB_TOKEN_FILE": str(token)}
        yield daemon


@pytest.fixture(params=["unix:", "tcp:"])
def scheme(request: pytest.FixtureRequest) -> str:
    """What stripes are reached by."""
    return str(request.param)


@pytest.fixture
def daemons(folder: Path) -> Iterator[list[Daemon]]:
    """Three of them in this process."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                smb.serve(unix=folder / f"{i}.sock", tcp="127.0.0.1:0", token=TOKEN, lease=2.0)
            )
            for i in range(3)
        ]


def addresses(daemons: list[Daemon], scheme: str) -> list[str]:
    return [a for daemon in daemons for a in daemon.addresses if a.startswith(scheme)]


@pytest.fixture
def open_box(daemons: list[Daemon]) -> Iterator[Callable[..., Box]]:
    """Boxes by lists of daemons, all of them by default."""
    with contextlib.ExitStack() as stack:

        def connect(scheme: str = "unix:", which: tuple[int, ...] = (0, 1, 2), timeout: float = 10.0) -> Box:
            where = addresses([daemons[i] for i in which], scheme)
            return stack.enter_context(smb.connect(",".join(where), token=TOKEN, timeout=timeout))

        yield connect


@pytest.fixture
def fort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon at a TCP port, under a token."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(auth.VARIABLE, raising=False)
    options = ServeOptions(memory_limit=64 << 20, lease=2.0)
    with smb.serve(tcp="127.0.0.1:0", token=strangers.TOKEN, options=options) as daemon:
        yield daemon


@pytest.fixture
def innocent(fort: Daemon) -> Iterator[strangers.Innocent]:
    one = strangers.Innocent(fort.addresses[0])
    yield one
    one.box.close()


@pytest.fixture
def attacker(fort: Daemon) -> Iterator[Attacker]:
    one = Attacker(fort.addresses[0], strangers.TOKEN)
    yield one
    one.close()
