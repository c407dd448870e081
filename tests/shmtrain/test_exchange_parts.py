"""What an exchange has cost by parts and in bytes, for every way: what the comparison of ways rests on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shmtrain.exchange.base import PARTS, ExchangeStats
from shmtrain.method import METHODS, Method
from tests.shmtrain.crowds import N, Recipe, open_job, together

STEPS, BYTES = 4, 4 * N
METHOD = Method(beta=None, wait_limit=30.0)


@dataclass(frozen=True)
class Cost:
    """Of two workers in STEPS steps: the parts of both, and the vectors that both have sent and received."""

    parts: set[str]
    sent: float
    received: float
    hidden: frozenset[str] = frozenset()
    way: str = "fused"


COSTS = {
    "seasgd": Cost({"exchange"}, 2, 2),
    "seasgd paper": Cost({"wait", "rgw", "ulw"}, 2, 2, frozenset({"wwi", "ugw"}), "paper"),
    "seasgd overlapped": Cost({"wait", "ulw"}, 2, 2, frozenset({"exchange"}), "overlapped"),
    "easgd": Cost({"exchange"}, 2, 2),
    "downpour": Cost({"rgw", "ulw", "ugw"}, 2, 2),
    # the first worker also keeps the center up to date
    "sync": Cost({"wwi", "wait", "rgw", "ugw"}, 2 + 1, 4),
    "allreduce": Cost({"collective", "ugw"}, 2 + 1, 0),
    # one group: its root exchanges and sends what it has then
    "hybrid": Cost({"exchange", "collective"}, 1 + 1 + 2, 1),
    "local": Cost(set(), 0, 0),
}


def cost(algorithm: str, address: str, way: str) -> list[ExchangeStats]:
    recipe = Recipe(algorithm, 2, METHOD, tau=1, way=way)
    job = open_job(address, recipe)
    together(job.workers, STEPS)
    for future in [w.pool.submit(getattr(w.exchange, "close", lambda: None)) for w in job.workers if w.pool]:
        future.result(30)
    if way != "fused":
        for worker in job.workers:
            worker.exchange._wait() if way == "paper" else worker.exchange._take()  # type: ignore[attr-defined]
    return [worker.exchange.stats for worker in job.workers]


@pytest.mark.parametrize("name", COSTS)
def test_each_way_times_its_parts_and_counts_its_bytes(name: str, address: str) -> None:
    want, algorithm = COSTS[name], name.split(maxsplit=1)[0]
    found = cost(algorithm, address, want.way)  # behind a ring's gradients travel a few numbers: 1%
    assert set().union(*(s.parts for s in found)) == want.parts
    assert set().union(*(s.hidden for s in found)) == want.hidden
    assert sum(s.sent for s in found) == pytest.approx(STEPS * BYTES * want.sent, rel=0.01)
    assert sum(s.received for s in found) == STEPS * BYTES * want.received
    for stats in found:
        assert set(stats.parts) | set(stats.hidden) <= PARTS.keys()


def test_the_parts_of_a_standing_exchange_are_no_longer_than_it(address: str) -> None:
    for stats in cost("sync", address, "fused"):
        assert 0 < sum(stats.parts.values()) <= stats.seconds


def test_every_way_through_the_box_is_held_here() -> None:
    """diloco's bytes are held by its own tests, eamsgd's exchange is easgd's."""
    through_the_box = {name for name, entry in METHODS.items() if entry.box}
    assert through_the_box - {name.split(maxsplit=1)[0] for name in COSTS} <= {"diloco", "eamsgd"}
