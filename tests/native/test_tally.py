"""What a segment's clients count of their own operations, in lines that the daemon reads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from smb.segment import Mapping

COUNT = 1000
NBYTES = 4 * COUNT


@pytest.fixture
def segment() -> Iterator[Mapping]:
    """The daemon's mapping of a segment."""
    mapping = Mapping.create(COUNT, "float32")
    yield mapping
    mapping.close()


def client(segment: Mapping, readonly: bool = False) -> Mapping:
    return Mapping.attach(segment.control_fd, segment.payload_fd, COUNT, "float32", readonly=readonly)


def test_operations_and_bytes_are_counted_both_ways(segment: Mapping) -> None:
    local = np.ones(COUNT, np.float32)
    with_line = client(segment)
    assert with_line.tally(7)
    with_line.write(local)
    with_line.read(local[:10])
    with_line.accumulate(local, 0.5)
    with_line.exchange(local, 0.5)
    with_line.read(local[:0])
    client(segment).write(local)
    assert segment.tallies() == {7: (4, 3 * NBYTES, NBYTES + 40, 0)}


def test_staleness_is_the_updates_of_others_between_exchanges(segment: Mapping) -> None:
    local = np.ones(COUNT, np.float32)
    one, other = client(segment), client(segment)
    assert one.tally(1)
    assert other.tally(2)
    assert segment.tallies()[1][3] == -1
    other.write(local)
    one.write(local)
    one.exchange(local, 0.5)
    assert segment.tallies()[1][3] == 1
    one.exchange(local, 0.5)
    assert segment.tallies()[1][3] == 0
    other.exchange(local, 0.5)
    assert segment.tallies()[2][3] == 3


def test_an_operation_that_fails_counts_nothing(segment: Mapping) -> None:
    one = client(segment)
    one.tally(1)
    with pytest.raises(Exception, match="NaN"):
        one.accumulate(np.full(COUNT, np.nan, np.float32))
    assert segment.tallies() == {1: (0, 0, 0, -1)}


def test_a_line_that_was_given_away_is_no_longer_written_to(segment: Mapping) -> None:
    local = np.ones(COUNT, np.float32)
    one, other = client(segment), client(segment)
    one.tally(1)
    one.write(local)
    segment.forget_tally(1)
    assert segment.tallies() == {}
    assert other.tally(2)
    one.write(local)
    assert segment.tallies() == {2: (0, 0, 0, -1)}


def test_two_mappings_of_one_session_share_a_line(segment: Mapping) -> None:
    for mapping in (client(segment), client(segment)):
        assert mapping.tally(5)
        mapping.write(np.ones(COUNT, np.float32))
    assert segment.tallies() == {5: (2, 2 * NBYTES, 0, -1)}


def test_who_finds_no_line_works_uncounted(segment: Mapping) -> None:
    taken = [client(segment) for _ in range(62)]
    assert all(mapping.tally(number + 1) for number, mapping in enumerate(taken))
    late = client(segment)
    assert not late.tally(1000)
    late.write(np.ones(COUNT, np.float32))
    assert late.version == 1
    assert 1000 not in segment.tallies()
    assert len(segment.tallies()) == 62
    reader = client(segment, readonly=True)
    assert not reader.tally(1001)
    reader.read(np.empty(COUNT, np.float32))


def test_nonsense_in_the_lines_is_only_shown(segment: Mapping) -> None:
    """Whoever maps the control file may write what it likes there."""
    import mmap

    with mmap.mmap(segment.control_fd, 4096) as control:
        control[128:4096] = b"\xff" * (4096 - 128)
    assert segment.tallies() == {2**64 - 1: (2**64 - 1, 2**64 - 1, 2**64 - 1, 2**62 - 1)}
    client(segment).write(np.ones(COUNT, np.float32))
