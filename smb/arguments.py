"""What may stand on the command line of ``smb``. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import smb
from smb.completion import add_shells

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EPILOG = (
    "ADDRESS is unix:PATH, tcp://HOST:PORT, rdma://HOST:PORT, or HOST:PORT for the best that works (its log "
    "says which), or several with commas that make one box; "
    "without it $SMB_ADDRESS, else the user's own daemon at the default socket. For --token, --tls-*: "
    "$SMB_TOKEN_FILE, $SMB_TLS_CA, $SMB_TLS_CERT, $SMB_TLS_KEY."
)


LONGEST = 1e9  # seconds, 31 years: the threads' clock ends at nine times as many


def size(text: str) -> int:
    from smb.memory import parse

    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and up to {LONGEST:g}")
    return value


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="smb", description="Soft Memory Box: named memory that processes share.", epilog=EPILOG
    )
    top.add_argument("--version", action="version", version=f"smb {smb.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="run a daemon until SIGTERM, SIGINT or SIGHUP")
    serve.add_argument("--unix", metavar="PATH", help="socket to listen at (default: the user's own)")
    serve.add_argument(
        "--memory-limit", type=size, metavar="SIZE", help="what all segments may take, such as 4G"
    )
    serve.add_argument(
        "--huge-pages", action="store_true", help="for large segments; refused where the kernel gives none"
    )
    serve.add_argument(
        "--lease",
        type=duration,
        default=30.0,
        metavar="S",
        help="kill a client that keeps others waiting for a lock longer than S seconds (default: 30)",
    )
    serve.add_argument(
        "--snapshot-dir", metavar="DIR", help="go on from the newest snapshot there; write one at the end"
    )
    serve.add_argument("--snapshot-every", type=duration, metavar="S", help="and every S seconds")
    add_watching(serve)
    add_access(serve)

    client = argparse.ArgumentParser(add_help=False)
    client.add_argument("--address", "-a", metavar="ADDRESS", help="the daemon (see `smb --help`)")
    client.add_argument("--token", metavar="FILE", help="what the daemon asks for over TCP")
    add_tls(client, "signed the daemon's certificate (and speak TLS)")

    ls = commands.add_parser("ls", parents=[client], help="list the segments", epilog=EPILOG)
    ls.add_argument("--verbose", "-v", action="store_true", help="and the sessions")
    ls.add_argument("prefix", nargs="?", default="", help="only keys that start so")
    stat = commands.add_parser("stat", parents=[client], help="one segment's figures", epilog=EPILOG)
    stat.add_argument("key")
    get = commands.add_parser(
        "get", parents=[client], help="copy a segment into a .npy or raw file", epilog=EPILOG
    )
    get.add_argument("key")
    get.add_argument("file", help="NAME.npy, any other name for raw elements, or - for raw on stdout")
    put = commands.add_parser(
        "put", parents=[client], help="copy a .npy or raw file into a segment", epilog=EPILOG
    )
    put.add_argument("key")
    put.add_argument("file", help="NAME.npy, any other name for raw elements, or - for raw from stdin")
    put.add_argument("--dtype", default="float32", help="of raw elements (default: float32)")
    free = commands.add_parser("free", parents=[client], help="take a segment's key away", epilog=EPILOG)
    free.add_argument("key", nargs="+")
    add_doctor(commands)
    add_measuring(commands, client)
    snapshot = commands.add_parser(
        "snapshot", parents=[client], help="have the daemon write a snapshot now", epilog=EPILOG
    )
    snapshot.add_argument("dir", nargs="?", help="on the daemon's host (default: its --snapshot-dir)")
    restore = commands.add_parser(
        "restore", parents=[client], help="load a snapshot into a running daemon", epilog=EPILOG
    )
    restore.add_argument("dir", help="on the daemon's host: its newest whole snapshot is taken")
    token = commands.add_parser("token", help="make a token: a new file of mode 0600 for `smb serve --token`")
    token.add_argument("file")
    add_shells(
        commands.add_parser("completion", help="print a script by which bash, zsh or fish complete all this"),
        "smb",
    )
    return top


def add_access(serve: argparse.ArgumentParser) -> None:
    """Who may come in over a network, and how much of the daemon they may use."""
    serve.add_argument("--tcp", metavar="HOST:PORT", help="listen here too; * is every address of this host")
    serve.add_argument(
        "--rdma",
        metavar="HOST:PORT",
        help="serve RDMA, set up over this TCP port ($SMB_RDMA: by which device)",
    )
    serve.add_argument(
        "--token",
        metavar="FILE",
        help="clients over TCP must have it (default on loopback: the user's own; `smb token` makes one)",
    )
    add_tls(serve, "signed the certificates that clients must show")
    serve.add_argument(
        "--insecure", action="store_true", help="listen though neither token nor certificate is asked for"
    )
    serve.add_argument("--max-clients", type=whole, default=4096, metavar="N", help="(default: 4096)")
    serve.add_argument("--max-segments", type=whole, default=100_000, metavar="N", help="(default: 100000)")
    serve.add_argument(
        "--max-streams",
        type=size,
        default=0,
        metavar="SIZE",
        help="what clients over TCP may have under way (default: half of what is free)",
    )
    serve.add_argument(
        "--max-rate", type=positive, default=0.0, metavar="R", help="requests a second of one connection"
    )


def add_watching(serve: argparse.ArgumentParser) -> None:
    """How a daemon is watched."""
    serve.add_argument("--verbose", "-v", action="store_true", help="log sessions too")
    serve.add_argument(
        "--log", choices=("text", "json"), default="text", help="lines for people or JSON objects, on stderr"
    )
    serve.add_argument("--metrics", metavar="HOST:PORT", help="serve figures for Prometheus there")


def listed(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of several values between commas."""

    def several(text: str) -> list[Any]:
        return [one(part) for part in text.split(",")]

    return several


