"""Estimators that give all calls of a rollout one advantage: against Python's statistics, and their invariants."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import ConfigError, InvalidArgument
from leyden.objectives.advantages import (
    ESTIMATORS,
    AdvantageEstimate,
    Advantages,
    DrGRPOAdvantages,
    GAEAdvantages,
    GRPOAdvantages,
    ProcessAdvantages,
    ReinforcePPAdvantages,
    ReMaxAdvantages,
    RLOOAdvantages,
    RolloutRewards,
    VinePPOAdvantages,
    find_estimator,
    make_advantages,
    register_estimator,
    repeated,
)

GROUPED = [
    GRPOAdvantages(),
    GRPOAdvantages(scale=False),
    DrGRPOAdvantages(),
    RLOOAdvantages(),
    ReinforcePPAdvantages(group_baseline=True),
]
OUTCOME = [*GROUPED, ReinforcePPAdvantages(), ReMaxAdvantages()]
EVERY = [
    *OUTCOME,
    ProcessAdvantages(),
    ProcessAdvantages(baseline="position", gamma=0.9),
    GAEAdvantages(gamma=0.9, lam=0.8),
    GAEAdvantages(whiten=False),
    VinePPOAdvantages(),
    VinePPOAdvantages(whiten=False),
]
each_grouped = pytest.mark.parametrize("constants", GROUPED, ids=repr)
each_outcome = pytest.mark.parametrize("constants", OUTCOME, ids=repr)
each = pytest.mark.parametrize("constants", EVERY, ids=repr)

few = settings(max_examples=30)  # of each estimator

REWARD = st.floats(-100, 100)
rewards = st.lists(REWARD, min_size=2, max_size=32)


@st.composite
def steps(draw: st.DrawFn) -> list[RolloutRewards]:
    """The rollouts of one step: groups of at least two, with a critic's values and a baseline."""
    numbers = [group for group in range(draw(st.integers(1, 4))) for _ in range(draw(st.integers(2, 5)))]
    baselines = {group: draw(REWARD) for group in numbers}
    return [rollout_of(draw, group, baselines[group]) for group in draw(st.permutations(numbers))]


def rollout_of(draw: st.DrawFn, group: int, baseline: float) -> RolloutRewards:
    call_rewards = draw(st.lists(REWARD, min_size=1, max_size=4))
    values = draw(st.lists(REWARD, min_size=len(call_rewards), max_size=len(call_rewards)))
    return RolloutRewards(group, math.fsum(call_rewards), call_rewards, values, baseline)


def estimated(rollouts: Sequence[RolloutRewards], constants: Advantages) -> list[list[float]]:
    return find_estimator(constants).function(rollouts, constants).advantages


def of_group(values: Sequence[float], constants: Advantages) -> list[float]:
    """The advantages of one group of rollouts with a call each."""
    return [advantage for (advantage,) in estimated([RolloutRewards(0, r, [r], [0.0], 0.0) for r in values], constants)]


def close(rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]], tolerance: float = 1e-6) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance)


# ---- formulas --------------------------------------------------------------------------------------------------------


@given(rewards)
def test_dr_grpo_is_the_reward_less_the_mean(values: list[float]) -> None:
    expected = [value - statistics.fmean(values) for value in values]
    assert of_group(values, DrGRPOAdvantages()) == pytest.approx(expected, abs=1e-9)
    assert of_group(values, GRPOAdvantages(scale=False)) == pytest.approx(expected, abs=1e-9)


@given(rewards, st.sampled_from([1e-6, 1e-4, 0.1]))
def test_grpo_is_divided_by_the_sample_or_the_population_deviation(values: list[float], epsilon: float) -> None:
    for ddof, deviation in {1.0: statistics.stdev(values), 0.0: statistics.pstdev(values)}.items():
        expected = [(value - statistics.fmean(values)) / (deviation + epsilon) for value in values]
        got = of_group(values, GRPOAdvantages(epsilon=epsilon, ddof=ddof))
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards)
def test_rloo_is_the_reward_less_the_mean_of_the_others(values: list[float]) -> None:
    expected = [value - statistics.fmean(values[:i] + values[i + 1 :]) for i, value in enumerate(values)]
    assert of_group(values, RLOOAdvantages()) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(steps())
def test_reinforce_pp_standardises_over_the_step(rollouts: list[RolloutRewards]) -> None:
    plain = [rollout.reward for rollout in rollouts]
    means = {g: statistics.fmean(r.reward for r in rollouts if r.group == g) for g in {r.group for r in rollouts}}
    less_group = [rollout.reward - means[rollout.group] for rollout in rollouts]
    for group_baseline, values in {False: plain, True: less_group}.items():
        scale = math.sqrt(statistics.variance(values) + 1e-8)
        got = estimated(rollouts, ReinforcePPAdvantages(group_baseline=group_baseline))
        expected = [(value - statistics.fmean(values)) / scale for value in values]
        assert [row[0] for row in got] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(steps())
