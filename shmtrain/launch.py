"""The launcher: holds the box, starts the workers and outlives any of them. Loads no torch.

It is the one process that the user's terminal talks to. Workers are in sessions of their own, so that Ctrl-C
reaches them once, through the launcher. They come from a fork server that has torch loaded already.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import smb
from shmtrain.config import TrainConfig
from shmtrain.environment import Launched
from shmtrain.grace import LastingProgress
from shmtrain.group import Progress, State
from shmtrain.handover import WAITED_OUT, BoxPlace, Console, Handover, counter_key, work, worker_threads
from shmtrain.joined import Joined
from shmtrain.launch_join import room
from shmtrain.lifeline import HandedDown
from shmtrain.log import Log
from shmtrain.reports import begin_files
from shmtrain.signals import before_training
from shmtrain.tempdir import SOCKET, keep_short
from shmtrain.watch import Signals, Watched, blocked

TICK = 0.25
AWAITED = 2.0  # seconds for which others that wait, too, may say so once one worker has given up waiting
LAST_ONES = 10.0  # seconds that the others may take to end once one worker has ended well
SAVING = 120.0  # seconds that the workers may take to save the center of a lost box: it may be large
PRELOAD = "shmtrain.preload"
OK, FAILED = 0, 1


def run(config: TrainConfig, console: Console, place: Launched | None = None) -> int:
    """Train as the configuration says; return the exit code.

    place  of this process where torchrun, mpirun or srun has started the workers: it is one of them
    """
    keep_short()
    before_training(config.run.sighup_effect)
    if config.sharing.join:
        from shmtrain import launch_join

        return launch_join.run(config, console)
    if place is not None and config.sharing.shared:
        from shmtrain import launch_rank

        return launch_rank.run(config, console, place)
    begin_files(config, range(config.sharing.workers))
    if not config.sharing.shared:
        from shmtrain.worker import run_alone

        return run_alone(config, console)
    with ExitStack() as stack:
        log = stack.enter_context(Log([sys.stderr], config.run.log))
        folder = stack.enter_context(_private_folder())
        try:
            address = config.sharing.smb or stack.enter_context(_embedded(folder))
            box = stack.enter_context(smb.connect(address, name="launcher", reconnect=config.sharing.grace))
            job = config.sharing.job or _job_name(config)
            tickets = box.counter(counter_key(job)).value
            progress = _open_job(box, job, config, tickets)
            own = os.pidfd_open(os.getpid())
            stack.callback(os.close, own)
            first = Handover(
                config=config,
                console=console,
                rank=0,
                job=job,
                box=BoxPlace(address, config.sharing.smb is None, folder),
                tickets=tickets,
                launcher=HandedDown(own),
                pid=os.getpid(),
            )
            box.patient = False  # the signals go on while the box is away
            return _Launch(first, progress, log, Joined(box, job, progress, log)).run()
        except smb.SmbError as error:
            log.error(f"The memory box: {error}")
            return FAILED


@contextmanager
def _private_folder() -> Iterator[str]:
    """A folder of this user alone, for sockets; gone at the end."""
    folder = tempfile.mkdtemp(prefix="shmtrain-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """Work in another folder meanwhile: a new interpreter looks for modules there before anywhere else.

    In a checkout it would take the sources, without their extensions, for the installed package. Workers
    change back to the launcher's folder before they do anything.
    """
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _embedded(folder: str) -> Iterator[str]:
    """A box in this process; its address."""
    with smb.serve(unix=os.path.join(folder, SOCKET)) as daemon:
        yield daemon.addresses[0]


def _job_name(config: TrainConfig) -> str:
    """Unlike any other job's: the solver's name, the time, and chance."""
    return f"{Path(config.path).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _open_job(box: smb.Box, job: str, config: TrainConfig, tickets: int) -> Progress:
    """The job's table; its name is taken in this box while this process lives. Others may join it."""
    try:
        return LastingProgress.create(box, job, config.sharing.workers, **room(config, tickets))
    except smb.KeyExists as error:
        raise smb.KeyExists(f"job {job!r} runs in this box already; choose another --job") from error


