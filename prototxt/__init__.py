"""Caffe's network language on torch.

Importing this package loads no torch: ``Net`` and the layer registry come when they are first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prototxt import errors, schema
from prototxt.errors import DataError, LayerError, NetError, ParseError, PrototxtError, WeightsError
from prototxt.text import parse_net, parse_solver

if TYPE_CHECKING:
    from prototxt.blob import Blob
    from prototxt.net import Net
    from prototxt.registry import Built, LayerSpec, layer

_LAZY = {
    "Blob": "prototxt.blob",
    "Net": "prototxt.net",
    "Built": "prototxt.registry",
    "LayerSpec": "prototxt.registry",
    "layer": "prototxt.registry",
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
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'prototxt' has no attribute {name!r}")
