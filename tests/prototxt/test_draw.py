"""A net as a picture: every layer has its box, edges go around boxes, and what is written in them is true."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from prototxt import draw, schema
from prototxt.diagram import Box, Layout, lay_out
from prototxt.errors import PrototxtError
from prototxt.text import net_from_text
from tests.prototxt.nets import inputs, layer, net, product

TEXT = (
    inputs(data=(2, 3, 8, 8), label=(2,))
    + layer("conv", "Convolution", "data", "conv", "convolution_param { num_output: 4 kernel_size: 3 "
            "stride: 2 pad: 1 group: 1 bias_term: false }")
    + layer("relu", "ReLU", "conv", "conv")
    + layer("pool", "Pooling", "conv", "pool", "pooling_param { pool: AVE kernel_h: 2 "
            "kernel_w: 3 stride: 2 }")
    + product("left", "conv", "left", 5, 'param { name: "w" } param { name: "b" }')
    + product("right", "conv", "right", 5, 'param { name: "w" } param { name: "b" }')
    + layer("quiet", "Silence", "pool left")
    + layer("loss & <more>", "SoftmaxWithLoss", "right label", "loss")
)  # fmt: skip


def by_name(drawn: list[draw.Drawn]) -> dict[str, draw.Drawn]:
    return {each.name: each for each in drawn}


def test_a_built_net_shows_shapes_and_parameters_and_no_splits() -> None:
    drawn = draw.of_net(net(TEXT))
    found = by_name(drawn)
    assert found["conv"].lines == (
        "Convolution", "3x3 4 out stride 2 pad 1", "→ 2 x 4 x 4 x 4", "108 parameters",
    )  # fmt: skip
    assert found["pool"].lines[:2] == ("Pooling", "AVE 2x3 stride 2")
    assert found["left"].lines[-1] == "325 parameters"
    assert found["right"].lines[-1] == "325 parameters, shared"
    assert found["loss & <more>"].lines == ("SoftmaxWithLoss", "→ scalar")
    assert not any(each.type == "Split" for each in drawn)
    sources = {each.name: {drawn[i].name for i in each.sources} for each in drawn}
    assert sources["pool"] == sources["left"] == sources["right"] == {"relu"}
    assert sources["quiet"] == {"pool", "left"}
    assert sources["loss & <more>"] == {"right", "label"}


def test_a_message_is_drawn_as_it_is_written_or_for_one_phase() -> None:
    rule = "include {{ phase: {} }} dummy_data_param {{ shape {{ dim: 1 dim: 2 }} }}"
    text = "".join(layer(p, "DummyData", "", "x", rule.format(p)) for p in ("TRAIN", "TEST"))
    message = net_from_text(text + product("ip", "x", "y"), "net").message
    assert [each.name for each in draw.of_message(message)] == ["TRAIN", "TEST", "ip"]
    assert draw.of_message(message)[2].sources == (0, 1)
    assert [each.name for each in draw.of_message(message, phase=1)] == ["TEST", "ip"]


def test_an_old_message_is_drawn_as_what_it_means() -> None:
    message = schema.NetParameter(name="old", input=["data"], input_dim=[1, 3, 4, 4])
    message.layers.add(name="c", type=4, bottom=["data"], top=["c"])
    assert [(each.name, each.type, each.sources) for each in draw.of_message(message)] == [
        ("input", "Input", ()),
        ("c", "Convolution", (0,)),
    ]
    assert len(message.layers) == 1
    message.layer.add(name="new")
    with pytest.raises(PrototxtError, match="layers"):
        draw.of_message(message)


def test_svg_holds_a_box_and_the_text_of_every_layer() -> None:
    drawn = draw.of_net(net(TEXT))
    root = ET.fromstring(draw.picture(drawn))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [line for each in drawn for line in (each.name, *each.lines)]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == len(drawn) + 1
    assert ET.fromstring(draw.picture([])).tag.endswith("svg")
    strange = [draw.Drawn("a\x00\x1bb", "ReLU", ("$x$",), ())]
    assert "a��b" in draw.picture(strange).decode()
    ET.fromstring(draw.picture(strange))


def test_the_ending_says_the_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = [*draw.of_net(net(TEXT)), draw.Drawn("a\x00$\\frac{$ _^", "ReLU", (), ())]
    for name, magic in (("n.svg", b"<svg"), ("n.PNG", b"\x89PNG"), ("n.pdf", b"%PDF")):
        draw.save(drawn, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    for name, message in (
        ("n", "says no format"),
        ("n.doc", "'doc' is no format"),
        ("no/n.svg", "cannot write"),
    ):
        with pytest.raises(PrototxtError, match=message):
            draw.save(drawn, tmp_path / name)
    with pytest.raises(PrototxtError, match="direction 'UP' is none of TB, BT, LR, RL"):
        draw.picture(drawn, "svg", "UP")


# Geometry -------------------------------------------------------------------------------------------------


def some_boxes(count: int, seed: int) -> list[Box]:
    """A random graph with short and long edges."""
    rng = random.Random(seed)

    def sources(index: int) -> tuple[int, ...]:
        count = rng.choice((1, 1, 2, 3)) if index else 0
        return tuple({rng.randrange(max(0, index - rng.choice((2, 30))), index) for _ in range(count)})

    return [Box(rng.uniform(20, 200), rng.uniform(20, 90), sources(index)) for index in range(count)]


@pytest.mark.parametrize("direction", ["TB", "BT", "LR", "RL"])
@pytest.mark.parametrize("seed", [1, 2])
def test_boxes_do_not_overlap_and_edges_do_not_cut_them(direction: str, seed: int) -> None:
    boxes = some_boxes(40, seed)
    layout = lay_out(boxes, direction)
    ends = iter(layout.edges)
    for i, box in enumerate(boxes):
        x, y = layout.corners[i]
        assert -1e-6 <= x <= layout.size[0] - box.width + 1e-6
        assert -1e-6 <= y <= layout.size[1] - box.height + 1e-6
        for j in range(i):
            assert not overlap(inner(layout, boxes, i), inner(layout, boxes, j))
        for source in box.sources:
            edge = next(ends)
            others = [k for k in range(len(boxes)) if k not in (i, source)]
            points = [between(a, b, t / 20) for a, b in pairwise(edge) for t in range(21)]
            assert not any(inside(point, inner(layout, boxes, k)) for point in points for k in others)
            assert inside(edge[0], inner(layout, boxes, source, 1))
            assert inside(edge[-1], inner(layout, boxes, i, 1))
            step = [b - a for a, b in zip(layout.corners[source], (x, y), strict=True)]
            assert (step[direction in ("TB", "BT")] > 0) == (direction in ("TB", "LR"))


Rect = tuple[float, float, float, float]


def inner(layout: Layout, boxes: list[Box], index: int, grow: float = -1) -> Rect:
    x, y = layout.corners[index]
    return x - grow, y - grow, x + boxes[index].width + grow, y + boxes[index].height + grow


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(point: tuple[float, float], rect: Rect) -> bool:
    return rect[0] < point[0] < rect[2] and rect[1] < point[1] < rect[3]


def between(a: tuple[float, float], b: tuple[float, float], t: float) -> tuple[float, float]:
    return a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])


def test_a_chain_is_a_straight_line() -> None:
    layout = lay_out([Box(30 + 10 * (i % 3), 20, (i - 1,) if i else ()) for i in range(9)])
    assert len({round(x, 3) for edge in layout.edges for x, _ in edge}) == 1


def test_a_source_must_stand_before_its_box() -> None:
    with pytest.raises(ValueError, match="sources must stand before it"):
        lay_out([Box(1, 1, (0,))])
