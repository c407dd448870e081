"""Which layers of a file belong to a net, and where its blobs must be split: messages in, messages out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prototxt.errors import NetError
from prototxt.registry import is_loss
from prototxt.text import NetSource


@dataclass
class Entry:
    """A layer's message and where it begins in the file.

    split_loss  a loss of implied weight that another layer uses
    """

    message: Any
    line: int | None
    split_loss: bool = False


def set_state(net: Any, phase: int, stages: Iterable[str], level: int | None) -> None:
    """Set the net's state as pycaffe does: phase replaced, stages appended, level replaced unless None."""
    net.state.phase = phase
    net.state.stage.extend(stage for stage in stages if stage not in net.state.stage)
    if level is not None:
        net.state.level = level


def filter_layers(source: NetSource) -> tuple[list[Entry], list[Entry]]:
    """The layers that the message's state keeps, and those it drops; NetError for one with both rules."""
    kept: list[Entry] = []
    dropped: list[Entry] = []
    lines = source.lines or [None] * len(source.message.layer)
    for layer, line in zip(source.message.layer, lines, strict=True):
        if layer.include and layer.exclude:
            place = source.path if line is None else f"{source.path}:{line}"
            raise NetError(
                f"{place}: layer {layer.name!r}: specify either include or exclude rules, not both"
            )
        rules = layer.include or layer.exclude
        met = any(meets(source.message.state, rule) for rule in rules)
        (kept if not rules or met == bool(layer.include) else dropped).append(Entry(layer, line))
    return kept, dropped


def meets(state: Any, rule: Any) -> bool:
    """Whether the state fulfils every condition of the rule that is set."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return stages.issuperset(rule.stage) and stages.isdisjoint(rule.not_stage)


def insert_splits(entries: list[Entry]) -> list[Entry]:
    """Put a Split layer behind each top that is used more than once, named as Caffe names them.

    A top with a loss weight counts as one use more; the weight moves to the split's first top. The original
    counts weights in the file alone: a loss without one that another layer uses gets that layer's gradient in
    place of its own there. Messages are changed in place.
    """
    users, weights = _count_users(entries)
    names = [entry.message.name for entry in entries]
    producers: dict[str, tuple[int, int]] = {}
    taken: Counter[tuple[int, int]] = Counter()
    result: list[Entry] = []
    for index, entry in enumerate(entries):
        layer = entry.message
        for position, bottom in enumerate(layer.bottom):
            top = producers.get(bottom)
            if top is not None and users[top] > 1:
                stem = _split_name(bottom, names[top[0]], top[1])
                layer.bottom[position] = f"{stem}_{taken[top]}"
                taken[top] += 1
        result.append(entry)
        for position, blob in enumerate(layer.top):
            top = (index, position)
            producers[blob] = top
            if users[top] > 1:
                split = _split(layer, blob, position, users[top], weights.get(top, 0.0))
                if weights.get(top):
                    _clear_weight(entry, position)
                    taken[top] += 1
                result.append(Entry(split, entry.line))
    return result


def _count_users(entries: list[Entry]) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], float]]:
    """Uses of each top (layer index, top index), and its explicit loss weight."""
    users: Counter[tuple[int, int]] = Counter()
    weights: dict[tuple[int, int], float] = {}
    producers: dict[str, tuple[int, int]] = {}
    for index, entry in enumerate(entries):
        layer = entry.message
        users.update(producers[bottom] for bottom in layer.bottom if bottom in producers)
        producers.update((blob, (index, position)) for position, blob in enumerate(layer.top))
        implied = [1.0] if is_loss(layer.type) else []
        for blob, weight in zip(layer.top, layer.loss_weight or implied, strict=False):
            weights[producers[blob]] = weight
            users[producers[blob]] += bool(weight)
    return users, weights


def _clear_weight(entry: Entry, position: int) -> None:
    weights, top = entry.message.loss_weight, entry.message.top
    if not weights:  # an implied one: once any is given, all are
        weights.extend([0.0] * len(top))
        entry.split_loss = True
    weights[position] = 0.0


def _split(layer: Any, blob: str, position: int, count: int, weight: float) -> Any:
    stem = _split_name(blob, layer.name, position)
    tops = [f"{stem}_{index}" for index in range(count)]
    split = type(layer)(name=stem, type="Split", bottom=[blob], top=tops)
    if weight:
        split.loss_weight.extend([weight] + [0.0] * (count - 1))
    return split


def _split_name(blob: str, layer: str, position: int) -> str:
    return f"{blob}_{layer}_{position}_split"
