"""``smb top``: a live table of a daemon's clients and segments.

What is not known is shown as a dash. Figures of clients that share memory are those that they count
themselves; what a read-only attachment does is seen by nobody.
"""

from __future__ import annotations

import select
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from smb.memory import show

if TYPE_CHECKING:
    from smb.client import Box
    from smb.protocol import ClientRow, Report, Stat

CLEAR = "\x1b[H\x1b[2J"
UNKNOWN = "-"
HEAD = ("pid", "name", "via", "ops/s", "in/s", "out/s", "stale", "steps", "steps/s", "waits for")
SEGMENT_HEAD = ("segment", "size", "clients", "version", "updates/s")
NOTE = (
    "~ did more than is counted (nobody sees what a read-only mapping reads); - is not known; what shm "
    "clients did is their own word"
)


def rate(now: float, before: float | None, seconds: float) -> float | None:
    """Per second; None without an earlier value, or when the count began anew."""
    if before is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds


def count(value: float | None) -> str:
    """A rate as people read it."""
    if value is None:
        return UNKNOWN
    for limit, scale, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (float("inf"), 1e9, "G")):
        if value < limit:
            return f"{value / scale:.3g}{unit}"
    return UNKNOWN


def volume(value: float | None) -> str:
    return UNKNOWN if value is None else show(value)


class Sight:
    """What the daemon said at one moment."""

    def __init__(self, report: Report, segments: Sequence[Stat]) -> None:
        self.report, self.segments = report, segments
        self.moment = report.uptime
        self.clients = {row.number: row for row in report.clients}
        self.versions = {stat.key: stat.version for stat in segments}


def take(box: Box) -> Sight:
    return Sight(box.status(), box.stats())


def _client(row: ClientRow, was: ClientRow | None, seconds: float) -> list[str]:
    known = row.counted or row.operations > 0
    more = "" if row.counted or not known else "~"

    def per_second(name: str) -> float | None:
        return rate(getattr(row, name), getattr(was, name) if was else None, seconds) if known else None

    same = was is not None and was.counter == row.counter
    steps = rate(row.progress, was.progress if was and same else None, seconds) if row.counter else None
    waits = f"{row.waiting} ({row.waited:.0f} s)" if row.waiting else ""
    if not waits and row.silent > 5:
        waits = f"silent for {row.silent:.0f} s"
    return [
        str(row.pid),
        row.name or UNKNOWN,
        f"{row.transport} {row.where}".strip(),
        more + count(per_second("operations")),
        more + volume(per_second("bytes_in")),
        more + volume(per_second("bytes_out")),
        str(row.staleness) if row.staleness >= 0 else UNKNOWN,
        str(row.progress) if row.counter else UNKNOWN,
        count(steps),
        waits,
    ]


def _segment(stat: Stat, before: Sight | None, seconds: float) -> list[str]:
    was = before.versions.get(stat.key) if before else None
    updates = count(rate(stat.version, was, seconds))
    return [stat.key, show(stat.nbytes), str(stat.sessions), str(stat.version), updates]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they must be; the first and the last to the left, others to the right."""
    cells = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    left = {0, 1, 2, len(head) - 1} if len(head) > 5 else {0}
    for row in cells:
        parts = [
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(parts).rstrip()


def lines(now: Sight, before: Sight | None) -> Iterator[str]:
    """The whole picture; rates are since ``before``."""
    report = now.report
    seconds = now.moment - before.moment if before else 0.0
    limit = f" of {show(report.limit)}" if report.limit else ""
    old = before.report if before else None

    def of_all(name: str) -> float | None:
        return rate(getattr(report, name), getattr(old, name) if old else None, seconds)

    yield (
        f"daemon pid {report.pid}, up {report.uptime:.0f} s: {len(report.clients)} clients "
        f"({report.past_sessions} gone), {report.segments} segments, {show(report.memory)}{limit}"
    )
    yield (
        f"{count(of_all('operations'))} operations/s, {volume(of_all('bytes_in'))}/s in, "
        f"{volume(of_all('bytes_out'))}/s out, {count(of_all('requests'))} requests/s"
    )
    yield ""
    earlier = before.clients if before else {}
    clients = sorted(report.clients, key=lambda row: (row.name, row.number))
    yield from table(HEAD, (_client(row, earlier.get(row.number), seconds) for row in clients))
    yield ""
    yield from table(SEGMENT_HEAD, (_segment(stat, before, seconds) for stat in now.segments))
    if any(not row.counted for row in clients):
        yield ""
        yield NOTE


def _fit(text: Iterable[str]) -> str:
    """As much of the picture as the terminal shows."""
    width, height = shutil.get_terminal_size()
    return "\n".join(line[:width] for line in list(text)[: height - 1])


def _pause(seconds: float) -> bool:
    """Wait; False when the user presses Enter."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return True
    return not select.select([sys.stdin], [], [], seconds)[0]


def once(box: Box, interval: float) -> None:
    """Print one table, with the rates of one interval."""
    before = take(box)
    time.sleep(interval)
    print("\n".join(lines(take(box), before)))


def live(box: Box, interval: float) -> None:
    """Show the table anew each interval until Enter or Ctrl-C."""
    before: Sight | None = None
    try:
        while True:
            now = take(box)
            print(f"{CLEAR}{_fit(lines(now, before))}", flush=True)
            before = now
            if not _pause(interval):
                return
    except KeyboardInterrupt:
        print()
