"""The command ``smb``: run a memory box, look into one, move arrays in and out.

Exit codes: 0 done, 1 it failed, 2 wrong usage. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import smb
from smb.arguments import parser

if TYPE_CHECKING:
    from smb.client import Box
    from smb.server import Daemon
    from smb.tls import Tls

STAT = ("key", "count", "dtype", "nbytes", "lifetime", "version", "sessions", "owner", "age", "meta")


def tls_files(options: argparse.Namespace) -> Tls | None:
    files = options.tls_cert, options.tls_key, options.tls_ca
    if not any(files):
        return None
    from smb.tls import Tls

    return Tls(*files)


def serve(options: argparse.Namespace) -> int:
    import resource
    from pathlib import Path

    from smb.embedded import serve as start
    from smb.limits import Limits
    from smb.logs import configure
    from smb.network import parse
    from smb.options import ServeOptions

    configure(options.log, options.verbose)
    if options.metrics is not None:
        parse(options.metrics)  # a mistake is told before anybody can have come in
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a segment, two a client
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before any thread: all of them inherit it
    limits = Limits(
        options.max_clients, segments=options.max_segments, rate=options.max_rate, streams=options.max_streams
    )
    folder = Path(options.snapshot_dir) if options.snapshot_dir is not None else None
    chosen = ServeOptions(
        options.memory_limit,
        options.lease,
        limits,
        folder,
        options.snapshot_every,
        huge_pages=options.huge_pages,
    )
    with start(
        options.unix,
        tcp=options.tcp,
        rdma=options.rdma,
        token=options.token,
        tls=tls_files(options),
        insecure=options.insecure,
        options=chosen,
    ) as daemon:
        print("listening at", *daemon.addresses, flush=True)
        with metrics(options.metrics, daemon):
            signal.sigwait(signals)
    return 0


@contextlib.contextmanager
def metrics(where: str | None, daemon: Daemon) -> Iterator[None]:
    """Serve the daemon's figures at ``where``, if anywhere."""
    if where is None:
        yield
        return
    from smb.metrics import Metrics, render
    from smb.report import report

    store = daemon.store
    with Metrics(where, lambda: render(report(store), store.list(""))) as served:
        print("metrics at", served.address, flush=True)
        yield


def top(options: argparse.Namespace) -> int:
    from smb.top import live, once

    with connect(options) as box:
        (once if options.once else live)(box, options.interval)
    return 0


def bench(options: argparse.Namespace) -> int:
    from smb.bench import run

    return run(options)


def connect(options: argparse.Namespace) -> Box:
    """A box of somebody else: one inside this process would be empty."""
    from smb.embedded import connect as to
    from smb.embedded import running
    from smb.transport.base import Options

    if options.address is not None and not options.address:
        raise ValueError("--address '': is empty")  # a variable that was not set must not mean another daemon
    address = options.address or os.environ.get("SMB_ADDRESS")
    if address:
        return to(address, options.token, name="smb", tls=tls_files(options))
    try:
        return running(Options("smb"))
    except smb.TransportError as error:
        raise smb.TransportError(f"{error} (start a daemon with `smb serve`)") from error


def ls(options: argparse.Namespace) -> int:
    from smb.memory import show

    with connect(options) as box:
        for row in box.stats(options.prefix):
            print(f"{row.key}\t{row.count} x {row.dtype}\t{show(row.nbytes)}\t{row.lifetime}\tv{row.version}")
        if options.verbose:
            for session in box.sessions():
                keys = " ".join(session["segments"]) or "-"
                print(f"session pid {session['pid']}\t{session['name']}\t{keys}")
    return 0


def stat(options: argparse.Namespace) -> int:
    with connect(options) as box:
        row = box.stat(options.key)
        for name in STAT:
            value = getattr(row, name)
            print(f"{name}: {f'{value:.1f} s' if name == 'age' else value}")
    return 0


def _save(file: str, array: Any) -> None:
    """Write the array; a file that the disk cannot hold does not stay.

    Not by array.tofile, nor by numpy.save, which calls it: that says nothing when the last bytes fail.
    """
    import io

    import numpy as np

    head = io.BytesIO()
    if file.endswith(".npy"):
        np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    try:
        with open(file, "wb") as out:
            try:
                out.write(head.getvalue())
                out.write(array.view(np.uint8).data)
                out.flush()
            except OSError:
                if os.path.isfile(file):
                    os.unlink(file)
                raise
    except OSError as error:
        raise OSError(f"cannot write {file!r}: {error.strerror}") from error


def get(options: argparse.Namespace) -> int:
    with connect(options) as box, box.attach(options.key, readonly=True) as segment:
        array = segment.read()
    if options.file == "-":
        sys.stdout.buffer.write(array.tobytes())
        sys.stdout.buffer.flush()
    else:
        _save(options.file, array)
    return 0


def _load(options: argparse.Namespace) -> Any:
    import numpy as np

    if options.file.endswith(".npy"):
        try:
            with open(options.file, "rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{options.file}: no .npy file of numbers: {error}") from error
        return np.ascontiguousarray(array).reshape(-1)
    if options.file == "-":
        data = sys.stdin.buffer.read()
    else:
        with open(options.file, "rb") as file:
            data = file.read()
    item = np.dtype(options.dtype).itemsize
    if len(data) % item:
        raise ValueError(f"{options.file}: {len(data)} bytes are no whole number of {options.dtype}")
    return np.frombuffer(data, options.dtype)


def put(options: argparse.Namespace) -> int:
    from smb.protocol import DTYPES

    if options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is none of {', '.join(DTYPES)}")
    array = _load(options)
    with connect(options) as box:
        if options.key in box.list(options.key):
            with box.attach(options.key) as segment:
                if array.size != segment.count:
                    raise ValueError(
                        f"segment {options.key!r} has {segment.count} elements, the file {array.size}"
                    )
                segment.write(array)
        else:
            box.create(options.key, array.size, str(array.dtype), lifetime="stay", initial=array)
    return 0


def token(options: argparse.Namespace) -> int:
    from smb.auth import make

    make(options.file)
    print(f"{options.file}: a new token; give it to the daemon and to each client, by a way that is safe")
    return 0


def free(options: argparse.Namespace) -> int:
    with connect(options) as box:
        for key in options.key:
            box.free(key)
    return 0


def snapshot(options: argparse.Namespace) -> int:
    with connect(options) as box:
        print(box.snapshot(options.dir))
    return 0


def restore(options: argparse.Namespace) -> int:
    with connect(options) as box:
        print(f"{box.restore(options.dir)} segments restored")
    return 0


def doctor(options: argparse.Namespace) -> int:
    from smb.doctor import run

    return run(options)


def completion(options: argparse.Namespace) -> int:
    from smb.completion import script

    print(script(options.shell, "smb", parser()), end="")
    return 0


COMMANDS = {
    "bench": bench,
    "completion": completion,
    "top": top,
    "doctor": doctor,
    "serve": serve,
    "ls": ls,
    "stat": stat,
    "get": get,
    "put": put,
    "free": free,
    "token": token,
    "snapshot": snapshot,
    "restore": restore,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        code = COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads: do not complain at exit either
        return 1
    except KeyboardInterrupt:
        return 1
    except (smb.SmbError, OSError, ValueError) as error:
        print(f"smb: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
