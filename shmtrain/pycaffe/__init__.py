"""The face that scripts written for the original import: ``from shmtrain import pycaffe as caffe``.

``python -m shmtrain.pycaffe SCRIPT.py`` runs them unchanged. What differs from the original stands in
docs/pycaffe.md: above all, each net draws its fillers from a stream of its own, and wrong files and arguments
raise exceptions instead of ending the process.
"""

from __future__ import annotations

from shmtrain.pycaffe import io, proto
from shmtrain.pycaffe.classifier import Classifier
from shmtrain.pycaffe.detector import Detector
from shmtrain.pycaffe.layer import Layer
from shmtrain.pycaffe.net import TEST, TRAIN, Net
from shmtrain.pycaffe.net_spec import NetSpec, layers, params, to_proto
from shmtrain.pycaffe.settings import (
    NCCL,
    Timer,
    has_nccl,
    init_log,
    layer_type_list,
    log,
    set_device,
    set_mode_cpu,
    set_mode_gpu,
    set_multiprocess,
    set_random_seed,
    set_solver_count,
    set_solver_rank,
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
    "NCCL",
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Classifier",
    "Detector",
    "Layer",
    "NesterovSolver",
    "Net",
    "NetSpec",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "Timer",
    "get_solver",
    "has_nccl",
    "init_log",
    "io",
    "layer_type_list",
    "layers",
    "log",
    "params",
    "proto",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
    "to_proto",
]
