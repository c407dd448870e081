"""Which ways are measured against each other, in which variants, and what each of them promises to hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shmtrain.bench.errors import BenchError
from shmtrain.bench.job import NOTHING, PUSH, SEQUENTIAL, WHOLE, Job

BOX, GLOO = "box", "gloo"
PARTS = ("sequential", "busy", "wait")
COMPUTE = "compute"

LABELS = {
    "fused": "fused exchange",
    "paper": "the paper's own sequence",
    "server": "send/recv with a server rank",
    "rma": "RMA get + accumulate",
    "window": "shared window, own loop, no locks",
    "allreduce": "allreduce",
}

SEQUENTIALLY = {
    "fused": ("1",),
    "paper": ("1",),
    "server": ("fused", "pull", "piped", "piped-256K"),
    "rma": ("held", "pieces-64K", "pieces-256K", "pieces-1M"),
    "window": ("fused",),
    "allreduce": ("in place", "out of place", "pieces-256K", "pieces-4M"),
}
GLOO_VARIANTS = ("whole", "pieces-4M")

# Overlapped: (how, op) -> variants. A way without halves is measured as PUSH, too: all of it is uncovered.
OVERLAPPED = {
    (PUSH, "fused"): ("1",),
    (PUSH, "paper"): ("1",),
    (PUSH, "server"): ("fused", "pull", "threaded", "piped"),
    (PUSH, "rma"): ("held", "threaded", "pieces-256K"),
    (PUSH, "window"): ("fused",),
    (WHOLE, "fused"): ("1",),
    (WHOLE, "server"): ("fused", "piped"),
    (WHOLE, "rma"): ("held", "pieces-256K"),
    (WHOLE, "allreduce"): ("in place", "pieces-4M"),
}
OF_BOX = ("fused", "paper")


@dataclass(frozen=True)
class Measure:
    """One way of one library in one variant, with a kind of computing or none."""

    library: str
    op: str
    variant: str
    overlap: str = SEQUENTIAL
    computing: str = "none"

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """All variants of a kind do the same; the best of them counts."""
        return self.library, self.op, self.overlap, self.computing

    def job(self, count: int, amount: float = 0.0, repeat: int = 1) -> Job:
        return Job(self.op, self.variant, count, self.overlap, self.computing, amount, repeat)


def measures(part: str, mpis: Sequence[str], gloo: bool, threads: int) -> list[Measure]:
    """Everything of a part, one of PARTS; ``threads``: the most that one worker at the box may use."""
    found = []
    computing = "none" if part == SEQUENTIAL else part
    for overlap, op, variants in _entries(part):
        if op in OF_BOX:
            more = (str(threads),) if op == "fused" and threads > 1 else ()
            found += [Measure(BOX, op, v, overlap, computing) for v in (*variants, *more)]
            continue
        found += [Measure(mpi, op, v, overlap, computing) for mpi in mpis for v in variants]
        if gloo and op == "allreduce":
            found += [Measure(GLOO, op, v, overlap, computing) for v in GLOO_VARIANTS]
    if computing != "none":
        found.append(Measure(BOX, COMPUTE, "", NOTHING, computing))
    return found


def _entries(part: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    if part == SEQUENTIAL:
        yield from ((SEQUENTIAL, op, variants) for op, variants in SEQUENTIALLY.items())
    else:
        yield from ((overlap, op, variants) for (overlap, op), variants in OVERLAPPED.items())


def placed(measure: Measure, job: Job, workers: int, cores: Sequence[int]) -> Job:
    """The job with what follows from this machine: processes no more than the processors get one each."""
    active = workers + (measure.op == "server")
    several = workers > 1 or measure.library != BOX  # a single worker's helpers want the other processors
    pinned = active <= len(cores) and several
    return replace(job, cpus=tuple(cores) if pinned else (), crowded=active > len(cores))


def hold(measure: Measure, workers: int, held: Sequence[float]) -> None:
    """Check the vectors after one exchange of each worker: worker i began with i + 1, the center with 0.

    held  the means of the workers' vectors and of the center, where it was told. Raises BenchError.
    """
    begun = workers * (workers + 1) / 2
    moved = all(abs(mean - i - 1) > 1e-6 for i in range(workers) for mean in held)
    if measure.op == "allreduce":
        good = sum(abs(mean - begun) < 1e-3 * begun for mean in held) == workers  # a server's is still 0
    elif measure.op == "window" and workers > 1:
        good = True  # without locks updates get lost: it promises nothing
    elif measure.library == BOX:
        good = moved  # the center is not told: the box's own tests hold the sum
    else:
        good = moved and abs(sum(held) - begun) < 1e-4 * begun
    if not good:
        raise BenchError(
            f"{measure.library} {measure.op} ({measure.variant}): wrong weights after it: {held}"
        )
