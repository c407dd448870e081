"""Small nets for tests, written as prototxt in the test itself."""

from __future__ import annotations

from typing import Any

import prototxt
from prototxt.net import Net
from prototxt.text import net_from_text


def net(text: str, phase: Any = "TRAIN", **options: Any) -> Net:
    """Build a net from prototxt text; errors name it "net"."""
    return Net(net_from_text(text, "net"), phase, **options)


def inputs(**shapes: tuple[int, ...]) -> str:
    """One Input layer a keyword: the top's name and its shape."""
    return "".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ '
        + " ".join(f"dim: {size}" for size in shape)
        + " } } }\n"
        for name, shape in shapes.items()
    )


def layer(name: str, kind: str, bottom: str = "", top: str = "", more: str = "") -> str:
    """A layer; bottom and top are names separated by blanks."""
    bottoms = " ".join(f'bottom: "{blob}"' for blob in bottom.split())
    tops = " ".join(f'top: "{blob}"' for blob in top.split())
    return f'layer {{ name: "{name}" type: "{kind}" {bottoms} {tops} {more} }}\n'


def product(name: str, bottom: str, top: str, outputs: int = 2, more: str = "") -> str:
    """An InnerProduct with random weights and biases."""
    filler = 'filler { type: "uniform" min: -1 max: 1 }'
    param = f"inner_product_param {{ num_output: {outputs} weight_{filler} bias_{filler} }}"
    return layer(name, "InnerProduct", bottom, top, f"{param} {more}")


__all__ = ["inputs", "layer", "net", "product", "prototxt"]
