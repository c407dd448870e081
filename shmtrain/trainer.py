"""The training loop: the original's, with the job's iterations counted by all workers together.

One iteration is one of the net's batches (iter_size of them). max_iter, the learning rate and the intervals
count the job's iterations. An interval is due when the job's counter has passed a multiple; what is written
is named after the multiple. With one worker and no box each count goes up by one: the original's own loop.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from shmtrain.counting import Counting
from shmtrain.exchange.base import Exchange
from shmtrain.learner import Learner
from shmtrain.log import number
from shmtrain.method import METHODS, describe
from shmtrain.params import F32
from shmtrain.progress import Look
from shmtrain.reports import Reports
from shmtrain.role import Role
from shmtrain.signals import Signals
from shmtrain.snapshot import SnapshotError
from shmtrain.testing import Interrupted, Score, Tester, output_lines

Callback = Callable[[], None]


class Diverged(RuntimeError):
    """The weights are no finite numbers any more; going on is pointless."""


@dataclass(frozen=True)
class Summary:
    """What a training came to.

    iterations  the job's, when it ended; steps this worker's own of this run
    loss        the smoothed training loss at the end; scores of the last test, empty without one
    snapshot    the last state file that this worker wrote
    stopped     ended early on request
    """

    iterations: int
    steps: int
    seconds: float
    loss: float
    scores: tuple[Score, ...]
    snapshot: str | None
    stopped: bool


class Interval:
    """Tells when a counter passes a multiple of ``every``; 0 is never."""

    def __init__(self, every: int, seen: int) -> None:
        self._every, self._last = every, seen

    def passed(self, count: int) -> int | None:
        """The highest multiple in (count at the last call, ``count``]; None without one."""
        last, self._last = self._last, max(count, self._last)
        if not self._every or count // self._every <= last // self._every:
            return None
        return count // self._every * self._every


class Smoothed:
    """The loss averaged over the last ``width`` iterations, as the original shows it."""

    def __init__(self, width: int) -> None:
        self._losses: deque[float] = deque(maxlen=width)
        self.value = 0.0

    def add(self, loss: float) -> float:
        """Take one more loss; the running mean with it. A loss that is not finite spoils only its window."""
        full = len(self._losses) == self._losses.maxlen
        oldest = self._losses[0] if full else 0.0
        self._losses.append(loss)
        size = len(self._losses)
        self.value += (loss - oldest) / size if full else (loss - self.value) / size
        if not math.isfinite(self.value):
            self.value = math.fsum(self._losses) / size if all(map(math.isfinite, self._losses)) else loss
        return self.value


@dataclass
class _Clock:
    """Since when, and from which iteration, the speed that the log shows is counted."""

    iteration: int = 0
    since: float = field(default_factory=time.perf_counter)

    def lap(self, iteration: int) -> tuple[float, float]:
        """Iterations a second and seconds since the last lap."""
        now = time.perf_counter()
        lapse = now - self.since
        speed = (iteration - self.iteration) / (lapse or 1.0)
        self.iteration, self.since = iteration, now
        return speed, lapse


class _Mean:
    """The mean of what was added since it was last taken."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1

    def take(self) -> float:
        mean = self._sum / max(self._count, 1)
        self._sum, self._count = 0.0, 0
        return mean


