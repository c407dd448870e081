"""What a worker of each way does, as its costs; equations are in shmtrain/exchange/, of the same names.

seasgd        waits for the whole exchange, in one pass: both directions and the move at once
paper         T_iter = max(T_comp, T_wwi + T_ugw) + T_rgw + T_ulw: reads and moves before the computing,
              writes its increment and has it added by a second thread during it
overlapped    the whole exchange in a second thread, one step late
hybrid        groups that take their slowest's time and a sum; their roots exchange as in seasgd or
              paper, and broadcast
downpour      fetches the center and pushes, both every tau iterations
diloco        as sync every tau iterations, of whole vectors through the box; -async: nobody waits
sync          all write a gradient and read the sum's parts through the box; the first N - b count
allreduce     a ring over all workers: 2 (N - 1)/N of the vector each
mpi-star      rank 0 receives all vectors, averages, and sends all back
mpi-easgd     a server rank serves one worker at a time: receives x, moves, sends x back
local         only computes
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmtrain.simulate.setting import GB, Setting
from shmtrain.simulate.shared import Event, Process, World

Steps = Generator[Event, Any, Any]


@dataclass
class Trace:
    """What one worker saw.

    computed   seconds of computing of each iteration
    ends       when each iteration ended
    staleness  of each exchange
    """

    computed: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)


class Site:
    """The machine as its users find it, and the center's version."""

    def __init__(self, world: World, setting: Setting) -> None:
        machine = setting.machine
        self.world, self.setting, self.machine = world, setting, machine
        self.version = 0
        self.crowd = min(1.0, machine.cores / setting.workers) if machine.cores else 1.0
        users = _groups(setting) if setting.way == "hybrid" else setting.workers
        self.hosts = -(-users // machine.per_host)
        self.memory = world.shared(machine.parallel * machine.boxes, machine.boxes)
        # Where processors are short, computing, copies and sums of all threads take turns on them.
        self.processors = world.shared(machine.cores, 1.0) if machine.cores else None
        self.line = world.queue()
        self.link = self.nics = None
        if machine.link is not None:
            # A striped vector uses all boxes alike: they are one box of so many times the rate.
            shared_nic = machine.per_host > 1
            self.link = world.shared(
                machine.link * GB * machine.boxes, float("inf") if shared_nic else machine.nic * GB
            )
            self.nics = [world.shared(machine.nic * GB) for _ in range(self.hosts)] if shared_nic else None

    # Pieces of a way; a worker's number says on which host it is --------------------------------------

    def move(self, worker: int, amount: float) -> list[Event]:
        """Bytes over the network between a worker and the boxes."""
        if self.link is None:
            return []
        if self.nics is None:
            return [self.link.use(amount)]
        return [self.link.use(amount), self.nics[worker // self.machine.per_host].use(amount)]

    def compute(self, seconds: float) -> Event:
        """An iteration's computing; ``seconds`` holds while all workers compute."""
        return self.processors.use(seconds * self.crowd) if self.processors else self.world.pause(seconds)

    def threads(self, rate: float, size: float) -> Event:
        """Work of one thread on a box's memory."""
        work = size / (rate * GB)
        if self.processors is None:
            return self.memory.use(work)
        return self.world.both(self.memory.use(work), self.processors.use(work))

    def fused(self, worker: int) -> Steps:
        size = self.setting.bytes
        yield self.world.pause(self.machine.latency)
        yield self.world.both(*self.move(worker, 2 * size), self.threads(self.machine.exchange, size))

    def read(self, worker: int) -> Steps:
        yield self.world.pause(self.machine.latency)
        yield self._carried(worker)

    def pull(self) -> Steps:
        if self.link is None:
            yield self.threads(self.machine.apply, self.setting.bytes)
        else:
            yield self.world.pause(self.setting.bytes / (self.machine.apply * GB))

    def push(self, worker: int) -> Steps:
        """Write an increment and have it added; returns the version after it."""
        yield self.world.pause(self.machine.latency)
        yield self._carried(worker)
        if self.machine.serial:
            with self.line.request() as turn:
                yield turn
                yield self.threads(self.machine.accumulate, self.setting.bytes)
        else:
            yield self.threads(self.machine.accumulate, self.setting.bytes)
        self.version += 1
        return self.version

    def _carried(self, worker: int) -> Event:
        """One vector between a worker and the box: over the network, or by a copy in memory."""
        if self.link is None:
            return self.threads(self.machine.copy, self.setting.bytes)
        return self.world.both(*self.move(worker, self.setting.bytes))

    def ring(self, members: int, rate: float) -> float:
        """Seconds of an allreduce of so many, each of whose links gives ``rate`` GB/s both ways together."""
        if members < 2:
            return 0.0
        part = (members - 1) / members * self.setting.bytes
        return 4 * part / (rate * GB) + 2 * (members - 1) * self.machine.latency

    def sum_of_all(self) -> float:
        """An allreduce of all workers; hosts sum inside first."""
        machine, workers = self.machine, self.setting.workers
        if machine.link is None:
            # A part's owner reads it from N - 1 others, which read its sum: 2 (N - 1) vectors in all.
            amount = 2 * (workers - 1) * self.setting.bytes / (machine.copy * GB)
            return amount / min(machine.parallel, workers * self.crowd) if workers > 1 else 0.0
        inside = self.ring(min(machine.per_host, workers), machine.inside)
        return inside + self.ring(self.hosts, machine.nic)


def _groups(setting: Setting) -> int:
    return -(-setting.workers // setting.group)


def start(site: Site) -> list[Trace]:
    """Begin all workers of the setting; what they see is in the traces once the world has run."""
    setting, world = site.setting, site.world
    if setting.way in LOCKSTEP:
        trace = Trace()
        world.start(_lockstep(site, trace))
        return [trace]
    if setting.way == "hybrid":
        traces = [Trace() for _ in range(_groups(setting))]
        for number, trace in enumerate(traces):
            world.start(_group(site, number, trace))
        return traces
    traces = [Trace() for _ in range(setting.workers)]
    for worker, trace in enumerate(traces):
        world.start(ASYNCHRONOUS[setting.way](site, worker, trace))
    return traces


def _due(setting: Setting, step: int) -> bool:
    return step % setting.tau == 0


# Workers that do not wait for each other -----------------------------------------------------------------


def _computing(site: Site, worker: int, trace: Trace) -> list[float]:
    setting = site.setting
    draws = setting.computing.draws(worker, setting.iterations, setting.seed)
    trace.computed = [float(x) for x in draws]
    return trace.computed


def _local(site: Site, worker: int, trace: Trace) -> Process:
    for seconds in _computing(site, worker, trace):
        yield site.compute(seconds)
        trace.ends.append(site.world.now)


def _saw(site: Site, trace: Trace, before: int) -> int:
    """Count this worker's update; updates of others since its previous one are its staleness."""
    site.version += 1
    trace.staleness.append(site.version - before - 1)
    return site.version


class PaperExchange:
    """One worker's two threads."""

    def __init__(self, site: Site, worker: int, trace: Trace) -> None:
        self.site, self.worker, self.trace = site, worker, trace
        self.pushed: Event | None = None

    def __call__(self) -> Steps:
        """Until the worker may compute: the increment before must have arrived, W_g been read, W_x moved."""
        if self.pushed is not None:
            yield self.pushed
        read = self.site.version
        yield from self.site.read(self.worker)
        yield from self.site.pull()
        self.pushed = self.site.world.start(_pushed(self.site, self.worker, read, self.trace))


class FusedExchange:
    """One worker's exchange in one pass."""

    def __init__(self, site: Site, worker: int, trace: Trace) -> None:
        self.site, self.worker, self.trace = site, worker, trace
        self.seen = 0

    def __call__(self) -> Steps:
        yield from self.site.fused(self.worker)
        self.seen = _saw(self.site, self.trace, self.seen)


EXCHANGES: dict[str, type[FusedExchange] | type[PaperExchange]] = {
    "seasgd": FusedExchange,
    "paper": PaperExchange,
}


def _seasgd(site: Site, worker: int, trace: Trace) -> Process:
    """By EXCHANGES[way]; the last increment of the paper's way may arrive after the last iteration."""
    exchange = EXCHANGES[site.setting.way](site, worker, trace)
    for step, seconds in enumerate(_computing(site, worker, trace)):
        if _due(site.setting, step):
            yield from exchange()
        yield site.compute(seconds)
        trace.ends.append(site.world.now)


def _pushed(site: Site, worker: int, read: int, trace: Trace) -> Process:
    version = yield from site.push(worker)
    trace.staleness.append(version - read - 1)


def _overlapped(site: Site, worker: int, trace: Trace) -> Process:
    world, under_way, seen = site.world, None, [0]
    for step, seconds in enumerate(_computing(site, worker, trace)):
        if _due(site.setting, step):
            if under_way is not None:
                yield under_way
                yield from site.pull()
            under_way = world.start(_whole(site, worker, trace, seen))
        yield site.compute(seconds)
        trace.ends.append(world.now)


def _whole(site: Site, worker: int, trace: Trace, seen: list[int]) -> Process:
    yield from site.fused(worker)
    seen[0] = _saw(site, trace, seen[0])


def _downpour(site: Site, worker: int, trace: Trace) -> Process:
    read = 0
    for step, seconds in enumerate(_computing(site, worker, trace)):
        if _due(site.setting, step):
            read = site.version
            yield from site.read(worker)
        yield site.compute(seconds)
        if _due(site.setting, step + 1):
            version = yield from site.push(worker)
            trace.staleness.append(version - read - 1)
        trace.ends.append(site.world.now)


def _mpi_easgd(site: Site, worker: int, trace: Trace) -> Process:
    """The server does one worker's exchange at a time, and its link carries one message at a time."""
    seen = 0
    size, machine = site.setting.bytes, site.machine
    for step, seconds in enumerate(_computing(site, worker, trace)):
        if _due(site.setting, step):
            with site.line.request() as turn:
                yield turn
                yield from site.read(worker)
                yield site.world.pause(size / (machine.exchange * GB))
                yield from site.read(worker)
                seen = _saw(site, trace, seen)
        yield site.compute(seconds)
        trace.ends.append(site.world.now)


# Workers that make the same steps ------------------------------------------------------------------------


def _lockstep(site: Site, trace: Trace) -> Process:
    """One process for all: a step takes the slowest's time (or the first N - b's), then what joins them."""
    setting, world = site.setting, site.world
    draws = np.array(
        [
            setting.computing.draws(worker, setting.iterations, setting.seed)
            for worker in range(setting.workers)
        ]
    )
    if setting.way == "diloco":  # they meet every tau steps
        rounds = setting.iterations // setting.tau
        spans = draws[:, : rounds * setting.tau].reshape(setting.workers, rounds, setting.tau).sum(2)
    else:
        spans = draws
    needed = setting.workers - (setting.backups if setting.way == "sync" else 0)
    waits = np.partition(spans, needed - 1, axis=0)[needed - 1]
    per = setting.tau if setting.way == "diloco" else 1
    trace.computed = [float(x) / per for x in spans.mean(0) for _ in range(per)]
    for seconds in waits:
        yield world.pause(float(seconds))
        began = world.now
        yield from LOCKSTEP[setting.way](site, float(seconds))
        trace.ends += (
            [began + (world.now - began) * (i + 1) / per for i in range(per)] if per > 1 else [world.now]
        )


def _through_box(site: Site, seconds: float) -> Steps:
    """All write one vector and read the others' parts: each reads N - 1 parts of 1/N and the sums of them."""
    workers = site.setting.workers
    if workers < 2:
        return
    writes = [site.world.start(_vectors(site, worker, 1.0)) for worker in range(workers)]
    yield site.world.both(*writes)
    reads = [site.world.start(_vectors(site, worker, max(1.0, workers - 1.0))) for worker in range(workers)]
    yield site.world.both(*reads)


def _vectors(site: Site, worker: int, number: float) -> Process:
    yield site.world.pause(site.machine.latency)
    size = site.setting.bytes * number
    if site.link is None:
        yield site.threads(site.machine.copy, size)
    else:
        yield site.world.both(*site.move(worker, size))


def _allreduce(site: Site, seconds: float) -> Steps:
    yield site.world.pause(_uncovered(site, site.sum_of_all(), seconds))


def _uncovered(site: Site, needed: float, seconds: float) -> float:
    """What of a sum the backward pass, two thirds of the computing, does not hide."""
    return needed - min(site.setting.hidden * needed, 2 / 3 * seconds)


def _star(site: Site, seconds: float) -> Steps:
    """Gather, average, redistribute: 2 (N - 1) vectors through rank 0's link, N passes over its memory."""
    setting, machine = site.setting, site.machine
    others = setting.workers - 1
    rate = min(machine.link, machine.nic) if machine.link is not None else machine.copy
    moved = 2 * others * setting.bytes / (rate * GB)
    yield site.world.pause(2 * machine.latency + moved + others * setting.bytes / (machine.accumulate * GB))


def _group(site: Site, number: int, trace: Trace) -> Process:
    """A group of the hybrid way; its root is its first worker. A group alone meets nobody at the box."""
    setting, world = site.setting, site.world
    first = number * setting.group
    members = range(first, min(first + setting.group, setting.workers))
    draws = np.array(
        [setting.computing.draws(worker, setting.iterations, setting.seed) for worker in members]
    )
    trace.computed = [float(x) for x in draws.mean(0)]
    inside = site.ring(len(members), site.machine.inside)
    spread = setting.bytes / (site.machine.inside * GB) if len(members) > 1 else 0.0
    exchange = EXCHANGES[setting.root](site, number, trace)
    for step, seconds in enumerate(draws.max(0)):
        if _due(setting, step) and setting.workers > setting.group:
            yield from exchange()
            yield world.pause(spread)
        yield world.pause(float(seconds) + _uncovered(site, inside, float(seconds)))
        trace.ends.append(world.now)


ASYNCHRONOUS = {
    "local": _local,
    "seasgd": _seasgd,
    "paper": _seasgd,
    "overlapped": _overlapped,
    "downpour": _downpour,
    "diloco-async": _downpour,
    "mpi-easgd": _mpi_easgd,
}
LOCKSTEP = {"diloco": _through_box, "sync": _through_box, "allreduce": _allreduce, "mpi-star": _star}
