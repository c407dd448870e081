"""The executor behind pycaffe's face: layer by layer, through blobs that scripts may read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prototxt.blob import ActivationBlob
from prototxt.errors import PrototxtError
from prototxt.nodes import Graph, Node
from prototxt.whole import failed

Callback = Callable[[int], None]


@dataclass
class _Record:
    """One layer's small autograd graph: what went in and what came out of its last forward."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class LayerByLayer:
    """Each layer reads its bottoms from the blobs and leaves its tops there.

    Backward asks autograd for one layer at a time, with the top blobs' diffs: bottom diffs are overwritten,
    parameter diffs added to. Numbers that scripts wrote between the calls are used as they stand.
    The four callback lists are called with the layer's index.
    """

    def __init__(self, graph: Graph, blobs: list[ActivationBlob]) -> None:
        self._graph, self._blobs = graph, blobs
        self._records: list[_Record | None] = [None] * len(graph.nodes)
        self._owners = {alias: owner for owner, group in graph.aliases.items() for alias in group}
        self.before_forward: list[Callback] = []
        self.after_forward: list[Callback] = []
        self.before_backward: list[Callback] = []
        self.after_backward: list[Callback] = []

    @property
    def observed(self) -> bool:
        """Whether somebody wants to be called between the layers."""
        return bool(self.before_forward or self.after_forward or self.before_backward or self.after_backward)

    def forward(self, start: int, end: int) -> float:
        """Run the layers from ``start`` up to and with ``end``; returns the loss they add up to."""
        loss = 0.0
        for index in range(start, end + 1):
            node = self._graph.nodes[index]
            for callback in self.before_forward:
                callback(index)
            if not node.built.feed:
                self._forward_one(index, node)
            loss += self._loss(node)
            for callback in self.after_forward:
                callback(index)
        return loss

    def _forward_one(self, index: int, node: Node) -> None:
        self._records[index] = None
        if node.alias:
            return
        record = self._compute(node)
        for slot, tensor in zip(node.top_slots, record.outputs, strict=True):
            self._blobs[slot].store(tensor)
        if node.need_backward:
            self._records[index] = record

    def _compute(self, node: Node) -> _Record:
        """The layer on its bottoms' present numbers; the blobs of its tops are not touched."""
        inputs = [self._input(node, position) for position in range(len(node.bottom_slots))]
        try:
            with torch.set_grad_enabled(node.need_backward):
                made = node.module(*inputs)
        except PrototxtError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise failed(node, error, list(inputs)) from error
        return _Record(inputs, [made] if isinstance(made, Tensor) else list(made))

    def _input(self, node: Node, position: int) -> Tensor:
        """The bottom as a leaf; a copy where an in-place layer writes over it: so gradients are right."""
        tensor = self._blobs[node.bottom_slots[position]].tensor
        leaf = tensor.clone() if node.overwritten[position] else tensor.detach()
        return leaf.requires_grad_(node.need_backward and node.need_bottom[position])

    def _loss(self, node: Node) -> float:
        """Weight times top, summed; the weights stand in the tops' diffs, where scripts may change them."""
        return sum(
            float(torch.dot(blob.tensor.flatten(), blob.diff_tensor.flatten()))
            for blob, weight in zip(
                (self._blobs[slot] for slot in node.top_slots), node.loss_weights, strict=True
            )
            if weight
        )

    def backward(self, start: int, end: int) -> None:
        """Run backward from layer ``start`` down to ``end``.

        A layer whose forward has not run works on the numbers that its bottoms' blobs hold.
        """
        for index in range(start, end - 1, -1):
            node = self._graph.nodes[index]
            for callback in self.before_backward:
                callback(index)
            if node.need_backward and not node.built.feed:
                self._backward_one(index, node)
            for callback in self.after_backward:
                callback(index)

    def _backward_one(self, index: int, node: Node) -> None:
        if node.alias:
            self._backward_split(node)
            return
        params = [param for param in node.blobs if param.requires_grad]
        needed = [position for position, need in enumerate(node.need_bottom) if need]
        if not needed and not params:
            return
        record = self._records[index]
        if record is None:  # no forward yet: a script has filled the blobs itself
            record = self._records[index] = self._compute(node)
        gradients = self._gradients(node, record, [record.inputs[position] for position in needed], params)
        for position, gradient in zip(needed, gradients, strict=False):
            diff = self._blobs[node.bottom_slots[position]].diff_tensor
            if gradient is None:
                diff.zero_()
            else:
                diff.copy_(gradient)
        for param, gradient in zip(params, gradients[len(needed) :], strict=True):
            if gradient is not None:
                self._add_gradient(param, gradient)

    def _gradients(
        self, node: Node, record: _Record, inputs: list[Tensor], params: list[nn.Parameter]
    ) -> list[Tensor | None]:
        """d loss / d (inputs, params), seeded with the diffs of those tops that depend on them."""
        tops = [
            (tensor, self._blobs[slot].diff_tensor)
            for slot, tensor in zip(node.top_slots, record.outputs, strict=True)
            if tensor.requires_grad
        ]
        if not tops:
            return [None] * (len(inputs) + len(params))
        # In place, the bottom's diff is the top's: a copy, lest the first gradient spoil the others' seed.
        seeds = [diff.view(tensor.shape).clone() for tensor, diff in tops]
        wanted = [*inputs, *params]
        return list(
            torch.autograd.grad(
                [tensor for tensor, _ in tops], wanted, seeds, retain_graph=True, allow_unused=True
            )
        )

    def _backward_split(self, node: Node) -> None:
        if not node.need_bottom[0]:
            return
        first, *rest = (self._blobs[slot].diff_tensor for slot in node.top_slots)
        total = first.clone()
        for diff in rest:
            total += diff
        self._blobs[node.bottom_slots[0]].diff_tensor.copy_(total)

    def _add_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        owner = self._owners.get(param, param)
        if owner.grad is None:
            owner.grad = torch.zeros_like(owner.data)
        owner.grad += gradient.view(owner.shape)
