"""The Python type: a class of the user's own as a layer that autograd goes through."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prototxt import python_layer
from prototxt.blob import ActivationBlob, Runs
from prototxt.errors import PythonLayerError
from prototxt.python_layer import Layer, Weights
from prototxt.python_modules import load_module, named_folders
from prototxt.registry import Built, LayerSpec, Shape, layer

FAILURES = (Exception, SystemExit)  # a layer's sys.exit(0) must not pass for the end of a training


class _Call(torch.autograd.Function):
    """The user's forward and backward as one operation over (bottoms, blobs)."""

    @staticmethod
    def forward(ctx: Any, module: PythonLayer, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.module, ctx.devices = module, [value.device for value in values]
        return module.compute(values[: len(module.bottom)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *seeds: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.module.differentiate(seeds, ctx.needs_input_grad[1:], ctx.devices))


class PythonLayer(nn.Module):
    """Holds the user's object, its blobs, and bottoms and tops as the object sees them."""

    def __init__(self, spec: LayerSpec, kind: type[Layer], bottoms: list[Shape]) -> None:
        super().__init__()
        self.spec, self.device = spec, spec.context.device
        self.values = nn.ParameterList()
        self.bottom = [ActivationBlob(shape, Runs(), 0) for shape in bottoms]
        own = [ActivationBlob((), Runs(), 0) for _ in spec.top]
        self.top = [
            self.bottom[i] if i < len(bottoms) and name == spec.bottom[i] else own[i]
            for i, name in enumerate(spec.top)
        ]
        self.name = f"{spec.python_param.module}.{spec.python_param.layer}"
        self.file = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
        self.layer = self._make(kind)
        self._ask("setup", self.bottom, self.top)
        self._ask("reshape", self.bottom, self.top)

    def _make(self, kind: type[Layer]) -> Layer:
        try:
            made = kind(self.spec.message)
        except FAILURES as error:
            raise self._failed("__init__", error) from error
        made.blobs = Weights(self.values)
        made.param_str = made.param_str_ = str(self.spec.python_param.param_str)
        made.phase = 1 if self.spec.phase == "TEST" else 0
        return made

    def _ask(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.layer, method)(*arguments)
        except FAILURES as error:
            raise self._failed(method, error) from error

    def _failed(self, method: str, error: BaseException) -> PythonLayerError:
        """Names the user's own line, though what it called may have raised deeper down.

        The class's file where no line of it has run: a method is missing, or takes other arguments.
        """
        frames = traceback.extract_tb(error.__traceback__)[1:]
        place = self.file
        if frames and frames[0].filename != python_layer.__file__:
            own = os.path.dirname(frames[0].filename)
            last = [frame for frame in frames if os.path.dirname(frame.filename) == own][-1]
            place = f"{last.filename}:{last.lineno}"
        return PythonLayerError(str(self.spec.error(f"{self.name}.{method}: {_said(error)} ({place})")))

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """The tops' shapes for bottoms of these."""
        for blob, shape in zip(self.bottom, bottoms, strict=True):
            blob.reshape(*shape)
        self._ask("reshape", self.bottom, self.top)
        return [blob.shape for blob in self.top]

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        if not self.top:
            return self.compute(bottoms)
        return _Call.apply(self, *bottoms, *self.values)  # type: ignore[no-untyped-call, no-any-return]

    def compute(self, bottoms: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The object's forward on copies of the bottoms."""
        for blob, value in zip(self.bottom, bottoms, strict=True):
            blob.store(value)
        self._ask("reshape", self.bottom, self.top)
        self._ask("forward", self.bottom, self.top)
        device = bottoms[0].device if bottoms else self.device
        return tuple([blob.tensor.clone().to(device) for blob in self.top])

    def differentiate(
        self, seeds: Sequence[Tensor], needed: Sequence[bool], devices: Sequence[torch.device]
    ) -> list[Tensor | None]:
        """The object's backward: a gradient for each bottom, then each blob; None where none is needed.

        A bottom's diff begins at zero, so one that the object leaves alone has no gradient.
        """
        down = list(needed[: len(self.bottom)])
        for blob in self.bottom:
            blob.diff_tensor.zero_()
        for blob, seed in zip(self.top, seeds, strict=True):
            blob.diff_tensor.copy_(seed)
        for weight in self.layer.blobs:
            weight.collect()
        try:
            self._ask("backward", self.top, down, self.bottom)
        finally:
            learned = [weight.collected() for weight in self.layer.blobs]
        given = [blob.diff_tensor.clone() for blob in self.bottom] + learned
        return [
            value.to(device) if need else None
            for value, need, device in zip(given, needed, devices, strict=True)
        ]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@layer("Python")
def python(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Bottoms, tops and blobs as the class ``layer`` of ``module`` has them; see prototxt.python_layer.Layer.

    The module lies in a folder of PYTHONPATH or of Net(options={"python_path": [folders]}), or is imported
    already. share_in_parallel changes nothing: workers are processes, each with a layer of its own.
    """
    module = PythonLayer(spec, _class_of(spec), bottoms)
    tops = [blob.shape for blob in module.top]
    return Built(module, tops, list(module.values), reshape=module.shapes)


def _class_of(spec: LayerSpec) -> type[Layer]:
    p = spec.python_param
    if not p.module or not p.layer:
        raise spec.error("python_param needs module and layer, a module's name and that of a class in it")
    folders = named_folders(spec.context.options.get("python_path", ()))
    try:
        module = load_module(p.module, folders)
    except FAILURES as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "caffe"
        hint = " (`import shmtrain` brings one)" if absent else ""
        said = str(error) if isinstance(error, ImportError) else _said(error)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if any(frame.filename.startswith(f + os.sep) for f in folders)]
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        raise PythonLayerError(str(spec.error(f"module {p.module!r}: {said}{hint}{place}"))) from error
    kind = getattr(module, p.layer, None)
    if not (isinstance(kind, type) and issubclass(kind, Layer)):
        what = "has no class" if kind is None else "has no layer"
        place = getattr(module, "__file__", None) or "built in"
        raise spec.error(
            f"module {p.module!r} ({place}) {what} {p.layer!r}: a class derived from caffe.Layer is needed"
        )
    return kind
