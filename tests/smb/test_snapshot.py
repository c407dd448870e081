"""Snapshots are whole or not there; a box comes back from one with everything; a damaged one is refused."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import records
from smb.client import Box
from smb.errors import NotPermitted, RequestError
from smb.segment import CHUNK_BYTES
from smb.snapshot import Snapshot, SnapshotError, newest
from tests.smb.processes import Program, ServeProcess, client, wait_for

CHUNK = CHUNK_BYTES // 4  # elements
COUNT = 3 * CHUNK + 100


@pytest.fixture
def snaps(folder: Path) -> Path:
    return folder / "snaps"


@contextmanager
def box_on(snaps: Path, every: float | None = None, lease: float = 30.0) -> Iterator[Box]:
    """A box in this process that goes on from the newest snapshot, and its client."""
    options = {"snapshot_dir": snaps, "snapshot_every": every, "lease": lease}
    with smb.serve(snaps.parent / "box.sock", **options) as daemon, smb.connect(daemon.addresses[0]) as box:  # type: ignore[arg-type]
        yield box


def crash(box: Box, snaps: Path) -> Path:
    """What a crash right after a snapshot leaves: its folder as it is now."""
    box.snapshot()
    return Path(shutil.copytree(snaps, snaps.parent / "crashed"))


def files(snaps: Path) -> list[Path]:
    return sorted(snaps.iterdir())


def two_snapshots(snaps: Path) -> tuple[Path, Path]:
    """Of a segment that holds ones in the first, twos in the second."""
    with smb.serve(snaps.parent / "box.sock") as daemon, smb.connect(daemon.addresses[0]) as box:
        center = box.create("job/center", COUNT, lifetime="stay", initial=np.ones(COUNT, np.float32))
        first = Path(box.snapshot(snaps))
        center.write(np.full(COUNT, 2, np.float32))
        return first, Path(box.snapshot(snaps))


def place(path: Path, chunk: int) -> int:
    """Where a chunk of the first segment lies in the file."""
    snapshot = Snapshot.open(path)
    return snapshot._places["job/center"][1] + chunk * (CHUNK_BYTES + 4)


# Coming back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint64"])
def test_a_box_comes_back_with_values_versions_counters_meta_and_lifetimes(snaps: Path, dtype: str) -> None:
    values = np.arange(COUNT).astype(dtype)
    with box_on(snaps) as box:
        for lifetime in records.LIFETIMES:
            box.create(f"of/{lifetime}", COUNT, dtype, lifetime=lifetime, initial=values, meta=b"\0\xff")
        box.attach("of/stay").write(values[:5], offset=7)
        box.counter("claims").add(41)
        before = {row.key: (row.version, row.nbytes, row.lifetime, row.meta) for row in box.stats()}
        after = crash(box, snaps)
    with box_on(after) as box:
        assert {row.key: (row.version, row.nbytes, row.lifetime, row.meta) for row in box.stats()} == before
        assert box.counter("claims").add(1) == 41
        np.testing.assert_array_equal(box.attach("of/owner").read(), values)
        changed = values.copy()
        changed[7:12] = values[:5]
        center = box.attach("of/stay", meta=b"\0\xff")
        np.testing.assert_array_equal(center.read(), changed)
        assert center.write(values) == 2


def test_a_daemon_that_is_asked_to_end_keeps_everything(snaps: Path, folder: Path) -> None:
    with ServeProcess(folder / "box.sock", "--snapshot-dir", str(snaps)) as daemon:
        with smb.connect(daemon.address) as box:
            box.create("kept", 10, lifetime="stay").write(np.arange(10, dtype=np.float32))
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 0
    with box_on(snaps) as box:
        np.testing.assert_array_equal(box.attach("kept").read(), np.arange(10))


def test_what_is_restored_has_one_lease_of_grace_and_then_needs_clients(snaps: Path) -> None:
    with box_on(snaps) as box:
        held = [box.create(f"of/{lifetime}", 10, lifetime=lifetime) for lifetime in records.LIFETIMES]
        assert len(held) == 3
        box.counter("claims").add(1)
        after = crash(box, snaps)
    with box_on(after, lease=0.6) as box:
        assert len(box.list()) == 3
        again = box.attach("of/attached")
        assert wait_for(lambda: box.list() == ["of/attached", "of/stay"], 5)
        again.detach()
        assert box.list() == ["of/stay"]
        assert box.counter("claims").value == 0


def test_a_snapshot_is_loaded_into_a_running_box_wholly_or_not_at_all(snaps: Path) -> None:
    two_snapshots(snaps)
    with smb.serve(snaps.parent / "box.sock") as daemon, smb.connect(daemon.addresses[0]) as box:
        box.create("mine", 10)
        assert box.restore(snaps) == 1
        assert box.attach("job/center").read().max() == 2
        with pytest.raises(smb.KeyExists, match="job/center"):
            box.restore(snaps)
        assert box.list() == ["job/center", "mine"]
        with pytest.raises(smb.UnknownKey, match="no snapshot"):
            box.restore(snaps.parent / "snaps" / "..")


# Consistency ---------------------------------------------------------------------------------------------


def test_every_update_that_a_version_counts_is_in_the_snapshot_and_no_chunk_is_half(snaps: Path) -> None:
    """A writer fills the segment with 1, 2, 3, ..: the value is the version that it makes."""
    stop = threading.Event()
    with box_on(snaps) as box:
        center = box.create("center", COUNT)

        def write() -> None:
            value = np.zeros(COUNT, np.float32)
            while not stop.is_set():
                value += 1
                center.write(value)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            paths = []
            for _ in range(10):
                path = Path(box.snapshot())
                paths.append(path.rename(snaps.parent / path.name))
        finally:
            stop.set()
            writer.join()
    for path in paths:
        snapshot = Snapshot.open(path)
        snapshot.verify()
        (segment,) = snapshot.description.segments
        mapping = snapshot.load("center")
        values = np.empty(COUNT, np.float32)
        mapping.read(values)
        mapping.close()
        for first in range(0, COUNT, CHUNK):
            assert len(np.unique(values[first : first + CHUNK])) == 1
        assert values.min() >= segment.version


def test_a_stuck_client_holds_a_snapshot_up_for_its_lease_only(snaps: Path) -> None:
    hold = "s = box.attach('center'); s._attachment.hold_chunk(1); print('holds', flush=True); time.sleep(60)"
    with box_on(snaps, lease=1.0) as box:
        box.create("center", COUNT, lifetime="stay")
        with client(box.address, hold) as victim:
            assert victim.line() == "holds"
            victim.stop()
            box.snapshot()
            assert victim.ended() == -signal.SIGKILL


def test_a_periodic_snapshot_is_written_only_when_something_has_changed(snaps: Path) -> None:
    with box_on(snaps, every=0.05) as box:
        center = box.create("center", COUNT)
        assert wait_for(lambda: newest(snaps, print) is not None and _version(snaps) == 0)
        before = files(snaps)
        threading.Event().wait(0.4)
        assert files(snaps) == before
        center.write(np.ones(1, np.float32), offset=COUNT - 1)
        assert wait_for(lambda: _version(snaps) == 1)


def _version(snaps: Path) -> int:
    found = newest(snaps, print)
    return found.description.segments[0].version if found and found.description.segments else -1


# Damage --------------------------------------------------------------------------------------------------


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_chunk_is_named_and_the_older_snapshot_is_used(
    snaps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two_snapshots(snaps)
    damage(second, place(second, 2) + 1000)
    with box_on(snaps) as box:
        assert box.attach("job/center").read().max() == 1
    assert f"{second} is damaged: chunk 2 of segment 'job/center'" in caplog.text
    assert f"using the older snapshot {first}" in caplog.text


@pytest.mark.parametrize("where", ["head", "description", "chunk", "checksum", "tail"])
def test_a_snapshot_that_is_cut_off_anywhere_is_refused(snaps: Path, where: str) -> None:
    _, second = two_snapshots(snaps)
    ends = {
        "head": 10,
        "description": place(second, 0) - 1,
        "chunk": place(second, 1) + 5,
        "checksum": place(second, 2) - 1,
        "tail": second.stat().st_size - 1,
    }
    os.truncate(second, ends[where])
    with pytest.raises(SnapshotError, match=str(second)):
        Snapshot.open(second).verify()


def test_chunks_that_changed_places_are_noticed(snaps: Path) -> None:
    _, second = two_snapshots(snaps)
    data = bytearray(second.read_bytes())
    a, b, size = place(second, 0), place(second, 1), CHUNK_BYTES + 4
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    second.write_bytes(data)
    with pytest.raises(SnapshotError, match="chunk 0 of segment 'job/center'"):
        Snapshot.open(second).verify()


def test_a_daemon_does_not_begin_empty_when_every_snapshot_is_damaged(snaps: Path) -> None:
    for path in two_snapshots(snaps):
        damage(path, place(path, 0))
    with pytest.raises(SnapshotError, match="2 are damaged"), box_on(snaps):
        pass


def test_a_description_that_makes_no_sense_is_refused(snaps: Path) -> None:
    import struct
    import zlib

    _, second = two_snapshots(snaps)
    text = (
        b'{"format": 1, "taken": 0, "numbers": 0, "segments": [{"key": "x"}], "counters": [], "sessions": []}'
    )
    second.write_bytes(struct.pack("<8sQII", b"SMBSNAP1", len(text), zlib.crc32(text), 0) + text)
    with pytest.raises(SnapshotError, match="makes no sense"):
        Snapshot.open(second)


# Failing to write ----------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_older_snapshot_and_the_daemon_goes_on(folder: Path, snaps: Path) -> None:
    with ServeProcess(folder / "box.sock", "--snapshot-dir", str(snaps)) as daemon:
        box = smb.connect(daemon.address)
        with box:
            center = box.create("center", COUNT, lifetime="stay")
            old = Path(box.snapshot())
            center.write(np.ones(COUNT, np.float32))
            hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (CHUNK_BYTES + 5000, hard))
            with pytest.raises(smb.SmbError, match=f"cannot write snapshot {snaps}.*File too large"):
                box.snapshot()
            assert files(snaps) == [old]
            center.write(np.full(COUNT, 2, np.float32))
            resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
            new = Path(box.snapshot())
            assert files(snaps) == [old, new]
            assert _version(snaps) == 2


CRASH = """
import os, smb
daemon = smb.serve(sys.argv[1], snapshot_dir=sys.argv[2])
with smb.connect(daemon.addresses[0]) as own:
    segment = own.create("center", 1000, lifetime="stay")
    own.snapshot()
    segment.write(np.ones(1000, np.float32))
    os.rename = lambda *names: os.kill(os.getpid(), 9)
    own.snapshot()
