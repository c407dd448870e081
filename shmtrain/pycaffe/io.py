"""Images and arrays on their way into a net: loading, resizing, cropping, and the messages that hold them.

Images are (height, width, channels) float32, RGB, values from 0 to 1; nets want (channels, height, width),
often BGR from 0 to 255 minus a mean: that is the Transformer's work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prototxt.blob import Array
from prototxt.data.decode import Undecodable, load_cv2
from shmtrain.pycaffe.proto import caffe_pb2  # scripts know it by this place too

AnyArray = npt.NDArray[Any]
GRAY = (0.2125, 0.7154, 0.0721)  # of red, green and blue: CIE 1931 luminance of linear light

# Messages ------------------------------------------------------------------------------------------------


def blobproto_to_array(blob: Any, return_diff: bool = False) -> AnyArray:
    """The numbers of a BlobProto (a mean file's, a weight's) in its shape; its diff where asked.

    A blob with the old num, channels, height and width gives four axes, one with no shape at all a scalar.
    Raises ValueError when the count does not fit the shape.
    """
    values = np.array(blob.diff if return_diff else blob.data)
    if any(blob.HasField(side) for side in ("num", "channels", "height", "width")):
        return values.reshape(blob.num, blob.channels, blob.height, blob.width)
    return values.reshape(tuple(blob.shape.dim))


def array_to_blobproto(arr: AnyArray, diff: AnyArray | None = None) -> Any:
    """A BlobProto of the array, and of ``diff``, which has the same shape."""
    blob = caffe_pb2.BlobProto()
    blob.shape.dim.extend(arr.shape)
    blob.data.extend(arr.astype(float).flat)
    if diff is not None:
        blob.diff.extend(diff.astype(float).flat)
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[AnyArray]) -> bytes:
    """The arrays as one serialised BlobProtoVector."""
    vector = caffe_pb2.BlobProtoVector(blobs=[array_to_blobproto(array) for array in arraylist])
    return bytes(vector.SerializeToString())


def blobprotovector_str_to_arraylist(serialised: bytes) -> list[AnyArray]:
    """The reverse. Raises google.protobuf.message.DecodeError for other bytes."""
    return [blobproto_to_array(blob) for blob in caffe_pb2.BlobProtoVector.FromString(serialised).blobs]


def array_to_datum(arr: AnyArray, label: int | None = None) -> Any:
    """A Datum of a (channels, height, width) array: bytes for uint8, floats for all else."""
    if arr.ndim != 3:
        raise ValueError(f"a Datum holds (channels, height, width); the array's shape is {arr.shape}")
    datum = caffe_pb2.Datum(channels=arr.shape[0], height=arr.shape[1], width=arr.shape[2])
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(float).flat)
    if label is not None:
        datum.label = label
    return datum


def datum_to_array(datum: Any) -> AnyArray:
    """(channels, height, width): uint8 of a Datum with bytes, else float64. The label is ``datum.label``."""
    shape = datum.channels, datum.height, datum.width
    if datum.data:
        return np.frombuffer(datum.data, np.uint8).reshape(shape).copy()
    return np.array(datum.float_data, float).reshape(shape)


# Preparing inputs ----------------------------------------------------------------------------------------


class Transformer:
    """Brings images into the form of a net's inputs, and back.

    inputs  input name -> the blob's shape (n, channels, height, width)

    Each step is made only where it was set: resize, transpose, channel swap, raw scale, mean, input scale.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = inputs
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, AnyArray] = {}
        self.input_scale: dict[str, float] = {}

    def _shape(self, in_: str) -> tuple[int, ...]:
        if in_ not in self.inputs:
            raise ValueError(f"{in_!r} is no input of the net (inputs: {', '.join(self.inputs)})")
        return tuple(self.inputs[in_])

    def preprocess(self, in_: str, data: AnyArray) -> Array:
        """(height, width, channels) of any size to the input's form, (channels, height, width) float32."""
        size = self._shape(in_)[2:]
        image = data.astype(np.float32)
        if image.shape[:2] != size:
            image = resize_image(image, size)
        if in_ in self.transpose:
            image = image.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            image = image[self.channel_swap[in_], :, :]
        if in_ in self.raw_scale:
            image = image * np.float32(self.raw_scale[in_])
        if in_ in self.mean:
            image = image - self.mean[in_]
        if in_ in self.input_scale:
            image = image * np.float32(self.input_scale[in_])
        return np.asarray(image, np.float32)

    def deprocess(self, in_: str, data: AnyArray) -> AnyArray:
        """The reverse, but for the size: an input's numbers as an image that can be shown."""
        self._shape(in_)
        image = data.copy().squeeze()
        if in_ in self.input_scale:
            image /= self.input_scale[in_]
        if in_ in self.mean:
            image += self.mean[in_]
        if in_ in self.raw_scale:
            image /= self.raw_scale[in_]
        if in_ in self.channel_swap:
            image = image[np.argsort(self.channel_swap[in_]), :, :]
        if in_ in self.transpose:
            image = image.transpose(np.argsort(self.transpose[in_]))
        return image

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """The order of axes: (2, 0, 1) makes (channels, height, width) of (height, width, channels)."""
        if len(order) != len(self._shape(in_)) - 1:
            raise ValueError(f"the order {tuple(order)} must name each axis of {self._shape(in_)[1:]}")
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """The order of channels after the transpose: (2, 1, 0) makes BGR of RGB."""
        if len(order) != self._shape(in_)[1]:
            raise ValueError(f"the order {tuple(order)} must name each of {self._shape(in_)[1]} channels")
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """Multiply before the mean is subtracted: 255 for nets that were trained on bytes."""
        self._shape(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: AnyArray) -> None:
        """Subtract: one number a channel, or a (channels, height, width) image, resized where it must be."""
        channels, *size = self._shape(in_)[1:]
        if mean.ndim == 1:
            if len(mean) != channels:
                raise ValueError(f"a mean of {len(mean)} channels for an input of {channels}")
            mean = mean[:, np.newaxis, np.newaxis]
        else:
            mean = mean[np.newaxis] if mean.ndim == 2 else mean
            if mean.ndim != 3:
                raise ValueError(f"a mean of shape {mean.shape} is neither per channel nor an image")
            if mean.shape[1:] != tuple(size):
                mean = resize_image(mean.transpose(1, 2, 0), size).transpose(2, 0, 1)
        self.mean[in_] = mean

    def set_input_scale(self, in_: str, scale: float) -> None:
        """Multiply after all else."""
        self._shape(in_)
        self.input_scale[in_] = scale


