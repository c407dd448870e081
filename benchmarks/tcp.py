"""The box over TCP against plain sockets and against MPI over TCP, all in one interleaved run.

    python benchmarks/tcp.py [--rounds 9] [--mib 64] [--link-mib 16] [--json FILE] [--only loopback|link]
        [--mpich-python PYTHON --mpich-exec MPIEXEC] [--ompi-python PYTHON --ompi-exec MPIEXEC]

Needs root: everything runs in network namespaces of its own, whose routes ask for cubic, since MPI sets no
congestion control and the machine's default may be another. Sockets have the box's options (smb.network.tune)
on both sides of the yardstick too; MPI gets buffers of 1 MiB where it can be told. Loopback: client on one
core, daemon (or the plain server, or MPI's server rank) on another. The exchange that is set against MPI's
has a client that does nothing else, as MPI's ranks do nothing else ("exchange float32"); the one among reads
and writes, which leave the caches full of other arrays, is printed beside it ("box exchange"). Link: two
namespaces, a veth pair held to 1 Gbit/s by tbf at both ends. Rounds are shuffled, every measure is warmed
first; figures are medians. The MPI interpreters need numpy and mpi4py ($MPICH_PYTHON, $MPICH_EXEC,
$OMPI_PYTHON, $OMPI_EXEC are the defaults).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from exchange import Table
from tcp_hosts import LINK, Host, link, loopback

from shmtrain.bench.mpi import Mpi

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300.0  # seconds of one measure
RATE = "1gbit"
BUFFERS = 1 << 20
WIRES = ("float32", "bfloat16", "int8")
Samples = dict[str, list[float]]


class TcpMpi(Mpi):
    """One MPI library whose two ranks talk over TCP, on one host or on one each."""

    def __init__(self, name: str, python: str, mpiexec: str, hosts: list[Host], agent: Path) -> None:
        super().__init__(name, python, mpiexec)
        self.hosts, self.agent = hosts, agent

    def command(self, ranks: int, bind: bool = True) -> list[str]:
        apart = len(self.hosts) > 1
        places = ",".join(host.address for host in self.hosts)
        if self.name == "mpich":
            ssh = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-hosts", places]
            here = [*ssh, "-localhost", self.hosts[0].address, "-ppn", "1"] if apart else ["-bind-to", "core"]
            words = [self.mpiexec, *here, "-n", str(ranks)]
        else:
            tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
            for which in ("sndbuf", "rcvbuf"):
                tcp += ["--mca", f"btl_tcp_{which}", str(BUFFERS)]
            if apart:
                tcp += ["--prtemca", "plm_ssh_agent", str(self.agent), "--prtemca", "prte_if_include", LINK]
                tcp += ["--mca", "btl_tcp_if_include", LINK, "--host", places, "--bind-to", "none"]
            else:
                tcp += ["--mca", "btl_tcp_if_include", "lo", "--bind-to", "core", "--oversubscribe"]
            words = [self.mpiexec, "--allow-run-as-root", *tcp, "-n", str(ranks)]
        return self.hosts[0].command(words)

    def environment(self) -> dict[str, str]:
        """Keeps MPICH on TCP: its UCX would take shared memory, and on a loopback has no TCP."""
        interface = LINK if len(self.hosts) > 1 else "lo"
        ofi = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": interface}
        return {**ofi, "MPIR_CVAR_NOLOCAL": "1"}

    def measure(self, samples: Samples, mib: int, repeat: int) -> None:
        """One start of the ranks; the seconds of each variant of the exchange go into samples."""
        words = ["--ops", "server", "--mib", str(mib), "--repeat", str(repeat)]
        for got in self.lines(2, words, **self.environment()):
            samples[f"{self.name} {got['variant']}"] += got["seconds"]


@contextmanager
def served(host: Host, core: int, *words: str) -> Iterator[str]:
    """A server of ours on a host and core; gives the first line that it prints."""
    command = host.command(["taskset", "-c", str(core), sys.executable, "-u", *words])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def daemon(host: Host, core: int) -> Iterator[str]:
    """Address of a daemon on a host and core."""
    with tempfile.TemporaryDirectory(prefix="smb-bench-") as folder, ExitStack() as stack:
        words = [
            "-m",
            "smb.cli",
            "serve",
            "--unix",
            f"{folder}/s",
            "--tcp",
            f"{host.address}:0",
            "--insecure",
        ]
        line = stack.enter_context(served(host, core, *words))
        yield next(word for word in line.split() if word.startswith("tcp://"))


def measured(host: Host, core: int, samples: Samples, *words: str) -> None:
    """A client process on a host and core that prints {measure: [seconds]}."""
    script = str(ROOT / "benchmarks" / "tcp_client.py")
    command = host.command(["taskset", "-c", str(core), sys.executable, script, *words])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        raise SystemExit(f"client failed: {done.stderr[-2000:]}")
    for name, seconds in json.loads(done.stdout).items():
        samples[name] += seconds


def mpis(given: argparse.Namespace, hosts: list[Host], agent: Path) -> list[TcpMpi]:
    settings = vars(given)
    return [
        TcpMpi(name, settings[f"{name}_python"], settings[f"{name}_exec"], hosts, agent)
        for name in ("mpich", "ompi")
        if settings[f"{name}_python"] and settings[f"{name}_exec"]
    ]


SEND_RECV = ("fused", "pull")  # a message is received whole before it is answered; piped is printed beside


def against(table: Table, samples: Samples, mine: float, what: str, bar: float) -> None:
    """How many times faster than the best send/recv exchange, and than the one in pieces."""
    median = {key: statistics.median(times) for key, times in samples.items()}
    whole = [time for key, time in median.items() if key.endswith(SEND_RECV)]
    pieces = [time for key, time in median.items() if key.endswith("piped")]
    if whole:
        table.add(f"{what}: times faster than the better MPI's send/recv", min(whole), mine, bar, False)
        print(f"{'  against its non-blocking exchange in 1 MiB pieces':<66} {min(pieces) / mine:8.2f}")


def on_loopback(given: argparse.Namespace, table: Table) -> Samples:
    """Reads and writes against plain sockets, the exchange against MPI, the round trip on one core."""
    samples: Samples = defaultdict(list)
    with loopback() as host, daemon(host, 1) as far, daemon(host, 0) as near, ExitStack() as stack:
        plain = stack.enter_context(served(host, 1, str(ROOT / "benchmarks" / "tcp_client.py"), "--serve"))
        rivals = mpis(given, [host], Path())
        for number in range(given.rounds):
            takes = [
                lambda: measured(host, 0, samples, "--plain", plain, "--box", far, "--mib", str(given.mib)),
                lambda: measured(
                    host, 0, samples, "--wire", "float32", "--box", far, "--mib", str(given.mib)
                ),
                lambda: measured(host, 0, samples, "--small", near),
                *(lambda m=m: m.measure(samples, given.mib, 3) for m in rivals),
            ]
            for take in random.sample(takes, len(takes)):
                take()
            sys.stderr.write(f"\rloopback, round {number + 1} of {given.rounds}")
    print(file=sys.stderr)
    median = {key: statistics.median(times) for key, times in samples.items()}
    for way in ("read", "write"):
        ratio = median[f"box {way}"] / median[f"plain {way}"]
        table.add(f"{given.mib} MiB {way} on loopback / plain sockets", ratio, 1.0, 1.1, True)
    against(table, samples, median["exchange float32"], f"{given.mib} MiB exchange on loopback", 1.4)
    table.add("4 KiB read, both ends on one core, microseconds", median["small read"], 1e-6, 20.0, True)
    return samples


def on_link(given: argparse.Namespace, table: Table) -> Samples:
    """The exchange on a held link by wire type, and by MPI."""
    samples: Samples = defaultdict(list)
    with link(RATE) as (hosts, agent), daemon(hosts[1], 1) as far:
        rivals = mpis(given, hosts, agent)
        for number in range(given.rounds):
            takes = [
                *(
                    lambda w=w: measured(
                        hosts[0], 0, samples, "--wire", w, "--box", far, "--mib", str(given.link_mib)
                    )
                    for w in WIRES
                ),
                *(lambda m=m: m.measure(samples, given.link_mib, 2) for m in rivals),
            ]
            for take in random.sample(takes, len(takes)):
                take()
            sys.stderr.write(f"\rlink, round {number + 1} of {given.rounds}")
    print(file=sys.stderr)
    median = {key: statistics.median(times) for key, times in samples.items()}
    what = f"{given.link_mib} MiB exchange at {RATE}"
    plain = median["exchange float32"]
    against(table, samples, plain, what, 1.8)
    table.add(f"{what}: bfloat16, times faster again", plain, median["exchange bfloat16"], 1.8, False)
    table.add(f"{what}: int8, times faster again", plain, median["exchange int8"], 3.2, False)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--link-mib", type=int, default=16)
    parser.add_argument("--only", choices=("loopback", "link"))
    parser.add_argument("--json", type=Path, help="write all samples there")
    for name in ("mpich", "ompi"):
        for what in ("python", "exec"):
            variable = f"{name}_{what}".upper()
            parser.add_argument(
                f"--{name}-{what}", default=os.environ.get(variable), help=f"default: ${variable}"
            )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by exceptions, so that no namespace stays
    table, samples = Table(), dict[str, Samples]()
    before = os.getloadavg()
    if given.only != "link":
        samples["loopback"] = on_loopback(given, table)
    if given.only != "loopback":
        samples["link"] = on_link(given, table)
    for place, taken in samples.items():
        for key, times in sorted(taken.items()):
            print(f"  {place:9} {key:20} {1e3 * statistics.median(times):10.3f} ms  of {len(times)}")
    print("load before", before, "after", os.getloadavg(), "(the run itself makes some)")
    if given.json:
        given.json.write_text(json.dumps({"rows": table.rows, "samples": samples}, indent=1))
    return 0 if all(row["met"] for row in table.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
