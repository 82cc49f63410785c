"""Estimators that read the final reward of each rollout and give each of its calls the same advantage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyden._lib.options import check_flag, check_number, named_options
from leyden.objectives.advantages.estimator import (
    AdvantageEstimate,
    Advantages,
    GroupAdvantages,
    RolloutRewards,
    members,
    register_estimator,
    repeated,
)
from leyden.objectives.advantages.statistics import centred, deviation, whitened


@named_options
@dataclass(frozen=True, slots=True)
class GRPOAdvantages(GroupAdvantages):
    """Constants of the estimator `grpo`. Raise ConfigError for one out of its range."""

    scale: bool = True
    """Whether the centred rewards are divided by the group's standard deviation."""
    epsilon: float = 1e-4
    """Added to the deviation; above 0."""
    ddof: float = 1.0
    """The deviation's variance is a sum of squares divided by G - ddof; from 0 to 1."""

    def __post_init__(self) -> None:
        check_flag("scale", self.scale)
        check_number("epsilon", self.epsilon, above=0)
        check_number("ddof", self.ddof, at_least=0, at_most=1)


@register_estimator("grpo", GRPOAdvantages)
def grpo(rollouts: Sequence[RolloutRewards], constants: GRPOAdvantages) -> AdvantageEstimate:
    """Return the standardised rewards of each group (GRPO, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + epsilon). Every group then weighs about the same, whether its rewards differ by
    little or by much. Without `scale`, A_i = r_i - mean(r).
    """

    def standardised(rewards_G: list[float]) -> list[float]:
        divisor = deviation(rewards_G, ddof=constants.ddof) + constants.epsilon if constants.scale else 1.0
        return [value / divisor for value in centred(rewards_G)]

    return repeated(_by_group(rollouts, standardised), rollouts)


@dataclass(frozen=True, slots=True)
class DrGRPOAdvantages(GroupAdvantages):
    """The estimator `dr_grpo`, which has no constants."""


@register_estimator("dr_grpo", DrGRPOAdvantages)
def dr_grpo(rollouts: Sequence[RolloutRewards], constants: DrGRPOAdvantages) -> AdvantageEstimate:
    """Return the centred rewards of each group (Dr. GRPO, arXiv:2503.20783, section 3.2).

    A_i = r_i - mean(r). Without a division by the deviation, tasks that are nearly always or nearly never solved weigh
    no more than the others.
    """
    return repeated(_by_group(rollouts, centred), rollouts)


@dataclass(frozen=True, slots=True)
class RLOOAdvantages(GroupAdvantages):
    """The estimator `rloo`, which has no constants."""


@register_estimator("rloo", RLOOAdvantages)
def rloo(rollouts: Sequence[RolloutRewards], constants: RLOOAdvantages) -> AdvantageEstimate:
    """Return each reward less the mean of the group's other rewards (RLOO, arXiv:2402.14740).

    A_i = r_i - mean of r_j over j != i = G / (G - 1) (r_i - mean(r)). The baseline does not depend on the rollout
    itself, so the policy gradient has no bias.
    """

    def left_out(rewards_G: list[float]) -> list[float]:
        factor = len(rewards_G) / (len(rewards_G) - 1)
        return [factor * value for value in centred(rewards_G)]

    return repeated(_by_group(rollouts, left_out), rollouts)


@named_options
@dataclass(frozen=True, slots=True)
class ReinforcePPAdvantages(Advantages):
    """Constants of the estimator `reinforce_pp`. Raise ConfigError for one out of its range."""

    group_baseline: bool = False
    """Whether the mean reward of the group is subtracted from each reward first (REINFORCE++-baseline)."""
    epsilon: float = 1e-8
    """Added to the variance; above 0."""
    ddof: float = 1.0
    """The variance of R rollouts is a sum of squares divided by R - ddof; from 0 to 1."""

    def __post_init__(self) -> None:
        check_flag("group_baseline", self.group_baseline)
        check_number("epsilon", self.epsilon, above=0)
        check_number("ddof", self.ddof, at_least=0, at_most=1)

    @property
    def min_group(self) -> int:
        return 2 if self.group_baseline else 1


@register_estimator("reinforce_pp", ReinforcePPAdvantages)
def reinforce_pp(rollouts: Sequence[RolloutRewards], constants: ReinforcePPAdvantages) -> AdvantageEstimate:
    """Return the rewards, standardised over all rollouts of the step (REINFORCE++, arXiv:2501.03262).

    A_i = (x_i - mean(x)) / sqrt(var(x) + epsilon) over the whole step, where x is the reward, or the reward less the
    mean of its group. The paper's penalty for leaving the reference policy is part of the reward here.
    """
    rewards_R = [rollout.reward for rollout in rollouts]
    values_R = _by_group(rollouts, centred) if constants.group_baseline else rewards_R
    rows = whitened([[value] for value in values_R], epsilon=constants.epsilon, ddof=constants.ddof)
    return repeated([value for (value,) in rows], rollouts)


@dataclass(frozen=True, slots=True)
class ReMaxAdvantages(Advantages):
    """The estimator `remax`, which has no constants."""

    uses_baseline: ClassVar[bool] = True


@register_estimator("remax", ReMaxAdvantages)
def remax(rollouts: Sequence[RolloutRewards], constants: ReMaxAdvantages) -> AdvantageEstimate:
    """Return each reward less the reward of a greedily decoded rollout (ReMax, arXiv:2310.10505, algorithm 1)."""
    # `or 0.0` is for the type checker: the registry refuses a rollout without a baseline.
    return repeated([rollout.reward - (rollout.baseline or 0.0) for rollout in rollouts], rollouts)


def _by_group(rollouts: Sequence[RolloutRewards], compare: Callable[[list[float]], list[float]]) -> list[float]:
    advantages_R = [0.0] * len(rollouts)
    for places in members(rollouts).values():
        found = compare([rollouts[place].reward for place in places])
        for place, advantage in zip(places, found, strict=True):
            advantages_R[place] = advantage
    return advantages_R
