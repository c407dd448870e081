"""Huge pages: asked for where the option says so, and nowhere else; a kernel without them is named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import smb
from smb import server
from smb.memory import huge_page_mode, need_huge_pages
from smb.options import ServeOptions
from smb.segment import Mapping

HUGE = 2 << 20  # bytes of a huge page


def advised() -> int:
    """Bytes of payloads mapped here for which huge pages were asked for."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = [
        entry for entry in entries if "smb-payload" in entry and re.search(r"^VmFlags:.* hg", entry, re.M)
    ]
    return sum(int(entry.split("Size:")[1].split()[0]) * 1024 for entry in ours)


@pytest.fixture
def mode(tmp_path: Path) -> Callable[[str], Path]:
    """A machine whose setting reads so."""

    def root(text: str) -> Path:
        file = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return tmp_path

    return root


@pytest.mark.parametrize("nbytes", [4096, HUGE - 4, HUGE, HUGE + 4, 3 * HUGE, 4 * HUGE - 4096])
def test_only_what_fills_huge_pages_asks_for_them(nbytes: int) -> None:
    """Else the last one would take memory beyond the segment, which the limits do not count."""
    before = advised()
    mapping = Mapping.create(nbytes // 4, "float32", huge_pages=True, prefault_threads=2)
    try:
        assert advised() - before == nbytes // HUGE * HUGE
        values = np.arange(nbytes // 4, dtype=np.float32)
        mapping.write(values)
        out = np.empty_like(values)
        mapping.read(out)
        np.testing.assert_array_equal(out, values)
    finally:
        mapping.close()


def test_a_daemons_segments_take_them_new_and_restored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "need_huge_pages", lambda: None)
    for huge in (True, False):
        options = ServeOptions(snapshot_dir=folder / f"snaps-{huge}", huge_pages=huge)
        before = advised()
        with (
            smb.serve(folder / "box.sock", options=options) as daemon,
            smb.connect(daemon.addresses[0]) as box,
        ):
            box.create("w", HUGE // 2, lifetime="stay")
            assert advised() - before == (2 * HUGE if huge else 0)
        with (
            smb.serve(folder / "box.sock", options=options) as daemon,
            smb.connect(daemon.addresses[0]) as box,
        ):
            assert box.attach("w").count == HUGE // 2
            assert advised() - before == (2 * HUGE if huge else 0)


@pytest.mark.parametrize("setting", ["never", "deny"])
def test_a_kernel_that_gives_none_is_named_with_the_cure(mode: Callable[[str], Path], setting: str) -> None:
    text = "always within_size advise never deny force\n".replace(setting, f"[{setting}]")
    with pytest.raises(
        smb.NotSupported, match=rf"setting is {setting}; as root: echo advise > /sys/.*shmem_enabled"
    ):
        need_huge_pages(mode(text))


def test_a_kernel_without_the_setting_gives_none(tmp_path: Path) -> None:
    assert huge_page_mode(tmp_path) == "never"


@pytest.mark.parametrize("setting", ["always", "within_size", "advise", "force"])
def test_any_other_setting_will_do(mode: Callable[[str], Path], setting: str) -> None:
    need_huge_pages(mode("always within_size advise never deny force\n".replace(setting, f"[{setting}]")))


def test_a_daemon_that_can_get_none_does_not_start_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise smb.NotSupported("none here")

    monkeypatch.setattr(server, "need_huge_pages", none)
    with pytest.raises(smb.NotSupported, match="none here"):
        smb.serve(folder / "box.sock", options=ServeOptions(huge_pages=True))
    assert not os.path.exists(folder / "box.sock")
    with smb.serve(folder / "box.sock") as daemon, smb.connect(daemon.addresses[0]) as box:
        box.create("w", 10)
