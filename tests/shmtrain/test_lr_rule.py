"""The learning rate of N workers is a pure function of N and the job's iteration."""

from __future__ import annotations

import pytest

from shmtrain.lr_rule import LrRule, parse_lr_rule


def test_one_worker_keeps_the_rate_to_the_bit() -> None:
    assert {LrRule().factor(1, i) for i in (0, 1, 49, 50, 10_000)} == {1.0}


def test_the_rate_grows_in_a_line_and_then_stays() -> None:
    rule = LrRule(power=1.0, warmup=3)
    own_steps = [rule.factor(4, 4 * step) for step in range(6)]
    assert own_steps == pytest.approx([1.75, 2.5, 3.25, 4.0, 4.0, 4.0])


def test_the_warm_up_counts_a_workers_own_steps() -> None:
    rule = LrRule(power=1.0, warmup=50)
    assert rule.factor(16, 16 * 49 + 15) < 16.0
    assert rule.factor(16, 16 * 50) == 16.0


def test_the_default_is_eight_times_for_sixteen_workers() -> None:
    assert LrRule().factor(16, 10_000) == pytest.approx(8.0)
    assert "x 16^0.75 = x 8 after 50" in LrRule().describe(16)


@pytest.mark.parametrize(
    ("text", "want"),
    [("none", LrRule(0.0, 0)), ("linear", LrRule(1.0, 50)), ("power:0.5", LrRule(0.5, 50))],
)
def test_the_rules_have_names(text: str, want: LrRule) -> None:
    assert parse_lr_rule(text) == want


@pytest.mark.parametrize(
    "text", ["", "sqrt", "power", "power:", "power:x", "power:-1", "power:2", "power:nan"]
)
def test_another_name_is_refused_with_the_list(text: str) -> None:
    with pytest.raises(ValueError, match="none of none, linear, power:P"):
        parse_lr_rule(text)


def test_none_has_no_warm_up() -> None:
    assert parse_lr_rule("none").factor(16, 0) == 1.0
