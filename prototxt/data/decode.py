"""Encoded images to pixels, by OpenCV as the original does it. For reader processes: a decoder may die."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
Mode = Literal["color", "gray", "unchanged"]
T = TypeVar("T")

# OpenCV reads the limit once, when it is loaded: the size in an image's head is looked at before memory is
# taken for it. A user who has larger images sets the same variable.
LIMIT_NAME = "OPENCV_IO_MAX_IMAGE_PIXELS"
LIMIT_PIXELS = 100_000_000


class Undecodable(ValueError):
    """Bytes that are no image, or one that is not wanted."""


def load_cv2() -> Any:
    """OpenCV with the limit of pixels set, one thread. Raises Undecodable when it is not installed."""
    os.environ.setdefault(LIMIT_NAME, str(LIMIT_PIXELS))
    try:
        import cv2
    except ImportError as error:
        raise Undecodable("is an encoded image; to read it install opencv-python-headless") from error
    cv2.setNumThreads(1)
    return cv2


class Decoder:
    """Decodes in ``threads`` threads, or where the result is asked for when that is 1."""

    def __init__(self, threads: int = 1) -> None:
        self._cv2 = load_cv2()
        self._flags = {
            "color": self._cv2.IMREAD_COLOR,
            "gray": self._cv2.IMREAD_GRAYSCALE,
            "unchanged": self._cv2.IMREAD_UNCHANGED,
        }
        self._pool = ThreadPoolExecutor(threads, "decode") if threads > 1 else None

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start ``work``; what is returned gives its result, or raises what it raised."""
        if self._pool is None:
            return work
        return self._pool.submit(work).result

    def decode(self, data: bytes | memoryview, mode: Mode, height: int = 0, width: int = 0) -> U8:
        """(height, width, channels) uint8, channels in the order blue, green, red.

        height, width  resize to this, bilinear, whatever the shape was; 0: as it is
        Raises Undecodable.
        """
        size = len(data)
        if height * width > (limit := int(os.environ[LIMIT_NAME])):
            raise Undecodable(
                f"is to be resized to {width}x{height}, more than {limit} pixels ({LIMIT_NAME})"
            )
        try:
            image = self._cv2.imdecode(np.frombuffer(data, np.uint8), self._flags[mode]) if size else None
        except self._cv2.error as error:
            raise Undecodable(f"cannot be decoded: {_reason(error)}") from error
        if image is None:
            raise Undecodable(f"is marked as encoded, but its {size} bytes are no image")
        if image.dtype != np.uint8:
            raise Undecodable(f"is a {image.dtype} image; only 8 bits a value are supported")
        if height and width:
            image = self._cv2.resize(image, (width, height))
        return np.ascontiguousarray(image.reshape(*image.shape[:2], -1))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if LIMIT_NAME in text or "PIXELS" in text:
        limit = os.environ[LIMIT_NAME]
        return f"it has more than {limit} pixels (the environment variable {LIMIT_NAME} raises the limit)"
    return text[-200:]
