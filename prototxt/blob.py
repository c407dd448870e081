"""pycaffe's Blob: a named array with a gradient, as numpy views that scripts read and write."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from prototxt.errors import NetError
from prototxt.registry import Shape
from prototxt.room import MAX_AXES

Array = npt.NDArray[np.float32]


class Blob:
    """Data and diff of one shape, float32. The views stay valid as long as the blob is not made larger.

    A view held past a growing reshape keeps the old numbers and is no part of the blob any more.
    """

    @property
    def tensor(self) -> Tensor:
        """The data as a tensor on the blob's own storage, without gradient."""
        raise NotImplementedError

    @property
    def diff_tensor(self) -> Tensor:
        """The diff as a tensor on its own storage; zeros until something is written."""
        raise NotImplementedError

    def reshape(self, *dims: int) -> None:
        """Change the shape; numbers are kept while the count fits into the memory there is."""
        raise NotImplementedError

    @property
    def data(self) -> Array:
        return np.asarray(self.tensor.numpy())

    @property
    def diff(self) -> Array:
        return np.asarray(self.diff_tensor.numpy())

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def num(self) -> int:
        return self._legacy(0)

    @property
    def channels(self) -> int:
        return self._legacy(1)

    @property
    def height(self) -> int:
        return self._legacy(2)

    @property
    def width(self) -> int:
        return self._legacy(3)

    def _legacy(self, axis: int) -> int:
        """A size by its old name: axes that the blob lacks count 1."""
        shape = self.shape
        if len(shape) > 4:
            raise NetError(f"num, channels, height and width need at most 4 axes; the shape is {shape}")
        return shape[axis] if axis < len(shape) else 1

    def __repr__(self) -> str:
        return f"Blob{self.shape}"


class Runs:
    """The values of the last whole-graph run, from which blobs refresh themselves when they are read.

    watched  blobs whose numpy views are in somebody's hands: refreshed at the end of every run
    inside   slots that a run leaves nothing in: they lie inside of compiled parts
    """

    def __init__(self) -> None:
        self.values: list[Tensor | None] = []
        self.inside: frozenset[int] = frozenset()
        self.number = 0
        self.watched: set[ActivationBlob] = set()

    def refresh(self) -> None:
        for blob in self.watched:
            if blob.slot not in self.inside:
                blob.tensor  # noqa: B018  (reading it brings it up to date)


class ActivationBlob(Blob):
    """A blob between layers. It takes memory, and values from whole-graph runs, only once someone looks.

    alias  the blob whose data this one shares (a Split's bottom); its diff is its own
    """

    def __init__(self, shape: Shape, runs: Runs, slot: int, alias: ActivationBlob | None = None) -> None:
        self._runs, self.slot, self._alias = runs, slot, alias
        self._seen = runs.number
        self._shape = _checked(shape)
        self._data = torch.zeros(0)
        self._view: Tensor | None = None  # the data in its shape, until either changes
        self._diff = torch.zeros(0)
        self.weight = 0.0

    @property
    def tensor(self) -> Tensor:
        if self._alias is not None:
            return self._alias.tensor
        if self._seen != self._runs.number:
            if self.slot in self._runs.inside:
                raise NetError(
                    "this blob lies inside of a compiled part, which shows nothing of a run(): read it after"
                    " forward(), or build the net without compile"
                )
            self._seen = self._runs.number
            value = self._runs.values[self.slot]
            if value is not None and value.data_ptr() != self._data.data_ptr():
                self.store(value)
        return self._reserve()

    @property
    def data(self) -> Array:
        self._runs.watched.add(self if self._alias is None else self._alias)
        return super().data

    def _reserve(self) -> Tensor:
        if self._view is None:
            count = math.prod(self._shape)
            if count > self._data.numel():
                self._data = torch.zeros(count)
            self._view = self._data[:count].view(self._shape)
        return self._view

    @property
    def diff_tensor(self) -> Tensor:
        shape = self.shape
        count = math.prod(shape)
        if self._diff.numel() < count:
            self._diff = torch.full((count,), self.weight)
        return self._diff[:count].view(shape)

    @property
    def shape(self) -> Shape:
        if self._alias is not None:
            return self._alias.shape
        value = self._runs.values[self.slot] if self._seen != self._runs.number else None
        return self._shape if value is None else tuple(value.shape)

    def reshape(self, *dims: int) -> None:
        if self._alias is not None:
            self._alias.reshape(*dims)
            return
        self._shape, self._view = _checked(dims), None
        self._seen = self._runs.number

    def live_in(self, tensor: Tensor) -> None:
        """Let the data be ``tensor``, contiguous float32 of the blob's shape: one storage from now on."""
        self._data, self._view = tensor.detach().reshape(-1), None

    def store(self, value: Tensor) -> None:
        """Take over shape and numbers of ``value``, unseen by autograd: graphs on this storage live."""
        self._seen = self._runs.number
        if tuple(value.shape) != self._shape:
            self.reshape(*value.shape)
        self._reserve().data.copy_(value.detach())


class ParamBlob(Blob):
    """A layer's weights; data and diff are the parameter's own storage and gradient."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param

    @property
    def tensor(self) -> Tensor:
        return self.param.data

    @property
    def diff_tensor(self) -> Tensor:
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param.data)
        return self.param.grad

    def reshape(self, *dims: int) -> None:
        shape = _checked(dims)
        if math.prod(shape) == self.count:
            self.param.data = self.param.data.view(shape)
        else:
            self.param.data = torch.zeros(shape)
        self.param.grad = None


def _checked(dims: Any) -> Shape:
    shape = tuple(int(size) for size in dims)
    if len(shape) > MAX_AXES or any(size < 0 for size in shape):
        raise NetError(f"a blob has at most {MAX_AXES} axes of 0 or more elements, not {shape}")
    return shape
