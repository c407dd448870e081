"""The pictures of a comparison, and the page that holds them. matplotlib is loaded here alone.

A way has one colour in all pictures; one worker is black. Each picture is a PNG and an SVG.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmtrain.compare.groups import Group, alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "legend.frameon": False, "figure.dpi": 110, "savefig.dpi": 140,
    "axes.titlesize": 10, "lines.linewidth": 1.4,
}  # fmt: skip
BLACK = "#222222"
COMPUTING = "#c8c8c8"
PART_COLOURS = {
    "rgw": "#4477aa", "ulw": "#66ccee", "wwi": "#228833", "ugw": "#ccbb44", "exchange": "#ee6677",
    "collective": "#aa3377", "wait": "#555555",
}  # fmt: skip
PART_WORDS = {
    "rgw": "T_rgw: read",
    "ulw": "T_ulw: local move",
    "wwi": "T_wwi: write",
    "ugw": "T_ugw: update the center",
    "exchange": "fused exchange",
    "collective": "collective",
    "wait": "waiting",
}


class NoPlots(Exception):
    """The drawing library is not installed."""


def draw(groups: Sequence[Group], folder: Path) -> list[str]:
    """All pictures of ``groups`` into ``folder``; the names of the PNGs. Raises NoPlots."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NoPlots("pictures need matplotlib: pip install 'shmtrain[plot]'") from error
    palette = _Palette(groups, pyplot)
    crowds = sorted({g.workers for g in groups if g.workers > 1})
    pictures: dict[str, Callable[[], Figure]] = {
        "accuracy": lambda: _final(groups, palette),
        "speed": lambda: _speed(groups, palette),
        **{f"curves-{n}": lambda n=n: _curves(groups, n, palette) for n in crowds},  # type: ignore[misc]
        "time": lambda: _time(groups, palette),
        "staleness": lambda: _staleness(groups, palette),
    }
    names = []
    with matplotlib.rc_context(STYLE):
        for name, make in pictures.items():
            figure = make()
            for extension in ("svg", "png"):
                figure.savefig(folder / f"{name}.{extension}")
            pyplot.close(figure)
            names.append(f"{name}.png")
    return names


