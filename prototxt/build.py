"""Builds and connects the layers of a filtered, split net, by Caffe's rules and in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prototxt.errors import NetError
from prototxt.needs import mark_backward
from prototxt.nodes import AUTOMATIC, Graph, Node
from prototxt.registry import BuildContext, Built, LayerSpec, Shape, build_layer
from prototxt.rules import Entry
from prototxt.sharing import ParamTable


def build_graph(
    net: Any, entries: Sequence[Entry], dropped: Sequence[Entry], path: str, context: BuildContext
) -> Graph:
    """Build every layer of ``entries``. What was opened is closed again when a layer fails.

    net      the NetParameter, for its state and force_backward
    dropped  layers that the rules left out: an unknown bottom is explained with them
    """
    builder = _GraphBuilder(net, dropped, path, context)
    try:
        for entry in entries:
            builder.add(entry)
        return builder.finish()
    except BaseException:
        close_sources(builder.graph)
        raise


def close_sources(graph: Graph) -> None:
    """End the readers of all data layers."""
    for node in graph.nodes:
        if node.built.source:
            node.module.close()  # type: ignore[operator]


class _GraphBuilder:
    def __init__(self, net: Any, dropped: Sequence[Entry], path: str, context: BuildContext) -> None:
        self.graph = Graph()
        self._net, self._dropped, self._path, self._context = net, dropped, path, context
        self._slots: dict[str, int] = {}
        self._available: set[str] = set()
        self._makers: dict[str, str] = {}
        self._need: list[bool] = []  # by slot: something before this blob wants a gradient
        self._params = ParamTable()

    def add(self, entry: Entry) -> None:
        layer = entry.message
        if not layer.HasField("phase"):
            layer.phase = self._net.state.phase
        bottoms = [self._bottom(entry, index) for index in range(len(layer.bottom))]
        need_bottom = self._needs(entry, bottoms)
        spec = LayerSpec(
            message=layer,
            path=self._path,
            line=entry.line,
            context=self._context,
            in_place=bool(layer.top and layer.bottom and layer.top[0] == layer.bottom[0]),
            need_gradient=self._net.force_backward or any(need_bottom),
        )
        self._check_tops(spec)
        built = build_layer(spec, [self.graph.shapes[slot] for slot in bottoms])
        if layer.blobs:
            _take_values(spec, built)
        node = Node(
            spec=spec,
            built=built,
            bottoms=list(layer.bottom),
            tops=list(layer.top),
            bottom_slots=tuple(bottoms),
            top_slots=(),
            blobs=[],
            loss_weights=_loss_weights(spec, built),
            need_bottom=need_bottom,
            split_loss=entry.split_loss,
        )
        self.graph.nodes.append(node)
        self._add_tops(node)
        if built.feed:
            self.graph.inputs += node.tops
        if built.statistics:
            _freeze_statistics(spec, built)
        node.blobs = self._params.add_layer(spec, built)
        trained = [
            index >= len(layer.param) or layer.param[index].lr_mult != 0 for index in range(len(built.blobs))
        ]
        node.need_backward = any(self._need[slot] for slot in bottoms) or any(trained)
        if node.need_backward:
            for slot in node.top_slots:
                self._need[slot] = True

    def _bottom(self, entry: Entry, index: int) -> int:
        name = entry.message.bottom[index]
        if name not in self._available:
            raise NetError(self._unknown_bottom(entry, index))
        self._available.discard(name)
        return self._slots[name]

    def _unknown_bottom(self, entry: Entry, index: int) -> str:
        """Caffe's words, and what would help: the state, and the layers that the rules dropped."""
        name, layer, state = entry.message.bottom[index], entry.message, self._net.state
        place = self._path if entry.line is None else f"{self._path}:{entry.line}"
        stages = f", stages {' '.join(state.stage)}" if state.stage else ""
        text = f"{place}: Unknown bottom blob '{name}' (layer '{layer.name}', bottom index {index})"
        text += f" in phase {self._context.phase}{stages}"
        makers = [f"'{other.message.name}'" for other in self._dropped if name in other.message.top]
        if makers:
            return f"{text}; the include or exclude rules drop layer {' and '.join(makers)}, which makes it"
        if name in self._slots:
            return f"{text}; another layer uses it up"
        return f"{text}; no layer before it makes it"

    def _needs(self, entry: Entry, bottoms: list[int]) -> list[bool]:
        given = list(entry.message.propagate_down)
        if given and len(given) != len(bottoms):
            place = self._path if entry.line is None else f"{self._path}:{entry.line}"
            raise NetError(
                f"{place}: layer {entry.message.name!r}: propagate_down is given never or once a bottom, not "
                f"{len(given)} times for {len(bottoms)}"
            )
        return given or [self._need[slot] for slot in bottoms]

    def _check_tops(self, spec: LayerSpec) -> None:
        bottoms = spec.bottom
        for index, name in enumerate(spec.top):
            in_place = index < len(bottoms) and bottoms[index] == name
            if not in_place and (name in self._makers or name in spec.top[:index]):
                first = self._makers.get(name, spec.name)
                text = f"Top blob '{name}' produced by multiple sources (first by layer '{first}')"
                if index < len(bottoms) and bottoms[index].startswith(f"{name}_{first}_"):
                    text += "; it cannot work in place, as another layer uses its bottom too: rename the top"
                raise spec.error(text)

    def _add_tops(self, node: Node) -> None:
        spec, shapes = node.spec, node.built.tops
        if len(shapes) < len(node.tops) or (len(shapes) > len(node.tops) and not node.built.loss):
            raise spec.error(f"a {spec.type} layer like this makes {len(shapes)} tops, not {len(node.tops)}")
        slots = []
        for index, shape in enumerate(shapes):
            name = node.tops[index] if index < len(node.tops) else AUTOMATIC
            if index < len(node.bottoms) and name == node.bottoms[index]:
                slot = node.bottom_slots[index]
                if shape != self.graph.shapes[slot]:
                    old = self.graph.shapes[slot]
                    raise spec.error(
                        f"cannot work in place: it turns shape {old} into {shape}; rename the top"
                    )
            else:
                slot = self._new_slot(name, shape)
            slots.append(slot)
            if name != AUTOMATIC:
                self._slots[name] = slot
                self._available.add(name)
                self._makers[name] = spec.name
        node.top_slots = tuple(slots)

    def _new_slot(self, name: str, shape: Shape) -> int:
        self.graph.names.append(name)
        self.graph.shapes.append(shape)
        self._need.append(False)
        return len(self.graph.names) - 1

    def finish(self) -> Graph:
        graph = self.graph
        graph.outputs = sorted(self._available)
        graph.learnable = self._params.learnable
        graph.aliases = self._params.aliases
        mark_backward(graph, force=self._net.force_backward)
        return graph


