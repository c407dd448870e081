"""How a segment over several daemons is made, found, refused and freed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from smb import protocol, stripes
from smb.client import Box
from smb.segment import CHUNK_BYTES
from smb.server import Daemon
from tests.smb.conftest import TOKEN
from tests.smb.processes import wait_for

F32 = np.float32
PER_CHUNK = CHUNK_BYTES // 4
N = 7 * PER_CHUNK + 100  # of three stripes two have more chunks than the third, one a short one


def ramp(count: int = N) -> np.ndarray:
    return np.arange(count, dtype=F32)


# Creation ------------------------------------------------------------------------------------------------


def test_whoever_finds_a_segment_finds_all_of_it(
    daemons: list[Daemon], open_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one client creates, slowly, another one gets UnknownKey or the whole segment."""
    seen: list[Any] = []
    missing: list[str] = []
    stop = threading.Event()
    watcher = open_box()

    def look(key: str) -> None:
        while not stop.is_set():
            try:
                seen.append(watcher.attach(key).read())
                return
            except smb.UnknownKey as error:
                missing.append(str(error))

    creator = open_box()
    for transport in creator._transport._transports:  # type: ignore[attr-defined]
        call = transport.call

        def slowly(request: object, timeout: float, call: Any = call) -> Any:
            reply = call(request, timeout)
            if isinstance(request, protocol.Publish):
                time.sleep(0.05)
            return reply

        monkeypatch.setattr(transport, "call", slowly)
    for key in ("x", "y"):
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look, key)
            try:
                creator.create(key, N, initial=ramp())
                looking.result(10)
            finally:
                stop.set()
        stop.clear()
    assert len(seen) == 2
    assert not [words for words in missing if "stripe" in words]
    for values in seen:
        np.testing.assert_array_equal(values, ramp())


def test_one_of_many_creators_is_first_and_all_see_its_values(
    daemons: list[Daemon], open_box: Callable[..., Box], scheme: str
) -> None:
    boxes = [open_box(scheme) for _ in range(6)]

    def create(rank: int, turn: int) -> tuple[bool, float]:
        segment = boxes[rank].create(f"x{turn}", N, initial=np.full(N, rank, F32), or_attach=True)
        values = segment.read()
        assert (values == values[0]).all()
        return segment.created, float(values[0])

    for turn in range(4):
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(create, range(6), [turn] * 6))
        assert sum(created for created, _ in results) == 1
        assert len({value for _, value in results}) == 1


def test_a_segment_that_goes_and_comes_again_is_never_half_there(open_box: Callable[..., Box]) -> None:
    """The last client's leaving and the next one's creation meet at each daemon at another time."""
    boxes = [open_box() for _ in range(4)]

    def come_and_go(box: Box) -> None:
        for _ in range(15):
            with box.create("x", N, initial=np.ones(N, F32), or_attach=True) as segment:
                assert segment.read().min() == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, boxes))
    assert boxes[0].list() == []


def test_what_one_daemon_cannot_hold_is_left_at_none(folder: Path, daemons: list[Daemon]) -> None:
    with smb.serve(unix=folder / "small.sock", memory_limit=CHUNK_BYTES) as small:
        where = [daemons[0].addresses[0], daemons[1].addresses[0], small.addresses[0]]
        with smb.connect(",".join(where)) as box:
            with pytest.raises(smb.OutOfMemory, match=r"small.sock"):
                box.create("x", N)
            assert [len(d.store._by_number) for d in (*daemons, small)] == [0, 0, 0, 0]
            box.create("x", 3 * PER_CHUNK)
            assert box.list() == ["x"]


def test_an_equal_segment_is_joined_and_another_one_refused(open_box: Callable[..., Box]) -> None:
    one, other = open_box(), open_box()
    one.create("x", N, meta=b"lenet")
    assert not other.create("x", N, meta=b"lenet", or_attach=True).created
    for change, words in [
        ({"count": N - 1}, f"exists with count {N}, not {N - 1}"),
        ({"dtype": "int32"}, "exists with dtype float32"),
        ({"lifetime": "stay"}, "exists with lifetime attached"),
        ({"meta": b"cifar"}, "exists with other meta: b'lenet'"),
    ]:
        wanted = {"count": N, "dtype": "float32", "lifetime": "attached", "meta": b"lenet", **change}
        with pytest.raises(smb.KeyExists, match=rf"'x' {words}"):
            other.create("x", or_attach=True, **wanted)  # type: ignore[arg-type]
    with pytest.raises(smb.KeyExists, match="exists already"):
        other.create("x", N)


