"""``Detector``: class scores of windows of images, as R-CNN takes them.

Source: Girshick, Donahue, Darrell, Malik 2014, the warping of region proposals with context.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from prototxt.blob import Array
from shmtrain.pycaffe.classifier import image_transformer
from shmtrain.pycaffe.io import AnyArray, load_image, resize_image
from shmtrain.pycaffe.net import TEST, Net, Path


class Detector(Net):
    """A deploy net with its weights, in the TEST phase, for windows of images.

    mean, input_scale, raw_scale, channel_swap  as in Transformer
    context_pad  pixels of the net's input, on each side, that show the window's surroundings; what lies
                 beyond the image is filled with the mean
    """

    def __init__(  # noqa: PLR0917  (the original's own order)
        self,
        model_file: Path,
        pretrained_file: Path,
        mean: AnyArray | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = image_transformer(
            self, mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap
        )
        self.configure_crop(context_pad)

    def detect_windows(
        self, images_windows: Iterable[tuple[str | os.PathLike[str], Iterable[AnyArray]]]
    ) -> list[dict[str, Any]]:
        """Score windows: pairs of an image's file and its windows (ymin, xmin, ymax, xmax).

        Returns a dict a window: ``window``, ``prediction`` (the net's first output for it), ``filename``.
        """
        found: list[dict[str, Any]] = []
        crops: list[AnyArray] = []
        for filename, windows in images_windows:
            image = load_image(filename)
            for window in windows:
                found.append({"window": window, "filename": filename})
                crops.append(self.crop(image, window))
        if not found:
            return []
        name = self.inputs[0]
        prepared = np.stack([self.transformer.preprocess(name, crop) for crop in crops])
        predictions = self.forward_all(**{name: prepared})[self.outputs[0]]
        for detection, prediction in zip(found, predictions, strict=True):
            detection["prediction"] = prediction
        return found

    def detect_selective_search(self, image_fnames: Iterable[str]) -> list[dict[str, Any]]:
        """Score the windows that selective search proposes.

        Needs the package selective_search_ijcv_with_python, which wraps a MATLAB program; ImportError
        without it: make the windows in another way and call detect_windows.
        """
        selective_search = import_module("selective_search_ijcv_with_python")
        names = [os.path.abspath(name) for name in image_fnames]
        windows = selective_search.get_windows(names, cmd="selective_search_rcnn")
        return self.detect_windows(zip(names, windows, strict=True))

    def configure_crop(self, context_pad: int | None) -> None:
        """Set the context, and the mean as an image, (height, width, channels) as load_image gives them."""
        name = self.inputs[0]
        channels, *size = self.blobs[name].shape[1:]
        self.context_pad = context_pad
        self.crop_dims = np.array([*size, channels])
        self.crop_mean = np.zeros(tuple(self.crop_dims), np.float32)
        mean = self.transformer.mean.get(name)
        if mean is not None:
            whole = np.broadcast_to(mean, (channels, *size)).transpose(1, 2, 0)
            order = self.transformer.channel_swap.get(name)
            whole = whole if order is None else whole[:, :, np.argsort(order)]
            self.crop_mean = (whole / self.transformer.raw_scale.get(name, 1.0)).astype(np.float32)

    def crop(self, im: AnyArray, window: AnyArray) -> AnyArray:
        """The window of the image; with ``context_pad`` warped to the input's size, surroundings included.

        im      (height, width, channels)
        window  ymin, xmin, ymax, xmax in pixels
        """
        box = np.asarray(window, float)
        if not self.context_pad:
            y0, x0, y1, x1 = box.astype(int)
            return im[y0:y1, x0:x1]
        size = self.blobs[self.inputs[0]].width  # the input is a square
        half = (box[2:] - box[:2] + 1) / 2
        centre = box[:2] + half
        reach = half * size / (size - 2.0 * self.context_pad)
        box = np.round(np.concatenate([centre - reach, centre + reach]))
        scale = size / (box[2:] - box[:2] + 1)
        pad = np.round(np.maximum(0, -box[:2]) * scale).astype(int)  # above and left of the image
        box = np.clip(box, 0, [*im.shape[:2], *im.shape[:2]])
        inside = np.round((box[2:] - box[:2] + 1) * scale).astype(int)
        inside = np.minimum(inside, size - pad)
        y0, x0, y1, x1 = box.astype(int)
        if min(*inside, y1 - y0, x1 - x0) < 1:
            raise ValueError(f"window {list(window)} lies outside the image of shape {im.shape}")
        crop: Array = self.crop_mean.copy()
        crop[pad[0] : pad[0] + inside[0], pad[1] : pad[1] + inside[1]] = resize_image(
            im[y0:y1, x0:x1], inside
        )
        return crop
