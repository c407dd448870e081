"""Nets as pictures: a box a layer, with type, settings, shapes and parameter counts; SVG without any library.

Other formats (PNG, PDF, JPEG) are drawn by matplotlib, the extra shmtrain[plot].
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from prototxt import schema, upgrade
from prototxt.diagram import Box, Layout, Point, lay_out
from prototxt.errors import PrototxtError

if TYPE_CHECKING:
    from prototxt.net import Net

FONT, LINE, PAD, MARGIN = 12.0, 16.0, 8.0, 12.0  # pixels
SIDE = 32_000  # the longest side of a picture of pixels that matplotlib is asked for
BACKGROUND, INK, EDGE = "#ffffff", "#1b1f24", "#6b7280"
COLOURS = {
    "data": "#d9e8d0",
    "weights": "#f6c9b8",
    "pooling": "#fbe3b0",
    "normalisation": "#d6d3ee",
    "activation": "#cdeee3",
    "loss": "#f4b6c2",
    "other": "#dbe7f5",
}
KINDS = {
    "data": "Data DummyData HDF5Data ImageData Input MemoryData WindowData Parameter",
    "weights": "Convolution Deconvolution InnerProduct Embed LSTM RNN Scale Bias Python",
    "pooling": "Pooling SPP",
    "normalisation": "BatchNorm LRN MVN",
    "activation": "AbsVal BNLL Clip Dropout ELU Exp Log PReLU Power ReLU Sigmoid Softmax Swish TanH"
    " Threshold",
    "loss": "ContrastiveLoss EuclideanLoss HingeLoss InfogainLoss MultinomialLogisticLoss"
    " SigmoidCrossEntropyLoss SoftmaxWithLoss Accuracy",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}


@dataclass(frozen=True)
class Drawn:
    """One layer as it is drawn: its name, the lines below it, and what it is made from, by index."""

    name: str
    type: str
    lines: tuple[str, ...]
    sources: tuple[int, ...]

    @property
    def size(self) -> tuple[float, float]:
        widest = max(len(self.name) * 1.08, *(len(line) for line in self.lines), 6)
        return widest * FONT * 0.58 + 2 * PAD, (1 + len(self.lines)) * LINE + PAD

    @property
    def colour(self) -> str:
        return COLOURS[KIND_OF.get(self.type, "other")]


# What is drawn -------------------------------------------------------------------------------------------


def of_net(net: Net) -> list[Drawn]:
    """The layers of a built net, with the shapes of their tops and their parameter counts; no Splits."""
    drawn: list[Drawn] = []
    makers: dict[str, list[int]] = {}
    seen: set[Any] = set()
    for node in net.layers:
        if node.type == "Split":
            makers.update((top, makers[node.bottoms[0]]) for top in node.tops)
            continue
        lines = [*_about(node.spec.message)]
        shapes = [" x ".join(map(str, net.blobs[top].shape)) or "scalar" for top in node.tops]
        lines += [f"\N{RIGHTWARDS ARROW} {shape}" for shape in dict.fromkeys(shapes)]
        if node.blobs:
            count = sum(param.numel() for param in node.blobs)
            shared = all(param in seen for param in node.blobs)
            lines.append(f"{count:,} parameters{', shared' if shared else ''}")
            seen.update(node.blobs)
        _add(drawn, makers, node.spec.message, lines)
    return drawn


def of_message(net: Any, phase: int | None = None, rates: bool = False) -> list[Drawn]:
    """The layers of a NetParameter as they are written; nothing is built, so no shape is known.

    phase  leave out the layers that include or exclude rules keep from this phase; None: draw all
    rates  add lr_mult where a layer sets it
    """
    drawn: list[Drawn] = []
    makers: dict[str, list[int]] = {}
    for layer in _current(net).layer:
        if phase is None or _in_phase(layer, phase):
            mults = [f"{param.lr_mult:g}" for param in layer.param] if rates else []
            lines = [*_about(layer), *([f"lr_mult {', '.join(mults)}"] if mults else [])]
            _add(drawn, makers, layer, lines)
    return drawn


def _current(net: Any) -> Any:
    """The message itself, or an upgraded copy of one that is written in an old way."""
    if not (net.layers or net.input):
        return net
    copy = type(net)()
    copy.CopyFrom(net)
    try:
        upgrade.upgrade_net(copy)
    except ValueError as error:
        raise PrototxtError(str(error)) from error
    return copy


def _add(drawn: list[Drawn], makers: dict[str, list[int]], layer: Any, lines: Iterable[str]) -> None:
    """One more layer. Of several makers of a blob (those of different phases) all are its sources."""
    sources = [index for bottom in layer.bottom for index in makers.get(bottom, [])]
    index = len(drawn)
    drawn.append(Drawn(layer.name, layer.type, tuple(lines), tuple(dict.fromkeys(sources))))
    for top in layer.top:
        makers[top] = [index] if top in layer.bottom else [*makers.get(top, []), index]


def _in_phase(layer: Any, phase: int) -> bool:
    met = [rule.phase == phase or not rule.HasField("phase") for rule in (*layer.include, *layer.exclude)]
    if layer.include:
        return any(met)
    return not any(met)


def _about(layer: Any) -> list[str]:
    """The type, and in a few words what a reader asks about one of it."""
    words: list[str] = []
    if layer.type in ("Convolution", "Deconvolution"):
        p = layer.convolution_param
        kernel = [p.kernel_h, p.kernel_w] if p.HasField("kernel_h") else list(p.kernel_size) * 2
        words = ["x".join(map(str, kernel[: max(2, len(p.kernel_size))])), f"{p.num_output} out"]
        words += [f"{name} {value}" for name, value in _spatial(p)]
        words += [f"group {p.group}"] if p.group > 1 else []
    elif layer.type == "Pooling":
        p = layer.pooling_param
        size = f"{p.kernel_h or p.kernel_size}x{p.kernel_w or p.kernel_size}"
        method = schema.PoolingParameter.DESCRIPTOR.enum_types_by_name["PoolMethod"].values_by_number[p.pool]
        words = [method.name, "global" if p.global_pooling else size]
        words += [f"stride {p.stride}"] if p.stride > 1 else []
        words += [f"pad {p.pad}"] if p.pad else []
    elif layer.type in ("InnerProduct", "Embed"):
        p = layer.inner_product_param if layer.type == "InnerProduct" else layer.embed_param
        words = [f"{p.num_output} out"]
    elif layer.type in ("LSTM", "RNN"):
        words = [f"{layer.recurrent_param.num_output} out"]
    elif layer.type == "Dropout":
        words = [f"{layer.dropout_param.dropout_ratio:g}"]
    elif layer.type == "LRN":
        words = [f"size {layer.lrn_param.local_size}"]
    elif layer.type == "Python":
        words = [f"{layer.python_param.module}.{layer.python_param.layer}"]
    return [layer.type, " ".join(words)] if words else [layer.type]


def _spatial(p: Any) -> list[tuple[str, str]]:
    """stride, pad and dilation where they are not the usual ones."""
    found = []
    for name, usual in (("stride", 1), ("pad", 0), ("dilation", 1)):
        values = list(getattr(p, name))
        if not values and name != "dilation" and p.HasField(f"{name}_h"):
            values = [getattr(p, f"{name}_h"), getattr(p, f"{name}_w")]
        if any(value != usual for value in values):
            found.append((name, "x".join(map(str, values))))
    return found


# Drawing it ----------------------------------------------------------------------------------------------


def picture(drawn: Sequence[Drawn], kind: str = "svg", direction: str = "TB") -> bytes:
    """The picture in the format ``kind``: svg, or one that matplotlib knows (png, pdf, jpg, ...).

    direction  where the net runs to: TB (down), BT, LR, RL
    Raises PrototxtError for another direction or format, and where matplotlib is not installed.
    """
    try:
        layout = lay_out([Box(*layer.size, layer.sources) for layer in drawn], direction)
    except ValueError as error:
        raise PrototxtError(str(error)) from error
    if kind.lower() == "svg":
        return _svg(drawn, layout).encode()
    return _by_matplotlib(drawn, layout, kind.lower())


def save(drawn: Sequence[Drawn], path: str | os.PathLike[str], direction: str = "TB") -> None:
    """Write the picture in the format that the name's ending says. Raises PrototxtError, as picture does."""
    kind = Path(path).suffix.removeprefix(".")
    if not kind:
        raise PrototxtError(f"{os.fspath(path)}: the name says no format (.svg, .png, .pdf)")
    image = picture(drawn, kind, direction)
    try:
        Path(path).write_bytes(image)
    except OSError as error:
        raise PrototxtError(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def _svg(drawn: Sequence[Drawn], layout: Layout) -> str:
    width, height = (side + 2 * MARGIN for side in layout.size)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-MARGIN:g} {-MARGIN:g} {width:.1f} {height:.1f}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT:g}" text-anchor="middle" fill="{INK}">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{EDGE}"/></marker></defs>',
        f'<rect x="{-MARGIN:g}" y="{-MARGIN:g}" width="100%" height="100%" fill="{BACKGROUND}"/>',
        f'<g fill="none" stroke="{EDGE}" stroke-width="1.2">',
        *(f'<path d="{_path(edge)}" marker-end="url(#head)"/>' for edge in layout.edges),
        "</g>",
    ]
    for layer, (x, y) in zip(drawn, layout.corners, strict=True):
        wide, high = layer.size
        parts.append(
            f'<g><rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="5" '
            f'fill="{layer.colour}" stroke="{EDGE}"/>'
        )
        for i, line in enumerate((layer.name, *layer.lines)):
            weight = ' font-weight="bold"' if i == 0 else ""
            at = y + PAD / 2 + (i + 0.75) * LINE
            parts.append(f'<text x="{x + wide / 2:.1f}" y="{at:.1f}"{weight}>{escape(_plain(line))}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _plain(text: str) -> str:
    """Without control characters, which XML cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _path(points: Sequence[Point]) -> str:
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _head(edge: Sequence[Point]) -> list[Point]:
    """The corners of an arrow head at the end of ``edge``, 7 pixels long."""
    (x0, y0), (x, y) = edge[-2:]
    length = math.hypot(x - x0, y - y0)
    dx, dy = 7 * (x - x0) / length, 7 * (y - y0) / length
    return [(x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)]


def _by_matplotlib(drawn: Sequence[Drawn], layout: Layout, kind: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import LineCollection, PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch
    except ImportError as error:
        raise PrototxtError(
            f"a {kind} picture needs matplotlib: pip install shmtrain[plot], or .svg"
        ) from error
    width, height = (side + 2 * MARGIN for side in layout.size)
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor=BACKGROUND)
    canvas = FigureCanvasAgg(figure)
    if kind not in canvas.get_supported_filetypes():
        raise PrototxtError(f"{kind!r} is no format that can be drawn: svg, png, pdf, jpg")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-MARGIN, width - MARGIN), ylim=(height - MARGIN, -MARGIN))
    axes.axis("off")
    axes.add_collection(LineCollection(layout.edges, colors=EDGE, linewidths=1.2))
    axes.add_collection(PolyCollection([_head(edge) for edge in layout.edges], facecolors=EDGE))
    for layer, (x, y) in zip(drawn, layout.corners, strict=True):
        wide, high = layer.size
        axes.add_patch(
            FancyBboxPatch((x, y), wide, high, "round,pad=0,rounding_size=5", fc=layer.colour, ec=EDGE)
        )
        for i, line in enumerate((layer.name, *layer.lines)):
            at = y + PAD / 2 + (i + 0.75) * LINE
            text = _plain(line).replace(
                "$", r"\$"
            )  # else what lies between two of them is set as mathematics
            axes.text(
                x + wide / 2,
                at,
                text,
                size=FONT - 1,
                ha="center",
                color=INK,
                weight="bold" if i == 0 else None,
            )
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=min(144.0, 72 * SIDE / max(width, height)))
    return out.getvalue()
