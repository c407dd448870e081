"""What every test gets: the reference folder, and a check that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHM = "/dev/shm"
GRACE = 5.0  # seconds that a process may take to go after its test is over
RUN_VARIABLE = "SHMTRAIN_TEST_RUN"  # in the environment of everything that this run starts

# multiprocessing keeps these two for as long as the process that started them lives.
LONG_LIVED = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


# The reference folder ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference folder (golden results, whole data sets); $SHMTRAIN_SHARED moves it."""
    folder = Path(os.environ.get("SHMTRAIN_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip("needs the reference folder beside the checkout")
    return folder


# Nothing is left behind ----------------------------------------------------------------------------------


def wait_until_empty(left: Callable[[], set[str]], seconds: float) -> set[str]:
    """What is still there when it is empty or ``seconds`` are over."""
    end = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def shm_files() -> set[str]:
    try:
        return set(os.listdir(SHM))
    except FileNotFoundError:
        return set()


def held_by_strangers(names: set[str]) -> set[str]:
    """Those files of /dev/shm that a living process outside this run has mapped or open.

    By their inodes: a semaphore is mapped under another name than the one it is given.
    """
    ours = set(run_processes()) | {os.getpid()}
    inodes, held = {}, set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[os.stat(f"{SHM}/{name}").st_ino] = name
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid in ours:
            continue
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        mapped = {int(line.split()[4]) for line in maps if f" {SHM}/" in line}
        held |= {name for inode, name in inodes.items() if inode in mapped or f"{SHM}/{name}" in links}
    return held


class Run:
    """Marks what this run starts, so that it is found even when its parent has died.

    A program inherits the environment variable, a plain fork the descriptor.
    """

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.fd = os.memfd_create(f"shmtrain-test-{self.name}")
        os.environ[RUN_VARIABLE] = self.name

    def owns(self, pid: int) -> bool:
        try:
            if os.readlink(f"/proc/{pid}/fd/{self.fd}").startswith(f"/memfd:shmtrain-test-{self.name}"):
                return True
        except OSError:
            pass
        try:
            return f"{RUN_VARIABLE}={self.name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            )
        except OSError:
            return False


RUN = Run()


def run_processes() -> dict[int, str]:
    """The living processes of this run besides pytest itself: pid -> command line."""
    me, found = os.getpid(), {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == me or not RUN.owns(pid):
            continue
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        state, parent = status.rpartition(") ")[2].split()[:2]
        if state in "ZX" or (int(parent) == me and any(word in command for word in LONG_LIVED)):
            continue
        found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process() -> Iterator[None]:
    """Fail a test file that ends with a process of its own still alive; then kill it."""
    before = set(run_processes())

    def survivors() -> set[str]:
        return {f"{pid} {command}" for pid, command in run_processes().items() if pid not in before}

    yield
    left = wait_until_empty(survivors, GRACE)
    for line in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    assert not left, "processes that outlived their tests: " + "; ".join(sorted(left))


@pytest.fixture(autouse=True)
def leaves_no_shm_file() -> Iterator[None]:
    """Fail a test that leaves a file in /dev/shm; another run's files on this machine do not count."""
    before = shm_files()
    yield
    if not shm_files() - before:
        return
    left = wait_until_empty(lambda: (new := shm_files() - before) - held_by_strangers(new), 1.0)
    assert not left, f"left in {SHM}: {sorted(left)}"


# A skip must be on the list ------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--named-skips",
        metavar="FILE",
        help="fail when a test is skipped for a reason that no line of FILE (regular expressions) matches",
    )


def allowed_skips(path: str) -> list[re.Pattern[str]]:
    lines = (ROOT / path).read_text().splitlines()
    return [re.compile(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--named-skips")
    if not path:
        return
    named = allowed_skips(path)
    for report in terminalreporter.stats.get("skipped", []):
        reason = skip_reason(report)
        known = any(pattern.search(reason) for pattern in named)
        terminalreporter.write_line(f"skipped{'' if known else ', NOT NAMED'}: {report.nodeid}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    """Started in a shell's background, this process ignores Ctrl-C, and so does all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("rdma") for item in items):
        from tests.rdma_guest.items import through_guest

        through_guest(items)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--named-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not path or reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    named = allowed_skips(path)
    reasons = {skip_reason(report) for report in reporter.stats.get("skipped", [])}
    if any(not any(pattern.search(reason) for pattern in named) for reason in reasons):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
