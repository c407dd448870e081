"""The layers of a net as scripts see them."""

from __future__ import annotations

from prototxt.blob import ParamBlob
from prototxt.layers.python import PythonLayer
from prototxt.net import Net
from prototxt.nodes import Node
from prototxt.python_layer import Layer

__all__ = ["Layer", "LayerView", "NetLayer", "layer_faces"]


class LayerView:
    """One built layer: its type and its blobs, which are those of ``net.params``."""

    def __init__(self, node: Node, blobs: list[ParamBlob]) -> None:
        self._node = node
        self.blobs = blobs

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def type(self) -> str:
        return self._node.type

    def __repr__(self) -> str:
        return f"<layer {self.name!r} ({self.type}), {len(self.blobs)} blobs>"


NetLayer = LayerView | Layer


def layer_faces(net: Net) -> list[NetLayer]:
    """One for each layer of ``net``, in order: of a Python layer the script's own object, else a view."""
    return [
        node.module.layer if isinstance(node.module, PythonLayer) else LayerView(node, net.blobs_of(node))
        for node in net.layers
    ]
