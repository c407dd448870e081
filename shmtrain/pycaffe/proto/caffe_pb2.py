"""Caffe's messages and enums under the name that generated code has, over the project's own schema.

``NetParameter()``, ``PoolingParameter.MAX``, ``TRAIN`` and ``TEST`` as in a compiled caffe.proto;
text_format and the binary methods work on them. They live in a pool of their own, so an original Caffe in
the same process does not clash with them; messages of the two cannot be put into each other.
"""

from __future__ import annotations

from typing import Any

from prototxt import schema

DESCRIPTOR: Any = schema.NetParameter.DESCRIPTOR.file
TRAIN: int = schema.Phase.Value("TRAIN")
TEST: int = schema.Phase.Value("TEST")

_NAMES = (*DESCRIPTOR.message_types_by_name, *DESCRIPTOR.enum_types_by_name)


def __getattr__(name: str) -> Any:
    try:
        return getattr(schema, name)
    except AttributeError:
        raise AttributeError(f"caffe_pb2 has no message or enum {name!r}") from None


def __dir__() -> list[str]:
    return ["DESCRIPTOR", "TEST", "TRAIN", *_NAMES]
