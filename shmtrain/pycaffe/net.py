"""``Net`` as scripts know it: the original's constructors and names around a net of prototxt."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from prototxt.blob import Array, Blob, ParamBlob
from prototxt.errors import DataError
from prototxt.net import Net as TorchNet
from prototxt.python_modules import name_folders, script_folders
from shmtrain.pycaffe.layer import NetLayer, layer_faces
from shmtrain.pycaffe.settings import next_seed

TRAIN, TEST = 0, 1

Path = str | os.PathLike[str]


class Net:
    """``Net(file, phase, level=0, stages=None, weights=None)``; deprecated: ``Net(file, weights, phase)``.

    blobs   name -> Blob, whose data and diff are numpy views to read and write
    params  layer name -> its Blobs
    torch   the net of prototxt behind it: ``net.torch.run()`` gives a loss that autograd knows

    Raises RuntimeError for a file that cannot be opened, else the errors of prototxt. Close it, or use it as
    a context manager, to end the readers of its data layers.
    """

    torch: TorchNet

    def __init__(
        self,
        network_file: Any,
        phase: int | Path,
        level: int | Path = 0,
        stages: Sequence[str] | None = None,
        weights: Path | None = None,
    ) -> None:
        if phase in ("TRAIN", "TEST") and not os.path.isfile(phase):
            raise ValueError(f"the phase is caffe.TRAIN or caffe.TEST, not {phase!r}")
        if isinstance(phase, (str, os.PathLike)):  # (file, weights, phase): the third is called level here
            weights, number, level = phase, level, 0
            warnings.warn(
                "Net(file, weights, phase) is deprecated: write Net(file, phase, weights=weights)",
                DeprecationWarning,
                stacklevel=2,
            )
        else:
            number = phase
        if number not in (TRAIN, TEST):
            raise ValueError(f"phase {number!r} is neither caffe.TRAIN nor caffe.TEST")
        if not isinstance(level, int):
            raise TypeError(f"level {level!r} is no number")
        if isinstance(stages, str):
            raise TypeError(f"stages is a list of names: [{stages!r}], not {stages!r}")
        for file in (network_file, weights):
            if isinstance(file, (str, os.PathLike)) and not os.path.isfile(file):
                raise RuntimeError(f"Could not open file {os.fspath(file)}")
        name_folders(script_folders)  # Python layers lie where the script's own modules do
        self.torch = TorchNet(
            network_file,
            "TEST" if number == TEST else "TRAIN",
            stages=tuple(stages or ()),
            level=level,
            weights=weights,
            seed=next_seed(),
        )

    @classmethod
    def around(cls, net: TorchNet) -> Net:
        """The face of a net that exists; both are one net."""
        face = cls.__new__(cls)
        face.torch = net
        return face

    # What it is made of ----------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self.torch.phase

    @property
    def name(self) -> str:
        return self.torch.name

    @property
    def blobs(self) -> OrderedDict[str, Blob]:
        """Bottom to top, by name."""
        return self.torch.blobs

    @property
    def params(self) -> OrderedDict[str, list[ParamBlob]]:
        """The layers that have parameters, by name."""
        return self.torch.params

    @cached_property
    def layers(self) -> list[NetLayer]:
        """In order, Splits included; a Python layer is the script's own object."""
        return layer_faces(self.torch)

    @cached_property
    def layer_dict(self) -> OrderedDict[str, NetLayer]:
        return OrderedDict(zip(self._layer_names, self.layers, strict=True))

    @property
    def inputs(self) -> list[str]:
        return self.torch.inputs

    @property
    def outputs(self) -> list[str]:
        """The blobs that no layer uses, alphabetical."""
        return self.torch.outputs

    @property
    def top_names(self) -> OrderedDict[str, list[str]]:
        return self.torch.top_names

    @property
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        return self.torch.bottom_names

    @property
    def blob_loss_weights(self) -> OrderedDict[str, float]:
        return self.torch.blob_loss_weights

    # Names that begin with an underscore, but that scripts use all the same
    @property
    def _layer_names(self) -> list[str]:
        return self.torch.layer_names

    @property
    def _blob_names(self) -> list[str]:
        return list(self.torch.blobs)

    @property
    def _blobs(self) -> list[Blob]:
        return list(self.torch.blobs.values())

    @property
    def _inputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.inputs]

    @property
    def _outputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.outputs]

    def _top_ids(self, layer: int) -> list[int]:
        return [self._blob_names.index(name) for name in self.torch.layers[layer].tops]

    def _bottom_ids(self, layer: int) -> list[int]:
        return [self._blob_names.index(name) for name in self.torch.layers[layer].bottoms]

    # Running it ------------------------------------------------------------------------------------------

    def forward(
        self,
        blobs: Iterable[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: Any,
    ) -> dict[str, Array]:
        """Run the layers from ``start`` to ``end``, both included; ``inputs`` are written first.

        Returns the data of the outputs (with ``end``: that layer's tops) and of ``blobs``, as views.
        """
        return self.torch.forward(blobs, start, end, **inputs)

    def backward(
        self,
        diffs: Iterable[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **seeds: Any,
    ) -> dict[str, Array]:
        """Run from ``start`` down to ``end``, both included; ``seeds`` are written to the outputs' diffs.

        Parameter diffs are added to, bottom diffs overwritten. Returns the diffs of the inputs (with
        ``end``: of that layer's bottoms) and of ``diffs``, as views.
        """
        return self.torch.backward(diffs, start, end, **seeds)

    def _forward(self, start: int, end: int) -> float:
        """By index; returns the loss."""
        return self.torch.forward_range(start, end)

    def _backward(self, start: int, end: int) -> None:
        self.torch.backward_range(start, end)

    def forward_all(self, blobs: Iterable[str] | None = None, **inputs: Any) -> dict[str, Array]:
        """Forward in batches of the net's own size; the last one is padded with zeros, which are cut off.

        inputs  (n, ...) arrays for all input blobs, of equal n
        Returns an array of n rows for each output and each of ``blobs``.
        """
        extra, rows = list(blobs or ()), _rows(inputs)
        batches = [self._copies(self.forward(extra, None, None, **batch)) for batch in self._batch(inputs)]
        return _joined(batches, rows)

    def forward_backward_all(
        self, blobs: Iterable[str] | None = None, diffs: Iterable[str] | None = None, **arrays: Any
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Forward and backward in batches.

        arrays  (n, ...) for the inputs and, as diffs, for the outputs. Of which there are none: the blobs
                are used as they stand
        Returns data of the outputs and ``blobs``, and diffs of the inputs and ``diffs``, n rows each.
        """
        extra, more, rows = list(blobs or ()), list(diffs or ()), _rows(arrays)
        forth = self._batch({name: arrays[name] for name in self.inputs if name in arrays})
        back = self._batch({name: arrays[name] for name in self.outputs if name in arrays})
        made, seen = [], []
        nothing: dict[str, Array] = {}
        for inputs, seeds in zip_longest(forth, back, fillvalue=nothing):
            made.append(self._copies(self.forward(extra, None, None, **inputs)))
            seen.append(self._copies(self.backward(more, None, None, **seeds)))
        return _joined(made, rows), _joined(seen, rows)

    def _batch(self, arrays: Mapping[str, Any]) -> Iterator[dict[str, Array]]:
        """The rows of ``arrays`` in pieces of the first blob's batch size, the last one padded with zeros."""
        if not arrays:
            return
        size, rows = next(iter(self.blobs.values())).shape[0], _rows(arrays)
        for first in range(0, rows, size):
            batch = {name: np.asarray(array[first : first + size]) for name, array in arrays.items()}
            missing = first + size - rows
            if missing > 0:
                batch = {
                    name: np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
                    for name, part in batch.items()
                }
            yield batch

    @staticmethod
    def _copies(views: dict[str, Array]) -> dict[str, Array]:
        return {name: view.copy() for name, view in views.items()}

    def reshape(self) -> None:
        """Carry the shapes of the input blobs through the net, without running it."""
        self.torch.reshape()

    def set_input_arrays(self, data: Array, labels: Array) -> None:
        """The rows that a net whose first layer is MemoryData goes through, in place.

        data    (n, channels, height, width) float32, C-contiguous, n a multiple of the batch size
        labels  (n,) or (n, 1, 1, 1) float32, C-contiguous
        Raises RuntimeError when they do not fit, or when the first layer is another.
        """
        layer = self.torch.layers[0]
        if layer.type != "MemoryData":
            raise RuntimeError(
                f"set_input_arrays needs a MemoryData layer first; {layer.name!r} is a {layer.type}"
            )
        take: Any = layer.module
        try:
            take.set_input_arrays(data, labels)
        except DataError as error:
            raise RuntimeError(str(error)) from error

    def before_forward(self, call: Callable[[int], None]) -> None:
        """Call it with each layer's index before its forward; so too the three below."""
        self.torch.layerwise.before_forward.append(call)

    def after_forward(self, call: Callable[[int], None]) -> None:
        self.torch.layerwise.after_forward.append(call)

    def before_backward(self, call: Callable[[int], None]) -> None:
        self.torch.layerwise.before_backward.append(call)

    def after_backward(self, call: Callable[[int], None]) -> None:
        self.torch.layerwise.after_backward.append(call)

    # Parameters ------------------------------------------------------------------------------------------

    def clear_param_diffs(self) -> None:
        self.torch.clear_param_diffs()

    def share_with(self, other: Net) -> None:
        """Let parameters of layers that both have, by name, be ``other``'s own."""
        self.torch.share_with(other.torch)

    def copy_from(self, path: Path) -> None:
        """Load a .caffemodel, binary or HDF5 as its content tells, layer by layer by name."""
        self.torch.copy_from(path)

    load_hdf5 = copy_from

    def save(self, path: Path) -> None:
        """Write a binary .caffemodel."""
        self.torch.save(path)

    def save_hdf5(self, path: Path) -> None:
        """Write an HDF5 .caffemodel.h5."""
        self.torch.save_hdf5(path)

    # Its end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the readers of the data layers; twice is fine."""
        self.torch.close()

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _rows(arrays: Mapping[str, Any]) -> int:
    """The common first axis of all arrays."""
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"the arrays must have equally many rows: {sorted(lengths)}" if lengths else "no array is given"
        )
    return lengths.pop()


def _joined(batches: list[dict[str, Array]], rows: int) -> dict[str, Array]:
    """The batches one after another, without the padding of the last."""
    if not batches:
        return {}
    return {name: _join([batch[name] for batch in batches], rows) for name in batches[0]}


def _join(parts: list[Array], rows: int) -> Array:
    return np.concatenate(parts)[:rows] if parts[0].ndim else np.stack(parts)
