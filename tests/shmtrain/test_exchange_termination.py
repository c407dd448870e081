"""N workers share max_iter: the counter gives each iteration once, the paper's rules end all together."""

from __future__ import annotations

import threading
from collections import Counter as Multiset

import pytest

import smb
from shmtrain.exchange.termination import MAX_QUOTA, Place, open_counting, quota
from shmtrain.group import Column, Progress, State


def places(box: smb.Box, workers: int, start: int, max_iter: int) -> list[Place]:
    progress = Progress.create(box, "job", workers)
    return [Place(progress, rank, start, max_iter) for rank in range(workers)]


@pytest.mark.parametrize(
    ("workers", "start", "max_iter"), [(1, 0, 10), (3, 0, 1000), (4, 37, 538), (5, 0, 3)]
)
def test_the_counter_gives_each_iteration_once(
    box: smb.Box, address: str, workers: int, start: int, max_iter: int
) -> None:
    taken: list[list[int]] = [[] for _ in range(workers)]

    def work(place: Place) -> None:
        with smb.connect(address) as mine:
            counting = open_counting("counter", place, lambda: mine.counter("job/iterations"))
            while (iteration := counting.claim()) is not None:
                taken[place.rank].append(iteration)
                counting.complete()

    all_places = places(box, workers, start, max_iter)
    assert box.counter("job/iterations").value == 0  # and it lives as long as this session
    threads = [threading.Thread(target=work, args=(place,)) for place in all_places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Multiset(i for part in taken for i in part) == Multiset(range(start, max_iter))
    assert start + all_places[0].progress.rows().total == max_iter


def test_a_second_job_of_one_name_counts_from_where_the_counter_stands(box: smb.Box) -> None:
    (place,) = places(box, 1, 0, 5)
    box.counter("job/iterations").add(1234)
    counting = open_counting("counter", place, lambda: box.counter("job/iterations"), begun=1234)
    assert [counting.claim() for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_what_a_dead_worker_had_claimed_counts_as_lost(box: smb.Box) -> None:
    here, dead = places(box, 2, 0, 1000)
    counting = open_counting("counter", here, lambda: box.counter("job/iterations"))
    other = open_counting("counter", dead, lambda: box.counter("job/iterations"))
    for _ in range(3):
        other.claim()
        other.complete()
    other.claim()
    here.progress.bury(dead.rank)
    while counting.claim() is not None:
        counting.complete()
    rows = here.progress.rows()
    assert counting.completed == 1000
    assert rows.table[dead.rank, Column.LOST] == quota(1000, 2) - 3
    assert rows.state(dead.rank) is State.DEAD


def test_quotas_are_small_and_never_empty() -> None:
    assert quota(1, 16) == 1
    assert quota(10_000, 4) <= MAX_QUOTA
    assert quota(10_000, 4) * 4 <= 10_000 // 50


def run_at_speeds(
    box: smb.Box, rule: str, speeds: list[int], max_iter: int, dead: int | None = None
) -> list[int]:
    """Steps of each worker when worker r takes speeds[r] a round; worker ``dead`` dies after a round."""
    workers = [
        open_counting(rule, place, lambda: box.counter("x"))
        for place in places(box, len(speeds), 0, max_iter)
    ]
    steps, ended = [0] * len(speeds), [False] * len(speeds)
    for turn in range(max_iter):
        for rank, counting in enumerate(workers):
            for _ in range(speeds[rank]):
                if rank == dead and turn == 1:
                    Progress.attach(box, "job").bury(rank)
                    ended[rank] = True
                if ended[rank] or counting.claim() is None:
                    ended[rank] = True
                    break
                counting.complete()
                steps[rank] += 1
    assert all(ended)
    return steps


# max_iter 30 and three workers: a share of 10.
@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ("master", [10, 20, 10]),  # the slow leader does its share, the fast one goes on meanwhile
        ("fastest", [5, 10, 5]),
        ("mean", [8, 14, 8]),
    ],
)
def test_the_papers_rules_end_all_workers(box: smb.Box, rule: str, want: list[int]) -> None:
    steps = run_at_speeds(box, rule, [1, 2, 1], 30)
    assert all(abs(got - expected) <= 2 for got, expected in zip(steps, want, strict=True)), steps
    met = {"master": steps[0] >= 10, "fastest": max(steps) >= 10, "mean": sum(steps) >= 30}
    assert met[rule]


def test_when_the_master_dies_the_next_rank_is_the_master(box: smb.Box) -> None:
    steps = run_at_speeds(box, "master", [1, 1, 2], 30, dead=0)
    assert steps[0] == 1
    assert steps[1] == 10


def test_the_learning_rates_iteration_stays_below_max_iter(box: smb.Box) -> None:
    """poly's rate is no number above max_iter, and a rule may make more steps than that in all."""
    slow, fast = places(box, 2, 0, 10)
    counting = open_counting("master", fast, lambda: box.counter("x"))
    open_counting("master", slow, lambda: box.counter("x"))
    claims = []
    for _ in range(20):
        claims.append(counting.claim())
        counting.complete()
    assert claims == [*range(10), *[9] * 10]
