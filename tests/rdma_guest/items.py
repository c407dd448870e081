"""Tests marked ``rdma`` where no RDMA device is: one guest runs them all, each is reported as if it ran here.

On a machine with a device they run directly. Without one they need root, apt and QEMU, or are skipped.
"""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.rdma_guest import boot, image

ROOT = Path(__file__).resolve().parent.parent.parent
START = 180.0  # seconds that the boot and the start of pytest may take on a busy machine
EACH = 60.0  # seconds for a test
LIMIT = 900.0  # seconds for all of them


def device_here() -> bool:
    """Whether tests can use real verbs without a guest."""
    states = [Path(path).read_text() for path in glob.glob("/sys/class/infiniband/*/ports/*/state")]
    return any("ACTIVE" in state for state in states) and importlib.util.find_spec("pyverbs") is not None


def obstacle() -> str:
    """Why no guest can run here; "" when one can."""
    if os.getuid() or not all(
        shutil.which(tool, path=image.PATH) for tool in ("qemu-system-x86_64", "apt-get")
    ):
        return "needs an RDMA device, or root, apt and QEMU for a guest that has one"
    return ""


def _pyverbs_fits() -> bool:
    suffixes = importlib.machinery.EXTENSION_SUFFIXES[:1]
    return any(glob.glob(f"/usr/lib/python3/dist-packages/pyverbs/device*{suffix}") for suffix in suffixes)


@dataclass
class Result:
    """What the guest's pytest said of one test."""

    kind: str  # "passed", "failure", "error" or "skipped"
    text: str
    seconds: str


@dataclass
class Guest:
    """The one boot of this run, at the first test that asks for its result."""

    _results: dict[tuple[str, str], Result] | None = None
    _said: str = ""
    _nodes: list[str] = field(default_factory=list)

    def result(self, item: GuestItem) -> Result:
        if self._results is None:
            self._results = {}
            self._nodes = [other.test for other in item.session.items if isinstance(other, GuestItem)]
            self._run()
        return self._results.get(_key(item.test)) or Result("error", f"no result:\n{self._said}", "0")

    def _run(self) -> None:
        made = image.image()
        if not _pyverbs_fits():
            pytest.skip(f"Debian's pyverbs is for another Python than {sys.version.split()[0]}")
        with tempfile.TemporaryDirectory(prefix="rdma-guest-out-") as folder:
            out = Path(folder)
            (out / "tests").write_text("\n".join(self._nodes))
            options = "-q -p no:cacheprovider --junit-xml=/run/hostout/junit.xml @/run/hostout/tests"
            inherited = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
            environment = {**inherited, "OMP_NUM_THREADS": "1"}
            seconds = min(LIMIT, START + EACH * len(self._nodes))
            # Interrupted, pytest still writes down what has ended.
            command = f"timeout --signal=INT {seconds - START:g} {sys.executable} -m pytest {options}"
            outcome = boot.boot(made, command, out, seconds, environment)
            self._said = outcome.said[-4000:]
            if (out / "junit.xml").exists():
                self._results = read_junit(out / "junit.xml")


def _key(nodeid: str) -> tuple[str, str]:
    """Class name and name as junit has them."""
    path, _, rest = nodeid.partition("::")
    plain, bracket, parameters = rest.partition("[")
    *classes, name = plain.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]), name + bracket + parameters


def read_junit(path: Path) -> dict[tuple[str, str], Result]:
    found: dict[tuple[str, str], Result] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        key = case.get("classname", ""), case.get("name", "")
        told = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = told[0].tag if told else "passed"
        text = "\n".join((child.text or child.get("message") or "") for child in told)
        if kind == "skipped":
            text = told[0].get("message") or text
        if (
            key not in found or found[key].kind == "passed"
        ):  # a test may fail and its teardown have an error too
            found[key] = Result(kind, text, case.get("time", "0"))
    return found


class GuestItem(pytest.Item):
    """Stands for a test that the guest runs. All have one file's name, so that one process has the guest.

    test  what pytest in the guest calls it
    """

    def __init__(self, *, guest: Guest, test: str, **keywords: Any) -> None:
        super().__init__(**keywords, nodeid=f"guest::{test}")
        self._guest = guest
        self.test = test

    def runtest(self) -> None:
        why = obstacle()
        if why:
            pytest.skip(why)
        result = self._guest.result(self)
        self.add_report_section("call", "guest", f"{result.seconds} s in the guest")
        if result.kind == "skipped":
            pytest.skip(result.text)
        if result.kind != "passed":
            raise FailedInGuest(result.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FailedInGuest):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class FailedInGuest(Exception):
    """The traceback as the guest printed it."""


def through_guest(items: list[pytest.Item]) -> None:
    """Replace the tests that need a device by the guest's reports of them, where there is no device."""
    if device_here() or not any(item.get_closest_marker("rdma") for item in items):
        return
    guest = Guest()
    for index, item in enumerate(items):
        if item.get_closest_marker("rdma"):
            assert item.parent is not None
            stand_in = GuestItem.from_parent(item.parent, name=item.name, guest=guest, test=item.nodeid)
            stand_in.own_markers[:] = [*item.own_markers, pytest.mark.timeout(LIMIT + 60).mark]
            items[index] = stand_in
