"""What is shipped: typed packages, native sources, the schema, and nothing stale."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.house.tree import PACKAGES, ROOT, tracked


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a source distribution of what git tracks."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    for path in tracked():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes((ROOT / path).read_bytes())
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--formats=gztar", "-d", str(folder)],
        cwd=tree,
        check=True,
        capture_output=True,
        timeout=100,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def test_the_source_distribution_holds_all_that_a_build_needs(sdist: set[str]) -> None:
    needed = {
        str(p)
        for p in tracked()
        if (p.parts[0] == "native" and p.suffix in {".cpp", ".hpp", ".h"} and "tests" not in p.parts)
        or (p.parts[0] in PACKAGES and p.suffix in {".py", ".pyi", ".proto", ".desc", ".typed"})
        or p.parts[0]
        in {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    }
    assert sorted(needed - sdist) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_marked_as_typed(package: str, sdist: set[str]) -> None:
    assert f"{package}/py.typed" in sdist


def test_the_settings_stand_in_setup_cfg_alone() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert {"metadata", "tool:pytest", "mypy", "importlinter"} <= set(config.sections())
    assert "[tool." not in (ROOT / "pyproject.toml").read_text()
    for stray in ("pytest.ini", "tox.ini", "mypy.ini", ".importlinter", "requirements.txt"):
        assert not (ROOT / stray).exists()


def test_an_editable_install_is_a_path_that_a_folder_of_our_name_cannot_hide(tmp_path: Path) -> None:
    """As a clone is one for who starts Python beside it: a finder of setuptools' would come too late."""
    tree, beside = tmp_path / "tree", tmp_path / "beside" / "shmtrain"
    for package in PACKAGES:
        (tree / package).mkdir(parents=True)
        (tree / package / "__init__.py").touch()
    for name in ("setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "setup.py").write_text("import setuptools\nsetuptools.setup()\n")
    beside.mkdir(parents=True)
    make = [sys.executable, "setup.py", "-q", "editable_wheel", "-d", str(tmp_path)]
    subprocess.run(make, cwd=tree, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")
    code = f"import site; site.addsitedir({str(site)!r}); import shmtrain; print(shmtrain.__file__)"
    command = [sys.executable, "-S", "-c", code]
    found = subprocess.run(command, cwd=beside.parent, check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == str(tree / "shmtrain" / "__init__.py")


def test_no_built_file_is_tracked() -> None:
    built = {".so", ".o", ".a", ".pyc", ".caffemodel", ".solverstate", ".mdb"}
    assert [str(p) for p in tracked() if p.suffix in built and Path("tests") not in p.parents] == []
