"""One worker: joins its job through the box and trains; or trains alone, as the original does."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

import smb
from prototxt.errors import PrototxtError
from shmtrain.algorithm_state import AlgorithmState
from shmtrain.config import TrainConfig
from shmtrain.counting import LocalCounting, Portioned
from shmtrain.crowd import Crowd
from shmtrain.cursor import Cursor
from shmtrain.environment import Launched, notation, numbers, where
from shmtrain.exchange import open_exchange
from shmtrain.exchange.base import Alpha, Exchange, Lockstep, Meeting, Vectors
from shmtrain.exchange.following import Following
from shmtrain.exchange.none import NoExchange
from shmtrain.exchange.termination import Place, RankCounting, SharedCounting, open_counting
from shmtrain.grace import Grace, LastingProgress, LastingTickets, Missing
from shmtrain.group import Column, Member, State, rows_lock
from shmtrain.handover import WAITED_OUT, Console, Handover, counter_key, worker_threads
from shmtrain.heap import keep_heap
from shmtrain.launch_marks import Witness, all_marks, machines, marks
from shmtrain.learner import Learner
from shmtrain.lifeline import Lifeline
from shmtrain.log import Log, number, tell
from shmtrain.method import moving_rate
from shmtrain.options import ConfigError
from shmtrain.reports import Reports
from shmtrain.rescue import Rescue
from shmtrain.role import Alone
from shmtrain.share_data import SharedData
from shmtrain.snapshot import SnapshotError
from shmtrain.trainer import Diverged, Summary, Trainer
from shmtrain.watch import unblock

WARM_POLL = 0.02
FAULT_WAIT = 2.0  # seconds until another worker has noted its own error
FAILURES = (smb.SmbError, PrototxtError, ConfigError, SnapshotError, Diverged, OSError)


def run_alone(config: TrainConfig, console: Console) -> int:
    """Train in this process, without a box; the exit code."""
    keep_heap()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with Reports.open(config, 0, console.progress) as reports:
        try:
            learner = Learner.open(config, Alone(), reports.log)
            counting = LocalCounting(learner.iteration, config.schedule.max_iter)
            loop(Trainer(learner, NoExchange(learner.params.array), counting, Alone(), reports), console)
        except FAILURES as error:
            reports.log.error(str(error))
            return 1
    return 0


def vectors(learner: Learner) -> Vectors:
    """What an exchange may see and change of a worker."""
    params, rule = learner.params, learner.config.rule
    multipliers = np.ones(params.trained, np.float32)
    for run in params.runs:
        multipliers[run.slice] = run.lr_mult
    return Vectors(
        weights=params.array,
        gradient=params.gradient.numpy(),
        trained=params.trained,
        statistics=params.frozen_stop,
        history=tuple(vector.numpy() for vector in learner.updater.history),
        momentum=rule.momentum if rule.type == "SGD" else None,
        multipliers=None if bool((multipliers == 1).all()) else multipliers,
        passes=rule.iter_size,
        updates=learner.updater,
        when_ready=learner.when_ready,
    )


def loop(trainer: Trainer, console: Console) -> None:
    """Train; the first worker shows the bar, and below it what the training came to."""
    config, learner = trainer.config, trainer.learner
    if console.progress and trainer.role.rank == 0:
        images = learner.portion.whole * config.rule.iter_size
        trainer.reports.show_bar(config.schedule.max_iter, learner.iteration, images)
    try:
        summary = trainer.run()
    finally:
        trainer.close()
    if trainer.reports.bar is not None:
        trainer.reports.bar.close(summary.iterations)
        tell(_came_to(summary))


def at_sigterm(trainer: Trainer, request: str) -> None:
    """``stop`` where launchers end all their processes by it: as Ctrl-C, but as often as it likes.

    ``leave`` where it is meant for this worker alone.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: trainer.signals.request(request))


def _came_to(summary: Summary) -> str:
    """What a person wants to know at the end; the log has it in the original's words."""
    how = "stopped after" if summary.stopped else "trained"
    parts = [f"{how} {summary.iterations} iterations in {summary.seconds:.1f} s"]
    for score in summary.scores:
        values = ", ".join(f"{name} {number(v[0])}" for name, v in score.values.items() if len(v) == 1)
        parts.append(f"test net #{score.net}: {values}")
    return "; ".join([*parts, *([summary.snapshot] if summary.snapshot else [])])


def main(handover: Handover) -> NoReturn:
    """The life of a worker process that our launcher has started."""
    os.setsid()  # the terminal's signals come through the launcher, once
    unblock()
    sys.exit(take_part(handover))


def take_part(handover: Handover) -> int:
    """Be one worker of the job to its end; the exit code."""
    config, bar = handover.config, handover.console.progress
    keep_heap()
    torch.set_num_threads(worker_threads(config, handover.place))
    # told: where each worker says what concerns the whole job
    with Reports.open(config, handover.rank, bar) as reports, Log([sys.stderr], config.run.log) as told:
        return _Worker(handover, reports, told).run()


