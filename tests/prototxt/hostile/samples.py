"""Small good files of every kind that this project reads: what the mutations begin with."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from prototxt import schema
from prototxt.data.idx import write_idx
from prototxt.data.mean import write_mean
from prototxt.data.write import write_database

SIDE = 12
FORMATS = ("jpg", "png", "bmp", "tiff", "webp", "jp2", "pgm", "hdr", "gif")

NET = """\
name: "sample"  # of many layers, all small
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 4 dim: 9 dim: 9 } } }
layer {
  name: "dummy" type: "DummyData" top: "label"
  dummy_data_param { shape { dim: 2 } data_filler { type: "constant" value: 1 } }
}
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 }
  convolution_param {
    num_output: 6 kernel_size: 3 stride: 1 pad: 1 group: 2 dilation: 1
    weight_filler { type: "xavier" variance_norm: AVERAGE }
    bias_filler { type: "gaussian" std: 0.1 sparse: 2 }
  }
}
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "norm" batch_norm_param { eps: 0.001 } }
layer { name: "scale" type: "Scale" bottom: "norm" top: "scale" scale_param { axis: 1 bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "scale" top: "scale" relu_param { negative_slope: 0.1 } }
layer {
  name: "pool" type: "Pooling" bottom: "scale" top: "pool"
  pooling_param { pool: MAX kernel_size: 3 stride: 2 pad: 1 round_mode: CEIL }
}
layer { name: "lrn" type: "LRN" bottom: "pool" top: "lrn" lrn_param { local_size: 3 alpha: 0.1 beta: 0.75 } }
layer {
  name: "up" type: "Deconvolution" bottom: "lrn" top: "up"
  convolution_param { num_output: 2 kernel_h: 2 kernel_w: 3 stride_h: 2 stride_w: 1 }
}
layer { name: "columns" type: "Im2col" bottom: "up" top: "columns" convolution_param { kernel_size: 3 } }
layer { name: "crop" type: "Crop" bottom: "up" bottom: "lrn" top: "crop" crop_param { axis: 2 offset: 1 } }
layer { name: "tile" type: "Tile" bottom: "crop" top: "tile" tile_param { axis: 1 tiles: 2 } }
layer {
  name: "slice" type: "Slice" bottom: "tile" top: "one" top: "two" slice_param { axis: 1 slice_point: 2 }
}
layer { name: "sum" type: "Eltwise" bottom: "one" bottom: "two" top: "sum" eltwise_param { operation: SUM } }
layer { name: "join" type: "Concat" bottom: "sum" bottom: "crop" top: "join" concat_param { axis: 1 } }
layer { name: "shape" type: "Reshape" bottom: "join" top: "shape" reshape_param { shape { dim: 0 dim: -1 } } }
layer { name: "drop" type: "Dropout" bottom: "shape" top: "drop" dropout_param { dropout_ratio: 0.4 } }
layer { name: "spp" type: "SPP" bottom: "lrn" top: "spp" spp_param { pyramid_height: 2 pool: AVE } }
layer { name: "mean" type: "Reduction" bottom: "spp" top: "mean" reduction_param { axis: 1 operation: MEAN } }
layer {
  name: "words" type: "Embed" bottom: "label" top: "words" embed_param { num_output: 3 input_dim: 5 }
}
layer { name: "power" type: "Power" bottom: "mean" top: "power" power_param { power: 2 scale: 1 shift: 1 } }
layer { name: "mvn" type: "MVN" bottom: "words" top: "mvn" mvn_param { normalize_variance: false } }
layer { name: "own" type: "Parameter" top: "own" parameter_param { shape { dim: 3 dim: 2 } } }
layer {
  name: "fc" type: "InnerProduct" bottom: "drop" top: "fc"
  inner_product_param { num_output: 5 axis: 1 weight_filler { type: "msra" } }
}
layer { name: "slope" type: "PReLU" bottom: "fc" top: "slope" prelu_param { channel_shared: false } }
layer {
  name: "top" type: "Accuracy" bottom: "slope" bottom: "label" top: "top"
  include { phase: TEST } accuracy_param { top_k: 2 }
}
layer {
  name: "loss" type: "SoftmaxWithLoss" bottom: "slope" bottom: "label" top: "loss" loss_weight: 1
  loss_param { ignore_label: 255 normalization: VALID }
}
"""

OLD = """\
name: "old" input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8
layers {
  name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2 weight_decay: 1
  convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 weight_filler { type: "gaussian" } }
}
layers { name: "pool" type: POOLING bottom: "conv" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layers { name: "fc" type: INNER_PRODUCT bottom: "pool" top: "fc" inner_product_param { num_output: 3 } }
layers { name: "prob" type: SOFTMAX bottom: "fc" top: "prob" }
"""

OLDEST = """\
name: "oldest" input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layers { layer { name: "pad" type: "padding" pad: 1 } bottom: "data" top: "pad" }
layers { layer { name: "conv" type: "conv" num_output: 4 kernelsize: 3 stride: 2 } bottom: "pad" top: "conv" }
layers { layer { name: "pool" type: "pool" pool: MAX kernelsize: 2 stride: 2 } bottom: "conv" top: "pool" }
layers { layer { name: "fc" type: "innerproduct" num_output: 3 } bottom: "pool" top: "fc" }
"""

SOLVER = """\
net: "net.prototxt"
base_lr: 0.01 lr_policy: "multistep" gamma: 0.1 power: 0.75 stepsize: 10 stepvalue: 3 stepvalue: 6
momentum: 0.9 weight_decay: 0.0005 regularization_type: "L2"
max_iter: 10 iter_size: 1 display: 2 average_loss: 2
test_iter: 1 test_interval: 5 test_initialization: false
snapshot: 5 snapshot_prefix: "out" snapshot_format: BINARYPROTO snapshot_diff: false
train_state { stage: "a" level: 0 } test_state { phase: TEST }
type: "SGD" solver_mode: CPU random_seed: 7 debug_info: false clip_gradients: 10
"""

# What the weights belong to: blobs of one to four axes.
WEIGHED = """\
name: "weighed"
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 dim: 6 dim: 6 } } }
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } }
}
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn" }
layer {
  name: "fc" type: "InnerProduct" bottom: "bn" top: "fc"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } }
}
"""


def make(folder: Path) -> None:
    """Write all samples into the folder."""
    for name, text in (("net", NET), ("old", OLD), ("oldest", OLDEST), ("solver", SOLVER)):
        (folder / f"{name}.prototxt").write_text(text)
    _weights(folder)
    _databases(folder)
    _rows(folder)
    _images(folder)
    write_idx(folder / "images.gz", np.zeros((3, 4, 4), np.uint8))


def _weights(folder: Path) -> None:
    from prototxt import hdf5_weights
    from prototxt.net import Net
    from prototxt.text import net_from_text
    from shmtrain.snapshot import State, write_state

    net = Net(net_from_text(WEIGHED), "TEST", seed=1)
    net.save(folder / "net.caffemodel")
    hdf5_weights.write_net(net, folder / "net.caffemodel.h5")
    old = schema.NetParameter(name="old")
    for name, blobs in net.params.items():
        layer = old.layers.add(name=name, type="CONVOLUTION")
        for blob in blobs:
            sides = (1, 1, 1, 1, *blob.shape)[-4:]
            layer.blobs.add(
                num=sides[0],
                channels=sides[1],
                height=sides[2],
                width=sides[3],
                data=blob.data.ravel().tolist(),
            )
    (folder / "old.caffemodel").write_bytes(old.SerializeToString())
    history = [blob.data.copy() for blobs in net.params.values() for blob in blobs]
    state = State(5, 1, str(folder / "net.caffemodel"), history)
    write_state(str(folder / "net.solverstate"), state)
    write_state(str(folder / "net.solverstate.h5"), state, hdf5=True)
    np.savez(folder / "worker.npz", version=1, count=3, fingerprint=np.zeros(4, np.uint8), histories=1,
             history0=np.zeros(20, np.float32))  # fmt: skip
    write_mean(folder / "mean.binaryproto", np.ones((3, SIDE, SIDE), np.float32))


def _picture(side: int, seed: int) -> np.ndarray:
    ramp = np.add.outer(np.arange(side), np.arange(side))[..., None] * np.array([3, 5, 7]) + seed
    return np.asarray(ramp % 256, np.uint8)


def _databases(folder: Path) -> None:
    import cv2

    raw, encoded = [], []
    for i in range(40):
        picture = _picture(SIDE, i)
        planes = picture.transpose(2, 0, 1)
        raw.append(schema.Datum(channels=3, height=SIDE, width=SIDE, data=planes.tobytes(), label=i % 5))
        jpeg = cv2.imencode(".jpg", picture)[1].tobytes()
        encoded.append(schema.Datum(data=jpeg, label=i % 5, encoded=True))
    for name, records in (("raw", raw), ("encoded", encoded)):
        rows = [(b"%08d" % i, datum.SerializeToString()) for i, datum in enumerate(records)]
        write_database(folder / f"{name}_lmdb", rows, "lmdb")
        write_database(folder / f"{name}_leveldb", rows, "leveldb")


def _rows(folder: Path) -> None:
    rng = np.random.default_rng(1)
    with h5py.File(folder / "rows.h5", "w") as file:
        file["data"] = rng.standard_normal((20, 3, 4)).astype(np.float32)
        file["label"] = np.arange(20, dtype=np.int32)
    with h5py.File(folder / "chunks.h5", "w") as file:
        data = rng.standard_normal((20, 3, 4))
        file.create_dataset("data", data=data, chunks=(5, 3, 4), compression="gzip", shuffle=True)
        file.create_dataset("label", data=np.arange(20), chunks=(4,), fletcher32=True)


def _images(folder: Path) -> None:
    import cv2

    for kind in FORMATS:
        picture: np.ndarray = _picture(64 if kind == "jp2" else SIDE, 0)
        if kind == "pgm":
            picture = picture[..., 0]
        if kind == "hdr":
            picture = picture.astype(np.float32)
        try:
            good, data = cv2.imencode(f".{kind}", picture)
        except cv2.error:
            good = False
        if good:
            (folder / f"image.{kind}").write_bytes(data.tobytes())
    (folder / "windows.txt").write_text(
        f"# 0\nimage.png\n3\n{SIDE}\n{SIDE}\n3\n1 0.9 1 1 8 8\n0 0.1 0 0 5 5\n2 0.7 2 3 9 9\n"
    )
    (folder / "list.txt").write_text("image.png 1\nimage.jpg 2\nimage.bmp 0\n")
