"""The files of the checkout as the house tests see them."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("smb", "shmtrain", "prototxt")
CODE = (".py", ".pyi", ".cpp", ".hpp", ".h", ".sh")


@cache
def tracked() -> list[Path]:
    """Every file that git tracks and that is there, relative to the top."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def sources(*suffixes: str, under: tuple[str, ...] = ()) -> list[Path]:
    return [p for p in tracked() if p.suffix in suffixes and (not under or p.parts[0] in under)]


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def definitions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in ast.walk(syntax(path)) if isinstance(node, kinds)]


def modules() -> list[Path]:
    return sources(".py", under=PACKAGES)


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")