"""


def test_a_crash_between_write_and_rename_leaves_the_older_snapshot(folder: Path, snaps: Path) -> None:
    code = "import sys, numpy as np\n" + CRASH
    with Program("-c", code, str(folder / "box.sock"), str(snaps)) as program:
        assert program.ended() == -signal.SIGKILL
    assert [path.suffix for path in files(snaps)] == [".snapshot", ".partial"]
    with box_on(snaps) as box:
        assert box.stat("center").version == 0
        box.snapshot()
        assert {path.suffix for path in files(snaps)} == {".snapshot"}


def test_the_two_newest_snapshots_are_kept(snaps: Path) -> None:
    with box_on(snaps) as box:
        box.create("center", 10)
        paths = [Path(box.snapshot()) for _ in range(4)]
        assert files(snaps) == paths[-2:]


# Who may -------------------------------------------------------------------------------------------------


def test_two_daemons_do_not_write_into_one_folder(folder: Path, snaps: Path) -> None:
    with (
        ServeProcess(folder / "box.sock", "--snapshot-dir", str(snaps)),
        pytest.raises(RequestError, match="another daemon keeps its snapshots"),
    ):
        smb.serve(folder / "other.sock", snapshot_dir=snaps)


def test_a_client_from_elsewhere_may_name_no_folder_of_the_daemons_host(folder: Path, snaps: Path) -> None:
    with (
        smb.serve(folder / "box.sock", tcp="127.0.0.1:0", token=b"secret" * 6) as daemon,
        smb.connect(daemon.addresses[1], token=b"secret" * 6) as box,
    ):
        for attempt in (box.snapshot, box.restore):
            with pytest.raises(NotPermitted, match="on the daemon's host"):
                attempt(snaps)
        assert not snaps.exists()


def test_a_snapshot_is_for_its_user_alone_and_holds_no_secret(snaps: Path) -> None:
    with box_on(snaps) as box:
        box.create("center", 10)
        path = Path(box.snapshot())
        assert path.stat().st_mode & 0o777 == 0o600
        assert snaps.stat().st_mode & 0o777 == 0o700
        secret = box._transport._standing.secret  # type: ignore[attr-defined]
        assert str(secret).encode() not in path.read_bytes()
