"""DummyData: tops filled by fillers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prototxt import schema
from prototxt.fillers import fill
from prototxt.layers.read_ahead import no_bottoms
from prototxt.registry import Built, LayerSpec, Shape, layer
from prototxt.room import too_large


class DummyData(nn.Module):
    """Filled tensors: a constant filler fills once, any other at each forward."""

    def __init__(self, spec: LayerSpec, shapes: list[Shape], fillers: list[Any]) -> None:
        super().__init__()
        self._spec = spec
        self._fillers = fillers
        self._tops = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        for top, filler in zip(self._tops, fillers, strict=True):
            fill(top, filler, spec.context.generator, spec)

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        for i, filler in enumerate(self._fillers):
            if filler.type != "constant":
                self._tops[i] = torch.empty_like(self._tops[i])  # the batch before may still be in use
                fill(self._tops[i], filler, self._spec.context.generator, self._spec)
        tops = tuple(top.to(self._spec.context.device) for top in self._tops)
        return tops[0] if len(tops) == 1 else tops

    @property
    def constants(self) -> dict[int, Tensor]:
        """The tops that are filled once, by index: what a script writes into them stays."""
        return {i: self._tops[i] for i, filler in enumerate(self._fillers) if filler.type == "constant"}

    def close(self) -> None:
        """Nothing to end."""


@layer("DummyData")
def dummy_data(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Tops of given shapes filled by fillers; one shape and one filler serve all tops, else one each."""
    no_bottoms(spec, bottoms)
    p = spec.dummy_data_param
    fillers = list(p.data_filler) or [schema.FillerParameter()]
    if len(fillers) not in (1, len(spec.top)):
        raise spec.error(
            f"data_filler must be given 0, 1 or {len(spec.top)} times (once a top), not {len(fillers)} times"
        )
    shapes = _dummy_shapes(spec)
    module = DummyData(spec, shapes, fillers * len(shapes) if len(fillers) == 1 else fillers)
    return Built(module, shapes, source=True)


def _dummy_shapes(spec: LayerSpec) -> list[Shape]:
    p, tops = spec.dummy_data_param, len(spec.top)
    sides = [p.num, p.channels, p.height, p.width]
    if any(sides) and p.shape:
        raise spec.error("shape and num/channels/height/width are both given; one of them is allowed")
    names = ["num", "channels", "height", "width"] if any(sides) else ["shape"]
    given = sides if any(sides) else [[tuple(shape.dim) for shape in p.shape]]
    for name, values in zip(names, given, strict=True):
        if len(values) not in (1, tops):
            raise spec.error(
                f"{name} must be given once or once a top ({tops} times), not {len(values)} times"
            )
    each = [list(values) * tops if len(values) == 1 else list(values) for values in given]
    shapes: list[Shape] = list(zip(*each, strict=True)) if any(sides) else each[0]
    for shape in shapes:
        if any(side < 1 for side in shape):
            raise spec.error(f"every dimension must be above 0, not {shape}")
        if reason := too_large(shape, taken=True):
            raise spec.error(reason)
    return shapes
