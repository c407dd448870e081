"""The comparison as text: a Markdown table, and CSV for whoever computes on."""

from __future__ import annotations

import csv
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmtrain.compare.groups import Group, Mean, alone, target
from shmtrain.compare.results import Result
from shmtrain.exchange.base import PARTS

MIB = 1 << 20
NONE = "–"
PAPER = {"rgw": "T_rgw", "ulw": "T_ulw", "wwi": "T_wwi", "ugw": "T_ugw"}


def report(
    groups: Sequence[Group],
    memory: dict[str, Any],
    aim: float | None,
    broken: Mapping[str, str],
    plots: Iterable[str] = (),
) -> str:
    """The whole page in Markdown.

    aim     the accuracy that the time to it is shown of, 0 to 1; None: the default
    broken  runs that did not come to their end, and why
    plots   names of pictures beside the page
    """
    aim = target(groups) if aim is None else aim
    return (
        "\n\n".join(
            [
                "# Comparison",
                _setting(groups, memory),
                *_missing(broken),
                "## Accuracy",
                _accuracy(groups),
                "## Speed",
                _speed(groups, aim),
                "## Where an iteration's time goes",
                _times(groups),
                "## Bytes and staleness",
                _bytes(groups),
                *[f"![{Path(name).stem}]({name})" for name in plots],
            ]
        )
        + "\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join(f"| {line} |" for line in [*lines, *(" | ".join(row) for row in rows)])


def _setting(groups: Sequence[Group], memory: dict[str, Any]) -> str:
    first = groups[0].results[0]
    images = first.iterations * int(first.start["batch"])
    lines = [
        f"Equal samples in every run: {first.iterations:,} iterations of {first.start['batch']} images,"
        f" {images:,} in all, on {os.cpu_count()} processors of this host.",
        *(f"- `{name}`: {shlex.join(told)}{_figures(groups, name)}" for name, told in memory["ways"].items()),
    ]
    if memory["options"]:
        lines.append(f"- every run: {shlex.join(memory['options'])}")
    return "\n".join(lines)


def _missing(broken: Mapping[str, str]) -> list[str]:
    if not broken:
        return []
    return [
        "\n".join(["Runs that are missing below:", *(f"- `{name}` {why}" for name, why in broken.items())])
    ]


def _figures(groups: Sequence[Group], name: str) -> str:
    """The numbers that a way went by, of its largest crowd, and the rule for its rate."""
    mine = [g for g in groups if g.name == name]
    if not mine:
        return ""
    record = mine[-1].results[0].record
    told = ", ".join([*record["figures"], record["rate"]])
    return f" ({mine[-1].workers} workers: {told})"


def _accuracy(groups: Sequence[Group]) -> str:
    base = alone(groups)
    rows = []
    for g in groups:
        seeds = ", ".join(f"{r.seed}: {_number(r.accuracy, _percent)}" for r in g.results)
        mean = g.accuracy
        gap = NONE
        if mean and base and base is not g and base.accuracy:
            gap = f"{100 * (mean.value - base.accuracy.value):+.2f}"
        loss = g.mean(lambda r: r.loss)
        rows.append([g.label, _spread(mean), gap, f"{loss.value:.4f}" if loss else NONE, seeds])
    text = table(["", "final accuracy, %", "points from 1 worker", "test loss", "by seed"], rows)
    return f"{text}\n\nMeans over seeds, with the 95% interval of the mean (Student's t)."


def _speed(groups: Sequence[Group], aim: float | None) -> str:
    base = alone(groups)
    rows = []
    for g in groups:
        gain = g.speed / base.speed if base else None
        reached, seconds = g.time_to(aim) if aim is not None else (0, None)
        when = f"{seconds.value:,.1f}" if seconds else NONE
        rows.append(
            [
                g.label,
                f"{g.speed:,.0f}",
                _number(gain, "{:.2f}".format),
                _number(gain and gain / g.workers, "{:.0%}".format),
                f"{g.average(lambda r: r.seconds):,.1f}",
                when if reached == len(g.results) else f"{when} ({reached} of {len(g.results)} seeds)",
            ]
        )
    to = "s to the accuracy" if aim is None else f"s to {100 * aim:.1f}%"
    head = ["", "images/s", "speed-up", "efficiency", "s in all", to]
    return (
        table(head, rows)
        + "\n\nSeconds are those of training: the time in which the job stood still for a test is left out."
        " Efficiency is the speed-up divided by the number of workers, however few processors they share."
    )


def _times(groups: Sequence[Group]) -> str:
    used = [name for name in PARTS if any(g.part(name) or g.part(name, hidden=True) for g in groups)]
    rows = []
    for g in groups:
        whole = g.average(lambda r: r.iteration_seconds)
        computing = whole - g.average(lambda r: r.exchange_seconds)
        rows.append(
            [
                g.label,
                f"{1e3 * whole:.2f}",
                f"{1e3 * computing:.2f}",
                *(_part(g, name) for name in used),
                f"{g.average(lambda r: r.share):.1%}",
            ]
        )
    head = [
        "ms an iteration of a worker",
        "T_iter",
        "T_comp",
        *(PAPER.get(n, n) for n in used),
        "not computing",
    ]
    words = "; ".join(f"{PAPER.get(name, name)}: {PARTS[name]}" for name in used)
    words = f"{words}. In brackets: done by a second thread beside the computing. " if words else ""
    return table(head, rows) + f"\n\n{words}The last column is (T_iter − T_comp) / T_iter."


def _part(group: Group, name: str) -> str:
    own, beside = (group.part(name, hidden) for hidden in (False, True))
    told = [f"{1e3 * own:.3f}"] if own else []
    return " ".join([*told, f"({1e3 * beside:.3f})"] if beside else told) or NONE


def _bytes(groups: Sequence[Group]) -> str:
    rows = []
    for g in groups:
        seen = g.staleness
        stale = g.mean(lambda r: r.mean_staleness)
        rows.append(
            [
                g.label,
                f"{g.average(lambda r: r.bytes_per_iteration) / MIB:.3f}",
                f"{g.average(lambda r: r.bytes) / MIB:,.0f}",
                _number(stale.value if stale else None, "{:.2f}".format),
                str(max(seen)) if seen else NONE,
                f"{g.average(lambda r: r.dropped):g}",
            ]
        )
    head = ["", "MiB an iteration", "MiB in all", "staleness, mean", "largest", "dropped"]
    return table(head, rows) + "\n\nBytes between workers and the box, or from worker to worker, each once."


def _number(value: float | None, form: Callable[[float], str]) -> str:
    return NONE if value is None else form(value)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _spread(mean: Mean | None) -> str:
    if mean is None:
        return NONE
    return _percent(mean.value) + (f" ± {100 * mean.half:.2f}" if mean.half is not None else "")


# CSV -----------------------------------------------------------------------------------------------------


def write_runs(path: Path, groups: Sequence[Group]) -> None:
    """One line a run."""
    columns: dict[str, Callable[[Result], object]] = {
        "way": lambda r: r.name, "workers": lambda r: r.workers, "seed": lambda r: r.seed,
        "iterations": lambda r: r.iterations, "batch": lambda r: r.start["batch"],
        "accuracy": lambda r: r.accuracy, "loss": lambda r: r.loss, "seconds": lambda r: r.seconds,
        "images_per_second": lambda r: r.images_per_second, "T_iter": lambda r: r.iteration_seconds,
        "exchange_share": lambda r: r.share,
        **{f"T_{name}": lambda r, name=name: r.parts.get(name, 0.0) for name in PARTS},  # type: ignore[misc]
        "bytes": lambda r: r.bytes, "staleness": lambda r: r.mean_staleness, "dropped": lambda r: r.dropped,
        "wall_seconds": lambda r: r.record["seconds"], "load_before": lambda r: r.record["load"],
    }  # fmt: skip
    rows = [[of(r) for of in columns.values()] for g in groups for r in g.results]
    _write(path, list(columns), rows)


def write_curves(path: Path, groups: Sequence[Group]) -> None:
    """One line a point of a curve: of the tests and of the mean training loss."""
    head = ["way", "workers", "seed", "kind", "iteration", "seconds", "bytes", "loss", "accuracy"]
    rows = [
        [r.name, r.workers, r.seed, kind, p.iteration, round(p.seconds, 3),
         round(p.iteration * r.bytes_per_iteration), p.loss, p.accuracy]
        for g in groups for r in g.results
        for kind, points in (("test", r.tests), ("train", r.losses)) for p in points
    ]  # fmt: skip
    _write(path, head, rows)


def write_staleness(path: Path, groups: Sequence[Group]) -> None:
    rows = [
        [r.name, r.workers, r.seed, staleness, count]
        for g in groups
        for r in g.results
        for staleness, count in sorted(r.staleness.items())
    ]
    _write(path, ["way", "workers", "seed", "staleness", "exchanges"], rows)


def _write(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(["" if value is None else value for value in row] for row in rows)
