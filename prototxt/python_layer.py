"""The base of layers written in Python, by pycaffe's protocol: four methods that work on numpy blobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prototxt.blob import Blob


class Layer:
    """Subclass it and name the class in ``python_param { module: .. layer: .. param_str: .. }``.

    setup(bottom, top)     once, when the net is built; may add blobs: ``self.blobs.add_blob(rows, columns)``
    reshape(bottom, top)   before every forward: ``top[0].reshape(*bottom[0].data.shape)``
    forward(bottom, top)   reads ``bottom[i].data``, writes ``top[i].data``
    backward(top, propagate_down, bottom)
                           reads ``top[i].diff``, writes ``bottom[i].diff`` where propagate_down[i], and the
                           gradient of this batch into ``self.blobs[i].diff``, which begins at zero

    bottom and top are lists of prototxt.Blob on the CPU, float32. They are the layer's own: what it writes
    into a bottom's data reaches nobody else, unless the net has the layer work in place.
    param_str and phase (0 TRAIN, 1 TEST) are set before setup.
    """

    type = "Python"
    param_str = ""
    param_str_ = ""  # its name in older versions
    phase = 0
    blobs: Weights

    def __init__(self, param: Any = None) -> None:
        """``param`` is the LayerParameter; a subclass need not call this."""

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Nothing to set up."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """The tops keep their shapes."""

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def backward(self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no backward")


class Weights:
    """A Python layer's learned blobs, ``self.blobs``: the net's own parameters, shared ones too."""

    def __init__(self, values: nn.ParameterList) -> None:
        self._values = values
        self._blobs: list[Weight] = []

    def add_blob(self, *dims: int) -> None:
        """One more blob of this shape, zeros; in setup alone."""
        shape = tuple(int(size) for size in dims)
        self._values.append(nn.Parameter(torch.zeros(shape)))
        self._blobs.append(Weight(self._values, len(self._blobs)))

    def __len__(self) -> int:
        return len(self._blobs)

    def __getitem__(self, index: int) -> Weight:
        return self._blobs[index]

    def __iter__(self) -> Iterator[Weight]:
        return iter(self._blobs)


class Weight(Blob):
    """One learned blob. Its diff is the parameter's gradient; during a backward, that batch's alone."""

    def __init__(self, values: nn.ParameterList, index: int) -> None:
        self._values, self._index = values, index
        self._collected: Tensor | None = None

    @property
    def param(self) -> nn.Parameter:
        """The parameter as it is now: a net may have exchanged it for a shared one."""
        value: nn.Parameter = self._values[self._index]
        return value

    @property
    def tensor(self) -> Tensor:
        return self.param.data

    @property
    def diff_tensor(self) -> Tensor:
        if self._collected is not None:
            return self._collected
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param.data)
        return self.param.grad

    def reshape(self, *dims: int) -> None:
        self.param.data = torch.zeros(tuple(int(size) for size in dims))
        self.param.grad = None

    def collect(self) -> None:
        """From here on ``diff`` is a fresh zero array."""
        self._collected = torch.zeros_like(self.param.data)

    def collected(self) -> Tensor:
        """What was written since; ``diff`` is the parameter's gradient again."""
        assert self._collected is not None
        collected, self._collected = self._collected, None
        return collected