# Lists of daemons ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ((0, 1), "'x' lies over 3 daemons .*this box is 2"),
        ((1, 0, 2), "'x' lies over 3 daemons .*holds stripe 1; this box is 3"),
        ((0,), "'x'.*stripe 0 of 3: connect to unix:.*,unix:.*,unix:"),
        ((2,), "'x'.*stripe 2 of 3"),
        ((0, 2, 1), "'x': the daemon at unix:.*.sock does not hold its stripe"),
    ],
)
def test_another_list_of_daemons_is_refused_by_name(
    daemons: list[Daemon], open_box: Callable[..., Box], which: tuple[int, ...], words: str
) -> None:
    open_box().create("x", N, initial=ramp())
    other = open_box("unix:", which)
    for ask in (lambda: other.attach("x"), lambda: other.create("x", N, or_attach=True)):
        with pytest.raises(smb.KeyExists, match=words):
            ask()
    assert [len(e.attached) for d in daemons for e in d.store._by_number.values()] == [1, 1, 1]


def test_a_plain_segment_of_the_key_is_named(open_box: Callable[..., Box]) -> None:
    plain, box = open_box("unix:", (0,)), open_box()
    plain.create("x", 10)
    for ask in (lambda: box.attach("x"), lambda: box.create("x", 10, or_attach=True), lambda: box.free("x")):
        with pytest.raises(smb.KeyExists, match=r"'x' lies at unix:.*0.sock alone"):
            ask()
    open_box("unix:", (1,)).create("y", 10)
    with pytest.raises(smb.KeyExists, match=r"'y': the daemon at unix:.*1.sock holds another one"):
        box.create("y", N)
    assert box.list() == ["x"]


def test_a_daemon_that_stands_in_another_box_too_is_not_mixed_up(open_box: Callable[..., Box]) -> None:
    """Both boxes have a stripe 1 of 2 of this key at one daemon, or would."""
    open_box("unix:", (0, 1)).create("x", N, lifetime="stay")
    with pytest.raises(smb.KeyExists, match=r"1.sock holds a stripe that a creator left"):
        open_box("unix:", (2, 1), 0.2).create("x", N)
    assert open_box("unix:", (2, 1)).list() == []
    np.testing.assert_array_equal(open_box("unix:", (0, 1)).attach("x").read(), 0)


def test_a_daemon_by_two_names_is_noticed(daemons: list[Daemon], folder: Path) -> None:
    path = daemons[0].addresses[0].removeprefix("unix:")
    (folder / "link.sock").symlink_to(path)
    for alias in (f"unix:{folder}/link.sock", daemons[0].addresses[1]):
        with pytest.raises(smb.RequestError, match=rf"{alias} is the same daemon as unix:.*0.sock"):
            smb.connect(f"unix:{path},{alias}", token=TOKEN)
    with pytest.raises(smb.RequestError, match="named twice"):
        smb.connect(f"unix:{path},unix:{path}")
    assert wait_for(lambda: daemons[0].store.sessions() == [])


def test_an_address_with_a_comma_in_its_path_is_one_address() -> None:
    assert stripes.daemons("unix:/tmp/a,b.sock") == ("unix:/tmp/a,b.sock",)
    assert stripes.daemons("unix:/tmp/a,tcp://h:1,h:2") == ("unix:/tmp/a", "tcp://h:1", "h:2")


def test_what_a_creator_left_is_named_and_freed_by_its_key(
    daemons: list[Daemon], open_box: Callable[..., Box]
) -> None:
    """As after a death between the stripes' publications, of which the first one's is the last."""
    open_box().create("x", N, lifetime="stay")
    daemons[0].store.free("x")
    box = open_box(timeout=0.2)
    assert box.list() == []
    with pytest.raises(smb.UnknownKey):
        box.attach("x")
    with pytest.raises(
        smb.KeyExists, match=r"'x': the daemon at unix:.*.sock holds a stripe that a creator left"
    ):
        box.create("x", N)
    box.free("x")
    assert box.create("x", N).created
    daemons[2].store.free("x")
    with pytest.raises(smb.UnknownKey, match=r"'x': its stripe 2 is not at unix:.*2.sock"):
        box.stat("x")
    with pytest.raises(smb.UnknownKey, match=r"'x': its stripe 2 is not at unix:.*2.sock"):
        open_box().attach("x")
    box.free("x")
    with pytest.raises(smb.UnknownKey):
        box.free("x")


def test_a_snapshot_of_one_daemon_is_not_taken_for_the_boxs(open_box: Callable[..., Box]) -> None:
    with pytest.raises(smb.NotSupported, match="ask one of them"):
        open_box()._call(protocol.SnapshotNow("/tmp"))
