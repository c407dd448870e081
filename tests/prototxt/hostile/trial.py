"""Tries mutated files, each in a fork of this process, and says how each ended, as JSON lines.

``python -m tests.prototxt.hostile.trial FOLDER FIRST COUNT [KIND]``: numbers FIRST to FIRST + COUNT - 1, each
of which is a seed. FOLDER/samples holds the samples (made when absent); FOLDER/kept gets the files that end
badly.

A fork has a limit of memory and of time, and an audit hook that sees what would be executed or written
elsewhere. The end of a trial is one of: "fine", "refused" (one of our errors), "told" (the reader tells its
net of another exception), "died apart" (a reader's death is its net's error), and the bad ones: "foreign"
(another exception reaches the user), "died", "hang", "memory", "executed".
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from prototxt.data.decode import LIMIT_NAME

if TYPE_CHECKING:
    from tests.prototxt.hostile.kinds import Kind

GOOD = frozenset({"fine", "refused", "told", "died apart"})
PER_FORK = 25
PIXELS = 1 << 20  # the limit of pixels in these trials: an image takes 3 MiB at most
SECONDS = 15.0  # the longest that a trial may take
ROOM = 2 << 30  # bytes of address space beyond what this process has
RUNS = frozenset(
    {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen"}
)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended; ``said`` is the error's text, ``grown`` the most memory it took, in bytes."""

    number: int
    kind: str
    what: str
    end: str
    error: str = ""
    said: str = ""
    grown: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.end in GOOD


def figure(name: str) -> int:
    """A line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


class Trials:
    """Tries numbers on forks of this process, some on one fork; what a bad one was tried with is kept."""

    def __init__(self, folder: Path, only: str = "") -> None:
        from tests.prototxt.hostile.kinds import KINDS

        self._folder, self._kinds = folder, KINDS
        self._names = [only] if only else list(KINDS)
        self._shares = [KINDS[name].share for name in self._names]

    def outcomes(self, first: int, count: int) -> Iterator[Outcome]:
        at, end = first, first + count
        while at < end:
            for outcome in self._forked(range(at, min(end, at + PER_FORK))):
                if not outcome.good:
                    self._prepare(outcome.number, self._folder / "kept" / str(outcome.number))
                at = outcome.number + 1
                yield outcome

    def _prepare(self, number: int, scratch: Path) -> tuple[Kind, Path, Outcome]:
        """The kind and the mutated file of a number, always the same."""
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for beside in ("net.caffemodel", "net.prototxt"):
            shutil.copy(self._folder / "samples" / beside, scratch / beside)
        rng = Random(number)
        (name,) = rng.choices(self._names, self._shares)
        path, what = self._kinds[name].prepare(rng, self._folder / "samples", scratch)
        return self._kinds[name], path, Outcome(number, name, what, "")

    def _forked(self, numbers: range) -> Iterator[Outcome]:
        """As far as the fork lives: the last outcome may be its end."""
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            self._child(numbers, write)
        os.close(write)
        done, hung = numbers.start, False
        with os.fdopen(read) as lines:
            while done < numbers.stop and not hung:
                if not select.select([read], [], [], SECONDS)[0]:
                    hung = True
                    os.kill(pid, signal.SIGKILL)
                elif line := lines.readline():
                    yield Outcome(**json.loads(line))
                    done += 1
                else:
                    break
        _, status = os.waitpid(pid, 0)
        if done < numbers.stop:
            yield self._death(done, hung, status)

    def _death(self, number: int, hung: bool, status: int) -> Outcome:
        kind, _, begun = self._prepare(number, self._folder / "scratch")
        if hung:
            return replace(begun, end="hang", seconds=SECONDS)
        end = "died apart" if kind.apart else "died"
        if os.WIFSIGNALED(status):
            return replace(begun, end=end, error=signal.Signals(os.WTERMSIG(status)).name)
        return replace(begun, end=end, error=f"exit code {os.WEXITSTATUS(status)}")

    def _child(self, numbers: range, write: int) -> None:
        """Work on the numbers and write each outcome as a line; never returns."""
        quiet = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(quiet, fd)
        watch = Watch()
        room = figure("VmSize") + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        for number in numbers:
            scratch = self._folder / "scratch" / str(number)
            kind, path, begun = self._prepare(number, scratch)
            os.chdir(scratch)
            line = json.dumps(asdict(watch.over(kind, path, begun))) + "\n"
            os.write(write, line.encode())
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)


class Watch:
    """Looks at what a trial executes, where it writes, how long it takes and how much memory."""

    def __init__(self) -> None:
        self._here, self._starts = "", False
        self._executed: list[str] = []
        sys.addaudithook(self._noted)

    def over(self, kind: Kind, path: Path, begun: Outcome) -> Outcome:
        self._here, self._starts = str(path.parent), kind.starts
        self._executed.clear()
        size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, started = figure("VmRSS"), time.monotonic()
        end, error, said = ending(kind, path)
        grown, seconds = figure("VmHWM") - before, round(time.monotonic() - started, 3)
        if self._executed:
            end, error = "executed", self._executed[0]
        elif end in GOOD and (grown > kind.floor + kind.times * size or error == "MemoryError"):
            end = "memory"
        return replace(begun, end=end, error=error, said=said, grown=grown, seconds=seconds)

    def _noted(self, event: str, args: tuple[Any, ...]) -> None:
        if event in RUNS and not self._starts:
            self._executed.append(f"{event} {args[:1]}")
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            place = os.path.abspath(args[0])
            if self._here and not place.startswith((self._here, "/dev/", "/proc/")):
                self._executed.append(f"wrote {place}")


def ending(kind: Kind, path: Path) -> tuple[str, str, str]:
    """(end, the error's type, its text) of the work on a file."""
    from prototxt.errors import PrototxtError
    from shmtrain.options import ConfigError
    from shmtrain.snapshot import SnapshotError

    try:
        kind.work(path)
        return "fine", "", ""
    except (PrototxtError, ConfigError, SnapshotError) as error:
        return "refused", type(error).__name__, str(error)[:3000]
    except BaseException as error:  # whatever it is
        said = "".join(traceback.format_exception(error))[-3000:]
        return "told" if kind.apart else "foreign", type(error).__name__, said


def main() -> None:
    folder, first, count = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3])
    os.environ[LIMIT_NAME] = str(PIXELS)
    import torch

    from tests.prototxt.hostile import samples

    torch.set_num_threads(1)
    if not (folder / "samples").is_dir():
        (folder / "samples").mkdir(parents=True)
        samples.make(folder / "samples")
    _warm(folder)
    for outcome in Trials(folder, *sys.argv[4:]).outcomes(first, count):
        print(json.dumps(asdict(outcome)), flush=True)


def _warm(folder: Path) -> None:
    """Load what the forks need, once: each works on a good sample of every kind."""
    import logging

    from tests.prototxt.hostile.kinds import KINDS

    logging.disable()
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder / "samples", scratch)
    here = os.getcwd()
    os.chdir(scratch)
    for kind in KINDS.values():
        if not kind.starts:
            for name in kind.files:
                if (scratch / name).exists():
                    kind.work(scratch / name)
    os.chdir(here)


if __name__ == "__main__":
    main()
