"""``Classifier``: a net that takes images as they come and gives class probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prototxt.blob import Array
from shmtrain.pycaffe.io import AnyArray, Transformer, oversample, resize_image
from shmtrain.pycaffe.net import TEST, Net, Path


def image_transformer(net: Net, **steps: Any) -> Transformer:
    """The transformer for the net's first input: (height, width, channels) images, and ``steps`` by name.

    steps  mean, input_scale, raw_scale, channel_swap; None leaves a step out
    """
    name = net.inputs[0]
    transformer = Transformer({name: net.blobs[name].shape})
    transformer.set_transpose(name, (2, 0, 1))
    for step, value in steps.items():
        if value is not None:
            getattr(transformer, f"set_{step}")(name, value)
    return transformer


class Classifier(Net):
    """A deploy net with its weights, in the TEST phase.

    image_dims  (height, width) that images are resized to before crops are taken; the net's input size
                unless given
    mean, input_scale, raw_scale, channel_swap  as in Transformer
    """

    def __init__(  # noqa: PLR0917  (the original's own order)
        self,
        model_file: Path,
        pretrained_file: Path,
        image_dims: Sequence[int] | None = None,
        mean: AnyArray | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = image_transformer(
            self, mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap
        )
        self.crop_dims = np.array(self.blobs[self.inputs[0]].shape[2:])
        self.image_dims = self.crop_dims if image_dims is None else np.array(image_dims)

    def predict(self, inputs: Sequence[AnyArray], oversample: bool = True) -> Array:
        """Class probabilities (n, classes) of n images (height, width, channels), each of any size.

        oversample  the mean over ten crops: corners, centre, and these mirrored; else the centre alone
        """
        images = np.stack([resize_image(image, self.image_dims) for image in inputs])
        crops = self._ten(images) if oversample else self._centre(images)
        name = self.inputs[0]
        prepared = np.stack([self.transformer.preprocess(name, crop) for crop in crops])
        predictions = self.forward_all(**{name: prepared})[self.outputs[0]]
        if oversample:
            predictions = predictions.reshape(len(inputs), 10, -1).mean(1)
        return predictions

    def _ten(self, images: Array) -> Array:
        return oversample(list(images), self.crop_dims)

    def _centre(self, images: Array) -> Array:
        height, width = self.crop_dims
        y, x = ((self.image_dims - self.crop_dims) / 2).astype(int)
        return images[:, y : y + height, x : x + width]
