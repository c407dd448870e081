"""What a comparison came to: tables, bars, CSV and a plot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from shmtrain.bench.contest import BOX, COMPUTE, LABELS
from shmtrain.bench.errors import BenchError
from shmtrain.bench.job import PUSH, SEQUENTIAL, WHOLE
from shmtrain.bench.run import Row
from smb.bench import load_pyplot

BARS = {"server": 4.0, "rma": 3.0, "allreduce": 3.0}  # sequential: times that the fused exchange is faster
UNCOVERED = 2.0  # overlapped: times less
FLOOR = 0.02  # milliseconds
COLUMNS = (
    (SEQUENTIAL, "none"), (PUSH, "busy"), (WHOLE, "busy"), (PUSH, "wait"), (WHOLE, "wait"),
)  # fmt: skip
PAPER = """\
the paper's own sequence moves memory about as often as MPI does: W_g into the worker's buffer, d into the
worker's segment, d and W_g again to be added, some 14 units of memory traffic for a unit of weights where the
fused exchange has 4. It saves the copies through a server's own buffers, not the passes: a little faster than
send/recv, not than RMA or allreduce, which have as many passes or fewer."""

Key = tuple[float, int, str, str, str, str]


def best(rows: Iterable[Row]) -> dict[Key, Row]:
    """The best variant of each (MiB, workers, library, op, overlap, computing), be it from the trial."""
    found: dict[Key, Row] = {}
    for row in rows:
        key = (row.mib, row.workers, row.library, row.op, row.overlap, row.computing)
        if key not in found or row.step < found[key].step:
            found[key] = row
    return found


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One size and number of workers: a line for each way, a column for each kind of overlap."""
    chosen, alone = best(rows), {row.computing: row.step for row in rows if row.op == COMPUTE}
    first = rows[0]
    columns = [kind for kind in COLUMNS if any((row.overlap, row.computing) == kind for row in rows)]
    yield ""
    workers = f"{first.workers} worker{'s' * (first.workers > 1)}"
    yield f"{first.mib:g} MiB, {workers}: milliseconds that an exchange of each adds to a step (best variant)"
    if alone:
        took = ", ".join(f"{kind} {step:.1f}" for kind, step in alone.items())
        yield f"milliseconds of the computing alone: {took}"
    yield f"{'':42}" + "".join(f"{_heading(*kind):>24}" for kind in columns)
    for library, op in dict.fromkeys((row.library, row.op) for row in rows if row.op != COMPUTE):
        cells = []
        for overlap, computing in columns:
            row = chosen.get((first.mib, first.workers, library, op, overlap, computing))
            cells.append(
                f"{row.uncovered:10.2f} {'(' + row.variant + ')':<13}" if row else f"{'-':>10}{'':14}"
            )
        yield f"{library + ' ' + LABELS[op]:42}" + "".join(cells).rstrip()


def _heading(overlap: str, computing: str) -> str:
    return {SEQUENTIAL: "sequential", PUSH: computing, WHOLE: f"{computing}, late"}[overlap]


def bars(rows: Sequence[Row]) -> Iterator[str]:
    """The box's ratios to its rivals, each with its bar, PASS or short."""
    chosen = best(rows)
    yield ""
    yield "times that the box is faster (sequential), or leaves less uncovered (overlapped)"
    for (mib, workers, library, op, overlap, computing), row in chosen.items():
        if library == BOX or op not in BARS:
            continue
        box = _box(chosen, mib, workers, overlap, computing)
        if box is None:
            continue
        bar = BARS[op] if overlap == SEQUENTIAL else UNCOVERED
        how = _heading(overlap, computing)
        what = f"{mib:g} MiB, {workers} workers, {how}: {library} {LABELS[op]} ({row.variant})"
        noise = _noise(rows, row)
        if max(row.uncovered, box.uncovered) <= noise:
            yield f"{what:<86} both are covered within the noise, {noise:.2g} ms"
            continue
        ratio = max(row.uncovered, noise) / max(box.uncovered, noise)
        yield f"{what:<86} {ratio:7.2f}   >= {bar:g}  {'PASS' if ratio >= bar else 'short'}"
    yield from _paper(chosen)


