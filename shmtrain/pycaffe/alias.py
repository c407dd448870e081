"""``import caffe`` for code that was written for the original."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
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
    """Finds ``caffe``, and ``caffe.X`` once that is this package: no file of ours is run a second time.

    always  also where an original is installed; else that comes first
    """

    def __init__(self, always: bool) -> None:
        self.always = always

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == NAME:
            ours = self.always or not original_is_installed()
            return ModuleSpec(NAME, _Alias(), is_package=True) if ours else None
        if not fullname.startswith(f"{NAME}.") or sys.modules.get(NAME) is not sys.modules[FACE]:
            return None
        found = importlib.util.find_spec(FACE + fullname[len(NAME) :])
        return None if found is None else ModuleSpec(fullname, _Alias())


def original_is_installed() -> bool:
    """Whether sys.path has another ``caffe``; the original's source that was never built does not count."""
    spec = PathFinder.find_spec(NAME)
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    unbuilt = any((folder / "_caffe.cpp").exists() for folder in folders) and not any(
        path.suffix != ".cpp" for folder in folders for path in folder.glob("_caffe.*")
    )
    return not unbuilt


def install(always: bool = False) -> None:
    """From now on ``import caffe`` gives this package, unless an original is installed or ``always`` is set.

    It stays so until ``uninstall``; to call it again is fine.
    """
    present = [finder for finder in sys.meta_path if isinstance(finder, CaffeFinder)]
    for finder in present:
        finder.always = finder.always or always
    if not present:
        sys.meta_path.insert(0, CaffeFinder(always))


def uninstall() -> None:
    """The reverse; modules that have imported it keep it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, CaffeFinder)]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == NAME and module.__name__.startswith(FACE):
            del sys.modules[name]
