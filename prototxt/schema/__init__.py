"""Caffe's messages by name: ``schema.NetParameter()``, ``schema.Phase.Value("TEST")``.

They live in a descriptor pool of our own, so that a real Caffe in the same process does not clash with them.
Generated types cannot be checked statically: every name is Any.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

PACKAGE = "caffe"


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The compiled caffe.proto, a fresh copy."""
    compiled = descriptor_pb2.FileDescriptorSet()
    compiled.ParseFromString(files(__package__).joinpath("caffe.desc").read_bytes())
    return compiled.file[0]


@cache
def _pool() -> Any:
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file_descriptor())
    return pool


@cache
def _named(name: str) -> Any:
    return message_class(_pool(), name)


def __getattr__(name: str) -> Any:  # undecorated, or mypy does not take it for the module's
    return _named(name)


def message_class(pool: Any, name: str) -> Any:
    """The class of message ``name`` in ``pool``, or the wrapper of an enum; AttributeError without one."""
    if not name.startswith("__"):
        try:
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        except KeyError:
            pass
        try:
            return enum_type_wrapper.EnumTypeWrapper(pool.FindEnumTypeByName(f"{PACKAGE}.{name}"))
        except KeyError:
            pass
    raise AttributeError(f"the schema has no message or enum {name!r}")