def test_remax_is_the_reward_less_that_of_the_greedy_rollout(rollouts: list[RolloutRewards]) -> None:
    close(
        estimated(rollouts, ReMaxAdvantages()),
        [[r.reward - (r.baseline or 0.0)] * len(r.call_rewards) for r in rollouts],
    )


# ---- invariants ------------------------------------------------------------------------------------------------------


@each_grouped
@few
@given(rollouts=steps(), shift=st.floats(-100, 100))
def test_a_constant_added_to_the_rewards_of_a_group_changes_nothing(
    constants: Advantages, rollouts: list[RolloutRewards], shift: float
) -> None:
    moved = [replace(r, reward=r.reward + shift) if r.group == 0 else r for r in rollouts]
    # Less precise where a deviation near 0 divides the rounding of the sum.
    tolerance = 1e-6 if constants in (DrGRPOAdvantages(), RLOOAdvantages(), GRPOAdvantages(scale=False)) else 1e-4
    close(estimated(moved, constants), estimated(rollouts, constants), tolerance)


@each_outcome
@few
@given(rollouts=steps(), times=st.integers(2, 5))
def test_more_calls_of_a_rollout_change_no_other_rollouts_advantage(
    constants: Advantages, rollouts: list[RolloutRewards], times: int
) -> None:
    longer = replace(
        rollouts[0], call_rewards=[*rollouts[0].call_rewards] * times, values=[*(rollouts[0].values or ())] * times
    )
    before, after = estimated(rollouts, constants), estimated([longer, *rollouts[1:]], constants)
    assert after[1:] == before[1:]
    assert after[0] == before[0] * times


@each
@few
@given(rollouts=steps(), seed=st.integers())
def test_the_order_of_the_rollouts_does_not_matter(
    constants: Advantages, rollouts: list[RolloutRewards], seed: int
) -> None:
    order = random.Random(seed).sample(range(len(rollouts)), len(rollouts))
    shuffled = estimated([rollouts[place] for place in order], constants)
    close(shuffled, [estimated(rollouts, constants)[place] for place in order])


@each_grouped
@few
@given(rollouts=steps(), reward=st.one_of(REWARD, st.sampled_from([0.1, 1e6, -1e6])))
def test_rollouts_of_equal_reward_have_no_advantage(
    constants: Advantages, rollouts: list[RolloutRewards], reward: float
) -> None:
    equal = [replace(rollout, reward=reward) for rollout in rollouts]
    assert all(value == 0 for row in estimated(equal, constants) for value in row)


@each_grouped
def test_huge_rewards_lose_no_precision(constants: Advantages) -> None:
    near, far = [0.0, 1.0, 0.0, 1.0], [1e6, 1e6 + 1, 1e6, 1e6 + 1]
    assert of_group(far, constants) == pytest.approx(of_group(near, constants), rel=1e-9)


@pytest.mark.parametrize("constants", [*GROUPED, ProcessAdvantages()], ids=repr)
def test_one_rollout_is_no_group(constants: Advantages) -> None:
    assert constants.min_group == 2
    with pytest.raises(ConfigError, match=r"group 0 has 1 rollout; .* at least 2 rollouts"):
        of_group([1.0], constants)


def test_groups_of_one_are_standardised_over_the_step() -> None:
    rollouts = [RolloutRewards(number, reward, [reward]) for number, reward in enumerate([0.0, 2.0])]
    close(estimated(rollouts, ReinforcePPAdvantages()), [[-math.sqrt(0.5)], [math.sqrt(0.5)]])
    assert estimated(rollouts[:1], ReinforcePPAdvantages()) == [[0.0]], "alone it is the mean"


@each
@few
@given(rollouts=steps())
def test_each_call_has_an_advantage(constants: Advantages, rollouts: list[RolloutRewards]) -> None:
    got = estimated(rollouts, constants)
    assert [len(row) for row in got] == [len(rollout.call_rewards) for rollout in rollouts]
    assert all(math.isfinite(value) for row in got for value in row)


# ---- what is refused -------------------------------------------------------------------------------------------------

GOOD = RolloutRewards(3, 1.0, [0.0, 1.0], [0.5, 0.5], 0.0)


