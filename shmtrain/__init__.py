"""Trains Caffe prototxt models on several workers that share weights through a memory box."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prototxt.python_modules import provide_face

if TYPE_CHECKING:
    from shmtrain.loop import Exchange
    from shmtrain.pycaffe.solver import Solver

__all__ = ["Exchange", "Solver"]


def __getattr__(name: str) -> Any:
    """``Solver`` and ``Exchange`` load torch; ``import shmtrain`` alone does not."""
    if name == "Solver":
        from shmtrain.pycaffe.solver import Solver

        return Solver
    if name == "Exchange":
        from shmtrain.loop import Exchange

        return Exchange
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _face() -> None:
    """``import caffe`` in the modules of Python layers gives shmtrain.pycaffe, but for an original."""
    from shmtrain.pycaffe.alias import install

    install()


provide_face(_face)
