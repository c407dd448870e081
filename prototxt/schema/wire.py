"""The same messages for weight files: ``wire.NetParameter()``, with BlobProto's data and diff as bytes.

A packed field of floats and a field of bytes have one encoding, so a megabyte of weights is one copy instead
of 250,000 Python floats. A file that holds unpacked floats does not read this way: caffemodel.py notices.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool

from prototxt.schema import file_descriptor, message_class

FLOATS = frozenset({"data", "diff"})


@cache
def _pool() -> Any:
    file = file_descriptor()
    (blob,) = (message for message in file.message_type if message.name == "BlobProto")
    for field in blob.field:
        if field.name in FLOATS:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
            field.label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            field.ClearField("options")
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@cache
def _named(name: str) -> Any:
    return message_class(_pool(), name)


def __getattr__(name: str) -> Any:  # undecorated, or mypy does not take it for the module's
    return _named(name)
