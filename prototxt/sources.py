"""A net whose data layers are exchanged for inputs of given shapes, so that it can be built without data."""

from __future__ import annotations

from collections.abc import Mapping

from prototxt import schema
from prototxt.errors import NetError
from prototxt.registry import Shape
from prototxt.text import NetSource


def with_inputs(source: NetSource, shapes: Mapping[str, Shape]) -> NetSource:
    """``source`` with an Input layer in place of each layer without bottoms that makes a blob of ``shapes``.

    Every top of such a layer needs a shape. Rules of phases stay. The message of ``source`` is changed.
    Raises NetError for a top without a shape, and for a blob that no such layer makes.
    """
    unused = set(shapes)
    for layer in source.message.layer:
        if layer.bottom or shapes.keys().isdisjoint(layer.top):
            continue
        new = schema.LayerParameter(name=layer.name, type="Input", top=layer.top)
        for top in layer.top:
            if top not in shapes:
                raise NetError(
                    f"{source.path}: layer {layer.name!r} makes {top!r} too: give that blob's shape as well"
                )
            new.input_param.shape.add().dim.extend(shapes[top])
        new.include.extend(layer.include)
        new.exclude.extend(layer.exclude)
        layer.CopyFrom(new)
        unused -= set(layer.top)
    if unused:
        made = sorted({top for layer in source.message.layer if not layer.bottom for top in layer.top})
        raise NetError(
            f"{source.path}: no layer without bottoms makes {', '.join(map(repr, sorted(unused)))} "
            f"(those that are made so: {', '.join(made) or 'none'})"
        )
    return source
