"""Who leads, who waits for whom, and what happens when somebody does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import smb
from shmtrain.exchange.termination import Place, open_counting
from shmtrain.group import Column, Member, Progress, State

WORLD = 3


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def members(box: smb.Box, address: str, warnings: list[str]) -> Iterator[list[Member]]:
    Progress.create(box, "job", WORLD)
    with smb.connect(address) as other:
        progress = Progress.attach(other, "job")
        yield [Member(progress, rank, WORLD, "job", warnings.append) for rank in range(WORLD)]


def waits(member: Member, patience: float = 30.0) -> threading.Thread:
    thread = threading.Thread(target=member.join, args=(patience,))
    thread.start()
    return thread


def test_the_lowest_living_rank_leads(members: list[Member]) -> None:
    assert [m.leads for m in members] == [True, False, False]
    members[0].progress.bury(0)
    assert [m.leads for m in members[1:]] == [True, False]
    members[0].progress.bury(1)
    assert members[2].leads


def test_the_leader_ends_after_all_others_and_they_after_its_snapshot(members: list[Member]) -> None:
    for member in members:
        member.enter(State.TRAINING)
    leader, second = waits(members[0]), waits(members[1])
    time.sleep(0.2)
    assert leader.is_alive()  # worker 2 still trains: the center is not final
    third = waits(members[2])
    leader.join(5)
    assert not leader.is_alive()
    assert second.is_alive()
    assert third.is_alive()
    members[0].enter(State.CLOSED)
    for thread in (second, third):
        thread.join(5)
        assert not thread.is_alive()


def test_when_the_leader_dies_in_its_snapshot_the_next_one_leads(members: list[Member]) -> None:
    for member in members:
        member.enter(State.TRAINING)
    second, third = waits(members[1]), waits(members[2])
    members[0].enter(State.FINISHED)
    time.sleep(0.1)
    assert second.is_alive()
    members[0].progress.bury(0)
    second.join(5)
    assert not second.is_alive()
    assert members[1].leads
    assert third.is_alive()
    members[1].enter(State.CLOSED)
    third.join(5)
    assert not third.is_alive()


def test_the_leader_names_a_worker_that_does_not_end(members: list[Member], warnings: list[str]) -> None:
    for member in members:
        member.enter(State.TRAINING)
    members[2].progress.put(2, Column.PID, 4711)
    members[1].enter(State.FINISHED)
    members[0].join(patience=0.3)
    assert warnings == ["No step for 0.3 s: worker 2 (pid 4711); ending without"]


def test_a_worker_that_still_makes_steps_is_waited_for(members: list[Member], warnings: list[str]) -> None:
    for member in members:
        member.enter(State.TRAINING)
    members[1].enter(State.FINISHED)
    leader = waits(members[0], patience=0.3)
    for step in range(8):
        time.sleep(0.1)
        members[2].progress.put(2, Column.DONE, step)
    assert leader.is_alive()
    members[2].enter(State.FINISHED)
    leader.join(5)
    assert warnings == []


def test_nobody_begins_before_all_have_loaded(members: list[Member], warnings: list[str]) -> None:
    threads = [threading.Thread(target=m.wait_for_all, args=(30.0,)) for m in members]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.2)
    assert all(t.is_alive() for t in threads[:2])
    threads[2].start()
    for thread in threads:
        thread.join(5)
    assert not any(t.is_alive() for t in threads)
    assert warnings == []


def test_a_worker_that_never_starts_is_named(members: list[Member], warnings: list[str]) -> None:
    members[1].enter(State.READY)
    members[0].wait_for_all(patience=0.2)
    assert warnings == ["Not started within 0.2 s: worker 2 (pid 0); beginning without"]


def test_dead_workers_are_not_waited_for(members: list[Member]) -> None:
    members[0].progress.bury(2)
    members[1].enter(State.READY)
    members[0].wait_for_all(patience=30.0)
    members[1].enter(State.FINISHED)
    members[0].join(patience=30.0)


def test_a_test_of_the_center_is_no_standstill(members: list[Member]) -> None:
    members[0].enter(State.TRAINING)
    with members[0].leading():
        assert members[0].progress.rows().state(0) is State.LEADING
    assert members[0].progress.rows().state(0) is State.TRAINING


def test_of_workers_told_to_leave_at_once_the_last_stays_and_saves(members: list[Member]) -> None:
    """The others still train: they finish what they have claimed before they go."""
    for member in members:
        member.enter(State.TRAINING)
    assert [member.leave() for member in members] == [True, True, False]
    assert not members[2].leaving


def test_a_jobs_name_is_taken_while_it_runs(box: smb.Box, address: str) -> None:
    with smb.connect(address) as other:
        Progress.create(other, "job", WORLD)
        with pytest.raises(smb.KeyExists):
            Progress.create(box, "job", WORLD)


def test_one_that_joins_takes_a_lost_ones_row_and_keeps_what_was_counted(box: smb.Box) -> None:
    """Then one that somebody has left, then a new one; and nobody waits for it before it trains."""
    progress = Progress.create(box, "job", 3, spare=1)
    for rank, (state, done) in enumerate([(State.TRAINING, 40), (State.TRAINING, 10), (State.LEFT, 7)]):
        progress.put(rank, Column.STATE, state)
        progress.put(rank, Column.START, 500)
        progress.put(rank, Column.CLAIMED, done + 3)
        progress.put(rank, Column.DONE, done)
    progress.put(2, Column.LEAVES, 1)
    progress.bury(1)
    total = progress.rows().total
    for rank in (1, 2, 3):
        assert progress.rows().vacant == rank
        progress.take_row(rank, 99)
    assert progress.rows().vacant is None
    rows = progress.rows()
    assert rows.total == total == 40 + 13 + 7
    assert rows.state(1) is State.JOINING
    assert not rows.leaves(2)
    assert rows.gone(1)
    assert (rows.working, rows.active, rows.leader, rows.began) == ([0], 1, 0, 4)
    assert (rows.done(1), rows.credit(1), rows.start(1), rows.pid(1)) == (13, 27, 500, 99)
    counting = open_counting("counter", Place(progress, 1, 500, 2000), lambda: box.counter("c"))
    counting.claim()
    assert counting.complete() == 500 + total + 1


def test_the_slowest_is_named_with_everybodys_speed(box: smb.Box) -> None:
    progress = Progress.create(box, "job", 3)
    assert progress.rows().speeds() == ""
    for rank, pace in enumerate([1000, 4000, 2000]):
        progress.put(rank, Column.PACE, pace)
    assert progress.rows().speeds() == (
        "Steps a second without the exchanges: worker 0 1e+03, worker 1 250, worker 2 500; the slowest is"
        " worker 1, which needs 4.00 times as long as the fastest"
    )
