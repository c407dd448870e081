"""The ShmCaffe paper's own figures, and what the model makes of them.

The paper gives shares of communication, (T_iter - T_comp) / T_iter, measured over 1,000 iterations with an
update interval of 1 on nodes of 4 GPUs and one memory server. It gives neither the computing times nor the
rates of the server's processor. So each model's computing time comes from one figure of the paper, named in
``MODELS``; three rates of the machine are chosen once for all (``MACHINE``); every other figure is a
prediction.

Source: Ahn et al., ShmCaffe, ICDCS 2018; sizes from the models' public parameter counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shmtrain.simulate.run import simulate
from shmtrain.simulate.setting import Computing, Machine, Setting

# The link: 6.7 GB/s reached of 7, reads and writes together, by 2 to 32 processes. "accumulate" (the server
# adds an increment, one at a time) and "apply" (T_ulw, on the way to the GPU included) follow from VGG16's
# 727.7 ms on two GPUs and Inception_v1's 16.3% on eight; "inside" from VGG16's 35% on one node of four.
MACHINE = Machine(
    link=6.7, nic=7.0, inside=14.4, accumulate=2.9, apply=1.3, exchange=1.3, parallel=1.0, serial=True
)  # fmt: skip
SPREAD = 0.05  # of the computing times; the paper tells none


@dataclass(frozen=True)
class Model:
    """bytes of the vector; seconds of computing, None: fitted to a share; where they are from."""

    bytes: float
    computing: float | None
    source: str


@dataclass(frozen=True)
class Figure:
    """A share of communication in percent as the paper has it; ``below``: it says less than that."""

    model: str
    way: str
    workers: int
    share: float
    below: bool = False
    used: str = ""  # what it has been used for; else a prediction is compared with it


MODELS = {
    "Inception_v1": Model(53.5e6, 23 * 3600 * 60 / (15 * 1_281_167), "23 hours for 15 epochs on one GPU"),
    "ResNet_50": Model(102.2e6, None, "its share on 8 GPUs"),
    "Inception_resnet_v2": Model(223.4e6, None, "its share on 16 GPUs"),
    "VGG16": Model(553.4e6, 0.9418 - 0.7277, "941.8 ms less 727.7 ms on 2 GPUs"),
}
FIGURES = (
    Figure("Inception_v1", "paper", 8, 16.3, used="T_ulw"),
    Figure("Inception_v1", "paper", 16, 26.0),
    Figure("Inception_v1", "hybrid", 16, 30.0, below=True),
    Figure("ResNet_50", "paper", 8, 30.0, used="T_comp"),
    Figure("ResNet_50", "paper", 16, 56.0),
    Figure("ResNet_50", "hybrid", 16, 30.0, below=True),
    Figure("Inception_resnet_v2", "paper", 16, 65.0, used="T_comp"),
    Figure("Inception_resnet_v2", "hybrid", 16, 30.7),
    Figure("VGG16", "paper", 2, 77.3, used="T_ugw"),
    Figure("VGG16", "hybrid", 4, 35.0, used="the sum inside"),
    Figure("VGG16", "hybrid", 16, 80.0),
)


def setting(figure: Figure, computing: float) -> Setting:
    return Setting(
        figure.way,
        figure.workers,
        MODELS[figure.model].bytes,
        MACHINE,
        Computing(computing, SPREAD),
        group=4,
        root="paper",
        iterations=60,
    )


def computing(model: str) -> float:
    """Seconds of computing: the paper's own, or those with which the share of its figure comes out."""
    known = MODELS[model].computing
    if known is not None:
        return known
    figure = next(f for f in FIGURES if f.model == model and f.used == "T_comp")
    low, high = 0.01, 10.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        more = 100 * simulate(setting(figure, middle)).share > figure.share
        low, high = (middle, high) if more else (low, middle)
    return float((low * high) ** 0.5)


def compared() -> Iterator[tuple[Figure, float, float]]:
    """Each figure with the model's seconds of computing and the simulated share in percent."""
    seconds = {model: computing(model) for model in MODELS}
    for figure in FIGURES:
        yield figure, seconds[figure.model], 100 * simulate(setting(figure, seconds[figure.model])).share


def fused(figure: Figure, seconds: float) -> float:
    """The share in percent with this project's exchange on the same link, its memory no longer the limit."""
    machine = replace(MACHINE, serial=False, parallel=4.0, exchange=5.0)
    way = "seasgd" if figure.way == "paper" else figure.way
    return 100 * simulate(replace(setting(figure, seconds), machine=machine, way=way, root="seasgd")).share


def table() -> Iterator[str]:
    """The paper's table beside ours."""
    yield "share of communication in an iteration, percent (A: asynchronous, H: hybrid in groups of 4)"
    yield (
        f"{'':30}{'computing ms':>13}{'paper':>9}{'simulated':>11}{'points':>8}   {'fused exchange':<16}"
        "the paper's figure is used for"
    )
    for figure, seconds, share in compared():
        name = f"{figure.model} {'A' if figure.way == 'paper' else 'H'} {figure.workers}"
        said = f"{'< ' * figure.below}{figure.share:g}"
        off = max(0.0, share - figure.share) if figure.below else share - figure.share
        ours = fused(figure, seconds)
        used = figure.used or "-"
        yield f"{name:30}{1e3 * seconds:13.1f}{said:>9}{share:11.1f}{off:+8.1f}   {ours:<16.1f}{used}"
    yield ""
    yield "computing times: " + "; ".join(f"{name} from {model.source}" for name, model in MODELS.items())
