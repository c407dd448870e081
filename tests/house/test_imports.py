"""Who may import what, and that nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.house.tree import ROOT, module_name, modules, syntax

# Outside the standard library; the internal seams are contracts in setup.cfg (import-linter).
ALLOWED = {
    "smb": {"smb", "numpy"},
    "prototxt": {"prototxt", "torch", "numpy", "google", "lmdb", "h5py", "cv2"},
    "shmtrain": {"shmtrain", "prototxt", "smb", "torch", "numpy", "google"},
}
ONLY_IN = {
    "tensorboard": ["shmtrain.metrics"],
    "torch.utils.tensorboard": ["shmtrain.metrics"],
    "tqdm": ["shmtrain.progress"],
    "mpi4py": ["shmtrain.exchange.mpi_*", "shmtrain.bench.*"],
    "simpy": ["shmtrain.simulate.shared"],
    "matplotlib": ["shmtrain.report", "prototxt.draw", "smb.bench"],
    "cupy": ["shmtrain.device"],
    "pyverbs": ["smb.transport.rdma"],
}


def loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from loaded(node)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in loaded(syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.lineno, node.module


def allowed(module: str, name: str) -> bool:
    for library, places in ONLY_IN.items():
        if name == library or name.startswith(library + "."):
            return any(fnmatch(module, place) for place in places)
    top = name.split(".", maxsplit=1)[0]
    return top in sys.stdlib_module_names or top in ALLOWED[module.split(".", maxsplit=1)[0]]


def test_each_package_imports_only_what_the_design_allows() -> None:
    wrong = [
        f"{path}:{line}: {name}"
        for path in modules()
        for line, name in imports(path)
        if not allowed(module_name(path), name)
    ]
    assert wrong == []


def test_nothing_is_unpickled() -> None:
    """What comes from a socket or a file must not be able to run code."""
    found = {"pickle", "marshal", "shelve", "dill"}
    assert [f"{p}:{n}" for p in modules() for n, name in imports(p) if name.split(".")[0] in found] == []


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import smb", ["torch", "google.protobuf"]),
        ("import prototxt", ["torch", "lmdb", "h5py"]),
        ("import shmtrain", ["torch", "lmdb", "h5py"]),
        ("import smb.cli", ["torch", "numpy", "google.protobuf"]),
        ("import shmtrain.cli", ["torch", "numpy", "lmdb", "h5py"]),
        ("import prototxt; prototxt.parse_solver", ["torch"]),
    ],
)
def test_an_import_loads_nothing_heavy(statement: str, heavy: list[str]) -> None:
    code = f"{statement}; import sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("command", ["smb", "shmtrain"])
def test_help_answers_at_once_and_without_torch(command: str) -> None:
    """At once is 0.3 s of a processor: on a busy machine the clock shows the others' work, too."""
    script = (
        f"import sys; sys.argv = ['{command}', '--help']\nfrom {command}.cli import main\n"
        "try:\n    sys.exit(main())\nfinally:\n"
        "    print('HEAVY', [m for m in ('torch', 'numpy') if m in sys.modules], file=sys.stderr)\n"
    )

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    def run() -> tuple[float, subprocess.CompletedProcess[str]]:
        before = used()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        return used() - before, done

    seconds, done = min((run() for _ in range(5)), key=lambda pair: pair[0])
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert "HEAVY []" in done.stderr
    assert seconds < 0.3


@pytest.mark.parametrize("command", ["smb", "shmtrain"])
def test_the_console_command_is_installed(command: str) -> None:
    beside = Path(sys.executable).parent / command
    path = str(beside) if beside.exists() else shutil.which(command)
    assert path, f"{command} is not installed beside {sys.executable}"
    done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
