"""Signals in the middle of operations over a network, and a box closed under them: what they leave."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import smb
from smb.client import Box
from tests.smb.certificates import Authority
from tests.smb.conftest import TOKEN
from tests.smb.processes import ServeProcess
from tests.smb.proxy import DOWN, Proxy

F32 = np.float32
ONES = np.ones(1000, F32)
PATIENCE = 20.0  # seconds

pytestmark = pytest.mark.timeout(60, method="thread")  # the alarm is ours


class Alarm(Exception):
    """What a program's own handler may raise."""


@contextmanager
def alarm_in(seconds: float, error: type[BaseException] | Callable[[], None]) -> Iterator[None]:
    """SIGALRM after so long; its handler raises the error, or makes the call. Both must end soon."""
    came = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        came.append(time.monotonic())
        if len(came) > 1:
            raise AssertionError(f"nothing has ended for {PATIENCE} s")
        if isinstance(error, type):
            raise error
        error()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def served(folder: Path) -> Iterator[smb.Daemon]:
    """Its leases outlast what is stopped here."""
    with smb.serve(unix=folder / "box.sock", tcp="127.0.0.1:0", token=TOKEN, lease=30.0) as daemon:
        yield daemon


# Interrupts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
def test_an_operation_whose_answer_never_comes_is_left_and_the_box_stays_usable(
    proxy: Proxy, remote: Box, error: type[BaseException]
) -> None:
    segment = remote.create("a", 1000)
    segment.accumulate(ONES)
    proxy.faults[DOWN].stalled = True
    start = time.monotonic()
    with alarm_in(0.2, error), pytest.raises(error):
        segment.accumulate(ONES)
    assert time.monotonic() - start < 12.0
    proxy.heal()
    segment.accumulate(ONES)
    assert set(segment.read()) <= {2.0, 3.0}  # the interrupted one may have been done