def operation(text: str) -> str:
    known = ("read", "write", "accumulate", "exchange")
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return text


def mappable(text: str) -> str:
    if text not in ("shm", "tcp"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of shm, tcp; for others give --address")
    return text


def add_measuring(commands: Commands, client: argparse.ArgumentParser) -> None:
    top = commands.add_parser(
        "top", parents=[client], help="what the daemon's clients are doing, live", epilog=EPILOG
    )
    top.add_argument("--once", action="store_true", help="print one table, with the rates of one interval")
    top.add_argument("--interval", "-i", type=duration, default=1.0, metavar="S", help="(default: 1)")
    bench = commands.add_parser("bench", help="how fast a box is, over sizes, processes and transports")
    bench.add_argument(
        "--address",
        "-a",
        action="append",
        help="a daemon, several times for several (default: one of its own)",
    )
    every = "read,write,accumulate,exchange"
    bench.add_argument(
        "--operations", type=listed(operation), default=every, metavar="O,O", help=f"of {every}"
    )
    bench.add_argument(
        "--sizes",
        type=listed(size),
        default="4K,256K,16M",
        metavar="SIZE,SIZE",
        help="(default: 4K,256K,16M)",
    )
    bench.add_argument("--processes", type=listed(whole), default="1,2", metavar="N,N", help="(default: 1,2)")
    bench.add_argument(
        "--transports", type=listed(mappable), default="shm,tcp", metavar="T,T", help="(default: shm,tcp)"
    )
    bench.add_argument("--seconds", type=duration, default=1.0, metavar="S", help="of each measurement")
    bench.add_argument("--csv", metavar="FILE", help="write the table there")
    bench.add_argument("--plot", metavar="FILE", help="draw it there (needs matplotlib)")


def add_tls(command: argparse.ArgumentParser, signed: str) -> None:
    command.add_argument("--tls-ca", metavar="FILE", help=f"authority that {signed}, in PEM")
    command.add_argument("--tls-cert", metavar="FILE", help="one's own certificate, in PEM")
    command.add_argument("--tls-key", metavar="FILE", help="its key (default: in the certificate's file)")


def transport(text: str) -> str:
    if text not in ("shm", "tcp", "rdma"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of shm, tcp, rdma")
    return text


def add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="say which transports work here, why not, and what to do; exit code 0 when they work"
    )
    doctor.add_argument(
        "transport",
        nargs="*",
        type=transport,
        metavar="TRANSPORT",
        help="shm, tcp or rdma: which must work (default: shm, tcp, and rdma where there is a device)",
    )
    doctor.add_argument("--json", action="store_true", help="all findings as one JSON object")
