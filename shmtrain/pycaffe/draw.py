"""Nets as pictures, from their messages: ``caffe.draw.draw_net_to_file(net, "net.png")``.

Without graphviz; ``shmtrain draw`` builds the net and shows shapes and parameter counts too.
"""

from __future__ import annotations

import os
from typing import Any

from prototxt import draw


def draw_net(
    caffe_net: Any, rankdir: str = "LR", ext: str = "png", phase: int | None = None, display_lrm: bool = False
) -> bytes:
    """The picture of a NetParameter.

    rankdir      where the net runs to: LR, RL, TB (down) or BT
    ext          svg, png, pdf, jpg
    phase        caffe.TRAIN or caffe.TEST: without the layers of the other; None: all
    display_lrm  show the learning-rate multipliers that layers set
    """
    return draw.picture(draw.of_message(caffe_net, phase, display_lrm), ext, rankdir)


def draw_net_to_file(
    caffe_net: Any,
    filename: str | os.PathLike[str],
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
) -> None:
    """Write the picture into a file, in the format that its ending says."""
    draw.save(draw.of_message(caffe_net, phase, display_lrm), filename, rankdir)