def test_one_interrupted_while_it_connects_again_leaves_the_box_usable(proxy: Proxy, remote: Box) -> None:
    segment = remote.create("a", 1000)
    segment.accumulate(ONES)
    proxy.refuse = True
    proxy.cut()
    with alarm_in(0.3, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        segment.accumulate(ONES)
    proxy.refuse = False
    for _ in range(3):
        segment.accumulate(ONES)
    np.testing.assert_array_equal(segment.read(), 4.0)


def test_both_ends_of_a_narrow_wire_begin_anew_after_an_interrupt(proxy: Proxy, remote: Box) -> None:
    """The daemon's move was made, its reply was lost: what it believes of the weights is another thing."""
    segment, x = remote.create("a", 1000), np.zeros(1000, F32)
    for _ in range(3):
        segment.exchange(x, 0.5, wire="bfloat16")
    x += 8.0
    proxy.faults[DOWN].lost = True
    cut = threading.Timer(0.6, proxy.cut)
    cut.start()
    with alarm_in(0.3, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        segment.exchange(x, 0.5, wire="bfloat16")
    cut.join()
    proxy.heal()
    for _ in range(40):
        segment.exchange(x, 0.5, wire="bfloat16")
    np.testing.assert_array_equal(segment.read(), x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
def test_an_interrupt_by_tls_moves_pieces_whole_and_leaves_the_box_usable(
    folder: Path, error: type[BaseException]
) -> None:
    """Where a call was interrupted nobody knows whether its bytes have gone: they must not go twice."""
    authority = Authority.make(folder)
    theirs, ours = authority.sign("daemon"), authority.sign("client")
    words = "--tls-cert", theirs.certificate, "--tls-key", theirs.key, "--tls-ca", theirs.ca
    rng, count, interrupted = np.random.default_rng(3), 1_000_000, 0
    pattern = (np.arange(count) % 4099 + 1).astype(F32)
    with (
        ServeProcess(folder / "s", "--tcp", "127.0.0.1:0", *map(str, words)) as daemon,
        smb.connect(daemon.addresses[1], tls=ours, timeout=20.0) as box,
    ):
        for trial in range(24):
            segment = box.create(f"a{trial}", count)
            segment.accumulate(pattern)
            try:
                with alarm_in(float(rng.uniform(0.0005, 0.01)), error):
                    segment.accumulate(pattern)
            except error:
                interrupted += 1
            got = segment.read()
            assert ((got == pattern) | (got == 2 * pattern)).all()
            segment.detach()
    assert interrupted >= 5


def test_a_signal_that_uses_the_box_is_refused_and_the_operation_goes_on(proxy: Proxy, remote: Box) -> None:
    segment, said = remote.create("a", 1000, initial=ONES), []

    def use_the_box() -> None:
        for use in (lambda: segment.version, segment.read):
            with pytest.raises(
                smb.RequestError, match="this thread is in the middle of another operation"
            ) as caught:
                use()
            said.append(str(caught.value))

    out = np.zeros(1000, F32)
    proxy.faults[DOWN].delay = 0.5
    with alarm_in(0.2, use_the_box):
        segment.read(out)
    assert len(said) == 2
    np.testing.assert_array_equal(out, 1.0)


def test_a_signal_may_close_the_box(served: smb.Daemon, proxy: Proxy, remote: Box, near: Box) -> None:
    segment = remote.create("a", 1000, initial=ONES)
    proxy.faults[DOWN].delay = 0.5
    with alarm_in(0.2, remote.close), contextlib.suppress(smb.Closed):  # its answer may have come
        segment.read(np.zeros(1000, F32))
    with pytest.raises(smb.Closed):
        segment.read()
    assert "remote" not in {session["name"] for session in near.sessions()}


# The end -------------------------------------------------------------------------------------------------


def called_until_closed(call: Callable[[], object], ends: list[BaseException]) -> None:
    try:
        while True:
            call()
    except BaseException as error:
        ends.append(error)


def test_a_box_closed_in_the_middle_of_its_threads_calls_leaves_no_session(folder: Path) -> None:
    with (
        ServeProcess(folder / "s", "--tcp", "127.0.0.1:0", "--lease", "30") as daemon,
        smb.connect(daemon.address) as near,
    ):
        for trial in range(20):
            box = smb.connect(daemon.addresses[1], timeout=10.0, name="closing")
            count = (1000, 300_000)[trial % 2]
            segment, ends = box.create(f"a{trial}", count), list[BaseException]()
            calls = (
                partial(segment.exchange, np.zeros(count, F32), 0.5),
                partial(segment.read, np.zeros(count, F32)),
                partial(getattr, segment, "version"),
                partial(segment.wait, 1 << 40, 30.0),
            )
            threads = [threading.Thread(target=called_until_closed, args=(call, ends)) for call in calls]
            for thread in threads:
                thread.start()
            time.sleep(0.01 + 0.001 * trial)
            box.close()
            for thread in threads:
                thread.join(20)
            assert [type(error) for error in ends] == 4 * [smb.Closed]
            assert "closing" not in {session["name"] for session in near.sessions()}


# Limits in time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.05, 0.6])
def test_a_request_waits_as_long_as_it_may(proxy: Proxy, timeout: float) -> None:
    with smb.connect(proxy.address, token=TOKEN, timeout=timeout) as box:
        proxy.faults[DOWN].stalled = True
        start = time.monotonic()
        with pytest.raises(smb.TransportError, match="no answer to"):
            box.list()
        assert timeout <= time.monotonic() - start < timeout + 0.35
    proxy.heal()


def test_a_nan_for_a_narrow_wire_is_refused_at_once(remote: Box) -> None:
    segment, x = remote.create("a", 1000), np.full(1000, np.nan, F32)
    took = []
    for _ in range(5):
        start = time.monotonic()
        with pytest.raises(smb.NonFinite):
            segment.exchange(x, 0.5, wire="bfloat16")
        took.append(time.monotonic() - start)
    assert min(took) < 0.1  # a wait for what cannot come takes 0.2
