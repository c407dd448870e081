"""The nets of this folder, layer by layer, from their papers; make.py writes them as prototxt.

Each function adds its layers to a NetSpec, ``data`` being its images, and returns the heads: (scores, weight
of their loss), the main one last. Layers are called as in the weight files that are passed around, so that
these load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmtrain.pycaffe import NetSpec
from shmtrain.pycaffe import layers as L
from shmtrain.pycaffe import params as P
from shmtrain.pycaffe.net_spec import Top

Heads = list[tuple[Top, float]]
Size = int | tuple[int, int]  # one number, or height and width
CLASSES = 1000

WEIGHTS_AND_BIAS = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]


def gaussian(std: float) -> dict[str, Any]:
    return {"type": "gaussian", "std": std}


def constant(value: float) -> dict[str, Any]:
    return {"type": "constant", "value": value}


XAVIER, MSRA = {"type": "xavier"}, {"type": "msra"}


def sizes(name: str, size: Size) -> dict[str, int]:
    """kernel or pad, for _h and _w where they differ."""
    if isinstance(size, tuple):
        return {f"{name}_h": size[0], f"{name}_w": size[1]}
    return {"kernel_size" if name == "kernel" else name: size}


def conv(net: NetSpec, name: str, bottom: Top, outputs: int, kernel: Size, **more: Any) -> Top:
    """A convolution with a bias. ``filler`` is its weights', ``bias`` the bias's first value."""
    net[name] = L.Convolution(
        bottom,
        num_output=outputs,
        **sizes("kernel", kernel),
        **sizes("pad", more.pop("pad", 0)),
        param=WEIGHTS_AND_BIAS,
        weight_filler=more.pop("filler"),
        bias_filler=constant(more.pop("bias", 0)),
        **more,
    )
    made: Top = net[name]
    return made


def product(  # noqa: PLR0917  (name, bottom, size: the order of all of them)
    net: NetSpec, name: str, bottom: Top, outputs: int, filler: dict[str, Any], bias: float = 0
) -> Top:
    net[name] = L.InnerProduct(
        bottom,
        num_output=outputs,
        param=WEIGHTS_AND_BIAS,
        weight_filler=filler,
        bias_filler=constant(bias),
    )
    made: Top = net[name]
    return made


def add(net: NetSpec, name: str, made: Top) -> Top:
    """Under a name of its own, whether in place or not."""
    net[name] = made
    return made


def relu(net: NetSpec, name: str, bottom: Top) -> Top:
    return add(net, name, L.ReLU(bottom, in_place=True))


def dropout(net: NetSpec, name: str, bottom: Top, ratio: float) -> Top:
    return add(net, name, L.Dropout(bottom, dropout_ratio=ratio, in_place=True))


def pool(  # noqa: PLR0917
    net: NetSpec, name: str, bottom: Top, kind: str, kernel: int, stride: int, **more: Any
) -> Top:
    how = getattr(P.Pooling, kind)
    return add(net, name, L.Pooling(bottom, pool=how, kernel_size=kernel, stride=stride, **more))


def over_all(net: NetSpec, name: str, bottom: Top) -> Top:
    """The mean of each channel over the whole image, of any size."""
    return add(net, name, L.Pooling(bottom, pool=P.Pooling.AVE, global_pooling=True))


# CIFAR-10 ------------------------------------------------------------------------------------------------


def cifar10_full(net: NetSpec, data: Top) -> Heads:
    """Three convolutions of 5 x 5, two normalisations within each channel, one inner product."""
    top = conv(net, "conv1", data, 32, 5, pad=2, filler=gaussian(0.0001))
    top = relu(net, "relu1", pool(net, "pool1", top, "MAX", 3, 2))
    top = add(net, "norm1", _within(top))
    top = relu(net, "relu2", conv(net, "conv2", top, 32, 5, pad=2, filler=gaussian(0.01)))
    top = add(net, "norm2", _within(pool(net, "pool2", top, "AVE", 3, 2)))
    top = relu(net, "relu3", conv(net, "conv3", top, 64, 5, pad=2, filler=gaussian(0.01)))
    top = product(net, "ip1", pool(net, "pool3", top, "AVE", 3, 2), 10, gaussian(0.01))
    net.ip1.fn.params["param"] = [{"lr_mult": 1, "decay_mult": 250}, {"lr_mult": 2, "decay_mult": 0}]
    return [(top, 1.0)]


def _within(bottom: Top) -> Top:
    region = P.LRN.WITHIN_CHANNEL
    made: Top = L.LRN(bottom, local_size=3, alpha=5e-5, beta=0.75, norm_region=region)
    return made


# AlexNet -------------------------------------------------------------------------------------------------


def alexnet(net: NetSpec, data: Top) -> Heads:
    """Krizhevsky, Sutskever, Hinton 2012: normalise, then pool; biases begin at 0.1 where the paper has 1."""
    return _alexnet(net, data, norm_first=True, bias=0.1)


def caffenet(net: NetSpec, data: Top) -> Heads:
    """The same, but pool, then normalise; less to compute."""
    return _alexnet(net, data, norm_first=False, bias=1)


def _alexnet(net: NetSpec, data: Top, norm_first: bool, bias: float) -> Heads:
    def shrink(number: int, top: Top) -> Top:
        for step in ("norm", "pool") if norm_first else ("pool", "norm"):
            if step == "pool":
                top = pool(net, f"pool{number}", top, "MAX", 3, 2)
            else:
                top = add(net, f"norm{number}", L.LRN(top, local_size=5, alpha=1e-4, beta=0.75))
        return top

    std = gaussian(0.01)
    top = relu(net, "relu1", conv(net, "conv1", data, 96, 11, stride=4, filler=std))
    top = conv(net, "conv2", shrink(1, top), 256, 5, pad=2, group=2, filler=std, bias=bias)
    top = shrink(2, relu(net, "relu2", top))
    top = relu(net, "relu3", conv(net, "conv3", top, 384, 3, pad=1, filler=std))
    for number, outputs in ((4, 384), (5, 256)):
        top = conv(net, f"conv{number}", top, outputs, 3, pad=1, group=2, filler=std, bias=bias)
        top = relu(net, f"relu{number}", top)
    top = pool(net, "pool5", top, "MAX", 3, 2)
    for number in (6, 7):
        top = relu(net, f"relu{number}", product(net, f"fc{number}", top, 4096, gaussian(0.005), bias))
        top = dropout(net, f"drop{number}", top, 0.5)
    return [(product(net, "fc8", top, CLASSES, std), 1.0)]


# GoogLeNet -----------------------------------------------------------------------------------------------

# Table 1: 1x1, 3x3 after its reduction, 5x5 after its reduction, 1x1 after the pooling.
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(net: NetSpec, data: Top) -> Heads:
    """Szegedy et al. 2014, Inception v1, with the two heads that help it train (weight 0.3 each)."""

    def convolve(name: str, bottom: Top, outputs: int, kernel: int, **more: Any) -> Top:
        folder, _, last = name.rpartition("/")
        made = conv(net, name, bottom, outputs, kernel, filler=XAVIER, bias=0.2, **more)
        return relu(net, f"{folder}/relu_{last}", made)

    def inception(number: str, bottom: Top) -> Top:
        name = f"inception_{number}"
        n1, r3, n3, r5, n5, after = INCEPTIONS[number]
        one = convolve(f"{name}/1x1", bottom, n1, 1)
        three = convolve(f"{name}/3x3_reduce", bottom, r3, 1)
        three = convolve(f"{name}/3x3", three, n3, 3, pad=1)
        five = convolve(f"{name}/5x5_reduce", bottom, r5, 1)
        five = convolve(f"{name}/5x5", five, n5, 5, pad=2)
        pooled = pool(net, f"{name}/pool", bottom, "MAX", 3, 1, pad=1)
        pooled = convolve(f"{name}/pool_proj", pooled, after, 1)
        return add(net, f"{name}/output", L.Concat(one, three, five, pooled))

    def head(number: int, bottom: Top) -> Top:
        name = f"loss{number}"
        top = convolve(f"{name}/conv", pool(net, f"{name}/ave_pool", bottom, "AVE", 5, 3), 128, 1)
        top = relu(net, f"{name}/relu_fc", product(net, f"{name}/fc", top, 1024, XAVIER, 0.2))
        top = dropout(net, f"{name}/drop_fc", top, 0.7)
        return product(net, f"{name}/classifier", top, CLASSES, XAVIER)

    top = convolve("conv1/7x7_s2", data, 64, 7, pad=3, stride=2)
    top = add(net, "pool1/norm1", L.LRN(pool(net, "pool1/3x3_s2", top, "MAX", 3, 2), alpha=1e-4))
    top = convolve("conv2/3x3_reduce", top, 64, 1)
    top = add(net, "conv2/norm2", L.LRN(convolve("conv2/3x3", top, 192, 3, pad=1), alpha=1e-4))
    top = pool(net, "pool2/3x3_s2", top, "MAX", 3, 2)
    heads: Heads = []
    for number in INCEPTIONS:
        if number in ("4a", "5a"):
            top = pool(net, f"pool{int(number[0]) - 1}/3x3_s2", top, "MAX", 3, 2)
        top = inception(number, top)
        if number in ("4a", "4d"):
            heads.append((head(len(heads) + 1, top), 0.3))
    top = dropout(net, "pool5/drop_7x7_s1", over_all(net, "pool5/7x7_s1", top), 0.4)
    return [*heads, (product(net, "loss3/classifier", top, CLASSES, XAVIER), 1.0)]


# VGG16 ---------------------------------------------------------------------------------------------------


def vgg16(net: NetSpec, data: Top) -> Heads:
    """Simonyan, Zisserman 2014, column D. Filled as the paper found enough later: by fan-in, without a
    shallower net before it."""
    top = data
    for block, (outputs, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for number in range(1, count + 1):
            top = conv(net, f"conv{block}_{number}", top, outputs, 3, pad=1, filler=MSRA)
            top = relu(net, f"relu{block}_{number}", top)
        top = pool(net, f"pool{block}", top, "MAX", 2, 2)
    for number in (6, 7):
        top = relu(net, f"relu{number}", product(net, f"fc{number}", top, 4096, gaussian(0.005)))
        top = dropout(net, f"drop{number}", top, 0.5)
    return [(product(net, "fc8", top, CLASSES, gaussian(0.01)), 1.0)]


# ResNet-50 -----------------------------------------------------------------------------------------------


def normalised(
    net: NetSpec, names: Sequence[str], bottom: Top, outputs: int, kernel: Size, **more: Any
) -> Top:
    """A convolution without bias, normalised in place; ``names`` are those of the three layers."""
    net[names[0]] = L.Convolution(
        bottom,
        num_output=outputs,
        **sizes("kernel", kernel),
        **sizes("pad", more.pop("pad", 0)),
        bias_term=False,
        param=[{"lr_mult": 1, "decay_mult": 1}],
        weight_filler=MSRA,
        **{key: value for key, value in more.items() if key not in ("eps", "fraction")},
    )
    numbers = {"moving_average_fraction": more.get("fraction", 0.999), "eps": more.get("eps", 1e-5)}
    top = add(net, names[1], L.BatchNorm(net[names[0]], in_place=True, **numbers))
    undecayed = [{"lr_mult": 1, "decay_mult": 0}] * 2
    return add(net, names[2], L.Scale(top, bias_term=True, in_place=True, param=undecayed))


def resnet50(net: NetSpec, data: Top) -> Heads:
    """He, Zhang, Ren, Sun 2015: blocks of 1x1, 3x3, 1x1 around a shortcut; strides in the first 1x1."""

    def convolve(name: str, bottom: Top, outputs: int, kernel: int, **more: Any) -> Top:
        names = (f"res{name}", f"bn{name}", f"scale{name}")
        return normalised(net, names, bottom, outputs, kernel, fraction=0.9, **more)

    def block(name: str, bottom: Top, width: int, stride: int, first: bool) -> Top:
        shortcut = convolve(f"{name}_branch1", bottom, 4 * width, 1, stride=stride) if first else bottom
        top = convolve(f"{name}_branch2a", bottom, width, 1, stride=stride)
        top = convolve(f"{name}_branch2b", relu(net, f"res{name}_branch2a_relu", top), width, 3, pad=1)
        top = convolve(f"{name}_branch2c", relu(net, f"res{name}_branch2b_relu", top), 4 * width, 1)
        top = add(net, f"res{name}", L.Eltwise(shortcut, top, operation=P.Eltwise.SUM))
        return relu(net, f"res{name}_relu", top)

    names = ("conv1", "bn_conv1", "scale_conv1")
    top = normalised(net, names, data, 64, 7, pad=3, stride=2, fraction=0.9)
    top = pool(net, "pool1", relu(net, "conv1_relu", top), "MAX", 3, 2)
    for stage, count in enumerate((3, 4, 6, 3), 2):
        for index in range(count):
            stride = 2 if index == 0 and stage > 2 else 1
            top = block(f"{stage}{'abcdef'[index]}", top, 64 * 2 ** (stage - 2), stride, index == 0)
    top = over_all(net, "pool5", top)
    return [(product(net, "fc1000", top, CLASSES, MSRA), 1.0)]


# Inception-ResNet-v2 -------------------------------------------------------------------------------------


def halve(net: NetSpec, name: str, top: Top) -> Top:
    return pool(net, name, top, "MAX", 3, 2, round_mode=P.Pooling.FLOOR)


def residual(  # noqa: PLR0917
    net: NetSpec, name: str, bottom: Top, branches: Sequence[Top], width: int, scale: float
) -> Top:
    """What the branches make together, brought to ``width`` and scaled, added to the bottom."""
    top = add(net, f"{name}_concat", L.Concat(*branches))
    top = conv(net, f"{name}_up", top, width, 1, filler=MSRA)
    return add(net, name, L.Eltwise(bottom, top, operation=P.Eltwise.SUM, coeff=[1, scale]))


def inception_resnet_v2(net: NetSpec, data: Top) -> Heads:
    """Szegedy, Ioffe, Vanhoucke, Alemi 2016, with the widths of the authors' code where figures differ."""

    def convolve(name: str, bottom: Top, outputs: int, kernel: Size, **more: Any) -> Top:
        names = (name, f"{name}_bn", f"{name}_scale")
        top = normalised(net, names, bottom, outputs, kernel, eps=0.001, fraction=0.9997, **more)
        return relu(net, f"{name}_relu", top)

    def branch(name: str, top: Top, *steps: tuple[int, Size]) -> Top:
        """Convolutions one after the other, padded such that the size stays."""
        for number, (outputs, kernel) in enumerate(steps, 1):
            tall, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
            pad: Size = tall // 2 if tall == wide else (tall // 2, wide // 2)
            top = convolve(f"{name}_{number}", top, outputs, kernel, pad=pad)
        return top

    top = convolve("conv1", data, 32, 3, stride=2)
    top = convolve("conv3", convolve("conv2", top, 32, 3), 64, 3, pad=1)
    top = convolve("conv4", halve(net, "pool1", top), 80, 1)
    top = halve(net, "pool2", convolve("conv5", top, 192, 3))
    pooled = pool(net, "stem_pool", top, "AVE", 3, 1, pad=1)
    branches = [
        branch("stem_a", top, (96, 1)),
        branch("stem_b", top, (48, 1), (64, 5)),
        branch("stem_c", top, (64, 1), (96, 3), (96, 3)),
        branch("stem_d", pooled, (64, 1)),
    ]
    top = add(net, "stem_concat", L.Concat(*branches))
    for number in range(1, 11):
        name = f"a{number}"
        branches = [
            branch(f"{name}_a", top, (32, 1)),
            branch(f"{name}_b", top, (32, 1), (32, 3)),
            branch(f"{name}_c", top, (32, 1), (48, 3), (64, 3)),
        ]
        top = relu(net, f"{name}_relu", residual(net, name, top, branches, 320, 0.17))
    branches = [
        convolve("reduce_a_a", top, 384, 3, stride=2),
        convolve("reduce_a_b_3", branch("reduce_a_b", top, (256, 1), (256, 3)), 384, 3, stride=2),
        halve(net, "reduce_a_pool", top),
    ]
    top = add(net, "reduce_a_concat", L.Concat(*branches))
    for number in range(1, 21):
        name = f"b{number}"
        branches = [
            branch(f"{name}_a", top, (192, 1)),
            branch(f"{name}_b", top, (128, 1), (160, (1, 7)), (192, (7, 1))),
        ]
        top = relu(net, f"{name}_relu", residual(net, name, top, branches, 1088, 0.1))
    branches = [
        convolve("reduce_b_a_2", branch("reduce_b_a", top, (256, 1)), 384, 3, stride=2),
        convolve("reduce_b_b_2", branch("reduce_b_b", top, (256, 1)), 288, 3, stride=2),
        convolve("reduce_b_c_3", branch("reduce_b_c", top, (256, 1), (288, 3)), 320, 3, stride=2),
        halve(net, "reduce_b_pool", top),
    ]
    top = add(net, "reduce_b_concat", L.Concat(*branches))
    for number in range(1, 11):
        name = f"c{number}"
        branches = [
            branch(f"{name}_a", top, (192, 1)),
            branch(f"{name}_b", top, (192, 1), (224, (1, 3)), (256, (3, 1))),
        ]
        last = number == 10  # neither scaled down nor rectified
        top = residual(net, name, top, branches, 2080, 1 if last else 0.2)
        top = top if last else relu(net, f"{name}_relu", top)
    top = over_all(net, "pool", convolve("conv6", top, 1536, 1))
    return [(product(net, "fc", dropout(net, "drop", top, 0.2), CLASSES, MSRA), 1.0)]
