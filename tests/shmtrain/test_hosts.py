"""Launches over two hosts, with the memory box on one of them: who reaches it how, and who started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.shmtrain.hosts import LINK, Host, agent, two_hosts
from tests.shmtrain.jobs import write
from tests.shmtrain.mpi import ROOT, Mpi, need

SHORT = "max_iter: 60 display: 20 momentum: 0.9 snapshot_prefix: 'm'\n"
LIMIT = 110.0
PORT = 7100


@dataclass(frozen=True)
class Pair:
    """Two hosts, the folder that both see, and the box's address on the first."""

    near: Host
    far: Host
    folder: Path

    @property
    def address(self) -> str:
        return f"{self.near.address}:{PORT}"

    def environment(self, **more: str) -> dict[str, str]:
        """gloo and MPI take the link; what is private of a host lies in its own folder."""
        token = str(self.folder / "token")
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "SMB_TOKEN_FILE": token, "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": LINK, "FI_TCP_IFACE": LINK, **more,
        }  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with TemporaryDirectory(prefix="t", dir="/tmp") as name:
        folder = Path(name)
        with two_hosts(folder) as (near, far):
            pair = Pair(near, far, folder)
            token = folder / "token"
            token.write_bytes(b"a token for this test")
            token.chmod(0o600)
            serve = [sys.executable, "-m", "smb.cli", "serve", "--tcp", pair.address, "--token", str(token)]
            words = near.command([*serve, "--unix", str(near.own / "s")], folder)
            with subprocess.Popen(words, env=pair.environment()) as daemon:
                try:
                    wait_for_the_box(pair)
                    yield pair
                finally:
                    daemon.terminate()


def wait_for_the_box(pair: Pair) -> None:
    look = pair.far.command(
        ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{pair.near.address}/{PORT}"], ROOT
    )
    until = time.monotonic() + 20
    while subprocess.run(look, capture_output=True).returncode:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture
def solver(pair: Pair) -> Path:
    for old in pair.folder.glob("m*"):
        old.unlink()
    return write(pair.folder, SHORT)


def train(*options: str) -> list[str]:
    return [sys.executable, "-m", "shmtrain.cli", "solver.prototxt", "--threads", "1", *options]


@pytest.mark.usefixtures("solver")
def test_torchrun_over_two_hosts_and_groups_by_machine(pair: Pair) -> None:
    """Two ranks on each host: hybrid's groups are the hosts."""
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", pair.near.address]
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *rendezvous,
        "--master-port",
        "29501",
        "--rdzv-id",
        "both",
    ]
    program = ["-m", "shmtrain.cli", "solver.prototxt", "--threads", "1", "--smb", pair.address]
    program += ["--algorithm", "hybrid", "--job", "over-hosts"]
    nodes = [
        subprocess.Popen(
            host.command([*words, "--node-rank", str(number), *program], pair.folder),
            env=pair.environment(), stderr=subprocess.PIPE, text=True,
        )
        for number, host in enumerate((pair.near, pair.far))
    ]  # fmt: skip
    texts = [node.communicate(timeout=LIMIT)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    places = f"ranks 0-1 on {pair.near.name} by shm, ranks 2-3 on {pair.far.name} by tcp"
    assert f"Job over-hosts, launched by torchrun: {places}" in texts[0], texts
    assert "Groups by machine, S2xA2: ranks 0-1; ranks 2-3" in texts[0]
    assert "hybrid, S2xA2, alpha 0.45" in texts[0]
    assert "Optimization Done." in texts[0]


def over_both(pair: Pair, mpi: Mpi, words: list[str]) -> subprocess.CompletedProcess[str]:
    """One rank on each host, by mpirun on the first."""
    places = f"{pair.near.address},{pair.far.address}"
    start = str(agent(pair.folder, (pair.near, pair.far)))
    if mpi.name == "mpich":
        options = ["-launcher", "ssh", "-launcher-exec", start, "-hosts", places]
        options += ["-localhost", pair.near.address, "-ppn", "1"]
    else:
        options = ["--prtemca", "plm_ssh_agent", start, "--prtemca", "prte_if_include", LINK]
        options += ["--mca", "btl_tcp_if_include", LINK, "--host", places]
    command = pair.near.command(mpi.command(2, words, *options), pair.folder)
    environment = pair.environment(**mpi.environment)
    if mpi.name == "ompi":
        passed = ("OMP_NUM_THREADS", "SMB_TOKEN_FILE", "PYTHONPATH", "MPI4PY_LIBMPI")
        command[-len(words) : -len(words)] = [
            w for name in passed if name in environment for w in ("-x", name)
        ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.mpi
@pytest.mark.parametrize("library", ["mpich", "ompi"])
@pytest.mark.usefixtures("solver")
def test_mpirun_over_two_hosts(pair: Pair, library: str) -> None:
    mpi = need(library)
    named = ["--job", "by-mpirun"] if library == "mpich" else []  # Open MPI's launches have names
    done = over_both(pair, mpi, train("--smb", pair.address, *named))
    assert done.returncode == 0, done.stderr
    launcher = {"mpich": "mpirun (MPICH)", "ompi": "mpirun (Open MPI)"}[library]
    places = f"rank 0 on {pair.near.name} by shm, rank 1 on {pair.far.name} by tcp"
    assert f", launched by {launcher}: {places}; memory box outside at {pair.address}" in done.stderr
    assert "Optimization Done." in done.stderr
    assert (pair.folder / "m_iter_60.caffemodel").exists()


@pytest.mark.mpi
@pytest.mark.usefixtures("solver")
def test_several_hosts_without_a_named_box_are_told_what_to_do(pair: Pair) -> None:
    done = over_both(pair, need("mpich"), train())
    assert done.returncode != 0
    assert "over several hosts they need a box that all can reach (`smb serve --tcp HOST:PORT`" in done.stderr