class _Times:
    """Seconds since the loop began, and those of them that this worker's tests took."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._testing = 0.0

    def now(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._since, "testing_seconds": self._testing}

    @contextmanager
    def testing(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._testing += time.perf_counter() - start


class Trainer:
    """One worker's loop. ``run`` trains to the end of the job; ``step`` serves a script that drives it.

    callbacks  pairs to call before each forward pass and before each update
    strict     a snapshot on the way that fails raises, instead of being logged
    """

    def __init__(
        self,
        learner: Learner,
        exchange: Exchange,
        counting: Counting,
        role: Role,
        reports: Reports,
    ) -> None:
        self.learner, self.config = learner, learner.config
        self.exchange, self.counting, self.role = exchange, counting, role
        self.reports, self.log = reports, reports.log
        self.signals = Signals(self.config.run.sigint_effect, self.config.run.sighup_effect)
        self.callbacks: list[tuple[Callback, Callback]] = []
        self.strict = False
        self.steps = 0
        self.scores: tuple[Score, ...] = ()
        self._start = learner.iteration
        self._tester: Tester | None = None
        self._center: F32 | None = None
        self._saved: tuple[int, str] | None = None
        self._stopping = self._leaving = False
        self._images = learner.portion.whole * self.config.rule.iter_size  # of one iteration
        self._speed = 0.0  # iterations of the job a second, when last shown
        self._times = _Times()
        self._loop: dict[str, float] = {}  # the times when the last step was made
        self._shown = _Mean()  # of the losses since the metrics' last line
        self._begin(learner.iteration)

    def _begin(self, iteration: int) -> None:
        """Set every interval to ``iteration``, from which the loop goes on."""
        schedule = self.config.schedule
        first = iteration - 1 if iteration or schedule.test_initialization else 0
        self._tests = Interval(schedule.test_interval, first)
        self._displays = Interval(schedule.display, iteration - 1)
        self._snapshots = Interval(self.config.snapshots.interval, iteration)
        self._loss = Smoothed(schedule.average_loss)
        self._clock = _Clock(iteration)

    def run(self) -> Summary:
        """Train until the job's iterations are done or a stop is requested.

        Raises Diverged, SnapshotError (the final snapshot; an earlier one that fails is only logged), the
        errors of the exchange and of the data.
        """
        began = time.perf_counter()
        if self.role.leads:
            self.tester()
        self._announce()
        self._clock.since = time.perf_counter()
        self._times = _Times()
        with self.signals:
            while not self._stopping and (iteration := self.counting.claim()) is not None:
                self.iterate(iteration)
            self._loop = self._times.now()
            self.exchange.finish()
            self.finish()
        seconds = time.perf_counter() - began
        saved = self._saved[1] if self._saved else None
        summary = Summary(
            self.counting.completed, self.steps, seconds, self._loss.value, self.scores, saved, self._stopping
        )
        self._report_end(summary)
        return summary

    def step(self, count: int) -> None:
        """Make ``count`` iterations, as the original's Step; for a script that drives the solver."""
        self._loss = Smoothed(self.config.schedule.average_loss)
        self._clock.since = time.perf_counter()
        for _ in range(count):
            if self._stopping or (iteration := self.counting.claim()) is None:
                break
            self.iterate(iteration)
        self.learner.updater.publish_update()

    def go_on_from(self, iteration: int) -> None:
        """After a restore: every interval counts from ``iteration``."""
        self._saved, self._stopping = None, False
        self._begin(iteration)

    def iterate(self, iteration: int) -> None:
        """One iteration of the loop: ``iteration`` is the job's."""
        self._test_when_due(iteration)
        if self._stopping:
            return
        for on_start, _ in self.callbacks:
            on_start()
        self.exchange.before_forward(self.steps)
        shown = self._displays.passed(iteration)
        loss = self.learner.compute(watch=shown is not None and self.config.run.debug_info)
        smoothed = self._loss.add(loss)
        self._shown.add(loss)
        if not math.isfinite(loss):
            self._check_weights(iteration, loss)
        if shown is not None:
            self._display(shown, smoothed)
        for _, on_gradients_ready in self.callbacks:
            on_gradients_ready()
        self.exchange.gradients_ready(self.steps)
        rate = self._update(iteration, shown)
        self.exchange.after_update(self.steps)
        self.steps += 1
        done = self.counting.complete()
        if self.reports.bar is not None:
            self._move_bar(done, smoothed, rate)
        self._after(done)

    def apply_update(self) -> None:
        """Update from the gradients as they are, and count the iteration; for a script that made them."""
        iteration = self.counting.completed
        self._update(iteration, self._displays.passed(iteration))
        self.learner.updater.publish_update()
        self.counting.complete()

    def _update(self, iteration: int, shown: int | None) -> float:
        rate = self.learner.rate(iteration)
        if shown is not None and self.role.leads:
            self.log.info(f"Iteration {shown}, lr = {number(rate)}")
            self._measure(shown, rate)
        self.learner.update(rate)
        return rate

    # Tests -----------------------------------------------------------------------------------------------

    def tester(self) -> Tester:
        """The test nets, built when they are first needed."""
        if self._tester is None:
            self._tester = Tester(self.learner, self.log)
        return self._tester

    def _test_when_due(self, iteration: int) -> None:
        due = self._tests.passed(iteration)
        if due is not None and self.role.leads:
            self.test_all(due)

    def test_all(self, iteration: int) -> None:
        """Test the center and report it under the name of ``iteration``."""
        if not self.config.tests:
            return
        times = self._times.now()
        with self.role.leading(), self._times.testing():
            try:
                self.scores = tuple(self.tester().test_all(iteration, self._weights(), self._poll))
            except Interrupted:
                self.log.info("Test interrupted.")
                return
        for score in self.scores:
            values = {k: v[0] if len(v) == 1 else v for k, v in score.values.items()}
            loss = {} if score.loss is None else {"loss": score.loss}
            self.reports.metrics.write("test", iteration, {"net": score.net, **loss, **values, **times})

    def _weights(self) -> F32 | None:
        """A fresh copy of the center; None where this worker's weights are the center."""
        if not self.config.sharing.shared:
            return None
        if self._center is None:
            self._center = np.empty(self.learner.params.n, np.float32)
        self.exchange.center(self._center)
        return self._center

    def _poll(self) -> None:
        """Between two batches of a test: serve the signals; a stop ends the test."""
        self._serve_signals(self.counting.completed)
        if self._stopping:
            raise Interrupted

    # After an iteration ----------------------------------------------------------------------------------

    def _after(self, done: int) -> None:
        """Snapshot when due, and serve the signals, in the original's order."""
        due = self._snapshots.passed(done)
        if due is not None:
            self._snapshot_or_log(due)
        self._serve_signals(done)

    def _serve_signals(self, done: int) -> None:
        while (request := self.signals.next()) is not None:
            if request == "leave" and self.role.leave():
                self._leaving = True
                self.counting.leave()
            elif request in ("stop", "leave"):
                self._stopping = True
            elif self._saved is None or self._saved[0] != done:
                self._snapshot_or_log(done)

    def _snapshot_or_log(self, iteration: int) -> None:
        """A snapshot on the way: one that fails is reported, and the training goes on (unless ``strict``)."""
        try:
            if self.role.leads:
                self.snapshot(iteration)
            else:
                self.learner.save_own(iteration)
        except SnapshotError as e:
            if self.strict:
                raise
            newest = f"; the newest whole one is {self._saved[1]}" if self._saved else ""
            self.log.error(f"{e}{newest}")

    def snapshot(self, iteration: int) -> str:
        """Save the center under the name of ``iteration``; the state file's name."""
        with self.role.leading():
            path = self.learner.save(iteration, self._weights())
        self._saved = (iteration, path)
        self.reports.metrics.write("snapshot", iteration, {"state": path})
        return path

    def finish(self) -> None:
        """Final snapshot, then the last train loss and test that the original shows, where they are due."""
        done, schedule = self.counting.completed, self.config.schedule
        if self._leaving:
            self.log.info("Leaving: the others go on.")
            return
        self._final_snapshot(done)
        if self._stopping:
            self.log.info("Optimization stopped early.")
            return
        if self.role.leads:
            if self._due_at_end(schedule.display, done):
                self.log.info(f"Iteration {done}, loss = {number(self._loss.add(self.learner.forward()))}")
            if self._due_at_end(schedule.test_interval, done):
                self.test_all(done)
        self.log.info("Optimization Done.")

    def _due_at_end(self, every: int, done: int) -> bool:
        """Whether what is due at multiples of ``every`` is due now; the paper's rules end beside max_iter."""
        sharing = self.config.sharing
        beside = sharing.shared and (sharing.termination != "counter" or METHODS[sharing.algorithm].lockstep)
        return every > 0 and (beside or done % every == 0)

    def _final_snapshot(self, done: int) -> None:
        """Among others even where the interval made one of this name: their last updates came after it."""
        shared, interval = self.config.sharing.shared, self.config.snapshots.interval
        made = not shared and self._saved is not None and self._saved[0] == done
        due = shared and interval > 0 and done % interval == 0
        if made or not (due or self.config.snapshots.after_train):
            return
        if self.role.leads:
            self.snapshot(done)
        else:
            self.learner.save_own(done)

    # What is told ----------------------------------------------------------------------------------------

    def _announce(self) -> None:
        self.log.info("Solver scaffolding done.")
        self.log.info("Starting Optimization")
        self.log.info(f"Solving {self.learner.net.name}")
        self.log.info(f"Learning Rate Policy: {self.config.rate.policy}")
        sharing, world, portion = self.config.sharing, self.role.world, self.learner.portion
        if sharing.shared:
            step = portion.images * self.config.rule.iter_size
            self.log.info(
                f"{world} workers share {self.config.schedule.max_iter} iterations of {self._images} images:"
                f" effective batch {step * (world - sharing.method.backup_workers)}"
                f" ({', '.join([sharing.algorithm, *sharing.figures()])})"
            )
            self.log.info(describe(sharing.algorithm, world, step, sharing.method))
            self.log.info(f"Learning rate for {world} workers: {self.learner.rate_rule()}")
        job = {"workers": world, "batch": self._images, "parameters": self.learner.params.n}
        self.reports.metrics.write("start", self._start, job)

    def _display(self, iteration: int, smoothed: float) -> None:
        speed, lapse = self._clock.lap(iteration)
        if not self.role.leads:
            return
        every = self.config.schedule.display
        self.log.info(
            f"Iteration {iteration} ({number(speed)} iter/s, {number(lapse)}s/{every} iters),"
            f" loss = {number(smoothed)}"
        )
        outcome = self.learner.last
        assert outcome is not None
        values = {k: v.detach().reshape(-1).tolist() for k, v in outcome.outputs.items()}
        for line in output_lines(self.learner.net, values):
            self.log.info(f"    Train net output {line}")
        self._speed = speed

    def _measure(self, iteration: int, rate: float) -> None:
        stats = self.exchange.stats
        meeting = {"exchange_seconds": stats.seconds, "exchanges": stats.count, "staleness": stats.staleness}
        self.reports.metrics.write(
            "train",
            iteration,
            {
                "loss": self._loss.value,
                "mean_loss": self._shown.take(),
                "lr": rate,
                **self._times.now(),
                "images_per_second": self._speed * self._images,
                **(meeting if self.config.sharing.shared else {}),
            },
        )

    def _move_bar(self, done: int, loss: float, rate: float) -> None:
        stats = self.exchange.stats
        shared = self.config.sharing.shared
        look = Look(loss, rate, stats.mean_seconds if shared else None, stats.staleness if shared else None)
        assert self.reports.bar is not None
        self.reports.bar.update(done, look)

    def _report_end(self, summary: Summary) -> None:
        self.reports.metrics.write(
            "end",
            summary.iterations,
            {
                "loss": summary.loss,
                "steps": summary.steps,
                "seconds": summary.seconds,
                "stopped": summary.stopped,
                **{f"loop_{name}": seconds for name, seconds in self._loop.items()},
                **self.learner.data_wait.tell(self.log),
                **self._met(),
            },
        )

    def _met(self) -> dict[str, object]:
        """What the exchanges came to; also for the log."""
        stats = self.exchange.stats
        if not self.config.sharing.shared or not stats.count:
            return {}
        self.log.info(f"Worker {self.role.rank}: {stats.summary()}")
        seen = {str(staleness): count for staleness, count in sorted(stats.histogram.items())}
        return {
            "exchanges": stats.count,
            "exchange_seconds": stats.seconds,
            "parts": stats.parts,
            "hidden_parts": stats.hidden,
            "bytes_sent": stats.sent,
            "bytes_received": stats.received,
            "staleness": seen,
            "dropped": stats.dropped,
        }

    def _check_weights(self, iteration: int, loss: float) -> None:
        who = f"worker {self.role.rank}: " if self.role.world > 1 else ""
        self.log.warning(f"{who}Iteration {iteration}, loss = {number(loss)}")
        params = self.learner.params
        for slot in params.slots:
            if not bool(torch.isfinite(params.vector[slot.slice]).all()):
                raise Diverged(
                    f"{who}the training has diverged: at iteration {iteration} the loss is {number(loss)} and"
                    f" parameter {slot.index} of layer {slot.layer!r} is not finite (is base_lr"
                    f" {number(self.config.rate.base)} too high?)"
                )

    def close(self) -> None:
        """End the readers of all nets; closing twice is fine."""
        if self._tester is not None:
            self._tester.close()
        self.learner.close()
