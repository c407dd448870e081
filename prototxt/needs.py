"""Which layers run backward and for which bottoms: Caffe's reverse pass over a connected net."""

from __future__ import annotations

from prototxt.nodes import Graph


def mark_backward(graph: Graph, force: bool) -> None:
    """Settle need_backward, need_bottom, requires_grad, overwritten and alias of every layer, in place.

    force  the net's force_backward: every layer runs, every bottom but labels gets a gradient
    Raises LayerError when a label would need a gradient.
    """
    _skip_what_feeds_no_loss(graph)
    _check_labels(graph)
    if force:
        for node in graph.nodes:
            node.need_backward = True
            node.need_bottom = [
                need or index not in node.built.labels for index, need in enumerate(node.need_bottom)
            ]
    for learnable in graph.learnable:
        wanted = (force or learnable.lr_mult != 0) and not learnable.statistics
        for param in (learnable.param, *graph.aliases.get(learnable.param, ())):
            param.requires_grad_(wanted)
    _mark_in_place(graph)


def _skip_what_feeds_no_loss(graph: Graph) -> None:
    """Backwards through the layers: no gradient is needed where no loss follows or all users block it."""
    under_loss: set[int] = set()
    blocked: set[int] = set()
    for node in reversed(graph.nodes):
        feeds_loss = any(node.loss_weights) or not under_loss.isdisjoint(node.top_slots)
        if node.need_backward and blocked.issuperset(node.top_slots):
            node.need_backward = False
            node.need_bottom = [False] * len(node.need_bottom)
        if feeds_loss:
            under_loss.update(node.bottom_slots)
        else:
            node.need_backward = False
            node.need_bottom = [False] * len(node.need_bottom)
        blocked.update(
            slot for slot, need in zip(node.bottom_slots, node.need_bottom, strict=True) if not need
        )


def _check_labels(graph: Graph) -> None:
    for node in graph.nodes:
        for index in node.built.labels if node.need_backward else ():
            if index < len(node.need_bottom) and node.need_bottom[index]:
                raise node.spec.error(
                    f"cannot backpropagate to bottom {index} ('{node.bottoms[index]}'): it takes labels, but "
                    "comes from a layer with weights (propagate_down: false for it stops this)"
                )


def _mark_in_place(graph: Graph) -> None:
    """Which bottoms are overwritten at or after their layer, and which Splits may share storage."""
    written: set[int] = set()
    for node in reversed(graph.nodes):
        in_place = set(node.bottom_slots) & set(node.top_slots)
        shared = not written.intersection(node.top_slots)
        written |= in_place
        node.alias = node.type == "Split" and not in_place and shared
        node.overwritten = tuple(slot in written for slot in node.bottom_slots)
