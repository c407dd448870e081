"""``import caffe`` for code that was written for the original, where that is not installed.

The finder stands behind all others, so an original that is installed is what such code gets.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "caffe"
FACE = __package__


class CaffeFinder(MetaPathFinder, Loader):
    """Gives ``caffe`` and ``caffe.X`` as this package's own modules: no second copy of a class or setting."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For names under ``caffe`` that this package has; None for all others."""
        if fullname.partition(".")[0] != NAME:
            return None
        ours = FACE + fullname[len(NAME) :]
        if importlib.util.find_spec(ours) is None:
            return None
        return ModuleSpec(fullname, self, is_package=fullname == NAME)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(FACE + spec.name[len(NAME) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already, under its own name, whose spec the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """From now on ``import caffe`` gives this package unless the original is installed; twice is fine."""
    if not any(isinstance(finder, CaffeFinder) for finder in sys.meta_path):
        sys.meta_path.append(CaffeFinder())


def uninstall() -> None:
    """The reverse; modules that have imported it keep it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, CaffeFinder)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == NAME and (module.__name__ or "").startswith(FACE):
            del sys.modules[name]
