"""A net's parts after it was built: what both executors run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from prototxt.registry import Built, LayerSpec, Learnable

AUTOMATIC = "(automatic)"


@dataclass
class Node:
    """One layer in its place.

    bottom_slots, top_slots   indices into Graph.names; an in-place top has its bottom's slot
    blobs                     the parameters the module uses, shared ones already exchanged
    loss_weights              one a top, 0 where it is no loss
    need_backward             the layer runs backward; need_bottom says for which of its bottoms
    overwritten               bottoms whose storage this or a later layer writes in place
    alias                     a Split whose tops can share its bottom's storage
    split_loss                a loss of implied weight that another layer uses
    """

    spec: LayerSpec
    built: Built
    bottoms: list[str]
    tops: list[str]
    bottom_slots: tuple[int, ...]
    top_slots: tuple[int, ...]
    blobs: list[nn.Parameter]
    loss_weights: list[float]
    need_bottom: list[bool]
    need_backward: bool = False
    overwritten: tuple[bool, ...] = ()
    alias: bool = False
    split_loss: bool = False

    @property
    def module(self) -> nn.Module:
        return self.built.module

    @property
    def name(self) -> str:
        return str(self.spec.name)

    @property
    def type(self) -> str:
        return str(self.spec.type)

    @property
    def place(self) -> str:
        """For messages: ``path:line: layer 'name' (Type)``."""
        line = "" if self.spec.line is None else f":{self.spec.line}"
        return f"{self.spec.path}{line}: layer {self.name!r} ({self.type})"


@dataclass
class Graph:
    """All layers of a net, connected.

    names    a blob's name by slot; losses without a named top give AUTOMATIC ones
    shapes   the shapes by slot that the builders announced
    """

    nodes: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    learnable: list[Learnable] = field(default_factory=list)
    aliases: dict[nn.Parameter, list[nn.Parameter]] = field(default_factory=dict)
