"""A net built from prototxt: Caffe's semantics on torch modules, pycaffe's names for what scripts touch."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from logging import getLogger
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from google.protobuf.message import Message
from torch import Tensor

from prototxt import schema, upgrade
from prototxt.blob import ActivationBlob, Array, Blob, ParamBlob, Runs
from prototxt.build import build_graph, close_sources
from prototxt.compiler import cpp_compiler
from prototxt.differences import differences_of
from prototxt.errors import NetError, ParseError
from prototxt.layerwise import LayerByLayer
from prototxt.nodes import AUTOMATIC, Node
from prototxt.registry import BuildContext, Learnable, Phase
from prototxt.reshape import reshape_blobs
from prototxt.rules import filter_layers, insert_splits, set_state
from prototxt.speed import PRECISIONS
from prototxt.text import NetSource, load_net
from prototxt.whole import Outcome, WholeGraph

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = getLogger(__name__)
Source = str | os.PathLike[str] | NetSource | Message


class Worker(TypedDict, total=False):
    """Whom a net works for; the rest of Net's keyword arguments.

    seed       of fillers and dropout; None or below 0: another one each time
    rank       this worker among ``world``: dropout and crops differ by it, fillers do not
    options    settings of the data readers; {"batch_parts": N}: a TRAIN layer's batch is shared out among N
    precision  of ``run()``: "float32", or "bf16" for what may work in bfloat16; parameters stay float32
    compile    let torch's compiler join layers of ``run()``: seconds at the first pass, less memory traffic
               after it. Blobs inside of what it joined show nothing of a ``run()``
    """

    seed: int | None
    rank: int
    world: int
    options: Mapping[str, Any] | None
    precision: str
    compile: bool


class Net:
    """The layers of one phase, connected, with two ways to run them.

    ``run()`` is for training: one autograd graph, no blobs touched. ``forward()`` and ``backward()`` go layer
    by layer through ``blobs``, where scripts read and write. Parameters belong to both.

    source   a prototxt file, a NetSource of prototxt.text, or a NetParameter (copied, upgraded when old)
    stages   appended to the net's own; level replaces the net's own unless None
    weights  a weight file or several, loaded over the fillers' values
    worker   seed, rank, world, options, precision and compile: see Worker

    Close the net, or leave its ``with`` block, to end its data layers' readers. Not for several threads.
    """

    def __init__(
        self,
        source: Source,
        phase: Phase = "TRAIN",
        *,
        stages: Iterable[str] = (),
        level: int | None = 0,
        weights: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        **worker: Unpack[Worker],
    ) -> None:
        loaded = _load(source)
        if worker.get("precision", "float32") not in PRECISIONS:
            raise NetError(f"the precision is {' or '.join(PRECISIONS)}, not {worker['precision']!r}")
        if worker.get("compile", False):
            cpp_compiler()
        if phase not in ("TRAIN", "TEST"):
            raise NetError(f"the phase is TRAIN or TEST, not {phase!r}")
        self.phase: Phase = phase
        self.path = loaded.path
        self.name = str(loaded.message.name)
        self.closed = False
        set_state(loaded.message, schema.Phase.Value(phase), stages, level)
        context = _context(loaded.message.state, phase, worker)
        kept, dropped = filter_layers(loaded)
        self._graph = build_graph(loaded.message, insert_splits(kept), dropped, loaded.path, context)
        self._close = weakref.finalize(self, close_sources, self._graph)
        _reseed(context)
        self._make_blobs(worker)
        if weights is not None:
            for path in [weights] if isinstance(weights, (str, os.PathLike)) else weights:
                self.copy_from(path)
        free = loaded.message.force_backward  # such a net is run backward from seeds that a script writes
        if not context.rank:
            for line in differences_of(self._graph, trains=phase == "TRAIN" or free):
                _log.warning("%s", line)
        if phase == "TRAIN" and self.learnable and not self.has_loss and not free:
            _log.warning("%s: no layer contributes to the loss: nothing will be trained", loaded.path)

    def _make_blobs(self, worker: Worker) -> None:
        graph, runs = self._graph, Runs()
        alias = {top: node.bottom_slots[0] for node in graph.nodes if node.alias for top in node.top_slots}
        slots: list[ActivationBlob] = []
        for slot, shape in enumerate(graph.shapes):
            slots.append(ActivationBlob(shape, runs, slot, slots[alias[slot]] if slot in alias else None))
        for node in graph.nodes:
            for slot, weight in zip(node.top_slots, node.loss_weights, strict=True):
                slots[slot].weight = weight
        self._keep_constants(slots)
        self._slots = slots
        self.blobs: OrderedDict[str, Blob] = OrderedDict(
            (name, blob) for name, blob in zip(graph.names, slots, strict=True) if name != AUTOMATIC
        )
        self._param_blobs = {param: ParamBlob(param) for node in graph.nodes for param in node.blobs}
        self.params: OrderedDict[str, list[ParamBlob]] = OrderedDict(
            (node.name, self.blobs_of(node)) for node in graph.nodes if node.blobs
        )
        self._whole = WholeGraph(
            graph, slots, runs, self.phase == "TRAIN",
            precision=worker.get("precision", "float32"), compiled=worker.get("compile", False),
        )  # fmt: skip
        self.layerwise = LayerByLayer(graph, slots)

    def _keep_constants(self, slots: list[ActivationBlob]) -> None:
        """A blob that is filled once is its layer's own tensor: scripts may write it. Not if a layer does."""
        nodes = self._graph.nodes
        written = {slot for node in nodes for slot in node.top_slots if slot in node.bottom_slots}
        for node in nodes:
            constants: dict[int, Tensor] = getattr(node.module, "constants", {})
            for top, tensor in constants.items():
                if node.top_slots[top] not in written:
                    slots[node.top_slots[top]].live_in(tensor)

    # ------------------------------------------------------------ what it is made of

    @property
    def layers(self) -> list[Node]:
        """The layers in order, Splits included."""
        return self._graph.nodes

    @property
    def learnable(self) -> list[Learnable]:
        """The parameters by their owners, in Caffe's order."""
        return self._graph.learnable

    @property
    def inputs(self) -> list[str]:
        """The tops of the Input layers, in order."""
        return self._graph.inputs

    @property
    def outputs(self) -> list[str]:
        """The blobs that no layer uses, alphabetical."""
        return self._graph.outputs

    @cached_property
    def layer_names(self) -> list[str]:
        return [node.name for node in self.layers]

    @property
    def compile_account(self) -> str:
        """One line about what is compiled and what not; empty for a net that is not to be."""
        return self._whole.account

    @cached_property
    def has_loss(self) -> bool:
        return any(any(node.loss_weights) for node in self.layers)

    @cached_property
    def layer_dict(self) -> OrderedDict[str, Node]:
        return OrderedDict((node.name, node) for node in self.layers)

    @cached_property
    def top_names(self) -> OrderedDict[str, list[str]]:
        return OrderedDict((node.name, node.tops) for node in self.layers)

    @cached_property
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        return OrderedDict((node.name, node.bottoms) for node in self.layers)

    @cached_property
    def blob_loss_weights(self) -> OrderedDict[str, float]:
        names = zip(self._graph.names, self._slots, strict=True)
        return OrderedDict((name, blob.weight) for name, blob in names if name != AUTOMATIC)

    # ------------------------------------------------------------ running it

    def run(self) -> Outcome:
        """One forward pass as one autograd graph; ``run().loss.backward()`` fills the parameters' gradients.

        Input blobs are read, data layers give their next batch. Afterwards ``blobs`` show what this run made.
        """
        self._check_open()
        return self._whole.run()

    def forward(
        self,
        blobs: Iterable[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: Any,
    ) -> dict[str, Array]:
        """Run the layers from ``start`` to ``end``, both included, through the blobs.

        inputs  arrays for all input blobs, of their shape (or one that broadcasts to it)
        Returns the data of the net's outputs (with ``end``: that layer's tops) and of ``blobs``.
        """
        first = 0 if start is None else self._index(start)
        last = len(self.layers) - 1 if end is None else self._index(end)
        self._write(inputs, self.inputs, "input", "data")
        self.forward_range(first, last)
        names = [*(self.outputs if end is None else self.layers[last].tops), *(blobs or ())]
        return {name: self._blob(name).data for name in names}

    def backward(
        self,
        diffs: Iterable[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **seeds: Any,
    ) -> dict[str, Array]:
        """Run backward from layer ``start`` down to ``end``, both included, from the top blobs' diffs.

        seeds  arrays for the diffs of all output blobs; without them the diffs stand as they are
        Returns the diffs of the inputs (with ``end``: of that layer's bottoms) and of ``diffs``.
        """
        first = len(self.layers) - 1 if start is None else self._index(start)
        last = 0 if end is None else self._index(end)
        self._write(seeds, self.outputs, "output", "diff")
        self.backward_range(first, last)
        names = [*(self.inputs if end is None else self.layers[last].bottoms), *(diffs or ())]
        return {name: self._blob(name).diff for name in names}

    def forward_range(self, first: int, last: int) -> float:
        """Run layers ``first`` to ``last`` by index; returns the loss they add up to."""
        self._check_open()
        return self.layerwise.forward(first, last)

    def backward_range(self, first: int, last: int) -> None:
        """Run layers ``first`` down to ``last`` backward, by index."""
        self._check_open()
        self.layerwise.backward(first, last)

    def _write(self, arrays: Mapping[str, Any], expected: list[str], kind: str, field: str) -> None:
        if not arrays:
            return
        if set(arrays) != set(expected):
            raise NetError(
                f"{kind} arguments do not match the net's {kind}s: got {', '.join(sorted(arrays))}; "
                f"the net has {', '.join(expected) or 'none'}"
            )
        for name, array in arrays.items():
            target = getattr(self.blobs[name], field)
            values = np.asarray(array)
            if values.ndim and target.ndim and values.shape[0] != target.shape[0]:
                raise NetError(
                    f"{kind} {name!r} is not batch sized: {values.shape[0]} rows for shape {target.shape} "
                    f"(reshape the blob first)"
                )
            try:
                target[...] = values
            except ValueError as error:
                raise NetError(
                    f"{kind} {name!r}: shape {values.shape} does not fit {target.shape}"
                ) from error

    def _index(self, name: str) -> int:
        if name not in self.layer_names:
            raise NetError(f"the net has no layer {name!r} (layers: {', '.join(self.layer_names)})")
        return self.layer_names.index(name)

    def _blob(self, name: str) -> Blob:
        if name not in self.blobs:
            raise NetError(f"the net has no blob {name!r} (blobs: {', '.join(self.blobs)})")
        return self.blobs[name]

    def reshape(self) -> None:
        """Carry the shapes of the input blobs through the net, without running it."""
        reshape_blobs(self._graph, self._slots)

    # ------------------------------------------------------------ parameters

    def set_param(self, layer: str, index: int, data: Tensor, gradient: Tensor | None = None) -> None:
        """Let a parameter live in ``data``, and its gradient in ``gradient`` when given; values are data's.

        Both have the parameter's count; they may be views of a flat vector. Every layer that shares the
        parameter follows.
        """
        param = self.params[layer][index].param
        if data.numel() != param.numel() or data.dtype != param.dtype:
            raise NetError(
                f"parameter {index} of layer {layer!r} is {param.numel()} x {param.dtype}, "
                f"not {data.numel()} x {data.dtype}"
            )
        param.data = data.view(param.shape)
        for alias in self._graph.aliases.get(param, ()):
            alias.data = data.view(alias.shape)
        if gradient is not None:
            param.grad = gradient.view(param.shape)

    def blobs_of(self, node: Node) -> list[ParamBlob]:
        """The layer's parameters as blobs; the same objects as in ``params``."""
        return [self._param_blobs[param] for param in node.blobs]

    def clear_param_diffs(self) -> None:
        """Set every parameter's gradient to zero, in place."""
        for learnable in self.learnable:
            if learnable.param.grad is not None:
                learnable.param.grad.zero_()

    def share_with(self, other: Net) -> None:
        """Let the parameters of layers that both nets have (by name) live in ``other``'s storage."""
        from prototxt.weights import share_parameters

        share_parameters(self, other)

    def copy_from(self, path: str | os.PathLike[str]) -> None:
        """Load a .caffemodel (binaryproto or HDF5, told by its content), layer by layer by name."""
        from prototxt.weights import load_weights

        load_weights(self, path)

    load_hdf5 = copy_from

    def save(self, path: str | os.PathLike[str], diff: bool = False) -> None:
        """Write a binaryproto .caffemodel; the file appears whole or not at all."""
        from prototxt.caffemodel import write_net

        write_net(path, self.to_proto(diff))

    def save_hdf5(self, path: str | os.PathLike[str], diff: bool = False) -> None:
        """Write an HDF5 .caffemodel.h5; the file appears whole or not at all."""
        from prototxt.hdf5_weights import write_net

        write_net(self, path, diff)

    def to_proto(self, diff: bool = False) -> Any:
        """The net with its weights as a NetParameter of prototxt.schema.wire; ``diff`` adds the gradients."""
        from prototxt.weights import net_message

        return net_message(self, diff)

    # ------------------------------------------------------------ its end

    def close(self) -> None:
        """End the readers of the data layers; twice is fine."""
        self.closed = True
        self._close()

    def _check_open(self) -> None:
        if self.closed:
            raise NetError(f"{self.path}: the net is closed")

    def __enter__(self) -> Net:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(source: Source) -> NetSource:
    if isinstance(source, (str, os.PathLike)):
        return load_net(source)
    if isinstance(source, NetSource):
        message, path, lines = schema.NetParameter(), source.path, list(source.lines)
        message.CopyFrom(source.message)
        return NetSource(message, path, lines)
    message = schema.NetParameter()
    message.CopyFrom(source)
    try:
        upgrade.upgrade_net(message)
    except ValueError as error:
        raise ParseError(f"<message>: {error}") from error
    return NetSource(message, "<message>")


def _context(state: Any, phase: Phase, worker: Worker) -> BuildContext:
    seed = worker.get("seed")
    seed = None if seed is None or seed < 0 else seed
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return BuildContext(
        phase=phase,
        seed=seed,
        rank=worker.get("rank", 0),
        world=worker.get("world", 1),
        generator=generator,
        stages=tuple(state.stage),
        level=state.level,
        options=worker.get("options") or {},
    )


def _reseed(context: BuildContext) -> None:
    """From here on the ranks draw different numbers: dropout, crops."""
    if context.seed is not None:
        mixed = np.random.SeedSequence([context.seed, context.rank]).generate_state(1, np.uint64)
        context.generator.manual_seed(int(mixed[0] >> np.uint64(1)))
