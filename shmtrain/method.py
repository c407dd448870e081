"""What a way of sharing weights may be told besides alpha and tau, checked and frozen. Loads no torch.

``METHODS`` names every way, where its code is, which options are its own and what holds by default. An option
of another way is refused: it would be passed over in silence otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shmtrain.lr_rule import DEFAULT_RULE
from shmtrain.options import ConfigError, MethodOptions, Options, choice

if TYPE_CHECKING:
    from shmtrain.settings import Sharing

WAYS = ("fused", "paper", "read-ahead", "overlapped")
SERVERS = ("sgd", "adagrad")
WIRES = ("float32", "bfloat16", "float16", "int8")
STALENESS = ("none", "inverse", "exponential", "drop", "bounded")
MAX_ALPHA = 0.99
ASYNCHRONOUS_RATE = 0.7
SERVER_RATE = 0.003  # of downpour's adagrad
ASYNCHRONOUS_MOMENTUM = 0.5  # of diloco's outer step, as in HALoS (arXiv 2506.04531); 0.9 diverges there
BETA = 0.9  # alpha = 0.9 / N by default: Zhang, Choromanska, LeCun 2015, section 5
LEAST_ALPHA = 0.2  # ShmCaffe's alpha for any number of workers
PARTS_ALPHA = 0.5  # where each steps on a part of a batch: the noisier the steps, the closer they must keep
ELASTIC = frozenset({"alpha", "beta", "tau", "staleness", "warm_start", "wire"})
MEAN = "the mean gradient of {workers} x {batch} images makes one step of the job"


@dataclass(frozen=True)
class Entry:
    """One way of sharing.

    module    holds ``open_exchange(meeting)``
    title     its name and source, for the help and the log
    rule      the learning-rate rule for N workers where none is given
    batch     what one step means to the center, for the log; {batch} images of each of {workers} workers
    options   fields of MethodOptions, and alpha, tau and exchange, that are its own
    tau       update interval where none is given
    staleness what becomes of old increments where nothing is said
    wire      how increments travel where nothing is said
    lockstep  all make the same steps: iterations are counted by the steps, not claimed
    box       whether they meet through a memory box; else by MPI, and mpirun starts them
    server    whether the first rank of mpirun does no training, but holds the center
    least     alpha by default where beta / N is below it and an exchange is one operation
    parts     the same where the workers share a batch out
    adds      the center takes each worker's step whole: with a part of a batch, the rate is a part, too
    """

    module: str
    title: str
    rule: str
    batch: str
    options: frozenset[str]
    tau: int = 1
    lockstep: bool = False
    staleness: str = "none"
    wire: str = "float32"
    box: bool = True
    server: bool = False
    least: float = 0.0
    parts: float = 0.0
    adds: bool = False

    def has(self, option: str) -> bool:
        return option in self.options or (option == "termination" and self.claims_freely)

    @property
    def claims_freely(self) -> bool:
        """Whether the workers need not end with the same step, and --termination says when they do."""
        return self.box and not self.lockstep


METHODS = {
    "seasgd": Entry(
        "seasgd", "SEASGD (ShmCaffe-A, 2018)", DEFAULT_RULE,
        "each worker steps on {batch} images of its own; the center follows {workers} of them",
        ELASTIC | {"exchange"}, least=LEAST_ALPHA, parts=PARTS_ALPHA,
    ),
    "easgd": Entry(
        "easgd", "asynchronous EASGD (Zhang et al. 2015)", DEFAULT_RULE,
        "each worker steps on {batch} images of its own; the center follows {workers} of them",
        ELASTIC,
    ),
    "eamsgd": Entry(
        "eamsgd", "EAMSGD (Zhang et al. 2015)", DEFAULT_RULE,
        "each worker steps on {batch} images of its own; the center follows {workers} of them",
        ELASTIC,
    ),
    "downpour": Entry(
        "downpour", "Downpour SGD (DistBelief, 2012)", "none",
        "the center takes every step of {batch} images of every worker",
        frozenset({"n_fetch", "n_push", "server", "server_rate", "staleness", "warm_start"}),
        adds=True, staleness="inverse",  # as they are, four workers' pushes with a momentum of 0.9 diverge
    ),
    "sync": Entry(
        "sync", "synchronous SGD through the box (backup workers: Chen et al. 2016)", DEFAULT_RULE, MEAN,
        frozenset({"backup_workers"}), lockstep=True,
    ),
    "allreduce": Entry(
        "allreduce", "synchronous SGD by allreduce (gloo)", DEFAULT_RULE, MEAN,
        frozenset({"bucket_mib"}), lockstep=True,
    ),
    "hybrid": Entry(
        "hybrid", "HSGD (ShmCaffe-H, 2018)", DEFAULT_RULE,
        "a group's mean gradient makes one step of the group; the center follows the groups",
        frozenset({"alpha", "beta", "tau", "group_size", "bucket_mib", "staleness", "wire"}), lockstep=True,
        least=LEAST_ALPHA, parts=LEAST_ALPHA,
    ),
    "diloco": Entry(
        "diloco", "DiLoCo (Douillard et al. 2023; asynchronous: Liu et al. 2024)", "power:0.25",
        "each worker makes tau steps on {batch} images of its own; their mean change is one outer step",
        frozenset({
            "tau", "outer_lr", "outer_momentum", "asynchronous", "outer_buffer", "staleness", "wire",
            "dynamic", "fragments", "overlap",
        }), tau=100, lockstep=True, wire="int8",
    ),
    "local": Entry(
        "local", "workers that never meet (the control)", "none",
        "each worker steps on {batch} images of its own; the one that leads is tested and saved", frozenset(),
    ),
    "mpi-allreduce": Entry(
        "mpi_allreduce", "synchronous SGD by MPI_Allreduce (MPICaffe)", DEFAULT_RULE, MEAN, frozenset(),
        lockstep=True, box=False,
    ),
    "mpi-star": Entry(
        "mpi_star", "synchronous SGD by a star of MPI sends (Caffe-MPI 1.0)", DEFAULT_RULE, MEAN, frozenset(),
        lockstep=True, box=False,
    ),
    "mpi-easgd": Entry(
        "mpi_easgd", "asynchronous EASGD with a server rank (Zhang et al. 2015)", DEFAULT_RULE,
        "each worker steps on {batch} images of its own; the center follows {workers} of them",
        frozenset({"alpha", "beta", "tau"}), box=False, server=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """The options of the chosen way; those of other ways stand at their defaults.

    beta            alpha = beta / (workers that take part), as they come and go; None: alpha is fixed
    least_alpha     where that is lower, alpha is this
    warm_start      iterations of the job that the leading worker makes alone, before the others begin
    staleness       what becomes of an old increment: none, inverse, exponential:R, drop:S, bounded:S
    n_fetch, n_push steps between two reads of the center, and between two pushes to it
    server          how the center takes a push: ``sgd`` adds it, ``adagrad`` divides by its own history
    server_rate     the rate of ``adagrad``
    backup_workers  b of the workers may come too late in each step: their gradients are dropped
    group_size      workers of one synchronous group
    outer_*         rate, momentum and (asynchronous) buffer of the outer step; buffer 0: one of each worker
    bucket_mib      MiB of one allreduce
    fragments       parts of the weights that diloco exchanges in turns; overlap: steps until a mean is taken
    dynamic         a slower worker makes fewer steps in a round
    wire            how increments travel over TCP and RDMA; diloco's changes are made small for any transport
    wait_limit      seconds after which a wait for other workers ends with an error that names them
    """

    beta: float | None = BETA
    least_alpha: float = 0.0
    warm_start: int = 0
    staleness: str = "none"
    n_fetch: int = 1
    n_push: int = 1
    server: str = "sgd"
    server_rate: float = SERVER_RATE
    backup_workers: int = 0
    group_size: int = 2
    outer_lr: float = 0.9
    outer_momentum: float = 0.6
    asynchronous: bool = False
    outer_buffer: int = 0
    fragments: int = 1
    overlap: int = 0
    dynamic: bool = False
    bucket_mib: float = 4.0
    wire: str = "float32"
    wait_limit: float = 300.0


def method(
    algorithm: str,
    workers: int,
    alpha_given: bool,
    given: MethodOptions,
    exchange: str = "fused",
    *,
    batch: str = "each",
) -> Method:
    """The options with the defaults filled in. Raises ConfigError."""
    entry = METHODS[choice("--algorithm", algorithm, METHODS)]
    told = {f.name: v for f in fields(given) if (v := getattr(given, f.name)) is not None}
    own(algorithm, told.keys() - {"wait_limit"})
    if alpha_given and "beta" in told:
        raise ConfigError(
            "--alpha and --beta exclude one another: beta divides by the workers that take part"
        )
    defaults: dict[str, Any] = {"staleness": entry.staleness, "wire": entry.wire}
    if alpha_given:
        defaults["beta"] = None
    if "beta" not in told and exchange == "fused":
        defaults["least_alpha"] = entry.parts if batch == "global" else entry.least
    if told.get("asynchronous"):
        defaults |= {"outer_lr": ASYNCHRONOUS_RATE, "outer_momentum": ASYNCHRONOUS_MOMENTUM}
    filled = Method(**{**defaults, **told})
    _check(filled, entry, workers)
    return filled


def own(algorithm: str, told: Iterable[str]) -> None:
    """Refuse the options that another way has."""
    for name in told:
        if not METHODS[algorithm].has(name):
            owners = ", ".join(other for other, entry in METHODS.items() if entry.has(name))
            raise ConfigError(f"--{name.replace('_', '-')} is an option of {owners}, not of {algorithm}")


def check_told(o: Options, m: Method) -> None:
    """Refuse what the command line says besides, where the way or the box has no use for it."""
    own(o.algorithm, o.told())
    if o.smb is not None and not METHODS[o.algorithm].box:
        raise ConfigError(f"--smb {o.smb}: {o.algorithm} meets by MPI and needs no box")
    if METHODS[o.algorithm].wire != "float32":
        return
    if m.wire != "float32" and o.smb is None:
        raise ConfigError(
            f"--wire {m.wire} is for a box on a network: name one, as with --smb tcp://HOST:PORT"
        )
    if m.wire != "float32" and o.exchange not in (None, "fused"):
        raise ConfigError(f"--wire {m.wire} needs --exchange fused, not {o.exchange}")


def check_interval(m: Method, tau: int) -> None:
    """Refuse parts and overlaps that a round of ``tau`` steps has no room for."""
    if m.fragments > tau or m.overlap * m.fragments > tau:
        raise ConfigError(
            f"--fragments {m.fragments} --overlap {m.overlap}: tau {tau} steps must have room for all,"
            " each with its overlap"
        )


def moving_rate(algorithm: str, workers: int, m: Method) -> float:
    """alpha = beta / N, N being the workers or their groups, at least least_alpha, and below 1 for one alone.

    An exchange that is one operation reads the center that it moves: many of them, one after the other, never
    take the center beyond the workers. N alpha need not stay below 1, as it must where increments come from
    an older center.
    """
    size = m.group_size if algorithm == "hybrid" else 1
    return min(max((m.beta or BETA) / -(-max(workers, 1) // size), m.least_alpha), MAX_ALPHA)


def _check(m: Method, entry: Entry, workers: int) -> None:
    at_least = {"warm_start": 0, "n_fetch": 1, "n_push": 1, "backup_workers": 0, "group_size": 1}
    for name, lowest in {**at_least, "outer_buffer": 0, "fragments": 1, "overlap": 0}.items():
        if getattr(m, name) < lowest:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(m, name)}: must be at least {lowest}")
    for name in ("outer_lr", "wait_limit", "bucket_mib", "beta", "server_rate"):
        value = getattr(m, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    if not 0 <= m.outer_momentum < 1:
        raise ConfigError(f"--outer-momentum {m.outer_momentum:g}: must lie in [0, 1)")
    if entry.module == "diloco" and not m.asynchronous and (m.staleness != "none" or m.outer_buffer):
        raise ConfigError("--staleness and --outer-buffer need --asynchronous: otherwise nothing is stale")
    if m.asynchronous and (m.fragments > 1 or m.overlap):
        raise ConfigError(
            "--fragments and --overlap are not for --asynchronous: there nobody waits for a mean"
        )
    if m.backup_workers and m.backup_workers >= workers:
        raise ConfigError(f"--backup-workers {m.backup_workers} of {workers} workers leaves none to wait for")
    choice("--server", m.server, SERVERS)
    choice("--wire", m.wire, WIRES)
    parse_staleness(m.staleness)


def parse_staleness(text: str) -> tuple[str, float]:
    """(kind, its number) of ``none``, ``inverse``, ``exponential:R``, ``drop:S`` or ``bounded:S``."""
    kind, colon, number = text.partition(":")
    choice("--staleness", kind, STALENESS)
    needs = kind not in ("none", "inverse")
    try:
        value = float(number) if colon else 0.0
    except ValueError:
        value = -1.0
    if needs != bool(colon) or not 0 <= value < float("inf") or (kind == "exponential" and value == 0):
        raise ConfigError(
            f"--staleness {text!r} is none of none, inverse, exponential:R (R > 0), drop:S, bounded:S"
        )
    return kind, value


def describe(algorithm: str, workers: int, batch: int, m: Method) -> str:
    """What a step of this way means: the line of the log about batches."""
    entry = METHODS[algorithm]
    workers -= m.backup_workers
    return f"{entry.title}: {entry.batch.format(workers=workers, batch=batch)}"


def figures(sharing: Sharing) -> list[str]:
    """The numbers that an algorithm goes by, as words; what stands at a default of no effect is left out."""
    entry, m = METHODS[sharing.algorithm], sharing.method
    words = {"exchange": sharing.exchange, "alpha": f"alpha {sharing.alpha:g}", "tau": f"tau {sharing.tau}"}
    if m.beta is not None:
        least = f", at least {m.least_alpha:g}" if m.least_alpha else ""
        words["beta"] = f"alpha follows {m.beta:g}/N{least}"
    shown = [text for name, text in words.items() if name in entry.options]
    if sharing.algorithm == "hybrid":
        shown.insert(0, f"S{m.group_size}xA{-(-sharing.workers // m.group_size)}")
    silent = {"beta": True, "server_rate": m.server == "sgd", "fragments": m.fragments == 1}
    for field in fields(m):
        value = getattr(m, field.name)
        if silent.get(field.name, False) or field.name not in entry.options:
            continue
        if value not in (None, False, 0, "none", "float32"):
            shown.append(f"{field.name.replace('_', ' ')} {value}".removesuffix(" True"))
    if entry.claims_freely:
        shown.append(f"termination {sharing.termination}")
    if sharing.global_batch:
        shown.append("batch global")
    return shown