def _take_values(spec: LayerSpec, built: Built) -> None:
    """Values that stand in the net's own message, as in a weight file, take the place of the fillers'."""
    if len(spec.blobs) != len(built.blobs):
        raise spec.error(f"{len(spec.blobs)} blobs are given, but the layer has {len(built.blobs)}")
    for index, (given, param) in enumerate(zip(spec.blobs, built.blobs, strict=True)):
        values = given.double_data or given.data
        if len(values) != param.numel():
            raise spec.error(f"blob {index} holds {len(values)} values, {param.numel()} are needed")
        param.data.copy_(torch.tensor(list(values)).view(param.shape))


def _loss_weights(spec: LayerSpec, built: Built) -> list[float]:
    """One weight a top: the file's, or 1 for the first top of a loss."""
    given = list(spec.loss_weight)
    if given and len(given) != len(built.tops):
        raise spec.error(
            f"loss_weight must be unspecified or specified once per top blob: "
            f"{len(given)} for {len(built.tops)} tops"
        )
    default = [1.0 if built.loss and index == 0 else 0.0 for index in range(len(built.tops))]
    return given or default


def _freeze_statistics(spec: LayerSpec, built: Built) -> None:
    """Accumulators have lr_mult 0, written into the message too, as Caffe saves it."""
    params = spec.message.param  # type: ignore[attr-defined]
    for param in params:
        if param.HasField("lr_mult") and param.lr_mult != 0:
            raise spec.error(
                f"Cannot configure batch normalization statistics as layer parameters: "
                f"lr_mult is {param.lr_mult:g}, leave it out or set it to 0"
            )
    while len(params) < len(built.blobs):
        params.add()
    for param in params:
        param.lr_mult = 0.0