# Images --------------------------------------------------------------------------------------------------


def load_image(filename: str | os.PathLike[str], color: bool = True) -> Array:
    """(height, width, 3) RGB float32 from 0 to 1, or (height, width, 1) intensity with ``color=False``.

    Alpha is dropped, and a grey image has three equal channels where colour is asked for.
    Needs OpenCV (the extra shmtrain[images]). Raises OSError for a file that cannot be read or decoded, or
    whose image is larger than the limit of 100 million pixels ($OPENCV_IO_MAX_IMAGE_PIXELS).
    """
    path = os.fspath(filename)
    raw = np.fromfile(path, np.uint8)  # its OSError names the file; imread would only give None
    try:
        cv2 = load_cv2()
    except Undecodable as error:
        raise OSError(f"{path}: {error}") from error
    try:
        pixels = cv2.imdecode(raw, cv2.IMREAD_UNCHANGED) if raw.size else None
    except cv2.error as error:
        raise OSError(f"{path}: OpenCV cannot decode it: {error.err}") from error
    if pixels is None:
        raise OSError(f"{path}: not an image that OpenCV can decode")
    whole = {"uint8": 255, "uint16": 65535}.get(pixels.dtype.name, 1)
    image = pixels.astype(np.float64) / whole
    image = image[:, :, 2::-1] if image.ndim == 3 else image[:, :, np.newaxis]
    if not color and image.shape[2] == 3:
        image = (image @ np.array(GRAY))[:, :, np.newaxis]
    if color and image.shape[2] == 1:
        image = np.tile(image, (1, 1, 3))
    return np.asarray(image, np.float32)


def resize_image(im: AnyArray, new_dims: Sequence[int] | AnyArray, interp_order: int = 1) -> Array:
    """``im`` (height, width, channels) at ``new_dims`` (height, width), float32.

    interp_order  0 nearest, 1 linear

    Images of 1 or 3 channels: pixels are squares, and beyond the border lies the image's least value.
    Others: the corners of both images coincide. No smoothing before an image is made smaller.
    """
    if interp_order not in (0, 1):
        raise ValueError(f"interpolation order {interp_order} is out of range: 0 (nearest) or 1 (linear)")
    if im.ndim != 3 or len(new_dims) != 2 or min(*new_dims, *im.shape[:2]) < 1:
        raise ValueError(
            f"cannot resize {im.shape} to {tuple(new_dims)}: (height, width, channels) is needed"
        )
    corners = im.shape[-1] not in (1, 3)
    rows, columns = (
        _weights(old, int(new), interp_order, corners)
        for old, new in zip(im.shape[:2], new_dims, strict=True)
    )
    floor = 0.0 if corners else float(im.min())
    image = np.asarray(im, np.float64) - floor
    resized = np.einsum("yh,hwc->ywc", rows, image, optimize=True)
    resized = np.einsum("xw,ywc->yxc", columns, resized, optimize=True) + floor
    return np.asarray(resized, np.float32)


def _weights(old: int, new: int, order: int, corners: bool) -> npt.NDArray[np.float64]:
    """(new, old): what each old pixel gives to each new one, along one axis."""
    at = np.arange(new, dtype=np.float64)
    at = at * ((old - 1) / max(new - 1, 1)) if corners else (at + 0.5) * (old / new) - 0.5
    weights = np.zeros((new, old))
    below = np.floor(at + 0.5 if order == 0 else at).astype(int)
    shares = [(below, np.ones(new))] if order == 0 else [(below, 1 - (at - below)), (below + 1, at - below)]
    for index, share in shares:
        inside = (index >= 0) & (index < old)
        weights[np.nonzero(inside)[0], index[inside]] += share[inside]
    return weights


def oversample(images: Sequence[AnyArray], crop_dims: Sequence[int] | AnyArray) -> Array:
    """Ten crops of each image: the four corners and the centre, then the same five mirrored.

    images     n arrays (height, width, channels) of one shape
    crop_dims  (height, width) of the crops
    Returns (10 n, height, width, channels) float32.
    """
    height, width = (int(side) for side in crop_dims)
    full_height, full_width, channels = images[0].shape
    if height > full_height or width > full_width:
        raise ValueError(f"crops of {height} x {width} do not fit into {full_height} x {full_width}")
    below, right = full_height - height, full_width - width
    corners = [(0, 0), (0, right), (below, 0), (below, right), (int(below / 2), int(right / 2))]
    crops = np.empty((len(images), 2, 5, height, width, channels), np.float32)
    for image, place in zip(images, crops, strict=True):
        for i, (y, x) in enumerate(corners):
            place[0, i] = image[y : y + height, x : x + width]
        place[1] = place[0][:, :, ::-1]
    return crops.reshape(-1, height, width, channels)
