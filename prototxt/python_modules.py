"""Where a net's Python layers come from: modules that lie on a path which the user has named. No torch.

A prototxt is data, yet it names code to run. So a module is taken from where the user said that such code
lies (``PYTHONPATH``, or folders that the program hands over) or from what the program has imported already;
never from the working directory, the prototxt's folder, the standard library or the installed packages.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_FACES: list[Callable[[], None]] = []
_FOLDERS: list[Callable[[], Iterable[str]]] = []


def provide_face(install: Callable[[], None]) -> None:
    """Have ``install`` called before a layer's module is loaded: it makes ``import caffe`` work there.

    It is called often, and must leave an original that is installed in its place.
    """
    if install not in _FACES:
        _FACES.append(install)


def name_folders(find: Callable[[], Iterable[str]]) -> None:
    """Let the folders that ``find`` returns, asked at each layer, count as named by this process's user."""
    if find not in _FOLDERS:
        _FOLDERS.append(find)


def named_folders(given: Iterable[str | os.PathLike[str]] = ()) -> list[str]:
    """The folders that may hold layers' modules: those given, PYTHONPATH's, the program's; absolute."""
    named = [os.fspath(folder) for folder in given] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named += [folder for find in _FOLDERS for folder in find()]
    return list(dict.fromkeys(os.path.abspath(folder) for folder in named if folder))


def script_folders() -> list[str]:
    """What a script has on sys.path beyond the interpreter's own folders: its own, and those it has added."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    known = (
        [sysconfig.get_path(kind) for kind in kinds] + site.getsitepackages() + [site.getusersitepackages()]
    )
    own = {Path(folder).resolve() for folder in known}
    found = [(folder, Path(folder).resolve()) for folder in sys.path if os.path.isdir(folder)]
    return [folder for folder, place in found if not own.intersection((place, *place.parents))]


def load_module(name: str, folders: list[str]) -> ModuleType:
    """The module, loaded from ``folders`` unless the program has imported one of this name already.

    Raises ImportError when no folder has it; what the module's own code raises goes through.
    """
    if name in sys.modules:
        return sys.modules[name]
    for install in _FACES:
        install()
    top = name.partition(".")[0]
    if top not in sys.modules:
        _load_top(top, folders)
    elif not _lies_in(sys.modules[top], folders):  # a part of an installed package that is imported otherwise
        raise _not_found(name, folders)
    return importlib.import_module(name)


def _not_found(name: str, folders: list[str]) -> ModuleNotFoundError:
    searched = ", ".join(folders) or "PYTHONPATH is not set"
    return ModuleNotFoundError(
        f"no module {name!r} on the path for Python layers ({searched}): put its folder on PYTHONPATH"
    )


def _lies_in(module: ModuleType, folders: list[str]) -> bool:
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(os.path.abspath(place).startswith(folder + os.sep) for place in places for folder in folders)


def _load_top(name: str, folders: list[str]) -> None:
    spec = PathFinder.find_spec(name, folders)
    if spec is None or spec.loader is None:
        raise _not_found(name, folders)
    for folder in folders:  # the module's own imports are found beside it
        if folder not in sys.path:
            sys.path.append(folder)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
