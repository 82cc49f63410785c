"""Group advantages against an independent formula (the statistics module) and their invariants."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.maths import ESTIMATORS
from leyden.maths.advantages import dr_grpo, grpo

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=32)


@given(rewards)
def test_dr_grpo_is_the_reward_less_the_mean(values: list[float]) -> None:
    assert dr_grpo(values) == pytest.approx([value - statistics.fmean(values) for value in values], abs=1e-9)


@given(rewards)
def test_grpo_is_divided_by_the_sample_deviation(values: list[float]) -> None:
    expected = [(value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-4) for value in values]
    assert grpo(values) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards, st.floats(-10, 10))
def test_a_constant_added_to_every_reward_changes_nothing(values: list[float], shift: float) -> None:
    shifted = dr_grpo([value + shift for value in values])
    assert shifted == pytest.approx(dr_grpo(values), abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_rollout_is_no_group(name: str) -> None:
    with pytest.raises(ConfigError, match="at least 2 rollouts"):
        ESTIMATORS[name]([1.0])
