"""What a worker does when the box or the launcher has died: save the center from its mapping, and end."""

from __future__ import annotations

import shutil
import time
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shmtrain.group import Progress
from shmtrain.handover import Handover
from shmtrain.learner import Learner
from shmtrain.log import Log
from shmtrain.snapshot import SnapshotError, write_atomically
from smb.errors import NotSupported, SmbError

if TYPE_CHECKING:
    from smb import Segment

PATIENCE = 3.0  # seconds that a lower rank may take to save the center
POLL = 0.05


class Rescue:
    """Knows what there is to save. ``end`` may run in any thread while the training loop hangs in a step."""

    def __init__(self, handover: Handover, name: str, told: Log) -> None:
        self._handover, self._name, self._told = handover, name, told
        self._since = time.time()
        self._held: tuple[Learner, Segment, Progress] | None = None

    def hold(self, learner: Learner, center: Segment, progress: Progress) -> None:
        """From now on there is a center."""
        self._held = (learner, center, progress)

    def end(self, reason: str) -> None:
        """Say why, save the center when no lower rank does, clear the launcher's folder."""
        self._told.error(f"{self._name}: {reason}")
        try:
            if self._held is not None and not self._saved_by_others(self._held[2]):
                self._save(*self._held)
        except (SmbError, SnapshotError) as error:
            self._told.error(f"{self._name}: the center is lost: {error}")
        shutil.rmtree(self._handover.box.folder, ignore_errors=True)

    @property
    def _prefix(self) -> str:
        return f"{self._handover.config.snapshots.prefix}_rescue_iter_"

    def _saved_by_others(self, progress: Progress) -> bool:
        """Wait for the lower ranks that live to save it; False when it is this worker's turn."""
        rows, until = progress.rescue(), time.monotonic() + PATIENCE
        lower = [rows.pid(rank) for rank in range(self._handover.rank) if rows.pid(rank)]
        while any(map(_runs, lower)) and not self._found() and time.monotonic() < until:
            time.sleep(POLL)
        return self._found()

    def _found(self) -> bool:
        """Whether somebody has saved a center since this worker started."""
        files = map(Path, glob(f"{escape(self._prefix)}*.caffemodel"))
        return any(file.stat().st_mtime >= self._since for file in files)

    def _save(self, learner: Learner, center: Segment, progress: Progress) -> None:
        """The net gets a vector of its own to hold the center: the loop may still write to the old one."""
        params = learner.params
        vector = torch.empty_like(params.vector)
        what = "the center"
        try:
            center.rescue(vector.numpy())
        except NotSupported:  # it lay at the daemon alone, on another host
            vector.copy_(params.vector)
            what = "this worker's weights, since the center is lost with the box,"
        for slot in params.slots:
            _, gradient = params.views(slot)
            learner.net.set_param(slot.layer, slot.index, vector[slot.slice].view(slot.shape), gradient)
        portion = learner.portion
        done = portion.iterations(portion.steps(learner.iteration) + progress.rescue().total)
        path = f"{self._prefix}{done}.caffemodel"
        write_atomically(path, learner.net.save)
        self._told.error(f"{self._name}: saved {what} after {done} iterations of the job as {path}")


def _runs(pid: int) -> bool:
    """Whether a process lives and is not stopped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] not in ("Z", "X", "T")
