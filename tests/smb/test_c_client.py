"""A client in plain C, written from docs/protocol.md alone, talks to the daemon."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np

import smb
from tests.smb.processes import ROOT, Program

COMPILER = os.environ.get("CC", "cc")


def test_a_client_in_plain_c_writes_reads_adds_and_counts(folder: Path) -> None:
    program = folder / "client"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1"]
    subprocess.run([COMPILER, *flags, "-o", program, ROOT / "tests/smb/client.c"], check=True, timeout=60)
    words = ["serve", "--unix", str(folder / "s"), "--tcp", "127.0.0.1:0", "--insecure"]
    with Program("-m", "smb.cli", *words) as daemon:
        unix, tcp = daemon.line().removeprefix("listening at ").split()
        host, _, port = tcp.removeprefix("tcp://").rpartition(":")
        done = subprocess.run([program, host, port], capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        assert done.stdout.splitlines() == [
            "version 1",
            "version 2",
            "read 100000 elements",
            "counter 0",
            "counter 5",
        ]
        with smb.connect(unix) as box:
            center = box.attach("c/center", meta=b"made in C")
            np.testing.assert_array_equal(center.read(), 1.5 * np.arange(100_000, dtype=np.float32))
        again = subprocess.run([program, host, port], capture_output=True, text=True, timeout=60)
        assert again.stderr == "client: segment 'c/center' exists already\n"
        assert again.returncode == 1
    program.unlink()
