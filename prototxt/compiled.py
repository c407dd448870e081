"""Layers that follow one another as one piece of code of torch's compiler, for ``Net(compile=True)``.

Only those become a part that can share one pass over memory: what works value by value, sums and joins.
Convolutions and products are library calls either way; BatchNorm by the batch's numbers and pooling are
slower compiled than as torch's own (and the gradient of AVE with windows counted upwards is wrong in torch
2.13); the others read files, call the user's Python, draw from the net's random stream, check labels or have
kernels of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from prototxt.compiler import WITHOUT
from prototxt.errors import NetError, first_line
from prototxt.layers.normalisation import BatchNorm
from prototxt.nodes import Graph

FUSED = frozenset({
    "AbsVal", "BatchNorm", "Bias", "BNLL", "Clip", "Concat", "ELU", "Eltwise", "Exp", "Log", "Power", "PReLU",
    "ReLU", "Scale", "Sigmoid", "Swish", "TanH",
})  # fmt: skip

Slots: TypeAlias = tuple[int, ...]
# A layer as the executor's loop needs it: index, forward, bottoms, tops, (top, weight) of its losses, bottoms
# to detach.
Step: TypeAlias = tuple[int, Callable[..., Any], Slots, Slots, tuple[tuple[int, float], ...], frozenset[int]]


class Part:
    """Consecutive steps as one function, from tensors of ``bottoms`` to those of ``tops``.

    It is compiled when it first runs, which takes seconds, for the shapes it is then given; inputs of other
    shapes go through the layers as they are. Raises NetError when the compiler fails.
    """

    def __init__(self, graph: Graph, steps: Sequence[Step], bottoms: Slots, tops: Slots) -> None:
        self.bottoms, self.tops = bottoms, tops
        self._first, self._last = graph.nodes[steps[0][0]], graph.nodes[steps[-1][0]]
        self._plain = _function(steps, bottoms, tops)
        # torch counts how often it compiles a code object and stops at some; each part has one of its own.
        plain = self._plain
        own = FunctionType(plain.__code__.replace(), plain.__globals__, closure=plain.__closure__)
        self._made = torch.compile(own, fullgraph=True, dynamic=False)
        self._shapes: list[torch.Size] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        shapes = [x.shape for x in inputs]
        if self._shapes is None:
            made = self._compile(inputs)
            self._shapes = shapes
            return made
        run: Callable[..., tuple[Tensor, ...]] = self._made if shapes == self._shapes else self._plain
        return run(*inputs)

    def _compile(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            made: tuple[Tensor, ...] = self._made(*inputs)
        except TorchDynamoException as error:
            raise NetError(
                f"{self._first.place} up to {self._last.name!r}: torch cannot compile them: "
                f"{_said(error)}; {WITHOUT}"
            ) from error
        return made


def _said(error: Exception) -> str:
    """The compiler's first error where it says one, else torch's first line."""
    lines = str(error).splitlines()
    return next((line for line in lines if " error: " in line), first_line(error))


def _function(steps: Sequence[Step], bottoms: Slots, tops: Slots) -> FunctionType:
    """The steps over a list of their own. ReLU makes new memory: the compiler knows what may be reused."""
    slots = dict.fromkeys(slot for step in steps for slot in (*step[2], *step[3]))
    number = {slot: place for place, slot in enumerate(slots)}
    calls = [
        (
            torch.relu if forward is torch.relu_ else forward,
            [(number[slot], i in blocked) for i, slot in enumerate(below)],
            [number[slot] for slot in above],
        )
        for _, forward, below, above, _, blocked in steps
    ]
    given, wanted = [number[slot] for slot in bottoms], [number[slot] for slot in tops]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        values: list[Any] = [None] * len(number)
        for place, tensor in zip(given, inputs):  # noqa: B905  (compiled: the fewer branches, the better)
            values[place] = tensor
        for forward, below, above in calls:
            made = forward(*[values[place].detach() if cut else values[place] for place, cut in below])
            if isinstance(made, Tensor):
                made = (made,)
            for place, tensor in zip(above, made):  # noqa: B905
                values[place] = tensor
        return tuple([values[place] for place in wanted])

    assert isinstance(run, FunctionType)
    return run


def compile_steps(graph: Graph, plan: Sequence[Step], outputs: set[int]) -> tuple[list[Step], frozenset[int]]:
    """The plan with each run of two or more layers of FUSED as one step; and the slots that stay inside.

    outputs  slots that are asked for at the end
    """
    made: list[Step] = []
    inside: set[int] = set()
    varying = _varying(graph)
    groups = [list(group) for _, group in groupby(plan, lambda step: _fits(graph, step, varying))]
    for at, steps in enumerate(groups):
        if len(steps) < 2 or not _fits(graph, steps[0], varying):
            made += steps
            continue
        later = outputs | {slot for group in groups[at + 1 :] for step in group for slot in step[2]}
        written = dict.fromkeys(slot for step in steps for slot in step[3])
        losses = {step[3][top]: weight for step in steps for top, weight in step[4]}
        tops = tuple(slot for slot in written if slot in later or slot in losses)
        inside |= set(written) - set(tops)
        part = Part(graph, steps, tuple(_from_outside(steps)), tops)
        weights = tuple((place, losses[slot]) for place, slot in enumerate(tops) if slot in losses)
        made.append((steps[0][0], part, part.bottoms, tops, weights, frozenset()))
    return made, frozenset(inside)


def _from_outside(steps: Sequence[Step]) -> Iterator[int]:
    written: set[int] = set()
    seen: set[int] = set()
    for _, _, below, above, _, _ in steps:
        for slot in below:
            if slot not in written | seen:
                seen.add(slot)
                yield slot
        written |= set(above)


def _fits(graph: Graph, step: Step, varying: set[int]) -> bool:
    node = graph.nodes[step[0]]
    by_batch = isinstance(node.module, BatchNorm) and not node.module.accumulated
    return node.type in FUSED and not by_batch and varying.isdisjoint(step[2])


def _varying(graph: Graph) -> set[int]:
    """Slots whose shape is settled by the data: Filter's tops, and all that follows from them."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.type == "Filter" or not found.isdisjoint(node.bottom_slots):
            found.update(node.top_slots)
    return found


def account(graph: Graph, plan: Sequence[Step], compiled: Sequence[Step]) -> str:
    """What of ``plan`` is compiled and what not, for the log."""
    parts = sum(isinstance(step[1], Part) for step in compiled)
    if not parts:
        return "compile: nothing here that torch's compiler could join: all layers run as they are"
    left = [graph.nodes[step[0]].type for step in compiled if not isinstance(step[1], Part)]
    joined = len(plan) - len(left)
    kinds = ", ".join(sorted(set(left) - {"Split"})) or "none"
    return f"compile: {joined} layers in {parts} parts, made at the first pass; as they are: {kinds}"
