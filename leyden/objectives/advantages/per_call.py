"""Estimators that compute a separate advantage for each model call of a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyden._lib.options import check_choice, check_flag, check_number, named_options
from leyden.objectives.advantages.estimator import (
    AdvantageEstimate,
    Advantages,
    GroupAdvantages,
    RolloutRewards,
    members,
    register_estimator,
)
from leyden.objectives.advantages.statistics import centre_and_variance, whitened


@named_options
@dataclass(frozen=True, slots=True)
class GAEAdvantages(Advantages):
    """Constants of the estimator `gae`. Raise ConfigError for one out of its range."""

    uses_values: ClassVar[bool] = True
    uses_call_rewards: ClassVar[bool] = True

    gamma: float = 1.0
    """Discount of the reward of the next call; from 0 to 1."""
    lam: float = 1.0
    """Weight of later estimates, from 0 to 1. With 0 only the critic's next value counts, with 1 only the rewards."""
    whiten: bool = True
    """Whether the advantages of the step are standardised. Each rollout weighs the same in mean and variance."""
    epsilon: float = 1e-2
    """Added to the variance; above 0. If all rewards of a step are nearly equal, the advantages are errors of the
    critic, and a smaller number would make them as large as true advantages. The default is for rewards from 0 to 1;
    for rewards in a range R take R^2 / 100."""
    ddof: float = 1.0
    """The variance over R rollouts is multiplied by R / (R - ddof); from 0 to 1."""

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, at_least=0, at_most=1)
        check_number("lam", self.lam, at_least=0, at_most=1)
        check_flag("whiten", self.whiten)
        check_number("epsilon", self.epsilon, above=0)
        check_number("ddof", self.ddof, at_least=0, at_most=1)


@register_estimator("gae", GAEAdvantages)
def gae(rollouts: Sequence[RolloutRewards], constants: GAEAdvantages) -> AdvantageEstimate:
    """Return generalised advantage estimates over the calls of each rollout (arXiv:1506.02438, eq. 16).

    A_c = delta_c + gamma * lam * A_{c+1} with delta_c = r_c + gamma * V_{c+1} - V_c, where both terms of call c + 1 are
    0 after the last call. The returns are A + V before the advantages are whitened.
    """
    advantages: list[list[float]] = []
    returns: list[list[float]] = []
    for rollout in rollouts:
        values_C = rollout.values or ()
        following_C = [*values_C[1:], 0.0]
        deltas_C = [
            reward + constants.gamma * following - value
            for reward, following, value in zip(rollout.call_rewards, following_C, values_C, strict=True)
        ]
        row = _discounted_sums(deltas_C, constants.gamma * constants.lam)
        advantages.append(row)
        returns.append([advantage + value for advantage, value in zip(row, values_C, strict=True)])
    if constants.whiten:
        advantages = whitened(advantages, epsilon=constants.epsilon, ddof=constants.ddof)
    return AdvantageEstimate(advantages, returns)


@named_options
@dataclass(frozen=True, slots=True)
class ProcessAdvantages(GroupAdvantages):
    """Constants of the estimator `process`. Raise ConfigError for one out of its range."""

    uses_call_rewards: ClassVar[bool] = True

    baseline: str = "reward"
    """The number that is centred within the group. `reward`: the reward of each call, before they are summed, against
    the rewards of all calls of the group. `position`: the sum of the rewards from each call on, against the same sums
    of the rollouts that have a call at this position."""
    gamma: float = 1.0
    """Discount of the reward of the next call; from 0 to 1."""
    scale: bool = True
    """Whether the centred numbers are divided by their standard deviation."""
    epsilon: float = 1e-4
    """Added to the deviation; above 0."""
    ddof: float = 1.0
    """The variance over G rollouts is multiplied by G / (G - ddof); from 0 to 1."""

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ("reward", "position"))
        check_number("gamma", self.gamma, at_least=0, at_most=1)
        check_flag("scale", self.scale)
        check_number("epsilon", self.epsilon, above=0)
        check_number("ddof", self.ddof, at_least=0, at_most=1)


@register_estimator("process", ProcessAdvantages)
def process(rollouts: Sequence[RolloutRewards], constants: ProcessAdvantages) -> AdvantageEstimate:
    """Return advantages from the rewards that followed each call (process supervision, arXiv:2402.03300, section
    4.1.3).

    With baseline="reward", A_c = sum over k >= c of gamma^(k - c) (r_k - mean(R)) / (std(R) + epsilon), where R are the
    rewards of all calls of the group. A rollout counts once in mean and deviation, so they are the paper's where all
    rollouts have equally many calls.

    With baseline="position", A_c = (G_c - mean(G_c)) / (std(G_c) + epsilon), over the rollouts of the group that have a
    call c, where G_c = sum over k >= c of gamma^(k - c) r_k. A call that no other rollout reached gets 0, because it
    has nothing to be compared with.
    """
    advantages: list[list[float]] = [[] for _ in rollouts]
    for places in members(rollouts).values():
        rewards = [rollouts[place].call_rewards for place in places]
        if constants.baseline == "reward":
            rows = [_discounted_sums(row, constants.gamma) for row in _standardised(rewards, constants)]
        else:
            rows = _against_position([_discounted_sums(row, constants.gamma) for row in rewards], constants)
        for place, row in zip(places, rows, strict=True):
            advantages[place] = row
    return AdvantageEstimate(advantages)


def _against_position(sums: Sequence[Sequence[float]], constants: ProcessAdvantages) -> list[list[float]]:
    """Return the sums, standardised at each position over the rollouts that have a call there, in the same shape. A
    position that only one rollout reached has the advantage 0.

    sums: for each rollout, the sum of the rewards from each call on.
    """
    rows: list[list[float]] = [[] for _ in sums]
    for call in range(max(map(len, sums))):
        reached = [place for place, row in enumerate(sums) if len(row) > call]
        column = [[sums[place][call]] for place in reached]
        found = _standardised(column, constants) if len(reached) > 1 else [[0.0]]
        for place, (value,) in zip(reached, found, strict=True):
            rows[place].append(value)
    return rows


def _standardised(rows: Sequence[Sequence[float]], constants: ProcessAdvantages) -> list[list[float]]:
    """Return a group's numbers less their mean, in the same shape. With `scale`, divide them by their deviation.

    rows: for each rollout, a number for each call.
    """
    middle, variance = centre_and_variance(rows, ddof=constants.ddof)
    divisor = math.sqrt(variance) + constants.epsilon if constants.scale else 1.0
    return [[(value - middle) / divisor for value in row] for row in rows]


def _discounted_sums(values_C: Sequence[float], factor: float) -> list[float]:
    """Return sum over k >= c of factor^(k - c) * values_k for each c, shape (C,)."""
    sums_C = list(values_C)
    for call in range(len(sums_C) - 2, -1, -1):
        sums_C[call] += factor * sums_C[call + 1]
    return sums_C
