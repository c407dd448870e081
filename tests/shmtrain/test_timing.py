"""``shmtrain time`` prints the original's table, and says what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmtrain import timing

NET = """
layer { name: "d" type: "DummyData" top: "x" top: "t" dummy_data_param {
  shape { dim: 2 dim: 3 } shape { dim: 2 dim: 1 } data_filler { value: 1 } data_filler { value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {
  num_output: 1 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_the_table_has_the_originals_lines(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "n.prototxt").write_text(NET)
    assert timing.main([str(tmp_path / "n.prototxt"), "--iterations", "3", "--phase", phase]) == 0
    text = capsys.readouterr().out
    line = re.compile(r"^ *(\w+)\t(forward|backward): ([\d.e+-]+) ms\.$", re.MULTILINE)
    rows = [(name, way) for name, way, _ in line.findall(text)]
    assert rows == [(name, way) for name in ("d", "ip", "loss") for way in ("forward", "backward")]
    assert all(float(ms) > 0 for _, way, ms in line.findall(text) if way == "forward")
    for name in ("Average Forward pass", "Average Backward pass", "Average Forward-Backward"):
        assert re.search(rf"^{name}: [\d.e+-]+ ms\.$", text, re.MULTILINE)


def test_compile_says_what_it_joins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "n.prototxt").write_text(NET)
    assert timing.main([str(tmp_path / "n.prototxt"), "--iterations", "1", "--compile"]) == 0
    assert capsys.readouterr().out.startswith("compile: nothing here that torch's compiler could join")


def test_a_net_that_cannot_be_built_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timing.main([str(tmp_path / "none.prototxt")]) == 1
    assert "none.prototxt" in capsys.readouterr().err


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        timing.main([str(tmp_path / "n.prototxt"), "--iterations", "0"])
    assert end.value.code == 2
