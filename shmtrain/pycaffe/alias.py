"""``import caffe`` for code that was written for the original, where that is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "caffe"
FACE = __package__


class _Alias(Loader):
    """Loads ``caffe`` and ``caffe.X`` by handing out this package's own modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(FACE + spec.name[len(NAME) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already, under its own name, whose spec the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class CaffeFinder(MetaPathFinder):
    """Finds ``caffe`` itself. It stands behind all others: an original that is installed comes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(NAME, _Alias(), is_package=True) if fullname == NAME else None


class SubmoduleFinder(MetaPathFinder):
    """Finds ``caffe.X`` once ``caffe`` is this package.

    It stands before all others, which would find the file and run it anew: a second copy of its classes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{NAME}.") or sys.modules.get(NAME) is not sys.modules[FACE]:
            return None
        found = importlib.util.find_spec(FACE + fullname[len(NAME) :])
        return None if found is None else ModuleSpec(fullname, _Alias())


def install() -> None:
    """From now on ``import caffe`` gives this package unless the original is installed; twice is fine."""
    if not any(isinstance(finder, CaffeFinder) for finder in sys.meta_path):
        sys.meta_path[:] = [SubmoduleFinder(), *sys.meta_path, CaffeFinder()]


def uninstall() -> None:
    """The reverse; modules that have imported it keep it."""
    ours = (CaffeFinder, SubmoduleFinder)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ours)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == NAME and module.__name__.startswith(FACE):
            del sys.modules[name]
