"""What layer builders share: counting bottoms and tops, resolving axes, modules made of one function."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import Tensor, nn

from prototxt.registry import Built, LayerSpec, Shape

Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Apply(nn.Module):
    """A layer without values of its own: forward is ``function(*bottoms)``."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*bottoms)


def shape_text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) if shape else "() (a scalar)"


def _range_text(least: int, most: int | None, word: str) -> str:
    if most is None:
        return f"at least {least} {word}s"
    if least == most:
        return f"{least} {word}{'' if least == 1 else 's'}"
    return f"{least} to {most} {word}s"


def expect(
    spec: LayerSpec,
    bottoms: tuple[int, int | None] | int,
    tops: tuple[int, int | None] | int = 1,
    *,
    automatic: bool = False,
) -> None:
    """Refuse a layer with another number of bottoms or tops; a range's second number may be None.

    automatic  a loss: tops that the file leaves out are made anonymously
    """
    for word, count, limits in (("bottom", len(spec.bottom), bottoms), ("top", len(spec.top), tops)):
        least, most = (limits, limits) if isinstance(limits, int) else limits
        if automatic and word == "top":
            least = 0
        if count < least or (most is not None and count > most):
            raise spec.error(f"{spec.type} takes {_range_text(least, most, word)}, not {count}")


def refuse_in_place(spec: LayerSpec) -> None:
    if spec.in_place:
        raise spec.error(f"{spec.type} cannot work in place: give the top a name of its own")


def axis_of(spec: LayerSpec, axis: int, shape: Shape, name: str = "axis") -> int:
    """``axis`` counted from the front; a negative one counts from the end of ``shape``."""
    if not -len(shape) <= axis < len(shape):
        raise spec.error(f"{name} {axis} is out of range for a bottom of shape {shape_text(shape)}")
    return axis % len(shape)


def count(shape: Shape, start: int = 0, end: int | None = None) -> int:
    """How many elements the axes from ``start`` up to ``end`` span; 1 without axes."""
    return prod(shape[start:end])


def like_bottom(spec: LayerSpec, bottoms: list[Shape], function: Function) -> Built:
    """A layer of one bottom and one top of the same shape."""
    expect(spec, 1)
    return Built(Apply(function), [bottoms[0]])