def _noise(rows: Sequence[Row], like: Row) -> float:
    """Milliseconds by which the computing alone varies; differences below that tell nothing."""
    same = (like.mib, like.workers, like.computing)
    spread = [r.spread for r in rows if r.op == COMPUTE and (r.mib, r.workers, r.computing) == same]
    return max([FLOOR, *spread])


def _box(chosen: dict[Key, Row], mib: float, workers: int, overlap: str, computing: str) -> Row | None:
    """The box's best way that is as fresh; with PUSH that may be the paper's, which hides a part."""
    ops = ("fused", "paper") if overlap == PUSH else ("fused",)
    found = [chosen.get((mib, workers, BOX, op, overlap, computing)) for op in ops]
    return min((row for row in found if row), key=lambda row: row.step, default=None)


def _paper(chosen: dict[Key, Row]) -> Iterator[str]:
    """The paper's own sequence against the rivals, as it is."""
    lines = []
    for (mib, workers, library, op, overlap, computing), row in chosen.items():
        paper = chosen.get((mib, workers, BOX, "paper", overlap, computing))
        if library != BOX and op in BARS and paper and overlap == SEQUENTIAL:
            ratio = row.uncovered / paper.uncovered
            lines.append(
                f"{mib:g} MiB, {workers} workers: {library} {LABELS[op]} / the paper's sequence: {ratio:.2f}"
            )
    if lines:
        yield ""
        yield from lines
        yield PAPER


def loads(before: Sequence[float], after: Sequence[float]) -> str:
    return (
        f"load of the machine before {before[0]:.2f}, after {after[0]:.2f} (the run itself makes some); "
        "on a machine that is busy with other things the figures prove nothing"
    )


def read_csv(path: str) -> list[Row]:
    """What smb's ``write_csv`` wrote. Raises BenchError for another file, OSError."""
    kinds = {"str": str, "int": int, "float": float}
    try:
        with open(path, newline="") as file:
            return [
                Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Row)})
                for line in csv.DictReader(file)
            ]
    except (KeyError, ValueError, TypeError) as error:
        raise BenchError(f"{path}: not the CSV of a comparison: {error}") from error


def read_tables(paths: Sequence[str]) -> Iterator[list[Row]]:
    """The files' rows of one size and number of workers at a time, numbers of workers and sizes rising."""
    rows = [row for path in paths for row in read_csv(path)]
    for workers, mib in sorted({(row.workers, row.mib) for row in rows}):
        yield [row for row in rows if (row.workers, row.mib) == (workers, mib)]


def plot(rows: Sequence[Row], path: str) -> None:
    """One picture a number of workers and kind of overlap: milliseconds over MiB, a line for each way."""
    chosen, draw = best(rows), load_pyplot()
    panels = [
        (workers, kind) for workers in dict.fromkeys(row.workers for row in rows) for kind in COLUMNS
        if any((row.workers, row.overlap, row.computing) == (workers, *kind) for row in rows)
    ]  # fmt: skip
    figure, axes = draw.subplots(1, len(panels), figsize=(4.5 * len(panels), 4.5), squeeze=False)
    for place, (workers, (overlap, computing)) in zip(axes[0], panels, strict=True):
        ways = dict.fromkeys((row.library, row.op) for row in rows if row.op != COMPUTE)
        for library, op in ways:
            points = [
                (key[0], max(row.uncovered, FLOOR)) for key, row in chosen.items()
                if key[1:] == (workers, library, op, overlap, computing)
            ]  # fmt: skip
            if points:
                place.plot(*zip(*points, strict=True), marker="o", label=f"{library} {LABELS[op]}")
        place.set(
            title=f"{workers} workers, {_heading(overlap, computing)}",
            xlabel="MiB",
            xscale="log",
            yscale="log",
        )
        place.grid(True, which="both", alpha=0.3)
        place.legend(fontsize="x-small")
    axes[0][0].set_ylabel("milliseconds an exchange adds to a step")
    figure.tight_layout()
    figure.savefig(path)
    draw.close(figure)
