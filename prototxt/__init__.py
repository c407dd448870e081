"""Caffe's network language on torch.

Importing this package loads neither torch nor protobuf: what needs them comes when it is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prototxt import errors
from prototxt.errors import DataError, LayerError, NetError, ParseError, PrototxtError, WeightsError

if TYPE_CHECKING:
    from prototxt import schema
    from prototxt.blob import Blob
    from prototxt.net import Net
    from prototxt.registry import Built, LayerSpec, layer
    from prototxt.text import parse_net, parse_solver

_LAZY = {
    "Blob": "prototxt.blob",
    "Net": "prototxt.net",
    "Built": "prototxt.registry",
    "LayerSpec": "prototxt.registry",
    "layer": "prototxt.registry",
    "parse_net": "prototxt.text",
    "parse_solver": "prototxt.text",
}

__all__ = [
    "Blob",
    "Built",
    "DataError",
    "LayerError",
    "LayerSpec",
    "Net",
    "NetError",
    "ParseError",
    "PrototxtError",
    "WeightsError",
    "errors",
    "layer",
    "parse_net",
    "parse_solver",
    "schema",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "schema":
        return import_module("prototxt.schema")
    raise AttributeError(f"module 'prototxt' has no attribute {name!r}")