@each
@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (replace(GOOD, reward=math.nan), "rollout 1 of group 3 has the reward nan; give finite numbers"),
        (replace(GOOD, call_rewards=[0.0, math.inf]), "rollout 1 of group 3 has the call_rewards inf"),
        (replace(GOOD, values=[math.nan, 0.0]), "rollout 1 of group 3 has the values nan"),
        (replace(GOOD, baseline=-math.inf), "rollout 1 of group 3 has the baseline -inf"),
        (replace(GOOD, call_rewards=[], values=[]), "rollout 1 of group 3 has no call_rewards"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_its_name(
    constants: Advantages, bad: RolloutRewards, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        estimated([GOOD, bad], constants)


@pytest.mark.parametrize(
    ("constants", "bad", "told"),
    [
        (GAEAdvantages(), replace(GOOD, values=None), "has no values for 2 calls; advantages='gae' needs a critic's"),
        (GAEAdvantages(), replace(GOOD, values=[1.0]), "has 1 values for 2 calls"),
        (ReMaxAdvantages(), replace(GOOD, baseline=None), "has no baseline; advantages='remax' needs the reward"),
    ],
)
def test_what_an_estimator_reads_must_be_there(constants: Advantages, bad: RolloutRewards, told: str) -> None:
    assert constants.uses_values or constants.uses_baseline
    with pytest.raises(ConfigError, match=f"rollout 1 of group 3 {told}"):
        estimated([GOOD, bad], constants)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_found_by_its_name_and_by_its_constants(name: str) -> None:
    constants = make_advantages(name)
    assert find_estimator(constants).name == name


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("grpo", {"epsilon": 0}, "epsilon is 0; it must be a number, above 0"),
        ("grpo", {"ddof": 2}, "ddof is 2"),
        ("grpo", {"scale": 1}, "scale is 1; possible: True, False"),
        ("gae", {"lam": 1.5}, "lam is 1.5"),
        ("process", {"baseline": "call"}, "baseline is 'call'"),
        ("grop", {}, "advantages is 'grop'; did you mean 'grpo'"),
    ],
)
def test_constants_out_of_their_range_are_refused(name: str, given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_advantages(name, given)


def test_an_unknown_constant_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidArgument, match="'grpo' has no option 'epsilom'; did you mean 'epsilon'"):
        make_advantages("grpo", {"epsilom": 1.0})


def test_a_name_and_a_type_of_constants_are_registered_once() -> None:
    for name, constants in {"grpo": Advantages, "grpo_again": GRPOAdvantages}.items():
        with pytest.raises(ConfigError, match=f"advantages '{name}' or its constants .* are registered already"):
            register_estimator(name, constants)(ESTIMATORS["grpo"].function)
    assert "grpo_again" not in ESTIMATORS


@dataclass(frozen=True)
class _Wrong(Advantages):
    result: Any = None


@register_estimator("wrong, for a test", _Wrong)
def _wrong(rollouts: Sequence[RolloutRewards], constants: _Wrong) -> AdvantageEstimate:
    return constants.result


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "a NoneType; return an AdvantageEstimate"),
        ([0.0, 0.0], "a list; return an AdvantageEstimate"),
        (np.zeros(2), "a ndarray"),
        (AdvantageEstimate([[0.0, 0.0]]), "advantages of 1 rollouts; there are 2"),
        (AdvantageEstimate([[0.0, 0.0], [0.0, 0.0]]), "advantages of 2 calls for rollout 1; it has 1"),
        (AdvantageEstimate([[0.0], [0.0]]), "advantages of 1 calls for rollout 0; it has 2"),
        (AdvantageEstimate([[0.0, np.zeros(3)], [0.0]]), "rollout 0 of which one has 3 elements, not one number"),
        (AdvantageEstimate([[0.0, 1.0], [float("nan")]]), "rollout 1 of which one is nan"),
        (AdvantageEstimate([[0.0, 1.0], ["high"]]), "rollout 1 of which one is 'high'"),
        (AdvantageEstimate([[0.0, 1.0], [0.0]], [[0.0], [0.0]]), "returns of 1 calls for rollout 0"),
    ],
)
def test_what_an_estimator_returns_is_checked_and_named(result: Any, told: str) -> None:
    rollouts = [RolloutRewards(0, 1.0, [0.5, 0.5]), RolloutRewards(0, 0.0, [0.0])]
    with pytest.raises(ConfigError, match=f"the estimator 'wrong, for a test' returned .*{told}"):
        _wrong(rollouts, _Wrong(result))
    with pytest.raises(ConfigError, match="1 advantages for 2 rollouts"):
        repeated([1.0], rollouts)


def test_numbers_of_other_libraries_become_floats() -> None:
    rollouts = [RolloutRewards(0, 1.0, [0.5, 0.5]), RolloutRewards(0, 0.0, [0.0])]
    found = _wrong(rollouts, _Wrong(repeated(np.asarray([0.25, -1.0]), rollouts)))
    assert found == AdvantageEstimate([[0.25, 0.25], [-1.0]])
    assert type(found.advantages[0][0]) is float
