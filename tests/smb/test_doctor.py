"""``smb doctor`` on machines that the tests make up, and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smb import doctor
from smb.doctor import Finding, Host
from tests.smb.processes import ROOT

LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max open files            {files}                 20000                files\n"
    "Max locked memory         {locked}              8388608              bytes\n"
)
NO_MODULE = "ModuleNotFoundError: No module named 'pyverbs'"
GIB = 1 << 20  # in kB


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def link(root: Path, kind: str, inode: int) -> None:
    place = root / "proc/self/ns" / kind
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(f"{kind}:[{inode}]")


def port(root: Path, state: str = "4: ACTIVE", gid: str = "fe80::1") -> None:
    base = "sys/class/infiniband/mlx5_0/ports/1"
    put(root, f"{base}/state", state)
    put(root, f"{base}/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000")
    put(root, f"{base}/gids/1", gid)
    put(root, f"{base}/gid_attrs/types/1", "RoCE v2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which everything works."""
    put(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB} kB\nMemAvailable: {32 * GIB} kB\n")
    put(tmp_path, "proc/self/limits", LIMITS.format(files="20000", locked="unlimited"))
    put(tmp_path, "proc/self/uid_map", "         0          0 4294967295\n")
    put(tmp_path, "proc/self/cgroup", "0::/user.slice\n")
    put(tmp_path, "proc/sys/net/ipv4/tcp_available_congestion_control", "reno cubic")
    put(tmp_path, "proc/sys/net/core/rmem_max", "4194304")
    put(tmp_path, "proc/sys/net/core/wmem_max", "4194304")
    put(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never")
    for kind, inode in doctor.INITIAL.items():
        link(tmp_path, kind, inode)
    port(tmp_path)
    put(tmp_path, "dev/infiniband/uverbs0", "")
    return tmp_path


def host(root: Path, **other: Any) -> Host:
    answers: dict[str, Any] = {
        "environment": {},
        "path": [],
        "release": "6.1.0-13-amd64",
        "python": lambda code: "",
        "bind": lambda family, where, number: "",
        "memory_file": lambda: "",
        **other,
    }
    return Host(root, **answers)


def bad(root: Path, **other: Any) -> list[Finding]:
    return [f for f in doctor.examine(host(root, **other)) if f.verdict != "ok"]


def test_on_a_machine_where_all_works_there_is_nothing_to_cure(root: Path) -> None:
    assert bad(root) == []
    assert doctor.verdicts(doctor.examine(host(root))) == {"shm": "", "tcp": "", "rdma": ""}


def _no_device(root: Path) -> None:
    (root / "sys/class/infiniband").rename(root / "away")


def _small_cgroup(root: Path) -> None:
    put(root, "sys/fs/cgroup/user.slice/memory.max", str(1 << 30))
    put(root, "sys/fs/cgroup/user.slice/memory.current", str(1 << 29))


# What is broken on the machine, the finding that it must lead to, and a word of its cure.
BROKEN: dict[str, tuple[Callable[[Path], object], str, str, str, str]] = {
    "no device": (_no_device, "rdma", "device", "fails", "rdma_rxe"),
    "no node": (
        lambda r: (r / "dev/infiniband/uverbs0").unlink(),
        "rdma",
        "/dev/infiniband",
        "fails",
        "ib_uverbs",
    ),
    "link down": (lambda r: port(r, state="1: DOWN"), "rdma", "mlx5_0 port 1", "fails", "ip link set"),
    "no gid": (lambda r: port(r, gid="0000:0000"), "rdma", "mlx5_0 port 1", "fails", "ip addr add"),
    "little locked": (
        lambda r: put(r, "proc/self/limits", LIMITS.format(files="20000", locked="8388608")),
        "rdma",
        "locked memory",
        "fails",
        "ulimit -l",
    ),
    "few files": (
        lambda r: put(r, "proc/self/limits", LIMITS.format(files="256", locked="unlimited")),
        "machine",
        "open files",
        "fails",
        "ulimit -n",
    ),
    "no memory": (
        lambda r: put(r, "proc/meminfo", "MemAvailable: 65536 kB\n"),
        "machine",
        "memory",
        "fails",
        "64 MiB",
    ),
    "cgroup": (_small_cgroup, "machine", "cgroup", "note", "memory.max"),
    "huge pages": (
        lambda r: put(r, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]"),
        "machine",
        "huge pages",
        "note",
        "shmem_enabled",
    ),
    "container": (lambda r: link(r, "pid", 4026532999), "shm", "PID namespace", "note", "--pid=host"),
    "other user": (
        lambda r: put(r, "proc/self/uid_map", "0 1000 1\n"),
        "shm",
        "user namespace",
        "note",
        "another user id",
    ),
    "bbr alone": (
        lambda r: put(r, "proc/sys/net/ipv4/tcp_available_congestion_control", "reno bbr"),
        "tcp",
        "cubic",
        "note",
        "modprobe tcp_cubic",
    ),
    "small buffers": (
        lambda r: put(r, "proc/sys/net/core/wmem_max", "212992"),
        "tcp",
        "wmem_max",
        "note",
        "sysctl -w net.core.wmem_max",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_cure_and_nothing_else_is(root: Path, name: str) -> None:
    break_it, topic, what, verdict, cure = BROKEN[name]
    break_it(root)
    (finding,) = bad(root)
    assert (finding.topic, finding.what, finding.verdict) == (topic, what, verdict)
    assert cure in finding.cure
    stands_in_the_way = [t for t, trouble in doctor.verdicts([finding]).items() if trouble]
    expected = {"fails": [topic] if topic != "machine" else ["shm", "tcp", "rdma"], "note": []}
    assert stands_in_the_way == expected[verdict]


@pytest.mark.parametrize(
    ("answers", "what", "cure"),
    [
        ({"release": "4.19.0"}, "kernel", "a kernel of at least 5.4"),
        ({"release": "5.10.0"}, "kernel", "5.14"),
        ({"memory_file": lambda: "Operation not permitted"}, "memory files", "memfd_create"),
        ({"access": lambda path, mode: "uverbs" not in str(path)}, "uverbs0", "chmod 666"),
        ({"access": lambda path, mode: path != Path("/tmp")}, "socket", "--unix PATH"),
        (
            {"environment": {"XDG_RUNTIME_DIR": f"/{'x' * 100}"}, "access": lambda p, m: True},
            "socket",
            "107 bytes",
        ),
        ({"bind": lambda family, where, number: "EACCES" if where == "::1" else ""}, "IPv6", "only IPv4"),
        ({"bind": lambda family, where, number: "EADDRINUSE" if number else ""}, "port 7100", "ss -ltnp"),
        (
            {"bind": lambda f, where, n: "EADDRNOTAVAIL" if where != "::1" and not n else ""},
            "IPv4",
            "ip link",
        ),
        ({"python": lambda code: "ImportError: no" if "smb" in code else ""}, "extension", "pip install ."),
    ],
)
def test_what_does_not_answer_is_named_with_its_cure(
    root: Path, answers: dict[str, Any], what: str, cure: str
) -> None:
    (finding,) = bad(root, **answers)
    assert finding.what == what
    assert cure in finding.cure


def _pyverbs(root: Path, says: str) -> str:
    (finding,) = bad(root, python=lambda code: says if "pyverbs" in code else "")
    assert (finding.what, finding.says, finding.verdict) == ("pyverbs", says, "fails")
    return finding.cure


def test_the_cure_for_pyverbs_fits_what_is_installed(root: Path) -> None:
    missing = _pyverbs(root, NO_MODULE)
    assert "apt-get install python3-pyverbs" in missing
    assert "not from PyPI" in missing
    foreign = _pyverbs(root, "ImportError: version `IBVERBS_PRIVATE_59' not found")
    assert "pip uninstall pyverbs" in foreign
    installed = f"{doctor.DEBIAN}/pyverbs"
    put(root, f"{installed}/qp.cpython-39-x86_64-linux-gnu.so", "")
    assert "built for Python 3.9" in _pyverbs(root, NO_MODULE)
    tag = f"{sys.version_info.major}{sys.version_info.minor}"
    put(root, f"{installed}/qp.cpython-{tag}-x86_64-linux-gnu.so", "")
    fits = _pyverbs(root, NO_MODULE)
    assert "apt-get" not in fits
    for cure in (missing, foreign, fits):
        assert f"ln -s /{installed} " in cure
        assert "PYTHONPATH=" in cure


def test_another_package_called_smb_is_found(root: Path, tmp_path: Path) -> None:
    put(tmp_path, "site/smb/__init__.py", "")
    put(tmp_path, "here/smb.py", "")
    put(tmp_path, "empty/smb/readme", "")
    put(tmp_path, "bin/smb", "#!/usr/bin/python3")
    path = [str(tmp_path / name) for name in ("site", "here", "empty", "bin")] + [str(ROOT)]
    (finding,) = bad(root, path=path)
    assert finding.what == "package name"
    assert finding.says == f"also called smb: {tmp_path}/site/smb, {tmp_path}/here/smb.py"
    assert "pip uninstall pysmb" in finding.cure


def test_rdma_counts_when_it_is_asked_for_or_a_device_is_there(root: Path) -> None:
    with_device = doctor.examine(host(root))
    _no_device(root)
    without = doctor.examine(host(root))
    assert doctor.required([], with_device) == ["shm", "tcp", "rdma"]
    assert doctor.required([], without) == ["shm", "tcp"]
    assert doctor.required(["rdma"], without) == ["rdma"]


def smb_doctor(*words: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "smb.cli", "doctor", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_exit_code_tells_whether_the_transports_asked_for_work(tmp_path: Path) -> None:
    code, out, _ = smb_doctor("shm", "tcp", "--json", XDG_RUNTIME_DIR=str(tmp_path))
    assert (code, json.loads(out)["transports"]["tcp"]) == (0, "")
    code, out, _ = smb_doctor("shm", XDG_RUNTIME_DIR=str(tmp_path / "missing"))
    assert code == 1
    assert "shm   does not work here: socket\n" in out
    assert smb_doctor("tcp", XDG_RUNTIME_DIR=str(tmp_path / "missing"))[0] == 0
    code, _, error = smb_doctor("carrier-pigeon")
    assert code == 2
    assert "'carrier-pigeon' is none of shm, tcp, rdma" in error


def test_the_extension_is_looked_for_where_this_program_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a checkout that one stands in, where it has not been built."""
    (tmp_path / "smb").mkdir()
    (tmp_path / "smb" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert doctor._run_python("import smb._native") == ""
