"""The fast executor: the whole net as one autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prototxt.blob import ActivationBlob, Runs
from prototxt.compiled import Step, account, compile_steps
from prototxt.errors import NetError, PrototxtError
from prototxt.nodes import Graph, Node
from prototxt.speed import replacements


@dataclass(slots=True)
class Outcome:
    """What one run gave.

    loss     0-d: the sum of loss weight times top over all losses; it has a gradient in the TRAIN phase
    outputs  the net's outputs by name, alphabetical
    """

    loss: Tensor
    outputs: dict[str, Tensor]


class WholeGraph:
    """Runs the layers one after another on live tensors; gradients are autograd's affair.

    All that can be known beforehand is settled here: the loop has no names, no rules and no shapes in it.
    ``account`` says what is compiled; empty when nothing was to be.
    """

    account = ""

    def __init__(
        self,
        graph: Graph,
        blobs: list[ActivationBlob],
        runs: Runs,
        train: bool,
        *,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        self._graph, self._runs, self._train = graph, runs, train
        self._feeds = [
            (slot, blobs[slot]) for node in graph.nodes if node.built.feed for slot in node.top_slots
        ]
        self._count = len(graph.names)
        self._outputs = [(name, graph.names.index(name)) for name in graph.outputs]
        self._plan = plan = _plan(graph, replacements(graph, train, precision))
        if compiled:
            self._plan, runs.inside = compile_steps(graph, plan, {slot for _, slot in self._outputs})
            self.account = account(graph, plan, self._plan)
        self._narrow = precision == "bf16"

    def run(self) -> Outcome:
        """One forward pass, recorded for gradients in the TRAIN phase; NetError names a layer that fails."""
        with torch.set_grad_enabled(self._train):
            if not self._narrow:
                return self._run()
            with torch.autocast("cpu", torch.bfloat16):
                made = self._run()
            return Outcome(made.loss, {name: top.float() for name, top in made.outputs.items()})

    def _run(self) -> Outcome:
        runs = self._runs
        values: list[Any] = [None] * self._count
        runs.values = values  # the last run's activations are freed before this one's are made
        for slot, blob in self._feeds:
            values[slot] = blob.tensor
        runs.number += 1
        loss: Tensor | None = None
        index = 0
        try:
            for index, forward, bottoms, tops, weights, blocked in self._plan:  # noqa: B007
                if blocked:
                    made = forward(
                        *[values[s].detach() if i in blocked else values[s] for i, s in enumerate(bottoms)]
                    )
                elif len(bottoms) == 1:
                    made = forward(values[bottoms[0]])
                else:
                    made = forward(*[values[slot] for slot in bottoms])
                if len(tops) == 1 and isinstance(made, Tensor):
                    values[tops[0]] = made
                else:
                    _spread(made, tops, values)
                if weights:
                    loss = _add_losses(loss, [(values[tops[top]], weight) for top, weight in weights])
        except PrototxtError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            node = self._graph.nodes[index]
            raise failed(node, error, [values[slot] for slot in node.bottom_slots]) from error
        if runs.watched:
            runs.refresh()
        outputs: dict[str, Any] = {name: values[slot] for name, slot in self._outputs}
        return Outcome(torch.zeros(()) if loss is None else loss, outputs)


def _add_losses(loss: Tensor | None, tops: list[tuple[Tensor, float]]) -> Tensor:
    for top, weight in tops:
        term = top.sum() if top.dim() else top
        term = term if weight == 1.0 else term * weight
        loss = term if loss is None else loss + term
    assert loss is not None
    return loss


def _plan(graph: Graph, replaced: dict[int, Callable[..., Any] | None]) -> list[Step]:
    """``replaced``: other forwards of layers, None for those that another one does; see prototxt.speed."""
    plan: list[Step] = []
    live: set[int] = set()  # slots whose tensors may carry a gradient
    for index, node in enumerate(graph.nodes):
        if node.built.feed:
            continue
        blocked = frozenset(
            position
            for position, (slot, need) in enumerate(zip(node.bottom_slots, node.need_bottom, strict=True))
            if not need and slot in live
        )
        trained = any(param.requires_grad for param in node.blobs)
        if trained or any(slot in live for i, slot in enumerate(node.bottom_slots) if i not in blocked):
            live.update(node.top_slots)
        else:
            live.difference_update(node.top_slots)
        losses = tuple((top, weight) for top, weight in enumerate(node.loss_weights) if weight)
        usual = _splitter(len(node.tops)) if node.type == "Split" else node.module.forward
        forward = replaced.get(index, usual)
        if forward is not None:
            plan.append((index, forward, node.bottom_slots, node.top_slots, losses, blocked))
    return plan


def _splitter(count: int) -> Callable[[Tensor], Any]:
    if count == 1:
        return lambda tensor: tensor
    return lambda tensor: (tensor,) * count


def _spread(made: Any, tops: tuple[int, ...], values: list[Any]) -> None:
    """Store a layer's tensors; one that gives another number than it announced is our own fault."""
    made = (made,) if isinstance(made, Tensor) else made
    assert len(made) == len(tops), f"{len(made)} tensors for {len(tops)} tops"
    for slot, tensor in zip(tops, made, strict=True):
        values[slot] = tensor


def failed(node: Node, error: Exception, bottoms: list[Tensor | None]) -> NetError:
    """A layer that failed while running: name it, with the shapes it was given."""
    shapes = ", ".join("none" if tensor is None else str(tuple(tensor.shape)) for tensor in bottoms)
    return NetError(f"{node.place}: {error} (bottom shapes: {shapes or 'none'})")