class _Worker:
    """One worker's part of the job."""

    def __init__(self, handover: Handover, reports: Reports, told: Log) -> None:
        self._handover, self._config = handover, handover.config
        self._reports, self._told = reports, told
        self._name = f"Worker {handover.rank} (pid {os.getpid()})"
        self._rescue = Rescue(handover, self._name, told)
        self._cursor = Cursor(self._config.rule.iter_size) if self._config.sharing.cursor else None
        self._groups: list[tuple[int, ...]] = []  # of hybrid, by machine; empty: neighbours by rank

    def run(self) -> int:
        """Train to the end of the job; the exit code. Does not return when the box or the launcher dies."""
        lifeline = Lifeline(self._handover.launcher.fd, self._handover.launched_by, self._rescue.end)
        with lifeline, ExitStack() as stack:
            box = None
            try:
                box = stack.enter_context(self._connect())
                self._train(box, stack)
            except smb.TransportError as error:
                lifeline.cut(f"the memory box is gone ({error})")  # while all is still open
            except FAILURES as error:
                self._told.error(f"{self._name}: {self._reason(box, error)}")
                return WAITED_OUT if isinstance(error, smb.WaitTimeout) else 1
        return 0

    def _reason(self, box: smb.Box | None, error: Exception) -> str:
        """What ends several workers, as data that cannot be read, is said in full by the first of them."""
        job, rank, said = self._handover.job, self._handover.rank, None
        if box is not None:
            with suppress(smb.SmbError), box.lock(rows_lock(job), FAULT_WAIT):
                said = LastingProgress.attach(box, job).fault(rank, str(error))
        return str(error) if said is None else f"ends by the same error as worker {said}"

    def _connect(self) -> smb.Box:
        name, grace = f"worker {self._handover.rank}", self._config.sharing.grace
        return smb.connect(self._handover.box.address, name=name, reconnect=grace)

    def _train(self, box: smb.Box, stack: ExitStack) -> None:
        handover = self._handover
        progress = LastingProgress.attach(box, handover.job)
        member = Member(progress, handover.rank, handover.world, handover.job, self._told.warning)
        progress.put(handover.rank, Column.PID, os.getpid())
        if not handover.joining:
            member.enter(State.STARTING)
        if handover.place is not None or handover.joining:
            self._settle(box, stack)
        learner = self._learner(member, self._reading(box, stack))
        stack.callback(learner.close)
        center = self._meet(box, learner)
        self._rescue.hold(learner, center, progress)
        if not handover.joining:
            member.wait_for_all(handover.console.stuck)
        if handover.place is not None and handover.rank == 0:
            self._tell_places(box, handover.place)
        sharing = self._config.sharing
        crowd = Crowd(
            box, handover.job, handover.rank, progress.size, progress, sharing.method.wait_limit,
            handover.world, handover.joining,
        )  # fmt: skip
        if sharing.method.warm_start and not handover.joining:
            self._let_the_first_begin(member, center, learner)
        exchange = open_exchange(sharing.algorithm, self._meeting(crowd, member, center, learner))
        stack.callback(getattr(exchange, "close", lambda: None))
        algorithm = AlgorithmState(sharing.algorithm, exchange, crowd, learner.params.fingerprint())
        learner.beside = algorithm.save
        if learner.restored is not None:
            algorithm.restore(learner.restored.stem, self._reports.log.info)
        counting = self._counting(crowd, exchange, learner)
        exchange = self._surviving(exchange, box)
        counting.stood = lambda: exchange.stats.seconds
        trainer = Trainer(learner, exchange, Portioned(counting, learner.portion), member, self._reports)
        at_sigterm(trainer, "stop" if handover.place else "leave")
        loop(trainer, handover.console)
        if member.leads and (speeds := progress.rows().speeds()):
            self._told.info(speeds)
        if member.leaving or handover.joining:
            what = "has left the job" if member.leaving else "has ended with the job"
            done = progress.rows().done(handover.rank)
            self._told.info(f"{self._name} {what} after {done} iterations of its own")
        member.enter(State.LEFT if member.leaving else State.CLOSED)

    def _reading(self, box: smb.Box, stack: ExitStack) -> dict[str, Any]:
        """For the data layers: which batches; memory in the box where one reader feeds all of a machine."""
        options = self._cursor.options() if self._cursor else {}
        if self._config.sharing.share_data:
            shared = SharedData(box, self._handover.job, self._handover.rank)
            stack.callback(shared.close)
            options |= shared.options()
        return options

    def _learner(self, member: Member, reading: dict[str, Any]) -> Learner:
        """Net and solver; who joins goes on from the iteration that the job began at."""
        progress, rank = member.progress, self._handover.rank
        learner = Learner.open(self._config, member, self._reports.log, reading)
        if self._handover.joining:
            learner.iteration = progress.rows().start(rank)
        else:
            progress.put(rank, Column.START, learner.iteration)
        return learner

    def _settle(self, box: smb.Box, stack: ExitStack) -> None:
        """No launcher of ours watches the workers: they do it themselves, and may be grouped by machine."""
        handover, stuck = self._handover, self._handover.console.stuck
        marked = 0 if handover.joining else handover.world
        stack.enter_context(
            Witness(self._connect, handover.job, handover.rank, marked=marked, stuck=stuck, told=self._told)
        )
        sharing = self._config.sharing
        if sharing.by_machine and not handover.joining:
            self._groups = machines(all_marks(box, handover.job, handover.world, stuck))
            self._config = replace(self._config, sharing=sharing.grouped(len(self._groups)))

    def _tell_places(self, box: smb.Box, place: Launched) -> None:
        handover = self._handover
        self._told.info(
            f"Job {handover.job}, launched by {place.launcher}: {where(marks(box, handover.job))}; memory box"
            f" {'in rank 0' if handover.box.embedded else 'outside'} at {handover.box.address}"
        )
        if self._groups:
            groups = "; ".join(map(numbers, self._groups))
            self._told.info(f"Groups by machine, {notation(self._groups)}: {groups}")

    def _counting(self, crowd: Crowd, exchange: Exchange, learner: Learner) -> RankCounting:
        handover, steps = self._handover, learner.portion.steps
        start, end = steps(learner.iteration), steps(self._config.schedule.max_iter)
        place = Place(crowd.progress, handover.rank, start, end)
        if isinstance(exchange, Lockstep):
            return Following(place, exchange)
        rule = self._config.sharing.termination
        counting = open_counting(rule, place, lambda: self._tickets(crowd.box), handover.tickets)
        if self._cursor and isinstance(counting, SharedCounting):
            self._cursor.follow(counting)
        return counting

    def _let_the_first_begin(self, member: Member, center: smb.Segment, learner: Learner) -> None:
        """A warm start: only the worker that leads trains at first; the others then take its center.

        It ends as soon as that worker dies or ends, too.
        """
        if member.leads:
            return
        member.enter(State.WAITING)
        count = learner.portion.steps(self._config.sharing.method.warm_start)
        while (rows := member.progress.rows()).total < count and not member.leads:
            if rows.gone(rows.leader):
                break
            time.sleep(WARM_POLL)
        center.read(learner.params.array)
        member.enter(State.READY)

    def _meet(self, box: smb.Box, learner: Learner) -> smb.Segment:
        """The job's center: whoever is first gives its weights, all others take them."""
        params, key = learner.params, self._handover.center_key
        try:
            center = box.create(
                key, count=params.n, dtype="float32", lifetime="attached", initial=params.array,
                or_attach=True, meta=params.fingerprint(),
            )  # fmt: skip
        except smb.KeyExists as error:
            raise smb.KeyExists(f"center {key!r} in the box is another net's: {error}") from error
        if not center.created:
            center.read(params.array)
        elif self._handover.joining:
            raise ConfigError(f"job {self._handover.job!r} has ended meanwhile: there is nothing to join")
        threads = torch.get_num_threads()
        of_all = "" if self._handover.joining else f" of {self._handover.world}"
        self._told.info(
            f"{self._name}{of_all}: center {'created' if center.created else 'attached'}"
            f" ({params.n} floats) by transport {center.transport}, torch threads: {threads}"
        )
        return center

    def _tickets(self, box: smb.Box) -> LastingTickets:
        return LastingTickets(box.counter(counter_key(self._handover.job)))

    def _surviving(self, exchange: Exchange, box: smb.Box) -> Exchange:
        """The exchange, left out while the box is away. Where all must meet, they wait for it instead."""
        sharing = self._config.sharing
        if not sharing.grace or sharing.algorithm != "seasgd" or sharing.exchange != "fused":
            return exchange
        grace = Grace(box, self._name, self._told.warning)
        grace.begin()
        return Missing(exchange, grace)

    def _meeting(self, crowd: Crowd, member: Member, center: smb.Segment, learner: Learner) -> Meeting:
        sharing = self._config.sharing
        return Meeting(
            center=center,
            vectors=vectors(learner),
            alpha=self._alpha(crowd),
            tau=sharing.tau,
            way=sharing.exchange,
            method=sharing.method,
            crowd=crowd,
            threads=torch.get_num_threads(),
            iterations=learner.steps_left,
            base_rate=self._config.rate.base,
            open_pair=self._open_pair,
            group=next((g for g in self._groups if member.rank in g), None),
            joined=lambda: member.join(self._handover.console.stuck),
            leaving=lambda: member.leaving,
        )

    def _alpha(self, crowd: Crowd) -> Alpha:
        """The moving rate: as told, or beta / N with the N of now."""
        sharing = self._config.sharing
        if sharing.method.beta is None:
            return lambda: sharing.alpha
        return lambda: moving_rate(sharing.algorithm, crowd.rows.active, sharing.method)

    def _open_pair(self) -> tuple[smb.Segment, smb.Segment]:
        """Another connection, for another thread: this worker's own segment and the center."""
        box = self._connect()
        center = box.attach(self._handover.center_key)
        own = box.create(self._handover.delta_key, count=center.count, dtype="float32", lifetime="owner")
        return own, center
