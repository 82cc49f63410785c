"""Estimators that give each call its own advantage, against the definitions written as sums."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.objectives.advantages import (
    GAEAdvantages,
    ProcessAdvantages,
    RolloutRewards,
    VinePPOAdvantages,
    gae,
    process,
    vineppo,
)
from leyden.objectives.advantages.statistics import centre_and_variance, whitened

NUMBER = st.floats(-10, 10)
UNIT = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@st.composite
def rollouts(draw: st.DrawFn, *, calls: int | None = None) -> list[RolloutRewards]:
    """One group of rollouts. calls: how many each made; None: 1 to 4."""
    made: list[RolloutRewards] = []
    for _ in range(draw(st.integers(2, 4))):
        n = calls or draw(st.integers(1, 4))
        rewards, values = (draw(st.lists(NUMBER, min_size=n, max_size=n)) for _ in range(2))
        made.append(RolloutRewards(0, math.fsum(rewards), rewards, values))
    return made


def to_go(rewards: Sequence[float], call: int, gamma: float) -> float:
    return sum(gamma ** (k - call) * rewards[k] for k in range(call, len(rewards)))


@given(rollouts(), UNIT, UNIT)
def test_gae_is_the_weighted_sum_of_temporal_differences(batch: list[RolloutRewards], gamma: float, lam: float) -> None:
    estimate = gae(batch, GAEAdvantages(gamma=gamma, lam=lam, whiten=False))
    assert estimate.returns is not None
    for rollout, row, returns in zip(batch, estimate.advantages, estimate.returns, strict=True):
        values = [*(rollout.values or ()), 0.0]
        deltas = [r + gamma * values[c + 1] - values[c] for c, r in enumerate(rollout.call_rewards)]
        expected = [
            sum((gamma * lam) ** (k - c) * deltas[k] for k in range(c, len(deltas))) for c in range(len(deltas))
        ]
        assert row == pytest.approx(expected, abs=1e-9)
        assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=False)], abs=1e-9)


@given(rollouts(), UNIT)
def test_with_lambda_1_gae_is_the_return_less_the_value(batch: list[RolloutRewards], gamma: float) -> None:
    estimate = gae(batch, GAEAdvantages(gamma=gamma, lam=1.0, whiten=False))
    for rollout, returns in zip(batch, estimate.returns or (), strict=True):
        expected = [to_go(rollout.call_rewards, call, gamma) for call in range(len(returns))]
        assert returns == pytest.approx(expected, abs=1e-9)


@given(rollouts())
def test_whitening_changes_the_advantages_and_not_the_returns(batch: list[RolloutRewards]) -> None:
    plain, white = (gae(batch, GAEAdvantages(whiten=whiten)) for whiten in (False, True))
    assert white.returns == plain.returns
    assert white.advantages == whitened(plain.advantages, epsilon=1e-2, ddof=1.0)


def test_errors_of_the_critic_stay_small_where_all_rewards_are_equal_and_true_advantages_do_not() -> None:
    errors = [0.003 * (-1) ** place for place in range(64)]

    def largest(rewards: list[float], values: list[float]) -> float:
        batch = [RolloutRewards(0, reward, [reward], [value]) for reward, value in zip(rewards, values, strict=True)]
        return max(abs(advantage) for (advantage,) in gae(batch, GAEAdvantages()).advantages)

    assert largest([1.0] * 64, [1.0 + error for error in errors]) < 0.05
    assert largest([0.0, 1.0] * 32, [0.5 + error for error in errors]) == pytest.approx(1.0, abs=0.05)


@given(st.lists(st.lists(NUMBER, min_size=3, max_size=3), min_size=2, max_size=5))
def test_with_equally_many_calls_the_moments_are_those_of_all_numbers(rows: list[list[float]]) -> None:
    numbers = [value for row in rows for value in row]
    middle, variance = centre_and_variance(rows, ddof=0.0)
    assert (middle, variance) == pytest.approx((statistics.fmean(numbers), statistics.pvariance(numbers)), abs=1e-9)


@given(st.lists(st.lists(NUMBER, min_size=1, max_size=4), min_size=2, max_size=5), st.integers(2, 4))
def test_a_rollout_counts_once_in_mean_and_variance_however_many_calls_it_made(
    rows: list[list[float]], times: int
) -> None:
    longer = [rows[0] * times, *rows[1:]]
    assert centre_and_variance(longer, ddof=1.0) == pytest.approx(centre_and_variance(rows, ddof=1.0), abs=1e-9)


@given(rollouts(calls=3), UNIT)
def test_process_supervision_sums_the_standardised_rewards_that_follow(
    batch: list[RolloutRewards], gamma: float
) -> None:
    everything = [reward for rollout in batch for reward in rollout.call_rewards]
    middle, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    got = process(batch, ProcessAdvantages(gamma=gamma, ddof=0.0)).advantages
    for rollout, row in zip(batch, got, strict=True):
        normal = [(reward - middle) / (deviation + 1e-4) for reward in rollout.call_rewards]
        assert row == pytest.approx([to_go(normal, call, gamma) for call in range(3)], rel=1e-6, abs=1e-6)


@given(rollouts(), UNIT, st.booleans())
def test_by_position_a_call_is_compared_with_the_rollouts_that_reached_it(
    batch: list[RolloutRewards], gamma: float, scale: bool
) -> None:
    got = process(batch, ProcessAdvantages(baseline="position", gamma=gamma, scale=scale)).advantages
    for call in range(4):
        column = [to_go(rollout.call_rewards, call, gamma) for rollout in batch if len(rollout.call_rewards) > call]
        expected = [0.0] * len(column)
        if len(column) > 1:
            divisor = statistics.stdev(column) + 1e-4 if scale else 1.0
            expected = [(value - statistics.fmean(column)) / divisor for value in column]
        assert [row[call] for row in got if len(row) > call] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_reward_before_a_call_is_no_credit_of_that_call() -> None:
    batch = [RolloutRewards(0, 1.0, [1.0, 0.0]), RolloutRewards(0, 0.0, [0.0, 0.0])]
    by_position = ProcessAdvantages(baseline="position", scale=False)
    assert process(batch, by_position).advantages == [[0.5, 0.0], [-0.5, 0.0]]


# ---- values by forks ---------------------------------------------------------------------------------------------------


@given(rollouts(), st.data())
def test_vineppo_is_the_difference_of_mean_returns_after_and_before_a_call(
    batch: list[RolloutRewards], data: st.DataObject
) -> None:
    returns = st.lists(NUMBER, min_size=1, max_size=4)
    group = [
        replace(each, forked_returns={place: data.draw(returns) for place in range(1, len(each.call_rewards))})
        for each in batch
    ]
    found = vineppo(group, VinePPOAdvantages(whiten=False)).advantages
    for place, (rollout, row) in enumerate(zip(group, found, strict=True)):
        others = [other.reward for index, other in enumerate(group) if index != place]
        values = [statistics.fmean(others)]
        values += [statistics.fmean(rollout.forked_returns[c]) for c in range(1, len(rollout.call_rewards))]
        values.append(rollout.reward)
        assert row == pytest.approx(
            [after - before for before, after in itertools.pairwise(values)], rel=1e-9, abs=1e-9
        )
        assert math.fsum(row) == pytest.approx(rollout.reward - values[0], abs=1e-6), "credit sums to the shared one"


def test_calls_between_two_values_share_their_difference() -> None:
    forked = {2: [1.0, 3.0], 3: []}
    group = [RolloutRewards(0, 5.0, [0.0] * 4 + [5.0], forked_returns=forked), RolloutRewards(0, 1.0, [1.0])]
    found = vineppo(group, VinePPOAdvantages(whiten=False)).advantages
    assert found == [[1.0, 1.0, 3.0, 3.0, 3.0], [-4.0]], "without forks it is the leave-one-out advantage"
    assert VinePPOAdvantages().fork_places(4) == [1, 2, 3]
    assert VinePPOAdvantages(calls=(1, 3, 9)).fork_places(4) == [1, 3]
    assert VinePPOAdvantages().fork_places(1) == []


def test_forks_before_the_first_trained_call_take_the_place_of_the_other_rollouts() -> None:
    assert VinePPOAdvantages(calls=(0, 2)).fork_places(3) == [0, 2]
    forked = {0: [2.0, 4.0], 1: [1.0]}
    group = [RolloutRewards(0, 5.0, [0.0, 5.0], forked_returns=forked), RolloutRewards(0, 100.0, [0.0, 100.0])]
    found = vineppo(group, VinePPOAdvantages(calls=(0, 1), whiten=False)).advantages
    assert found[0] == [1.0 - 3.0, 5.0 - 1.0]


def test_forks_at_a_call_that_a_rollout_has_not_are_refused() -> None:
    group = [RolloutRewards(0, 5.0, [0.0] * 4 + [5.0]), RolloutRewards(0, 1.0, [1.0])]
    with pytest.raises(ConfigError, match=r"forked_returns at \[5\]"):
        vineppo([replace(group[0], forked_returns={5: [1.0]}), group[1]], VinePPOAdvantages())
