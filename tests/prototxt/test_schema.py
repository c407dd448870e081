"""The schema is Caffe's, compiled as it stands, in a pool of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from prototxt import schema
from prototxt.schema import wire


def test_the_committed_descriptors_are_those_of_the_proto_file(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    out = tmp_path / "caffe.desc"
    subprocess.run(
        [root / "scripts" / "schema", out],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=60,
    )
    made, kept = descriptor_pb2.FileDescriptorSet(), descriptor_pb2.FileDescriptorSet()
    made.ParseFromString(out.read_bytes())
    kept.ParseFromString((root / "prototxt" / "schema" / "caffe.desc").read_bytes())
    assert made == kept, "run scripts/schema"


@pytest.mark.parametrize(
    ("message", "field", "number", "default"),
    [
        ("LayerParameter", "convolution_param", 106, None),
        ("LayerParameter", "clip_param", 148, None),
        ("NetParameter", "layer", 100, None),
        ("NetParameter", "layers", 2, None),
        ("SolverParameter", "weights", 42, None),
        ("SolverParameter", "delta", 31, 1e-8),
        ("SolverParameter", "momentum2", 39, 0.999),
        ("BatchNormParameter", "moving_average_fraction", 2, 0.999),
        ("ConvolutionParameter", "dilation", 18, None),
        ("DataParameter", "backend", 8, 0),
        ("V1LayerParameter", "blob_share_mode", 1002, None),
        ("V0LayerParameter", "hdf5_output_param", 1001, None),
        ("HingeLossParameter", "norm", 1, 1),
    ],
)
def test_numbers_and_defaults_are_caffes(
    message: str, field: str, number: int, default: float | None
) -> None:
    entry = getattr(schema, message).DESCRIPTOR.fields_by_name[field]
    assert entry.number == number
    if default is not None:
        assert entry.default_value == pytest.approx(default, rel=1e-6)


def test_our_own_solver_fields_are_far_from_any_forks_numbers() -> None:
    fields = schema.SolverParameter.DESCRIPTOR.fields_by_name
    assert {fields["moving_rate"].number, fields["update_interval"].number} == {71001, 71002}
    assert schema.SolverParameter().update_interval == 1


def test_the_schema_leaves_the_default_pool_to_a_real_caffe() -> None:
    schema.NetParameter()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("caffe.NetParameter")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no message or enum 'NetParam'"):
        _ = schema.NetParam
    assert schema.Phase.Value("TEST") == 1


def test_wire_and_plain_messages_have_one_encoding() -> None:
    values = np.array([1.5, -2, 3e-9], dtype="<f4")
    plain = schema.BlobProto(data=values, shape=schema.BlobShape(dim=[3]))
    raw = wire.BlobProto(data=values.tobytes(), shape=wire.BlobShape(dim=[3]))
    assert plain.SerializeToString(deterministic=True) == raw.SerializeToString(deterministic=True)
