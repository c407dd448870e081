"""Where nets give other results than in the original, because the original is wrong there.

One table for both readers: docs/prototxt.md lists it, and a net that meets an entry says so once in its log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prototxt.nodes import Graph, Node

Met = Callable[[Node, Graph], bool]


@dataclass(frozen=True)
class Difference:
    """One way in which a layer's results differ.

    topic     what the page calls it
    original  what the original does; ours is what we do instead
    met       whether a layer of a built net meets it; None where only its data would tell
    backward  it shows in gradients alone
    """

    topic: str
    original: str
    ours: str
    met: Met | None = None
    backward: bool = False


def differences_of(graph: Graph, trains: bool) -> Iterator[str]:
    """A line for the log for each entry that the net meets, with its first layer and the number of others.

    trains  the net runs backward, so that differences of gradients count
    """
    for entry in DIFFERENCES:
        if entry.met is None or (entry.backward and not trains):
            continue
        hit = [node for node in graph.nodes if entry.met(node, graph)]
        if hit:
            others = f" (and {len(hit) - 1} more)" if len(hit) > 1 else ""
            yield (
                f"{hit[0].place}{others}: {entry.topic} differs here from the original: "
                f"there, {entry.original}; here, {entry.ours}"
            )


def _writes_in_place(node: Node) -> bool:
    return bool(set(node.bottom_slots) & set(node.top_slots))


def _reads_what_it_overwrote(node: Node, graph: Graph) -> bool:
    spec: Any = node.spec
    wrong: dict[str, Callable[[], bool]] = {
        "BNLL": lambda: True,
        "Clip": lambda: True,
        "Log": lambda: True,
        "Power": lambda: spec.power_param.power not in (0, 1) and spec.power_param.scale != 0,
        "ReLU": lambda: spec.relu_param.negative_slope < 0,
        "ELU": lambda: spec.elu_param.alpha < 0,
    }
    return node.type in wrong and _writes_in_place(node) and wrong[node.type]()


_READS_ITS_TOP = frozenset({"ELU", "Exp", "LRN", "MVN", "Power", "Sigmoid", "Softmax", "Swish", "TanH"})


def _top_is_overwritten(node: Node, graph: Graph) -> bool:
    """The next layer that touches the top writes over it."""
    if node.type not in _READS_ITS_TOP:
        return False
    if node.type == "Power" and node.spec.power_param.power in (0, 1, 2):
        return False
    (slot,) = node.top_slots
    after = graph.nodes[graph.nodes.index(node) + 1 :]
    user = next((other for other in after if slot in other.bottom_slots), None)
    return user is not None and slot in user.top_slots and not _idle(user)


def _idle(node: Node) -> bool:
    return node.type == "Dropout" and node.spec.phase == "TEST"


def _split_top_is_overwritten(node: Node, graph: Graph) -> bool:
    return node.type == "Split" and len(node.tops) > 1 and not node.alias


def _window_outside(node: Node, graph: Graph) -> bool:
    """Without padding a stride above the kernel may lay the last window behind the image."""
    if node.type != "Pooling":
        return False
    pool = getattr(node.module, "pool", None)
    if pool is None or any(pool.pad):
        return False
    size = graph.shapes[node.bottom_slots[0]][2:4]
    windows = pool.counts((size[0], size[1]))
    return any((windows[i] - 1) * pool.stride[i] >= size[i] for i in (0, 1))


def _two_top_loss(node: Node, graph: Graph) -> bool:
    return node.type == "SoftmaxWithLoss" and len(node.tops) == 2


def _divides_product(node: Node, graph: Graph) -> bool:
    p = node.spec.eltwise_param
    return node.type == "Eltwise" and p.operation == p.PROD and not p.stable_prod_grad


def _odd_power(node: Node, graph: Graph) -> bool:
    p = node.spec.power_param
    return (
        node.type == "Power"
        and p.shift == 0
        and p.scale != 0
        and p.power > 1
        and p.power != 2
        and not math.isnan(p.power)
    )


DIFFERENCES = [
    Difference(
        "the gradient of a layer in place",
        "BNLL, Clip, Log, Power, and ReLU or ELU with a slope below 0 take their output for their input",
        "the gradient is that of what the layer computes",
        _reads_what_it_overwrote,
        backward=True,
    ),
    Difference(
        "the gradient of a layer whose top the next one overwrites in place",
        "ELU, Exp, LRN, MVN, Power, Sigmoid, Softmax, Swish and TanH take the next output for their own",
        "the gradient is that of what the layer computes",
        _top_is_overwritten,
        backward=True,
    ),
    Difference(
        "a layer in place behind one top of a Split",
        "it changes the other tops too, as all share one memory",
        "the other tops keep their values",
        _split_top_is_overwritten,
    ),
    Difference(
        "a pooling window wholly outside the image",
        "MAX gives the lowest float and sends its gradient out of bounds, AVE gives 0 or 0/0",
        "MAX gives the lowest float and no gradient, AVE gives 0",
        _window_outside,
    ),
    Difference(
        "SoftmaxWithLoss with two tops",
        "such a net cannot be built",
        "the second top holds the probabilities, without a gradient",
        _two_top_loss,
    ),
    Difference(
        "the gradient of a product",
        "stable_prod_grad: false divides the product by the bottom, 0/0 where it is 0",
        "it is always the product of the other bottoms",
        _divides_product,
        backward=True,
    ),
    Difference(
        "the gradient of a power at 0",
        "it is power y / x, 0/0 at x = 0",
        "it is power x^(power - 1)",
        _odd_power,
        backward=True,
    ),
    Difference(
        "a loss without loss_weight that another layer uses",
        "the other layer's gradient takes the place of the loss's own, and spoils the next iteration's loss",
        "its implied weight of 1 counts as a use: a Split keeps both gradients, as with a written weight",
        lambda node, graph: node.split_loss,
    ),
    Difference(
        "a label out of range",
        "memory that belongs to something else is read",
        "an error names the layer, the label, its record and what is allowed",
    ),
    Difference(
        "Accuracy of scores that are NaN",
        "every prediction counts as right",
        "none does",
    ),
    Difference(
        "STOCHASTIC pooling",
        "it runs on GPUs alone, and its gradient in the TEST phase is that of nothing",
        "it runs everywhere; in the TEST phase it has the gradient of its average",
    ),
    Difference(
        "InnerProduct without num_output",
        "its top has no values",
        "an error says that num_output must be set",
    ),
    Difference(
        "InfogainLoss whose matrix is a bottom, under force_backward",
        "the net cannot be built",
        "the matrix gets no gradient",
    ),
    Difference(
        "two layers of one name",
        "weights are loaded into the first alone",
        "the first of the file goes to the first of the net, the second to the second, and so on",
    ),
    Difference(
        "a layer name with a slash in an HDF5 weight file",
        "cannot be written",
        "is written as nested groups, and read again",
    ),
    Difference(
        "Python layers while several workers train",
        "refused, or one for all with share_in_parallel",
        "each worker is a process with a layer of its own; share_in_parallel changes nothing",
    ),
    Difference(
        "HDF5Output over several passes",
        "the first pass is kept, the second fails",
        "each pass adds its rows",
    ),
    Difference(
        "the data of a training that goes on from a snapshot",
        "begins again at the first record",
        "goes on behind the batches that the worker has had",
    ),
    Difference(
        "random numbers",
        "one stream of a Mersenne twister for a whole process",
        "each net has torch's generator of its own: equal distributions, other numbers",
    ),
]
