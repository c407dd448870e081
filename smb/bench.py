"""``smb bench``: how fast a box reads, writes, accumulates and exchanges over sizes, processes, transports.

A worker process attaches to a segment that all of its group share and calls one operation for so many
seconds. The groups meet at a barrier before each measurement. Bytes are those of the range that a call works
on: an exchange over tcp sends them twice, once each way.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import IO, Any

import smb
from smb.errors import OutOfMemory, SmbError
from smb.listen import short_folder
from smb.memory import RESERVE, available, cgroup_left, show

OPERATIONS = ("read", "write", "accumulate", "exchange")
LIMIT = 60.0  # seconds beyond the measuring that a group of workers may take
ALPHA = 0.1
KEEP = 100_000  # latencies of one measurement that are kept for the percentiles


@dataclass(frozen=True)
class Row:
    """One measurement of a group of processes."""

    operation: str
    transport: str
    size: int  # bytes
    processes: int
    calls: int
    seconds: float  # of the process that took longest
    gib_per_s: float  # of all processes together
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class Plan:
    """What every worker of a group does, in this order."""

    address: str
    operations: Sequence[str]
    sizes: Sequence[int]
    processes: int
    seconds: float
    name: str  # of this group, in keys


# A worker ------------------------------------------------------------------------------------------------


def _call(segment: Any, operation: str, local: Any) -> Callable[[], object]:
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: segment.read(local),
        "write": lambda: segment.write(local),
        "accumulate": lambda: segment.accumulate(local, scale=0.001),
        "exchange": lambda: segment.exchange(local, ALPHA),
    }
    return calls[operation]


def _measure(call: Callable[[], object], seconds: float) -> tuple[int, float, list[float]]:
    """Calls made, seconds taken, and how long single calls took."""
    times: list[float] = []
    calls, start = 0, time.perf_counter()
    end, now = start + seconds, start
    while now < end:
        call()
        before, now = now, time.perf_counter()
        calls += 1
        if len(times) < KEEP:
            times.append(now - before)
    return calls, now - start, times


def _percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


def work(plan: Plan) -> Iterator[dict[str, object]]:
    """One worker's measurements."""
    import numpy as np

    with smb.connect(plan.address, name="smb bench", timeout=LIMIT) as box:
        for size in plan.sizes:
            count = max(1, size // 4)
            local = np.full(count, 0.5, np.float32)
            segment = box.create(f"{plan.name}/{size}", count, or_attach=True)
            for operation in plan.operations:
                call = _call(segment, operation, local)
                call()
                box.barrier(f"{plan.name}/go", plan.processes, LIMIT)
                calls, seconds, times = _measure(call, plan.seconds)
                local[:] = 0.5
                yield {
                    "transport": segment.transport,
                    "calls": calls,
                    "seconds": seconds,
                    "p50": _percentile(times, 0.5),
                    "p99": _percentile(times, 0.99),
                }
            segment.detach()


# The groups ----------------------------------------------------------------------------------------------


def _line(out: IO[bytes], seconds: float) -> bytes:
    """The next line of a child; SmbError when none comes in time."""
    if not select.select([out], [], [], seconds)[0]:
        raise SmbError(f"a process of the benchmark said nothing for {seconds:.0f} s")
    return out.readline()


def _start(*words: str) -> subprocess.Popen[bytes]:
    root = str(Path(smb.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-m", *words],
        stdout=subprocess.PIPE,
        env=environment,
        bufsize=0,
    )


@contextlib.contextmanager
def _children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that do not outlive the block."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        yield children
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
            if child.stdout:
                child.stdout.close()


def _combined(plan: Plan, operation: str, size: int, parts: list[dict[str, Any]]) -> Row:
    calls = sum(part["calls"] for part in parts)
    rate = sum(part["calls"] * size / part["seconds"] for part in parts)
    return Row(
        operation,
        parts[0]["transport"],
        size,
        plan.processes,
        calls,
        round(max(part["seconds"] for part in parts), 3),
        round(rate / 2**30, 4),
        round(1e6 * sum(part["p50"] for part in parts) / len(parts), 2),
        round(1e6 * max(part["p99"] for part in parts), 2),
    )


def measure(plan: Plan) -> Iterator[Row]:
    """Run one group of workers."""
    with _children() as children:
        for _ in range(plan.processes):
            children.append(_start("smb.bench", json.dumps(asdict(plan))))
        for size in plan.sizes:
            for operation in plan.operations:
                parts = []
                for child in children:
                    assert child.stdout is not None
                    line = _line(child.stdout, plan.seconds + LIMIT)
                    if not line:
                        raise SmbError(f"a process of the benchmark ended with code {child.wait()}")
                    part = json.loads(line)
                    if "error" in part:
                        raise SmbError(part["error"])
                    parts.append(part)
                yield _combined(plan, operation, size, parts)


@contextlib.contextmanager
def _daemon(transports: Sequence[str]) -> Iterator[list[str]]:
    """Addresses of a daemon of our own, one for each transport."""
    with (
        tempfile.TemporaryDirectory(prefix="smb-bench-", dir=short_folder()) as folder,
        _children() as children,
    ):
        words = ["smb.cli", "serve", "--unix", f"{folder}/box.sock"]
        if "tcp" in transports:
            words += ["--tcp", "127.0.0.1:0"]
        children.append(_start(*words))
        out = children[0].stdout
        assert out is not None
        addresses = _line(out, LIMIT).decode().removeprefix("listening at ").split()
        schemes = {"shm": "unix:", "tcp": "tcp:"}
        found = [next((a for a in addresses if a.startswith(schemes[t])), "") for t in transports]
        if not all(found):
            raise SmbError(f"the daemon of the benchmark did not start (it listens at {addresses})")
        yield found


def check_sizes(options: argparse.Namespace) -> None:
    """Raise OutOfMemory where the largest size cannot fit: the segment, and an array in every process."""
    size, processes = max(options.sizes), max(options.processes)
    arrays = processes + (0 if options.address else 1)
    rooms = [room for room in (available(), cgroup_left()) if room is not None]
    if rooms and size * arrays > min(rooms) - RESERVE:
        what = "its processes" if options.address else "its processes and the segment"
        raise OutOfMemory(
            f"--sizes {show(size)}: {what} take {show(size * arrays)} in all, but {show(min(rooms))} are free"
        )


def rows(options: argparse.Namespace, addresses: Sequence[str]) -> Iterator[Row]:
    for address in addresses:
        for processes in options.processes:
            name = f"bench/{os.getpid()}/{processes}"
            yield from measure(
                Plan(address, options.operations, options.sizes, processes, options.seconds, name)
            )


# What comes out ------------------------------------------------------------------------------------------


def table(found: Sequence[Row]) -> Iterator[str]:
    head = ("operation", "via", "size", "procs", "GiB/s", "calls/s", "p50 us", "p99 us")
    yield "{:10} {:5} {:>9} {:>5} {:>9} {:>10} {:>10} {:>10}".format(*head)
    for row in found:
        yield (
            f"{row.operation:10} {row.transport:5} {show(row.size):>9} {row.processes:5} "
            f"{row.gib_per_s:9.3f} {row.calls / row.seconds:10.0f} {row.p50_us:10.1f} {row.p99_us:10.1f}"
        )


def write_csv(kind: Any, found: Sequence[Any], path: str) -> None:
    """The names of the dataclass ``kind``'s fields, then a line for each of ``found``."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(kind))
        writer.writerows(astuple(row) for row in found)


def load_pyplot() -> Any:
    """matplotlib's, drawing into files. Raises SmbError where it is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SmbError("--plot needs matplotlib: `pip install 'shmtrain[plot]'`") from error
    return pyplot


def plot(found: Sequence[Row], path: str) -> None:
    """One picture an operation: GiB/s over the size, a line for each transport and number of processes."""
    pyplot = load_pyplot()
    operations = list(dict.fromkeys(row.operation for row in found))
    figure, axes = pyplot.subplots(1, len(operations), figsize=(4.5 * len(operations), 4), squeeze=False)
    for place, operation in zip(axes[0], operations, strict=True):
        mine = [row for row in found if row.operation == operation]
        for transport, processes in dict.fromkeys((row.transport, row.processes) for row in mine):
            points = [r for r in mine if (r.transport, r.processes) == (transport, processes)]
            label = f"{transport}, {processes} process{'es' if processes > 1 else ''}"
            place.plot([r.size for r in points], [r.gib_per_s for r in points], marker="o", label=label)
        place.set(title=operation, xlabel="bytes", xscale="log", yscale="log")
        place.grid(True, which="both", alpha=0.3)
        place.legend(fontsize="small")
    axes[0][0].set_ylabel("GiB/s, all processes")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    check_sizes(options)
    if options.plot:
        load_pyplot()  # before the measuring: it may be missing
    found: list[Row] = []
    with contextlib.ExitStack() as stack:
        addresses = options.address or stack.enter_context(_daemon(options.transports))
        header, *_ = table([])
        print(header, flush=True)
        for row in rows(options, addresses):
            found.append(row)
            print(list(table([row]))[1], flush=True)
    if options.csv:
        write_csv(Row, found, options.csv)
    if options.plot:
        plot(found, options.plot)
    return 0


def _worker(text: str) -> int:
    values = json.loads(text)
    try:
        for line in work(Plan(**values)):
            print(json.dumps(line), flush=True)
    except (SmbError, MemoryError) as error:
        print(json.dumps({"error": str(error)}), flush=True)  # for the one message that is shown
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_worker(sys.argv[1]))
