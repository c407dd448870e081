"""How reader and net know of each other: by counts in memory, and by a message to who sleeps."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from prototxt._native import Words
from prototxt.data import reader as reader_side
from prototxt.data.config import ReaderConfig
from prototxt.data.counts import COUNTS_BYTES, Counts
from prototxt.data.reader import LONGEST_SLEEP, MANY_SLOTS, SMALL_RING_SLOTS, Inbox, Outbox
from prototxt.data.source import Reader
from prototxt.errors import DataError

STEP = 0.01  # seconds in which a net takes a batch


@pytest.fixture
def ends() -> tuple[Counts, Counts]:
    """(reader's, net's) end of one memory."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, COUNTS_BYTES)
    pair = Counts(fd, "reader"), Counts(fd, "net")
    os.close(fd)
    return pair


@pytest.fixture
def full(make_lmdb: Any) -> Iterator[Reader]:
    """A reader that sleeps on its first full ring of small batches."""
    source = make_lmdb([(np.full((1, 2, 2), i, np.uint8), i) for i in range(100)])
    config = ReaderConfig("lmdb", str(source), 1, ("data", "label"), train=False)
    with Reader(config, place="p", timeout=5.0) as reader:
        reader.take()
        end = time.monotonic() + 20.0
        while reader._counts.theirs() < SMALL_RING_SLOTS and time.monotonic() < end:
            time.sleep(0.005)
        assert reader._counts.theirs() == SMALL_RING_SLOTS
        reader._look()  # and learns where they lie: its first look may have found a few of them or one
        yield reader


class Silent:
    """A socket that no message may go through."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the net called the kernel: {name}")


def test_a_net_that_finds_its_batch_ready_sends_nothing_and_receives_nothing(full: Reader) -> None:
    sock, full._sock = full._sock, cast(socket.socket, Silent())
    assert [full.take()[1].tolist() for _ in range(12)] == [[i] for i in range(1, 13)]
    full._sock = sock


def test_a_reader_asleep_is_woken_before_its_net_sleeps(full: Reader) -> None:
    """Else each waits for the other."""
    labels = [int(full.take()[1]) for _ in range(1, 5 * SMALL_RING_SLOTS)]
    assert labels == [i % 100 for i in range(1, 5 * SMALL_RING_SLOTS)]


def test_a_net_asleep_is_woken_by_the_batch_that_it_waits_for(full: Reader) -> None:
    os.kill(full.pid, signal.SIGSTOP)
    for _ in range(1, SMALL_RING_SLOTS):
        full.take()
    waker = threading.Timer(0.2, os.kill, (full.pid, signal.SIGCONT))
    waker.start()
    assert full.take()[1].tolist() == [SMALL_RING_SLOTS]
    waker.join()


def test_batches_of_other_shapes_in_the_same_slots_are_told_of(make_lmdb: Any) -> None:
    sides = [2 + i % 5 for i in range(4 * SMALL_RING_SLOTS)]
    source = make_lmdb([(np.full((1, side, side), i, np.uint8), i) for i, side in enumerate(sides)])
    config = ReaderConfig("lmdb", str(source), 1, ("data", "label"), train=False)
    with Reader(config, place="p", timeout=20.0) as reader:
        for i, side in enumerate(sides):
            data, label = reader.take()
            assert data.shape == (1, 1, side, side)
            assert (data == i).all()
            assert label.tolist() == [i]


def test_one_message_for_one_wish(ends: tuple[Counts, Counts]) -> None:
    reader, net = ends
    assert not net.move(1), "nobody wished"
    assert reader.wish(3) == 1
    assert [net.move(count) for count in (2, 3, 4, 5)] == [False, True, False, False]
    assert reader.wish(0) == 5
    assert not net.move(6)
    assert reader.wish(9) == 6
    assert net.move(12), "beyond it"
    assert net.wish(1) == 0
    assert reader.move(1)


@pytest.mark.parametrize("slots", [2, MANY_SLOTS - 1, MANY_SLOTS, SMALL_RING_SLOTS])
def test_where_there_are_many_slots_the_reader_wakes_up_by_itself_in_time(
    ends: tuple[Counts, Counts], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the net's pace from the second time on; the net's step goes by without a message then."""
    counts, net = ends
    now, taken, woken, slept = 0.0, 0, 0, list[float | None]()
    monkeypatch.setattr(reader_side, "monotonic", lambda: now)

    class Sleep:
        def sleep(self, seconds: float | None) -> None:
            nonlocal now, taken, woken
            slept.append(seconds)
            end = now + (60.0 if seconds is None else seconds)
            while now + STEP <= end:
                now, taken = now + STEP, taken + 1
                if net.move(taken):
                    woken += 1
                    return
            now = end

    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        outbox = Outbox(mine, cast(Inbox, Sleep()), counts, slots)
        for batch in range(6 * slots):
            assert outbox.wait_free() == batch % slots
            outbox.publish(b"as before")
            assert batch - taken < slots, "a batch was written where one of the net's lies"
    many = slots >= MANY_SLOTS
    assert woken == (1 if many else len(slept))
    assert all((seconds is not None) == many for seconds in slept[1:])


def test_a_net_that_stands_still_is_left_alone(
    ends: tuple[Counts, Counts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at the counts costs processor time: a test or a snapshot may take minutes."""
    counts, net = ends
    now, looks = 0.0, 0
    monkeypatch.setattr(reader_side, "monotonic", lambda: now)

    class Sleep:
        def sleep(self, seconds: float | None) -> None:
            nonlocal now, looks
            looks += 1
            if seconds is None or now + seconds > 600.0:
                net.move(net.theirs())
            now += seconds or STEP

    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        outbox = Outbox(mine, cast(Inbox, Sleep()), counts, SMALL_RING_SLOTS)
        for _ in range(2 * SMALL_RING_SLOTS + 1):
            outbox.wait_free()
            outbox.publish(b"as before")
    assert looks < 40


def test_a_reader_never_sleeps_longer_than_it_can_be_told_to(
    ends: tuple[Counts, Counts], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, net = ends
    now = 0.0
    monkeypatch.setattr(reader_side, "monotonic", lambda: now)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        outbox = Outbox(mine, cast(Inbox, None), counts, SMALL_RING_SLOTS)
        net.move(10)
        now = 1.0
        assert outbox._seconds(15) == pytest.approx(0.5)
        assert outbox._seconds(9) == 0.0, "the net is farther by now"
        now = 60 * 86400.0
        assert outbox._seconds(16) == LONGEST_SLEEP


def test_a_reader_that_counts_more_batches_than_its_slots_hold_is_refused(full: Reader) -> None:
    """Else the net would train on the same few batches for ever."""
    full._counts._words.store(0, 1 << 62)
    full._ready = full._taken
    with pytest.raises(DataError, match=rf"reader process {full.pid} says .* room for {SMALL_RING_SLOTS}"):
        full.take()


def test_words_keep_to_their_memory() -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 2 * Words.LINE)
        words = Words(fd, 2)
        words.store(1, -(1 << 63))
        assert (words.load(0), words.load(1)) == (0, -(1 << 63))
        assert int.from_bytes(os.pread(fd, 8, Words.LINE), "little", signed=True) == -(1 << 63)
        for index in (2, 1 << 60):
            with pytest.raises(IndexError):
                words.load(index)
            with pytest.raises(IndexError):
                words.store(index, 0)
        with pytest.raises(ValueError, match="too short"):
            Words(fd, 3)
    finally:
        os.close(fd)
