"""One process of a launch by torchrun, mpirun or srun: it is one worker, and nobody of ours watches it.

The first rank opens the job in the box that --smb names, or holds a box itself where all ranks are on its
host: the others find its socket in a folder that only this user can enter, named after what identifies the
launch.
Loads no torch before that box is open.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

import smb
from shmtrain.config import TrainConfig
from shmtrain.environment import Launched
from shmtrain.grace import LastingProgress
from shmtrain.group import State
from shmtrain.handover import BoxPlace, Console, Handover, counter_key
from shmtrain.launch_join import room
from shmtrain.lifeline import HandedDown, open_parent
from shmtrain.log import Log
from shmtrain.method import METHODS
from shmtrain.options import ConfigError
from shmtrain.reports import begin_files
from shmtrain.tempdir import SOCKET, private

FIRST_RANK = 60.0  # seconds until the first rank has opened the job
LAST_ONES = 10.0  # seconds for which the first rank holds its box for others that end
POLL = 0.05
FAILED = 1
Found = TypeVar("Found")


def run(config: TrainConfig, console: Console, place: Launched) -> int:
    """Train as this worker; the exit code. Raises ConfigError."""
    if not METHODS[config.sharing.algorithm].box:
        from shmtrain import launch_mpi

        return launch_mpi.run(config, console, place)
    job = job_of(config, place)
    begin_files(config, [place.rank])
    with Log([sys.stderr], config.run.log if place.rank == 0 else None) as told, ExitStack() as stack:
        try:
            box, where = _box(config, place, stack)
            tickets = _open_job(box, job, place, config)
        except (smb.SmbError, OSError) as error:
            told.error(f"Worker {place.rank} (pid {os.getpid()}): {error}")
            return FAILED
        parent = open_parent()
        stack.callback(os.close, parent)
        handover = Handover(
            config, console, place.rank, job, where, tickets, HandedDown(parent), os.getppid(), place
        )
        from shmtrain.worker import take_part

        code = take_part(handover)
        if where.embedded and place.rank == 0:
            _hold_for_the_others(box)
        return code


def job_of(config: TrainConfig, place: Launched) -> str:
    """The job's name: as told, or what identifies the launch. Raises ConfigError where a box needs one."""
    sharing = config.sharing
    if sharing.smb is None and not place.one_host:
        raise ConfigError(
            f"{place.launcher} has started {place.world} processes, {place.local_world} of them on this host:"
            " over several hosts they need a box that all can reach (`smb serve --tcp HOST:PORT` on one of"
            " them): name it with --smb HOST:PORT"
        )
    if (job := sharing.job or place.job) is not None:
        return job
    if sharing.smb is not None:
        raise ConfigError(
            f"{place.launcher} does not tell one launch from another: name this job with --job, unlike any"
            " other in the box"
        )
    return Path(config.path).stem


# The box -------------------------------------------------------------------------------------------------


def _box(config: TrainConfig, place: Launched, stack: ExitStack) -> tuple[smb.Box, BoxPlace]:
    """A connection to the job's box, which the first rank may have to serve itself."""
    sharing, name = config.sharing, f"launch {place.rank}"
    if sharing.smb is not None:
        box = stack.enter_context(smb.connect(sharing.smb, name=name, reconnect=sharing.grace))
        return box, BoxPlace(sharing.smb, False, "")
    folder = meeting_folder(sharing.job or place.job or _parent())
    path = folder / SOCKET
    if place.rank == 0:
        _sweep(folder.parent)
        _make_private(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(smb.serve(unix=path))
        box = smb.connect(f"unix:{path}", name=name)
    else:
        box = _until(lambda: _connected(folder, path, name), f"box at {path}")
    return stack.enter_context(box), BoxPlace(f"unix:{path}", True, str(folder))


def meeting_folder(identity: str) -> Path:
    """Where the ranks of one launch meet on this host."""
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"shmtrain-{os.getuid()}-{digest}"


def _parent() -> str:
    """The process that has started all ranks of this host, unlike any other before or after it."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(") ")[2].split()[19]
    return f"{parent}-{started}"


def _make_private(folder: Path) -> None:
    """Make the folder, or take it over from a launch that was killed. Raises OSError where it is not ours."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not private(folder):
            raise


def _sweep(parent: Path) -> None:
    """Remove what launches have left whose processes were all killed: folders with a socket nobody hears."""
    for folder in parent.glob(f"shmtrain-{os.getuid()}-*"):
        with suppress(OSError):
            old = time.time() - folder.lstat().st_mtime > FIRST_RANK
            if old and private(folder) and _unheard(folder / SOCKET):
                shutil.rmtree(folder, ignore_errors=True)


def _unheard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _connected(folder: Path, path: Path, name: str) -> smb.Box | None:
    try:
        return smb.connect(f"unix:{path}", name=name) if private(folder) and path.exists() else None
    except (smb.TransportError, FileNotFoundError):
        return None


def _hold_for_the_others(box: smb.Box) -> None:
    """They still say that they have ended: the box must not go before them."""
    until = time.monotonic() + LAST_ONES
    while any(row["pid"] != os.getpid() for row in box.sessions()) and time.monotonic() < until:
        time.sleep(POLL)


# The job -------------------------------------------------------------------------------------------------


def _open_job(box: smb.Box, job: str, place: Launched, config: TrainConfig) -> int:
    """What the job's counter stood at when the first rank opened the job: it does, the others wait for it.

    Raises KeyExists when a job of this name, or this rank of it, is there already.
    """
    key = f"{job}/launch"
    if place.rank == 0:
        begun = box.counter(counter_key(job)).value
        try:
            LastingProgress.create(box, job, place.world, lifetime="attached", **room(config, begun))
        except smb.KeyExists as error:
            raise smb.KeyExists(f"job {job!r} runs in this box already; choose another --job") from error
        box.create(key, count=1, dtype="int64", initial=np.array([begun], np.int64))
        return begun
    begun = int(np.asarray(_until(lambda: _attached(box, key), f"job {job!r}").read())[0])
    if LastingProgress.attach(box, job).rows().state(place.rank) is not State.ABSENT:
        raise smb.KeyExists(
            f"worker {place.rank} of job {job!r} runs in this box already; choose another --job"
        )
    return begun


def _attached(box: smb.Box, key: str) -> smb.Segment | None:
    try:
        return box.attach(key)
    except smb.UnknownKey:
        return None


def _until(look: Callable[[], Found | None], what: str) -> Found:
    """What ``look`` finds. Raises WaitTimeout when the first rank does not open it in time."""
    until = time.monotonic() + FIRST_RANK
    while (found := look()) is None:
        if time.monotonic() > until:
            raise smb.WaitTimeout(f"the first rank has not opened its {what} within {FIRST_RANK:g} s")
        time.sleep(POLL)
    return found
