"""The face that scripts written for the original import: ``from shmtrain import pycaffe as caffe``.

First cut: nets, blobs, the six solvers, modes and seeds. What differs from the original: nothing is logged to
stderr, and each net draws its fillers from a stream of its own.
"""

from __future__ import annotations

from shmtrain.pycaffe.net import TEST, TRAIN, Net
from shmtrain.pycaffe.settings import (
    layer_type_list,
    set_device,
    set_mode_cpu,
    set_mode_gpu,
    set_random_seed,
    solver_count,
    solver_rank,
)
from shmtrain.pycaffe.solver import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    Solver,
    get_solver,
)

__version__ = "1.0.0"  # the original whose face this is

__all__ = [
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "NesterovSolver",
    "Net",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "get_solver",
    "layer_type_list",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_random_seed",
    "solver_count",
    "solver_rank",
]
