"""The place where scripts look for the messages: ``from caffe.proto import caffe_pb2``."""

from __future__ import annotations

from shmtrain.pycaffe.proto import caffe_pb2

__all__ = ["caffe_pb2"]
