"""What the whole-graph executor runs in the place of single layers: the same numbers in less time.

Settled once, when a net is built: which layers are done together with the one before, which work in place,
and whether images lie in memory with their channels last. Blobs, weights and the layer-by-layer executor see
nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from prototxt.layers.convolution import Convolution
from prototxt.layers.normalisation import Affine, BatchNorm
from prototxt.nodes import Graph, Node

Forward = Callable[..., Any]

# Their tops are memory of their own, which their backward does not read: what follows may overwrite it.
FRESH = frozenset({"Convolution", "InnerProduct", "BatchNorm", "Scale", "Eltwise", "Concat", "Pooling"})

# They take images however these lie in memory; for all others they are put in order first.
ANY_ORDER = frozenset({
    "Accuracy", "BatchNorm", "Bias", "Concat", "Convolution", "Dropout", "ELU", "Eltwise", "InnerProduct",
    "LRN", "PReLU", "Pooling", "ReLU", "Scale", "Sigmoid", "Split", "TanH",
})  # fmt: skip


# They may work in bfloat16: their sums are made in float32 inside. All others are given float32.
NARROW = ANY_ORDER - {"Accuracy", "LRN"}
PRECISIONS = ("float32", "bf16")


def replacements(graph: Graph, train: bool, precision: str = "float32") -> dict[int, Forward | None]:
    """Other forwards by the layer's index; None for a layer that an earlier one does with its own.

    Only what nobody can look at between two layers is left out: numbers that an in-place layer overwrites.
    """
    found: dict[int, Forward | None] = {}
    for index, node in enumerate(graph.nodes):
        if index in found:
            continue
        if train:
            group = _normalisation(graph, index)
            made = _normalise_and_scale(group) if len(group) == 2 else None
        else:
            group = _convolution(graph, index)
            made = _folded(group) if len(group) > 1 else None
        if made is not None:
            found |= dict.fromkeys((i for i, _ in group), None) | {index: made}
        elif _is_relu(node) and _overwrites_fresh(graph, index):
            found[index] = torch.relu_
    if channels_last_pays(graph):
        _order(graph, found)
    if precision != "float32":
        _widen(graph, found)
    return found


# Layers that are one ------------------------------------------------------------------------------------


def _chain(graph: Graph, index: int) -> Iterator[tuple[int, Node]]:
    """The layer and those after it that only turn its one top into another in the same place."""
    node = graph.nodes[index]
    yield index, node
    if len(node.top_slots) != 1:
        return
    slot = node.top_slots[0]
    for later in range(index + 1, len(graph.nodes)):
        after = graph.nodes[later]
        if slot not in after.bottom_slots and slot not in after.top_slots:
            continue
        blocked = node.need_backward and not all(after.need_bottom)
        if after.bottom_slots != (slot,) or after.top_slots != (slot,) or blocked:
            return
        yield later, after


def _silent(node: Node) -> bool:
    return not any(node.loss_weights) and len(node.bottom_slots) == 1


def _scales_channels(node: Node) -> bool:
    module = node.module
    if not isinstance(module, Affine) or module.scale is None or not _silent(node):
        return False
    return module.axis == 1 and module.scale.dim() == 1


def _normalisation(graph: Graph, index: int) -> list[tuple[int, Node]]:
    """BatchNorm and the Scale in its place."""
    node = graph.nodes[index]
    if not isinstance(node.module, BatchNorm) or not _silent(node):
        return []
    chain = list(_chain(graph, index))[:2]
    return chain if len(chain) == 2 and _scales_channels(chain[1][1]) else []


def _convolution(graph: Graph, index: int) -> list[tuple[int, Node]]:
    """A convolution and, in its place, BatchNorm by accumulated numbers, Scale, or both."""
    node = graph.nodes[index]
    if not isinstance(node.module, Convolution) or not _silent(node) or node.module.axis != 1:
        return []
    if node.module.turned or node.module.dense is None:
        return []
    group, kinds = [(index, node)], [BatchNorm, Affine]
    for later, after in list(_chain(graph, index))[1:]:
        module = after.module
        if not kinds or not _silent(after):
            break
        if isinstance(module, BatchNorm) and BatchNorm in kinds and module.accumulated:
            kinds = [Affine]
        elif _scales_channels(after):
            kinds = []
        else:
            break
        group.append((later, after))
    return group


def _normalise_and_scale(group: list[tuple[int, Node]]) -> Forward:
    norm, affine = group[0][1].module, group[1][1].module
    assert isinstance(norm, BatchNorm)
    assert isinstance(affine, Affine)
    return lambda x: norm.scaled(x, affine.scale, affine.bias)


def _folded(group: list[tuple[int, Node]]) -> Forward:
    """The convolution with the weights that do what follows, too; made anew each time, as weights change."""
    conv = group[0][1].module
    assert isinstance(conv, Convolution)
    norm = next((node.module for _, node in group[1:] if isinstance(node.module, BatchNorm)), None)
    affine = next((node.module for _, node in group[1:] if isinstance(node.module, Affine)), None)

    def run(x: Tensor) -> Tensor:
        weight, bias = conv.weight, conv.bias
        factor = torch.ones(weight.shape[0], dtype=weight.dtype, device=weight.device)
        shift = torch.zeros_like(factor) if bias is None else bias
        if norm is not None:
            mean, variance = norm.accumulators()
            factor = torch.rsqrt(variance + norm.eps)
            shift = (shift - mean) * factor
        if affine is not None and affine.scale is not None:
            factor, shift = factor * affine.scale, shift * affine.scale
            shift = shift if affine.bias is None else shift + affine.bias
        return conv.with_weights(x, weight * factor.view(-1, *[1] * (weight.dim() - 1)), shift)

    return run


def _is_relu(node: Node) -> bool:
    return node.type == "ReLU" and node.spec.relu_param.negative_slope == 0 and _silent(node)


def _overwrites_fresh(graph: Graph, index: int) -> bool:
    """Whether the layer works in place on memory that it may have."""
    slots = graph.nodes[index].bottom_slots
    if graph.nodes[index].top_slots != slots:
        return False
    for before in reversed(graph.nodes[:index]):
        if slots[0] in before.top_slots:
            return before.type in FRESH and len(before.top_slots) == 1
    return False


# Order in memory ----------------------------------------------------------------------------------------


def channels_last_pays(graph: Graph) -> bool:
    """Whether the convolutions are faster with each pixel's channels side by side.

    Not in groups of several channels, as AlexNet's: benchmarks/images.py, 1.28 times plain torch so, 1.43 in
    the usual order.
    """
    convolutions = [node.module for node in graph.nodes if _dense(node)]
    return bool(convolutions) and not any(_in_groups(one) for one in convolutions)


def _in_groups(module: Any) -> bool:
    return bool(module.group > 1 and module.weight.shape[1] > 1)


def _dense(node: Node) -> bool:
    module = node.module
    if not isinstance(module, Convolution) or module.turned or module.axis != 1:
        return False
    return len(module.windows.kernel) == 2 and len(node.bottom_slots) == 1


def _order(graph: Graph, found: dict[int, Forward | None]) -> None:
    """Let convolutions have channels last, which what follows keeps, and odd layers the usual order."""
    for index, node in enumerate(graph.nodes):
        forward = found.get(index, node.module.forward)
        if forward is None or node.built.feed or not node.bottom_slots:
            continue
        if _dense(node):
            found[index] = _with_channels_last(forward)
        elif node.type not in ANY_ORDER:
            found[index] = _with_usual_order(forward)


def _widen(graph: Graph, found: dict[int, Forward | None]) -> None:
    """Give layers that need float32 their bottoms so."""
    for index, node in enumerate(graph.nodes):
        forward = found.get(index, node.module.forward)
        if forward is not None and node.bottom_slots and not node.built.feed and node.type not in NARROW:
            found[index] = _with_float32(forward)


def _with_float32(forward: Forward) -> Forward:
    return lambda *bottoms: forward(*[x.float() for x in bottoms])


def _with_channels_last(forward: Forward) -> Forward:
    return lambda x: forward(_channels_last(x))


def _channels_last(x: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    if x.dim() != 4 or x.shape[1] != 1 or x.requires_grad:
        return x
    # One channel lies the same either way: only the strides say which way is meant, and what comes after
    # follows them.
    _, _, height, width = x.shape
    return x.as_strided(x.shape, (height * width, 1, width, 1))


def _with_usual_order(forward: Forward) -> Forward:
    return lambda *bottoms: forward(*[x.contiguous() for x in bottoms])
