"""The branches of a run's configuration: plain frozen data that is sent to the worker processes as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from prototxt import schema
from shmtrain.lr_rule import LrRule
from shmtrain.method import METHODS, Method, figures, moving_rate

Phase = Literal["TRAIN", "TEST"]


@dataclass(frozen=True)
class Rule:
    """The update rule: registered name and its numbers, as the solver file gives them."""

    type: str
    momentum: float
    momentum2: float
    rms_decay: float
    delta: float
    weight_decay: float
    regularization: str
    clip_gradients: float
    iter_size: int


@dataclass(frozen=True)
class LearningRate:
    """The policy and its numbers; ``max_iter`` is what the poly policy runs down to."""

    policy: str
    base: float
    gamma: float
    power: float
    stepsize: int
    stepvalues: tuple[int, ...]
    max_iter: int


@dataclass(frozen=True)
class NetSource:
    """Where a net comes from and the state it is filtered by.

    label    what the log calls it
    path     a text file, else ``inline`` holds the message of the solver file, serialised
    """

    label: str
    path: str | None
    inline: bytes | None
    phase: Phase
    level: int = 0
    stages: tuple[str, ...] = ()

    def source(self) -> Any:
        """What prototxt.Net takes: the path, or the inline message."""
        if self.path is not None:
            return self.path
        net = schema.NetParameter()
        net.ParseFromString(self.inline or b"")
        return net


@dataclass(frozen=True)
class TestRun:
    """One test net and the number of its batches a test averages over."""

    __test__ = False  # not a test case, whatever its name looks like

    net: NetSource
    iterations: int


@dataclass(frozen=True)
class Schedule:
    """The counts of the loop, all in iterations of the job; 0 means never."""

    max_iter: int
    display: int
    average_loss: int
    test_interval: int
    test_initialization: bool
    test_compute_loss: bool


@dataclass(frozen=True)
class Snapshots:
    """When, where and how (hdf5) snapshots are written; interval 0: only after the training, if at all."""

    interval: int
    prefix: str
    diff: bool
    after_train: bool
    hdf5: bool = False


@dataclass(frozen=True)
class Start:
    """What the weights and the solver's state start from."""

    weights: tuple[str, ...]
    snapshot: str | None
    resume: bool


@dataclass(frozen=True)
class Sharing:
    """How the workers meet. ``shared`` is False where the loop is the original's, alone.

    by_machine  the groups are those of each machine, and not known yet; ``grouped`` tells them
    join        the job runs already: one more worker joins it
    share_data  the workers of a machine read their data through one process
    cursor      the workers read what they claim, not each its own share
    global_batch  the net's batch is that of all workers together: each takes its part of it
    """

    workers: int
    algorithm: str
    exchange: str
    alpha: float
    tau: int
    termination: str
    lr_rule: LrRule
    method: Method
    smb: str | None
    job: str | None
    box_grace: float = 0.0
    by_machine: bool = False
    join: bool = False
    share_data: bool = False
    cursor: bool = False
    global_batch: bool = False

    def grouped(self, groups: int) -> Sharing:
        """The same now that the number of groups is known."""
        method = replace(self.method, group_size=-(-self.workers // groups))
        alpha = self.alpha if method.beta is None else moving_rate(self.algorithm, self.workers, method)
        return replace(self, method=method, alpha=alpha, by_machine=False)

    @property
    def shared(self) -> bool:
        return self.workers > 1 or self.smb is not None or not METHODS[self.algorithm].box

    @property
    def grace(self) -> float:
        """Seconds for which a box outside the launcher may be away."""
        return self.box_grace if self.smb is not None else 0.0

    def figures(self) -> list[str]:
        """The numbers that the algorithm goes by, as the log shows them."""
        return figures(self)


@dataclass(frozen=True)
class Run:
    """What concerns this run alone: seed (None: from the clock), signals, threads and where it reports.

    log, metrics  files of the first worker, beside the snapshots or in --log-dir
    gpu_asked     the solver file says ``solver_mode: GPU``, which most files do: it is trained on the CPU
    """

    random_seed: int | None
    debug_info: bool
    gpu_asked: bool
    sigint_effect: str
    sighup_effect: str
    threads: int | None
    precision: str
    compile: bool
    log: str
    metrics: str
    tensorboard: str | None
