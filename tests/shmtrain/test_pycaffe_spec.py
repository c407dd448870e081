"""Nets written in Python, their crops, and the messages under the original's names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from shmtrain import pycaffe as caffe
from shmtrain.pycaffe import coord_map, net_spec
from shmtrain.pycaffe import layers as L
from shmtrain.pycaffe import params as P
from shmtrain.pycaffe.coord_map import crop
from shmtrain.pycaffe.proto import caffe_pb2


def small() -> caffe.NetSpec:
    n = caffe.NetSpec()
    n.data, n.label = L.DummyData(shape=[{"dim": [2, 3, 9, 9]}, {"dim": [2]}], ntop=2)
    n.conv = L.Convolution(n.data, kernel_size=3, num_output=4, weight_filler={"type": "xavier"},
                           param=[{"lr_mult": 1}, {"lr_mult": 2}])  # fmt: skip
    n.relu = L.ReLU(n.conv, in_place=True)
    n.pool = L.Pooling(n.relu, pool=P.Pooling.AVE, kernel_size=2, stride=2)
    n["ip"] = L.InnerProduct(n.pool, num_output=5)
    n.loss = L.SoftmaxWithLoss(n.ip, n.label, loss_param={"ignore_label": 7}, loss_weight=0.5)
    n.quiet = L.Silence(n.data, ntop=0)
    return n


def test_a_spec_becomes_the_net_that_it_says(tmp_path: Path) -> None:
    proto = small().to_proto()
    names = [(layer.name, layer.type, list(layer.bottom), list(layer.top)) for layer in proto.layer]
    assert names == [
        ("data", "DummyData", [], ["data", "label"]),
        ("conv", "Convolution", ["data"], ["conv"]),
        ("relu", "ReLU", ["conv"], ["conv"]),
        ("pool", "Pooling", ["conv"], ["pool"]),
        ("ip", "InnerProduct", ["pool"], ["ip"]),
        ("loss", "SoftmaxWithLoss", ["ip", "label"], ["loss"]),
        ("quiet", "Silence", ["data"], []),
    ]
    conv, pool, loss = proto.layer[1], proto.layer[3], proto.layer[5]
    assert list(conv.convolution_param.kernel_size) == [3]
    assert [param.lr_mult for param in conv.param] == [1, 2]
    assert pool.pooling_param.pool == caffe_pb2.PoolingParameter.AVE
    assert (loss.loss_param.ignore_label, list(loss.loss_weight)) == (7, [0.5])
    (tmp_path / "net").write_text(str(proto))
    with caffe.Net(str(tmp_path / "net"), caffe.TRAIN) as net:
        assert net.blobs["ip"].shape == (2, 5)
        assert net.layer_dict["conv"].type == "Convolution"


def test_what_has_no_name_is_called_after_its_type() -> None:
    data = L.DummyData(shape={"dim": [1, 2]})
    first, second = L.InnerProduct(data, num_output=1), L.InnerProduct(data, num_output=2)
    both = L.Eltwise(first, second)
    assert [layer.name for layer in both.to_proto().layer] == [
        "DummyData1", "InnerProduct1", "InnerProduct2", "Eltwise1",
    ]  # fmt: skip
    assert len(net_spec.to_proto(first, both).layer) == 4


def test_a_deep_net_needs_no_deep_stack() -> None:
    top = L.DummyData(shape={"dim": [1]})
    for _ in range(5000):
        top = L.ReLU(top)
    assert len(top.to_proto().layer) == 5001


def test_tops_are_read_back_copied_and_deleted() -> None:
    n = small()
    assert n["conv"] is n.conv
    assert "conv" in n
    assert copy.copy(n).conv is n.conv
    del n.quiet
    with pytest.raises(AttributeError, match="no top 'quiet'"):
        n.quiet  # noqa: B018


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: L.ReLU("x"), TypeError, r"ReLU input 0 is not a Top \(type is <class 'str'>\)"),
        (
            lambda: L.DummyData(nope=1).to_proto(),
            AttributeError,
            r"LayerParameter has no field 'nope' \(it has: .*accuracy_param",
        ),
        (
            lambda: L.Pooling(pooling_param={"sise": 1}).to_proto(),
            AttributeError,
            "PoolingParameter has no field 'sise'",
        ),
        (lambda: L.Pooling(kernel_size="big").to_proto(), TypeError, "big|int"),
    ],
)
def test_a_wrong_layer_is_told(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# Crops ----------------------------------------------------------------------------------------------------


def up(stride: int = 2, pool: int = 2, pad: int = 0, **more: Any) -> tuple[Any, Any]:
    """An image of 100 x 100, pooled and upsampled again."""
    data = L.Input(shape={"dim": [1, 1, 100, 100]})
    conv = L.Convolution(data, num_output=3, kernel_size=3, stride=1, pad=pad, **more)
    pooled = L.Pooling(conv, pool=P.Pooling.MAX, kernel_size=pool, stride=pool)
    window = {"num_output": 3, "kernel_size": 2 * stride, "stride": stride}
    return data, L.Deconvolution(pooled, convolution_param=window)


def shift(top_from: Any, top_to: Any) -> float:
    axis, scale, moved = coord_map.coord_map_from_to(top_from, top_to)
    assert (axis, float(np.squeeze(scale))) == (1, 1)
    return float(np.squeeze(moved))


@pytest.mark.parametrize(("pad", "dilation", "want"), [(0, 1, 0), (1, 1, -1), (7, 1, -7), (3, 4, 0)])
def test_a_map_goes_through_the_layers_between(pad: int, dilation: int, want: int) -> None:
    """Padding shifts by itself, dilation d of a kernel of 3 by d - 1; pooling and upsampling by 2 cancel."""
    data, top = up(pad=pad, dilation=dilation)
    assert (shift(top, data), shift(data, top)) == (want, -want)
    data, top = up(stride=4, pool=4, pad=pad, dilation=dilation)
    assert shift(top, data) == want - 1


def test_a_crop_cuts_where_the_pixels_meet(tmp_path: Path) -> None:
    data, top = up(pad=4)
    cut = crop(top, data)
    (layer,) = [layer for layer in cut.to_proto().layer if layer.type == "Crop"]
    assert (layer.crop_param.axis, list(layer.crop_param.offset)) == (2, [4])
    (tmp_path / "net").write_text(str(cut.to_proto()))
    with caffe.Net(str(tmp_path / "net"), caffe.TEST) as net:
        assert net.blobs[net.outputs[0]].shape == (1, 3, 100, 100)
    assert shift(cut, data) == 0


def test_tops_that_cannot_be_aligned_say_why() -> None:
    data, top = up()
    with pytest.raises(RuntimeError, match="connected by spatial layers"):
        crop(L.InnerProduct(top, num_output=1), data)
    data, top = up(pool=3)
    with pytest.raises(AssertionError, match="differ in scale"):
        crop(top, data)
    with pytest.raises(AssertionError, match="negative offset"):
        crop(L.Crop(data, data, axis=2, offset=9), L.Crop(data, data, axis=2, offset=3))
    with pytest.raises(AssertionError, match="no whole number"):
        crop(L.Convolution(data, kernel_size=2, num_output=1, pad=1), data)
    with pytest.raises(coord_map.AxisMismatchException):
        coord_map.compose((1, 1, 0), (2, 1, 0))
    with pytest.raises(AssertionError, match="not kernel_h"):
        crop(L.Pooling(data, kernel_h=2, kernel_w=2), data)


# Messages -------------------------------------------------------------------------------------------------


def test_messages_are_read_written_and_built_into_nets() -> None:
    net = caffe_pb2.NetParameter()
    text_format.Merge('name: "x" layer { name: "d" type: "DummyData" top: "y" '
                      "dummy_data_param { shape { dim: 2 } } }", net)  # fmt: skip
    net.layer[0].dummy_data_param.shape[0].dim.append(3)
    again = caffe_pb2.NetParameter.FromString(net.SerializeToString())
    assert text_format.MessageToString(again) == str(net)
    with caffe.Net(again, caffe.TEST) as built:
        assert built.forward()["y"].shape == (2, 3)


def test_enums_and_names_are_where_generated_code_has_them() -> None:
    assert (caffe_pb2.TRAIN, caffe_pb2.TEST) == (caffe.TRAIN, caffe.TEST) == (0, 1)
    assert caffe_pb2.Phase.Value("TEST") == 1
    assert (caffe_pb2.V1LayerParameter.CONVOLUTION, caffe_pb2.SolverParameter.GPU) == (4, 1)
    assert {"NetParameter", "Datum", "Phase", "TRAIN"} <= set(dir(caffe_pb2))
    assert caffe.proto.caffe_pb2 is caffe.io.caffe_pb2 is caffe_pb2
    with pytest.raises(AttributeError, match="caffe_pb2 has no message or enum 'Nope'"):
        caffe_pb2.Nope  # noqa: B018
    assert np.float32(caffe_pb2.SolverParameter().momentum2) == np.float32(0.999)
