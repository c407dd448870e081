"""debug_info: the mean absolute value of every blob and gradient, layer by layer, as the original logs them.

The first layer that shows nan or inf is the one to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prototxt.net import Net
from prototxt.whole import Outcome
from shmtrain.log import Log, number


def watched_forward(net: Net, log: Log) -> Outcome:
    """One forward pass through the blobs, each layer's tops and parameters logged."""
    with _callback(net.layerwise.after_forward, lambda index: _log_forward(net, index, log)):
        return _layered_forward(net)


def layered_pass(net: Net) -> Outcome:
    """Forward and backward layer by layer, for a net whose layers somebody observes; nothing is logged."""
    outcome = _layered_forward(net)
    net.backward_range(len(net.layers) - 1, 0)
    return outcome


def _layered_forward(net: Net) -> Outcome:
    loss = net.forward_range(0, len(net.layers) - 1)
    return Outcome(torch.tensor(loss), {name: _tensor(net, name) for name in net.outputs})


def watched_pass(net: Net, log: Log) -> Outcome:
    """Forward and backward, gradients added to the parameters' own; diffs logged on the way back."""
    outcome = watched_forward(net, log)
    with _callback(net.layerwise.after_backward, lambda index: _log_backward(net, index, log)):
        net.backward_range(len(net.layers) - 1, 0)
    weights = [learnable.param.detach() for learnable in net.learnable]
    diffs = [learnable.param.grad for learnable in net.learnable if learnable.param.grad is not None]
    log.error(
        f"    [Backward] All net params (data, diff): L1 norm = ({_norm(weights, 1)}, {_norm(diffs, 1)});"
        f" L2 norm = ({_norm(weights, 2)}, {_norm(diffs, 2)})"
    )
    return outcome


@contextmanager
def _callback(callbacks: list[Callable[[int], None]], call: Callable[[int], None]) -> Iterator[None]:
    callbacks.append(call)
    try:
        yield
    finally:
        callbacks.remove(call)


def _log_forward(net: Net, index: int, log: Log) -> None:
    node = net.layers[index]
    for top in node.tops:
        if top in net.blobs:
            log.info(f"    [Forward] Layer {node.name}, top blob {top} data: {_mean(_tensor(net, top))}")
    for i, param in enumerate(node.blobs):
        log.info(f"    [Forward] Layer {node.name}, param blob {i} data: {_mean(param.detach())}")


def _log_backward(net: Net, index: int, log: Log) -> None:
    node = net.layers[index]
    if not node.need_backward:
        return
    for bottom, need in zip(node.bottoms, node.need_bottom, strict=True):
        if need:
            diff = torch.from_numpy(net.blobs[bottom].diff)
            log.info(f"    [Backward] Layer {node.name}, bottom blob {bottom} diff: {_mean(diff)}")
    for i, param in enumerate(node.blobs):
        if param.grad is not None and param.requires_grad:
            log.info(f"    [Backward] Layer {node.name}, param blob {i} diff: {_mean(param.grad)}")


def _tensor(net: Net, name: str) -> Tensor:
    return torch.from_numpy(net.blobs[name].data)


def _mean(values: Tensor) -> str:
    return number(float(values.abs().sum()) / max(values.numel(), 1))


def _norm(tensors: list[Tensor], order: int) -> str:
    """The norm of all of them as one vector."""
    powers = sum(float(torch.linalg.vector_norm(t.flatten(), order)) ** order for t in tensors)
    return number(powers ** (1 / order))
