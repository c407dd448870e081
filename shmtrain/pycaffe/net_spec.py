"""Nets written in Python: ``n.conv = L.Convolution(n.data, num_output=20, kernel_size=5)``; ``n.to_proto()``.

``layers`` (L) makes a layer of any type, ``params`` (P) names a type's constants: ``P.Pooling.MAX``. Names
are those that a NetSpec's attributes give; what has none is called after its type, with a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from prototxt import schema


class Top:
    """One output of a layer: what other layers take as input."""

    def __init__(self, fn: Function, n: int) -> None:
        self.fn, self.n = fn, n

    def to_proto(self) -> Any:
        """The NetParameter of all layers that this top needs."""
        return to_proto(self)


class Function:
    """A layer: type, inputs, parameters, and its tops.

    params  as the call gave them; ``ntop`` (default 1) and ``in_place`` are taken out
    """

    def __init__(self, type_name: str, inputs: Iterable[Top], params: Mapping[str, Any]) -> None:
        self.type_name, self.inputs = type_name, tuple(inputs)
        for index, given in enumerate(self.inputs):
            if not isinstance(given, Top):
                raise TypeError(f"{type_name} input {index} is not a Top (type is {type(given)})")
        self.params = dict(params)
        self.ntop: int = self.params.pop("ntop", 1)
        self.in_place: bool = self.params.pop("in_place", False)
        self.tops = tuple(Top(self, n) for n in range(self.ntop))


class _Writer:
    """Writes layers into a NetParameter, each after those it takes its inputs from."""

    def __init__(self, names: Mapping[Top | Function, str]) -> None:
        self.net: Any = schema.NetParameter()
        self._names = dict(names)
        self._counts: Counter[str] = Counter()
        self._written: dict[Function, Any] = {}

    def add(self, last: Function) -> None:
        """Write ``last`` and what it needs; no recursion, for nets are deeper than Python's stack."""
        stack = [last]
        while stack:
            function = stack[-1]
            missing = [given.fn for given in function.inputs if given.fn not in self._written]
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if function not in self._written:
                self._write(function)

    def _write(self, function: Function) -> None:
        layer = self.net.layer.add()
        layer.type = function.type_name
        layer.bottom.extend(self._written[given.fn].top[given.n] for given in function.inputs)
        if function.in_place:
            layer.top.extend(layer.bottom)
        else:
            layer.top.extend(self._name(top, function) for top in function.tops)
        layer.name = self._layer_name(function)
        for key, value in function.params.items():
            _set_parameter(layer, key, value)
        self._written[function] = layer

    def _layer_name(self, function: Function) -> str:
        """The layer is called as its first top, also where that is written in place."""
        if function in self._names or not function.tops:
            return self._name(function, function)
        return self._name(function.tops[0], function)

    def _name(self, thing: Top | Function, function: Function) -> str:
        if thing not in self._names:
            self._counts[function.type_name] += 1
            self._names[thing] = f"{function.type_name}{self._counts[function.type_name]}"
        return self._names[thing]


def to_proto(*tops: Top | Function) -> Any:
    """The NetParameter of all layers that ``tops`` need, under generated names."""
    return _written(tops, {})


def _written(tops: Iterable[Top | Function], names: Mapping[Top | Function, str]) -> Any:
    writer = _Writer(names)
    for top in tops:
        writer.add(top.fn if isinstance(top, Top) else top)
    return writer.net


class NetSpec:
    """A net whose attributes (or items) are tops, under the names that they have here.

    tops  all of them, by name, in the order they were first set
    """

    tops: dict[str, Any]

    def __init__(self) -> None:
        super().__setattr__("tops", {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.tops[name] = value

    def __getattr__(self, name: str) -> Any:
        if name == "tops" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # a copy that is being made has no tops yet
        try:
            return self.tops[name]
        except KeyError:
            raise AttributeError(f"the net has no top {name!r}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.tops[name] = value

    def __getitem__(self, name: str) -> Any:
        return self.tops[name]

    def __delattr__(self, name: str) -> None:
        del self.tops[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tops

    def to_proto(self) -> Any:
        """The NetParameter of the layers that the tops need."""
        return _written(self.tops.values(), {top: name for name, top in self.tops.items()})


class Layers:
    """``L.Type(*bottoms, **parameters)``: a Top, a tuple of ``ntop`` of them, or the Function with ntop=0."""

    def __getattr__(self, type_name: str) -> Callable[..., Any]:
        if type_name.startswith("__"):
            raise AttributeError(type_name)

        def make(*inputs: Top, **params: Any) -> Any:
            function = Function(type_name, inputs, params)
            if function.ntop == 0:
                return function
            return function.tops[0] if function.ntop == 1 else function.tops

        return make


class Parameters:
    """``P.Type.NAME``: the constants of ``TypeParameter``."""

    def __getattr__(self, type_name: str) -> Any:
        if type_name.startswith("__"):
            raise AttributeError(type_name)
        return getattr(schema, f"{type_name}Parameter")


layers = Layers()
params = Parameters()


@cache
def param_name_dict() -> dict[str, str]:
    """Layer type -> the field of LayerParameter that holds its parameters, without ``_param``.

    By the message's name: Pooling -> pooling, since the field pooling_param is a PoolingParameter.
    """
    fields = schema.LayerParameter.DESCRIPTOR.fields
    return {
        field.message_type.name.removesuffix("Parameter"): field.name.removesuffix("_param")
        for field in fields
        if field.name.endswith("_param") and field.message_type is not None
    }


def _set_parameter(layer: Any, key: str, value: Any) -> None:
    """Into the layer's own message where that has the field, else into the LayerParameter."""
    if not key.endswith("param"):
        own = param_name_dict().get(layer.type)
        field = f"{own}_param"
        if own is not None and key in getattr(layer, field).DESCRIPTOR.fields_by_name:
            assign_proto(getattr(layer, field), key, value)
            return
    assign_proto(layer, key, value)


def assign_proto(message: Any, name: str, value: Any) -> None:
    """Put a Python value into a field: dicts are messages, lists repeated fields, a lone value a list of one.

    Raises AttributeError for a field that the message has not, TypeError or ValueError for a wrong value.
    """
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        known = ", ".join(sorted(message.DESCRIPTOR.fields_by_name))
        raise AttributeError(f"{message.DESCRIPTOR.name} has no field {name!r} (it has: {known})")
    target = getattr(message, name)
    if hasattr(target, "extend"):
        values = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]
        for item in values:
            if isinstance(item, Mapping):
                _assign_all(target.add(), item)
            else:
                target.append(item)
    elif isinstance(value, Mapping):
        target.SetInParent()
        _assign_all(target, value)
    elif field.message_type is not None:
        target.CopyFrom(value)
    else:
        setattr(message, name, value)


def _assign_all(message: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        assign_proto(message, name, value)
