"""A layer type is one decorated function: LayerSpec and bottom shapes in, module and top shapes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

import torch
from google.protobuf.message import Message
from torch import nn

from prototxt.errors import LayerError, PrototxtError, first_line
from prototxt.forks import FORK_TYPES, origin
from prototxt.room import too_large

Shape = tuple[int, ...]
Phase = Literal["TRAIN", "TEST"]


@dataclass(frozen=True)
class BuildContext:
    """What a layer may know of the net it is built into.

    generator  the net's one random stream: fillers draw from it while the net is built (equal on every
               rank); afterwards the net reseeds it by rank, so dropout and crops differ between workers.
               Keep the object, not numbers drawn from it
    options    settings of the data readers, handed through from Net(options=...)
    """

    phase: Phase
    seed: int | None = None
    rank: int = 0
    world: int = 1
    generator: torch.Generator = field(default_factory=torch.Generator)
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (a torch.device is immutable)
    stages: tuple[str, ...] = ()
    level: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the file as its builder sees it; ``spec.convolution_param`` reads the message's field.

    line           where the layer begins in ``path``; None when the message did not come from a text
    in_place       top 0 is bottom 0
    need_gradient  a gradient is wanted for one of the bottoms
    """

    message: Message
    path: str
    line: int | None
    context: BuildContext
    in_place: bool = False
    need_gradient: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    @property
    def phase(self) -> Phase:
        """The layer's own phase when it has one, else the net's."""
        message: Any = self.message
        if message.HasField("phase"):
            return "TEST" if message.phase == 1 else "TRAIN"
        return self.context.phase

    def error(self, text: str) -> LayerError:
        """An error to raise: ``path:line: layer 'name': text``."""
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return LayerError(f"{place}: layer {self.name!r}: {text}")


@dataclass
class Built:
    """A layer ready to run.

    module      forward(*bottoms) -> Tensor | tuple[Tensor, ...], one a top, () without tops. It must not
                change a bottom in place, nor rely on the shapes it was built with where the data decides.
    tops        shapes for the bottom shapes given. More than the layer names: the rest is anonymous,
                which only a loss may do
    blobs       learned or accumulated values, in Caffe's order and layout. Each is registered in
                ``module`` and looked up there at every forward: the net exchanges the parameter object
                for a shared one, and its storage for a part of the trainer's vector
    loss        set from the type's registration: top 0 has loss_weight 1 unless the file says otherwise
    statistics  the blobs are accumulators (BatchNorm): never trained, lr_mult is 0
    labels      bottoms that never get a gradient
    source      a data layer: forward() without bottoms gives the next batch; the module has close()
    feed        an Input layer: its tops are written by the caller; forward is never called
    reshape     the tops' shapes for other bottom shapes, where building the layer anew would have effects
    """

    module: nn.Module
    tops: list[Shape]
    blobs: list[nn.Parameter] = field(default_factory=list)
    loss: bool = False
    statistics: bool = False
    labels: frozenset[int] = frozenset()
    source: bool = False
    feed: bool = False
    reshape: Callable[[list[Shape]], list[Shape]] | None = None


@dataclass
class Learnable:
    """One parameter blob of a net, by its owner; Caffe's learnable_params, in its order.

    shared_name  the name in ``param { name: }``, "" when it has none
    """

    layer: str
    index: int
    param: nn.Parameter
    lr_mult: float
    decay_mult: float
    statistics: bool
    shared_name: str


Builder = Callable[[LayerSpec, list[Shape]], Built]
_BUILDERS: dict[str, Builder] = {}
_LOSSES: set[str] = set()


def layer(*types: str, loss: bool = False) -> Callable[[Builder], Builder]:
    """Register the function below as the builder of these layer types; a second one of a type replaces it.

    loss  top 0 has loss_weight 1 unless the file says otherwise, and tops may be left out
    """

    def register(builder: Builder) -> Builder:
        _BUILDERS.update(dict.fromkeys(types, builder))
        (_LOSSES.update if loss else _LOSSES.difference_update)(types)
        return builder

    return register


def layer_types() -> list[str]:
    """The types that can be built, alphabetical."""
    import prototxt.layers  # noqa: F401  (the import registers them)

    return sorted(_BUILDERS)


def is_loss(kind: str) -> bool:
    """Whether layers of this type weigh 1 in the net's loss by themselves."""
    layer_types()
    return kind in _LOSSES


def builder_of(kind: str) -> Builder:
    """The registered function that builds layers of this type; KeyError without one."""
    layer_types()
    return _BUILDERS[kind]


def _hint(kind: str, known: list[str]) -> str:
    """What may be meant by an unknown type."""
    if not kind:
        return "type must be set"
    fork = origin(kind, FORK_TYPES)
    if fork:
        return fork
    near = [name for name in known if name.lower() == kind.lower()] or get_close_matches(kind, known, 3)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def build_layer(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Build one layer; LayerError for an unknown type, with the nearest known, and for what torch refuses."""
    known = layer_types()
    builder = _BUILDERS.get(spec.type)
    if builder is None:
        raise spec.error(f"unknown layer type {spec.type!r} ({_hint(spec.type, known)})")
    try:
        built = builder(spec, bottoms)
        built.loss = spec.type in _LOSSES
        for shape in built.tops:
            if reason := too_large(shape):
                raise spec.error(reason)
        return built
    except PrototxtError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise spec.error(f"cannot be built for bottoms of shape {bottoms}: {first_line(error)}") from error
