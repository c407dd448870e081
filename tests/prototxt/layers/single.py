"""One layer by itself, from its prototxt text: what the tests of this folder build and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf import text_format
from torch import Tensor

from prototxt import schema
from prototxt.registry import BuildContext, Built, LayerSpec, Phase, Shape, build_layer

Array = npt.NDArray[Any]


def build(text: str, *bottoms: Shape, tops: int = 1, phase: Phase = "TRAIN", in_place: bool = False) -> Built:
    """Build ``layer { name: "it" <text> }`` over bottoms a, b, .. of these shapes and tops y0, y1, .."""
    message: Any = text_format.Parse(text, schema.LayerParameter())
    message.name = "it"
    message.bottom.extend("abcdefgh"[: len(bottoms)])
    message.top.extend(f"y{i}" for i in range(tops))
    generator = torch.Generator().manual_seed(11)
    context = BuildContext(phase=phase, seed=11, generator=generator)
    return build_layer(LayerSpec(message, "net.prototxt", 7, context, in_place), list(bottoms))


def set_blobs(built: Built, *values: npt.ArrayLike) -> None:
    for blob, value in zip(built.blobs, values, strict=True):
        blob.data.copy_(torch.as_tensor(np.asarray(value), dtype=blob.dtype).reshape(blob.shape))


def tensors(*arrays: npt.ArrayLike) -> list[Tensor]:
    return [torch.tensor(np.asarray(a, dtype=np.float32)) for a in arrays]


def run(built: Built, *arrays: npt.ArrayLike) -> list[Array]:
    """The tops as arrays; their shapes must be those that the builder announced."""
    made = built.module(*tensors(*arrays))
    tops = [made] if isinstance(made, Tensor) else list(made)
    assert [tuple(top.shape) for top in tops] == built.tops
    return [top.detach().numpy() for top in tops]


def gradients(built: Built, *arrays: npt.ArrayLike, seed: npt.ArrayLike | None = None) -> list[Array]:
    """d top 0 / d bottoms for a top diff of ``seed``, ones by default; 0 for a bottom without gradient."""
    inputs = tensors(*arrays)
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i not in built.labels)
    made = built.module(*inputs)
    top = made if isinstance(made, Tensor) else made[0]
    if not top.requires_grad:  # a constant, or a layer without gradient
        return [np.zeros(t.shape) for t in inputs]
    given = torch.ones_like(top) if seed is None else torch.tensor(np.asarray(seed, dtype=np.float32))
    top.backward(given.reshape(top.shape))
    return [np.zeros(t.shape) if t.grad is None else t.grad.numpy() for t in inputs]


def noise(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