class _Palette:
    """A colour and a mark for every way."""

    MARKS = "osD^vPX<>*"

    def __init__(self, groups: Sequence[Group], pyplot: Any) -> None:
        self.pyplot = pyplot
        self.ways = list(dict.fromkeys(g.name for g in groups if g.workers > 1))
        colours = pyplot.get_cmap("tab10" if len(self.ways) <= 10 else "tab20").colors
        self._colours = {way: colours[i % len(colours)] for i, way in enumerate(self.ways)}

    def style(self, way: str) -> dict[str, Any]:
        """Of a line with marks."""
        mark = self.MARKS[self.ways.index(way) % len(self.MARKS)] if way in self.ways else "o"
        return {"color": self.colour(way), "marker": mark, "markersize": 4}

    def colour(self, way: str) -> Any:
        return self._colours.get(way, BLACK)

    def grid(self, rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
        figure, axes = self.pyplot.subplots(
            rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
        )
        return figure, [list(row) for row in axes]


# The pictures --------------------------------------------------------------------------------------------


def _final(groups: Sequence[Group], palette: _Palette) -> Figure:
    """Every seed a dot, the mean and its interval beside them."""
    shown = [g for g in groups if g.accuracy is not None]
    figure, ((axes,),) = palette.grid(1, 1, 7.5, 1.2 + 0.32 * max(len(shown), 1))
    for place, g in enumerate(shown):
        mean, colour = g.accuracy, palette.colour(g.name)
        assert mean is not None
        axes.plot([100 * v for v in mean.values], [place] * len(mean.values), "o", color=colour, alpha=0.45)
        half = None if mean.half is None else [100 * mean.half]
        axes.errorbar([100 * mean.value], [place], xerr=half, fmt="|", color=colour, capsize=3, markersize=11)
    base = alone(shown)
    if base is not None and base.accuracy is not None:
        axes.axvline(100 * base.accuracy.value, color=BLACK, linewidth=0.8, linestyle=":")
    seeds = [v for g in shown for v in (g.accuracy.values if g.accuracy else ())]
    if seeds:
        room = 100 * max(max(seeds) - min(seeds), 0.001) * 0.15
        axes.set_xlim(100 * min(seeds) - room, 100 * max(seeds) + room)
    axes.set_yticks(range(len(shown)), [g.label for g in shown])
    axes.invert_yaxis()
    axes.set(xlabel="final accuracy, % (dots: seeds; bars: mean and its 95% interval)")
    axes.set_title("Accuracy after equal samples", loc="left")
    return figure


def _speed(groups: Sequence[Group], palette: _Palette) -> Figure:
    figure, ((left, right),) = palette.grid(1, 2, 9, 3.6)
    base = alone(groups)
    counts = sorted({g.workers for g in groups})
    for way in palette.ways:
        mine = [g for g in groups if g.name == way or g is base]
        mine.sort(key=lambda g: g.workers)
        left.plot([g.workers for g in mine], [g.speed for g in mine], label=way, **palette.style(way))
        if base is not None:
            efficiency = [100 * g.speed / base.speed / g.workers for g in mine]
            right.plot([g.workers for g in mine], efficiency, **palette.style(way))
    if base is not None:
        left.plot(counts, [n * base.speed for n in counts], ":", color=BLACK, label="N times one worker")
        left.set_ylim(0, max(1.15 * max(g.speed for g in groups), 1.5 * base.speed))
        right.axhline(100, linestyle=":", color=BLACK)
    left.set(xlabel="workers", ylabel="images a second, all workers")
    right.set(xlabel="workers", ylabel="of N times one worker, %", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
    left.set_title("Throughput", loc="left")
    right.set_title("Scaling efficiency", loc="left")
    _legend(figure, left)
    return figure


def _curves(groups: Sequence[Group], workers: int, palette: _Palette) -> Figure:
    """Accuracy and loss against iterations, seconds and bytes, of all ways with so many workers."""
    figure, rows = palette.grid(2, 3, 11, 6)
    base = alone(groups)
    mine = [g for g in groups if g.workers == workers]
    for g in [*([base] if base else []), *mine]:
        colour, label = palette.colour(g.name), g.label if g.workers == 1 else g.name
        per_iteration = g.average(lambda r: r.bytes_per_iteration) / MIB
        for row, tests in zip(rows, (True, False), strict=True):
            points = g.tested() if tests else g.trained()
            values = (
                [100 * p.accuracy if p.accuracy is not None else math.nan for p in points]
                if tests
                else [p.loss if p.loss is not None else math.nan for p in points]
            )
            style = {"color": colour, "linestyle": ":" if g.workers == 1 else "-", "label": label}
            style |= {"marker": ".", "markersize": 4} if tests else {"linewidth": 0.9}
            row[0].plot([p.iteration for p in points], values, **style)
            row[1].plot([p.seconds for p in points], values, **style)
            if per_iteration:
                moved = [p.iteration * per_iteration or math.nan for p in points]
                row[2].plot(moved, values, **style)
    for row, what in zip(rows, ("test accuracy, %", "training loss"), strict=True):
        for axes, unit in zip(
            row, ("iterations of the job", "seconds of training", "MiB moved"), strict=True
        ):
            axes.set(xlabel=unit)
        row[0].set_ylabel(what)
        _log(row[2], "x", palette)
    _closer(rows[0], [100 * p.accuracy for g in mine for p in g.tested() if p.accuracy is not None])
    for axes in rows[1]:
        _log(axes, "y", palette)
        axes.set_ylim(rows[1][0].get_ylim())
    figure.suptitle(f"{workers} workers, means over seeds", x=0.01, ha="left")
    _legend(figure, rows[0][0])
    return figure


def _log(axes: Axes, which: str, palette: _Palette) -> None:
    """A logarithmic axis with plain numbers, where there is anything that it can show."""
    values = [v for line in axes.get_lines() for v in np.asarray(getattr(line, f"get_{which}data")())]
    positive = [float(v) for v in values if v > 0]
    if not positive:
        return
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(palette.pyplot.FuncFormatter(lambda value, _: f"{value:g}"))
    few = max(positive) < 30 * min(positive)  # so few powers of ten that those between need names
    between = palette.pyplot.FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axis.set_minor_formatter(between if few else palette.pyplot.NullFormatter())


def _closer(row: Iterable[Axes], values: Sequence[float]) -> None:
    """Leave the first steps out of the picture, where all ways are far from where they end."""
    if not values:
        return
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 5], ordered[-1]
    room = max(high - low, 0.5) * 0.15
    for axes in row:
        axes.set_ylim(max(low - 2 * room, 0.0), min(high + room, 100.0))


def _time(groups: Sequence[Group], palette: _Palette) -> Figure:
    """An iteration's time: what stood still on top of the computing, and beside it what was hidden."""
    figure, ((axes,),) = palette.grid(1, 1, 8.5, 1.6 + 0.34 * len(groups))
    shown: set[str] = set()
    for place, g in enumerate(groups):
        whole = 1e3 * g.average(lambda r: r.iteration_seconds)
        stood = 1e3 * g.average(lambda r: r.exchange_seconds)
        axes.barh(
            place, whole - stood, height=0.5, color=COMPUTING, label=None if place else "T_comp: computing"
        )
        at, under = whole - stood, 0.0
        for name, colour in PART_COLOURS.items():
            own, beside = (1e3 * g.part(name, hidden) for hidden in (False, True))
            label = PART_WORDS[name] if own + beside and name not in shown else None
            if own + beside:
                shown.add(name)
            axes.barh(place, own, 0.5, left=at, color=colour, label=label)
            axes.barh(place + 0.34, beside, 0.14, left=under, color=colour)
            at, under = at + own, under + beside
        share = f"{100 * g.average(lambda r: r.share):.1f}%"
        axes.annotate(share, (max(at, whole), place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(groups)), [g.label for g in groups])
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_xlim(0, 1.12 * max(1e3 * g.average(lambda r: r.iteration_seconds) for g in groups))
    axes.grid(False, axis="y")
    axes.set(xlabel="ms of a worker's iteration; thin: beside the computing; percent: not computing")
    axes.set_title("Where an iteration's time goes", loc="left")
    _legend(figure, axes)
    return figure


def _staleness(groups: Sequence[Group], palette: _Palette) -> Figure:
    """The share of the exchanges that saw a staleness, one panel for each number of workers."""
    seen = [g for g in groups if g.workers > 1 and max(g.staleness, default=0) > 0]
    crowds = sorted({g.workers for g in seen})
    figure, (row,) = palette.grid(1, max(len(crowds), 1), max(3.4 * len(crowds), 5), 3.4)
    for axes, workers in zip(row, crowds, strict=False):
        mine = [g for g in seen if g.workers == workers]
        for g in mine:
            total = sum(g.staleness.values())
            most = _quantile(g, 0.995)
            values = range(most + 1)
            shares = [100 * g.staleness[s] / total for s in values]
            axes.plot(values, shares, label=g.name, **palette.style(g.name))
        axes.set_title(f"{workers} workers", loc="left")
        axes.set(xlabel="updates by others since the last exchange", ylim=(0, None))
        axes.xaxis.set_major_locator(palette.pyplot.MaxNLocator(integer=True))
        axes.legend(fontsize="small")
    row[0].set_ylabel("of all exchanges, %")
    if not crowds:
        row[0].annotate("no exchange was stale", (0.5, 0.5), xycoords="axes fraction", ha="center")
    return figure


def _quantile(group: Group, share: float) -> int:
    """The staleness that so many of the exchanges did not exceed."""
    total, so_far = sum(group.staleness.values()), 0
    for staleness, count in sorted(group.staleness.items()):
        so_far += count
        if so_far >= share * total:
            return staleness
    return 0


def _legend(figure: Figure, axes: Axes) -> None:
    """All labels of one panel, beside the picture."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper")


# The page ------------------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222 }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100%; display: block; margin: 1.5rem 0 }}
code {{ background: #f3f3f3; padding: 0 .2rem }}
</style></head><body>
{body}
</body></html>
"""


def page(markdown: str, folder: Path) -> str:
    """The report as one HTML file that needs no other: the pictures are in it, as SVG."""
    blocks = [_block(block.splitlines(), folder) for block in markdown.strip().split("\n\n")]
    return PAGE.format(title="Comparison", body="\n".join(blocks))


def _block(lines: Sequence[str], folder: Path) -> str:
    """One block of what tables.py writes: heading, table, list, picture or paragraph."""
    first = lines[0]
    if first.startswith("#"):
        level = len(first) - len(first.lstrip("#"))
        return f"<h{level}>{_words(first.lstrip('# '))}</h{level}>"
    if first.startswith("|"):
        head, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
        cells = "".join(f"<th>{_words(cell)}</th>" for cell in head)
        body = "".join(f"<tr>{''.join(f'<td>{_words(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><tr>{cells}</tr>{body}</table>"
    if first.startswith("!["):
        name = Path(first.partition("](")[2].rstrip(")"))
        data = base64.b64encode((folder / name.with_suffix(".svg")).read_bytes()).decode()
        return f'<img alt="{html.escape(name.stem)}" src="data:image/svg+xml;base64,{data}">'
    items = [line for line in lines if line.startswith("- ")]
    text = " ".join(line for line in lines if not line.startswith("- "))
    listed = "".join(f"<li>{_words(item[2:])}</li>" for item in items)
    return (f"<p>{_words(text)}</p>" if text else "") + (f"<ul>{listed}</ul>" if listed else "")


def _words(text: str) -> str:
    """Text with its ``code`` between backquotes."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
