"""Parameters by their owners: multipliers, and the exchange of a shared one in the modules that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prototxt.errors import LayerError
from prototxt.registry import Built, LayerSpec, Learnable


@dataclass
class _Owner:
    learnable: Learnable
    explicit_lr: bool
    explicit_decay: bool


class ParamTable:
    """Collects the parameters of one net, in layer order.

    learnable  owners only
    aliases    owner -> parameters of another shape that share its storage (share_mode PERMISSIVE)
    """

    def __init__(self) -> None:
        self.learnable: list[Learnable] = []
        self.aliases: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._names: dict[str, _Owner] = {}

    def add_layer(self, spec: LayerSpec, built: Built) -> list[nn.Parameter]:
        """Register the layer's blobs; returns the parameters that its module uses from now on."""
        params = spec.message.param  # type: ignore[attr-defined]
        if len(params) > len(built.blobs):
            raise spec.error(
                f"too many param blocks: {len(params)}, but the layer has {len(built.blobs)} blobs"
            )
        return [self._add(spec, built, index) for index in range(len(built.blobs))]

    def _add(self, spec: LayerSpec, built: Built, index: int) -> nn.Parameter:
        params = spec.message.param  # type: ignore[attr-defined]
        settings = params[index] if index < len(params) else type(spec.message)().param.add()  # type: ignore[attr-defined]
        blob = built.blobs[index]
        owner = self._names.get(settings.name)
        if settings.name and owner is not None:
            return self._share(spec, built, index, settings, owner)
        learnable = Learnable(
            layer=spec.name,
            index=index,
            param=blob,
            lr_mult=settings.lr_mult,
            decay_mult=settings.decay_mult,
            statistics=built.statistics,
            shared_name=settings.name,
        )
        self.learnable.append(learnable)
        if settings.name:
            self._names[settings.name] = _Owner(
                learnable, settings.HasField("lr_mult"), settings.HasField("decay_mult")
            )
        return blob

    def _share(self, spec: LayerSpec, built: Built, index: int, settings: Any, owner: _Owner) -> nn.Parameter:
        blob, shared = built.blobs[index], owner.learnable.param
        strict = settings.share_mode != type(settings).PERMISSIVE
        if blob.numel() != shared.numel() or (strict and blob.shape != shared.shape):
            raise _mismatch(spec, settings.name, owner.learnable, blob, strict)
        _merge_multipliers(spec, settings, owner)
        if blob.shape == shared.shape:
            replace_parameter(built.module, blob, shared)
            return shared
        _alias(blob, shared)
        self.aliases.setdefault(shared, []).append(blob)
        return blob


def _merge_multipliers(spec: LayerSpec, settings: Any, owner: _Owner) -> None:
    """The first layer that sets a multiplier decides; another value later is an error."""
    learnable = owner.learnable
    for name in ("lr_mult", "decay_mult"):
        flag = "explicit_lr" if name == "lr_mult" else "explicit_decay"
        if not settings.HasField(name):
            continue
        value = getattr(settings, name)
        if not getattr(owner, flag):
            setattr(owner, flag, True)
            setattr(learnable, name, value)
        elif getattr(learnable, name) != value:
            raise spec.error(
                f"Shared param '{settings.name}' has mismatched {name}: {value:g} here, "
                f"{getattr(learnable, name):g} in layer {learnable.layer!r}"
            )


def _mismatch(spec: LayerSpec, name: str, owner: Learnable, blob: Tensor, strict: bool) -> LayerError:
    what = "shape" if strict else "count"
    hint = (
        "; share_mode: PERMISSIVE asks for equal counts only" if blob.numel() == owner.param.numel() else ""
    )
    return spec.error(
        f"Cannot share param '{name}' owned by layer '{owner.layer}' with layer '{spec.name}'; "
        f"{what} mismatch: the owner's is {tuple(owner.param.shape)}, here it is {tuple(blob.shape)}{hint}"
    )


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever ``module`` has ``old`` registered."""
    for part in module.modules():
        for name, value in list(part._parameters.items()):
            if value is old:
                setattr(part, name, new)


def _alias(blob: nn.Parameter, owner: nn.Parameter) -> None:
    """Let ``blob`` read the owner's storage in its own shape, and hand its gradients over to the owner."""
    blob.data = owner.data.view(blob.shape)

    def hand_over(param: Tensor) -> None:
        assert param.grad is not None
        gradient = param.grad.view(owner.shape)
        param.grad = None
        with torch.no_grad():
            owner.grad = gradient.clone() if owner.grad is None else owner.grad.add_(gradient)

    blob.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