class _Launch:
    """One job: its workers from their start to the exit code."""

    def __init__(self, first: Handover, progress: Progress, log: Log, joined: Joined) -> None:
        """``joined``: the workers that are not ours."""
        self._first, self._progress, self._log, self._joined = first, progress, log, joined
        self._signals = Signals()
        self._workers: list[Watched] = []
        self._snapshots = 0  # requests passed on
        self._done_at: float | None = None  # when the first worker ended well
        self._waited_out_at: float | None = None  # when the first worker gave up waiting for others
        self._forced = self._stopped = False

    def run(self) -> int:
        with self._signals:
            self._announce()
            with blocked():
                self._start()
            try:
                self._watch()
            except smb.TransportError as error:
                return self._outlive(error)
        return self._verdict()

    # The start -------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        first = self._first
        where = "in the launcher" if first.box.embedded else "outside"
        self._log.info(
            f"Job {first.job}: {first.world} workers, launcher pid {first.pid}, memory box {where} at"
            f" {first.box.address}"
        )

    def _start(self) -> None:
        """Start all workers; the fork server keeps its socket in our folder."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])
        threads = str(worker_threads(self._first.config))
        os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)  # read when torch is loaded
        # Where multiprocessing puts the fork server's socket: by itself it would leave a folder when killed.
        multiprocessing.current_process()._config["tempdir"] = self._first.box.folder  # type: ignore[attr-defined]
        with _working_in(self._first.box.folder):
            forkserver.ensure_running()
        self._workers = [self._start_one(context, rank) for rank in range(self._first.world)]

    def _start_one(self, context: ForkServerContext, rank: int) -> Watched:
        process = context.Process(target=work, args=(replace(self._first, rank=rank),), name=f"worker-{rank}")
        process.start()
        return Watched(rank, process)

    # The watch -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while (living := [w for w in self._workers if not w.ended]) or self._joined_go_on():
            self._wait(living)
            for worker in living:
                self._bury(worker)
            self._obey()
            self._look()

    def _joined_go_on(self) -> bool:
        """Those on other machines cannot be killed from here: a forced end does not wait for them."""
        return not self._forced and self._joined.working()

    def _wait(self, living: list[Watched]) -> None:
        """Until a worker ends, a signal comes or TICK is over."""
        connection.wait([*(w.process.sentinel for w in living), self._signals.fd], TICK)
        self._signals.drain()

    def _outlive(self, error: smb.TransportError) -> int:
        """The box is gone: the workers save the center and end, each for itself."""
        self._log.error(f"The memory box is gone ({error})")
        until = time.monotonic() + SAVING
        while left := [w for w in self._workers if w.process.is_alive()]:
            if time.monotonic() > until or self._signals.stops > 1:
                break
            self._wait(left)
        self._kill()
        return FAILED

    def _bury(self, worker: Watched) -> None:
        """Name a worker that has died, and free the others of it."""
        if worker.process.is_alive():
            return
        worker.ended = True
        if worker.process.exitcode == OK and self._progress.rows().state(worker.rank) is State.LEFT:
            return
        if worker.process.exitcode == OK:
            self._done_at = self._done_at or time.monotonic()
            return
        if worker.process.exitcode == WAITED_OUT:
            self._waited_out_at = self._waited_out_at or time.monotonic()
        done = self._progress.rows().done(worker.rank)
        self._progress.bury(worker.rank)
        self._log.error(f"{worker.name} {worker.end()} after {done} iterations of its own")

    def _obey(self) -> None:
        """Pass on what was asked for: a stop to each worker once it trains, a snapshot to the leader."""
        if self._signals.stops > 1 and not self._forced:
            self._forced = True
            self._log.error("Asked twice to stop: ending all workers now, nothing more is saved")
            self._kill()
            self._joined.tell(signal.SIGKILL)
        if not self._signals.stops and self._snapshots == self._signals.snapshots:
            return
        rows = self._progress.rows()
        if self._snapshots < self._signals.snapshots:
            self._snapshots = self._signals.snapshots
            for worker in self._workers:
                if worker.rank == rows.leader and not worker.ended:
                    worker.send(signal.SIGHUP)
        if self._signals.stops and not self._stopped:
            self._stopped = True
            self._joined.tell(signal.SIGINT)
        for worker in self._workers if self._signals.stops else ():
            if not worker.told and rows.state(worker.rank) >= State.TRAINING:
                worker.told = True
                worker.send(signal.SIGINT)

    def _look(self) -> None:
        """Name the workers that are stuck; end those that are when the job is over."""
        rows = self._progress.rows()
        self._joined.look(rows, {w.rank for w in self._workers if not w.ended})
        for worker in self._workers:
            if not worker.ended and (line := worker.stuck(rows, self._first.console.stuck)):
                self._log.warning(line)
        self._end_the_awaited()
        if self._done_at is not None and time.monotonic() - self._done_at > LAST_ONES:
            for worker in self._workers:
                if not worker.ended:
                    self._log.error(f"{worker.name} did not end with the others: killing it")
            self._kill()

    def _end_the_awaited(self) -> None:
        """Those that the others have waited for too long must not make something of the job by themselves."""
        if self._waited_out_at is None or time.monotonic() - self._waited_out_at < AWAITED:
            return
        for worker in self._workers:
            if not worker.ended and not worker.told:
                worker.told = True
                self._log.error(f"{worker.name} did not come to the others in time: the job fails")
                worker.send(signal.SIGKILL)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.send(signal.SIGKILL)

    def _verdict(self) -> int:
        ended_well = any(w.process.exitcode == OK for w in self._workers) or self._joined.ended_well
        if ended_well and not self._forced and self._waited_out_at is None:
            return OK
        if not self._forced:
            self._log.error("All workers have died; the last snapshot, if any, is what is left")
        return FAILED
