"""The command ``smb``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.smb.certificates import Authority
from tests.smb.processes import ROOT, Program, ServeProcess


def run(*words: str, stdin: bytes = b"", address: str | None = None) -> tuple[int, bytes, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("SMB_ADDRESS", None)
    if address:
        environment["SMB_ADDRESS"] = address
    command = [sys.executable, "-m", "smb.cli", *words]
    done = subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=60)
    return done.returncode, done.stdout, done.stderr.decode()


def test_arrays_go_in_and_come_out_as_they_were(process: ServeProcess, folder: Path) -> None:
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    np.save(folder / "in.npy", values)
    address = process.address
    assert run("put", "w", str(folder / "in.npy"), address=address)[0] == 0
    assert run("get", "w", str(folder / "out.npy"), address=address)[0] == 0
    np.testing.assert_array_equal(np.load(folder / "out.npy"), values.reshape(-1))
    assert run("get", "w", "-", address=address)[1] == values.tobytes()
    assert run("get", "w", str(folder / "raw"), "--address", address)[0] == 0
    assert (folder / "raw").read_bytes() == values.tobytes()
    raw = np.arange(5, dtype=np.int32).tobytes()
    assert run("put", "i", "-", "--dtype", "int32", stdin=raw, address=address)[0] == 0
    assert run("put", "i", "-", "--dtype", "int32", stdin=raw[::-1], address=address)[0] == 0
    assert run("get", "i", "-", address=address)[1] == raw[::-1]
    (folder / "in.npy").unlink()
    (folder / "out.npy").unlink()


def test_ls_stat_and_free_show_and_remove(process: ServeProcess) -> None:
    with smb.connect(process.address, name="me") as box:
        box.create("job/center", 1000, meta=b"lenet").write(np.ones(1000, np.float32))
        box.create("other", 10, lifetime="stay")
        code, out, _ = run("ls", "-v", "job/", "-a", process.address)
        lines = out.decode().splitlines()
        assert code == 0
        assert lines[0] == "job/center\t1000 x float32\t3.9 KiB\tattached\tv1"
        assert f"session pid {os.getpid()}\tme\tjob/center other" in lines
        out = run("stat", "job/center", "-a", process.address)[1]
        assert b"count: 1000\ndtype: float32\nnbytes: 4000\nlifetime: attached\nversion: 1\n" in out
        assert b"meta: b'lenet'" in out
        assert run("free", "other", "-a", process.address)[0] == 0
        assert box.list() == ["job/center"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["get", "nobody", "-"], 1, "smb: no segment 'nobody'"),
        (["stat", "nobody"], 1, "smb: no segment 'nobody'"),
        (["free", "nobody"], 1, "smb: no segment 'nobody'"),
        (["put", "a b", "-"], 1, "smb: bad key 'a b': 1 to 255 letters"),
        (["put", "k", "-"], 1, "smb: segment 'k': count: 0 is not in 1.."),
        (["put", "k", "/nowhere/x.npy"], 1, "smb: [Errno 2] No such file or directory: '/nowhere/x.npy'"),
        (["put", "k", "-", "--dtype", "complex"], 1, "smb: dtype 'complex' is none of float32"),
        (["ls", "-a", "unix:/nowhere/b.sock"], 1, "smb: no daemon answers at /nowhere/b.sock: No such file"),
        (["ls", "-a", "tcp://h:1"], 1, "smb: host 'h' is not known"),
        (["ls", "-a", ""], 1, "smb: --address '': is empty"),
        (["serve", "--memory-limit", "9" * 400], 2, "9' is no size such as 4G or 512M"),
        (["serve", "--lease", "0"], 2, "'0' is no number of seconds above 0"),
        (["serve", "--snapshot-every", "1e300"], 2, "'1e300' is no number of seconds above 0"),
        (["serve", "--max-rate", "-1"], 2, "'-1' is no number above 0"),
        (["snapshot", ""], 1, "smb: snapshot: the folder's name is empty"),
        (["restore", ""], 1, "smb: restore: the folder's name is empty"),
        (["serve", "--memory-limit", "lots"], 2, "'lots' is no size such as 4G or 512M"),
        (["get", "k"], 2, "the following arguments are required: file"),
        (["fly"], 2, "invalid choice: 'fly'"),
        ([], 2, "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_told_on_stderr_with_the_right_exit_code(
    process: ServeProcess, words: list[str], code: int, message: str
) -> None:
    got, out, error = run(*words, address=process.address)
    assert (got, out) == (code, b"")
    assert message in error
    assert "Traceback" not in error


def test_a_file_of_another_size_is_not_written(process: ServeProcess) -> None:
    with smb.connect(process.address) as box:
        segment = box.create("c", 3)
        code, _, error = run("put", "c", "-", stdin=bytes(16), address=process.address)
        assert (code, error) == (1, "smb: segment 'c' has 3 elements, the file 4\n")
        code, _, error = run("put", "c", "-", stdin=bytes(15), address=process.address)
        assert (code, error) == (1, "smb: -: 15 bytes are no whole number of float32\n")
        assert segment.version == 0


def test_a_file_with_objects_in_it_is_not_unpickled(process: ServeProcess, folder: Path) -> None:
    np.save(folder / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    code, _, error = run("put", "c", str(folder / "evil.npy"), address=process.address)
    assert code == 1
    assert "Object arrays cannot be loaded" in error
    (folder / "evil.npy").unlink()


def test_an_empty_file_is_named(process: ServeProcess, folder: Path) -> None:
    (folder / "empty.npy").touch()
    code, _, error = run("put", "c", str(folder / "empty.npy"), address=process.address)
    assert code == 1
    assert error.startswith(f"smb: {folder / 'empty.npy'}: no .npy file of numbers: ")
    assert len(error.splitlines()) == 1
    (folder / "empty.npy").unlink()


@pytest.mark.parametrize("name", ["full", "full.npy"])
def test_an_array_that_the_disk_does_not_take_is_no_success(
    process: ServeProcess, folder: Path, name: str
) -> None:
    (folder / name).symlink_to("/dev/full")
    with smb.connect(process.address) as box:
        box.create("c", 10)
        code, _, error = run("get", "c", str(folder / name), address=process.address)
    assert (code, error) == (1, f"smb: cannot write '{folder / name}': No space left on device\n")
    (folder / name).unlink()


def test_without_a_daemon_there_is_a_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    code, _, error = run("ls")
    assert code == 1
    assert "no daemon answers at" in error
    assert "(start a daemon with `smb serve`)" in error


def test_serve_refuses_a_second_daemon(process: ServeProcess) -> None:
    code, _, error = run("serve", "--unix", str(process.path))
    assert (code, error) == (1, f"smb: a daemon already listens at {process.path}\n")


def test_version() -> None:
    assert run("--version")[1].decode() == f"smb {smb.__version__}\n"


def test_a_reader_that_goes_away_is_no_crash(process: ServeProcess) -> None:
    with smb.connect(process.address) as box:
        box.create("c", 1_000_000)
        command = f"{sys.executable} -m smb.cli get c - -a {process.address} | head -c 10"
        done = subprocess.run(command, shell=True, capture_output=True, cwd=ROOT, timeout=60)
        assert (done.returncode, len(done.stdout), done.stderr) == (0, 10, b"")


def test_a_token_opens_a_daemon_over_tcp_and_tls_by_argument_and_by_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, other = str(folder / "token"), str(folder / "other")
    for path in (token, other):
        code, told, _ = run("token", path)
        assert (code, told.decode().partition(": ")[0]) == (0, path)
        assert Path(path).read_text().strip() not in told.decode()
    code, _, error = run("token", token)
    assert (code, error) == (1, f"smb: {token} exists already; it was left alone\n")
    authority = Authority.make(folder, "ca")
    own, mine = (authority.sign(name) for name in ("daemon", "worker"))
    tls = ["--tls-cert", f"{own.certificate}", "--tls-key", f"{own.key}", "--tls-ca", f"{own.ca}"]
    with Program("-m", "smb.cli", "serve", "--tcp", "localhost:0", "--token", token, *tls) as daemon:
        address = daemon.line().split()[-1]
        files = ["--tls-ca", f"{mine.ca}", "--tls-cert", f"{mine.certificate}", "--tls-key", f"{mine.key}"]
        assert run("ls", "-a", address, "--token", token, *files)[0] == 0
        code, _, error = run("ls", "-a", address, "--token", other, *files)
        assert (code, error[:16]) == (1, "smb: wrong token")
        assert run("ls", "-a", address, "--token", token, *files[:2])[0] == 1
        for name, value in zip(("SMB_TLS_CA", "SMB_TLS_CERT", "SMB_TLS_KEY"), files[1::2], strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SMB_TOKEN_FILE", token)
        assert run("put", "w", "-", "-a", address, stdin=bytes(40))[0] == 0
        assert run("get", "w", "-", "-a", address)[1] == bytes(40)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-clients", "0"], "'0' is no whole number above 0"),
        (
            ["--tcp", "127.0.0.1:0", "--token", "/no/such"],
            "token file /no/such: No such file or directory (`smb token",
        ),
        (
            ["--tcp", "127.0.0.1:0", "--tls-ca", "/no/such"],
            "a daemon needs a certificate for TLS (--tls-cert)",
        ),
        (["--tcp", "127.0.0.1:0", "--tls-cert", "/no/such"], "TLS certificate /no/such: No such file"),
        (["--tcp", "127.0.0.1"], "bad address '127.0.0.1': HOST:PORT is expected"),
    ],
)
def test_what_serve_cannot_listen_with_is_named(words: list[str], message: str) -> None:
    code, _, error = run("serve", *words)
    assert code in (1, 2)
    assert message in error


def test_an_address_that_metrics_cannot_have_is_told_before_the_daemon_listens(folder: Path) -> None:
    code, out, error = run("serve", "--unix", str(folder / "m.sock"), "--metrics", "127.0.0.1")
    assert (code, out) == (1, b"")
    assert "bad address '127.0.0.1': HOST:PORT is expected" in error
