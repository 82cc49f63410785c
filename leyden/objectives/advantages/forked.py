"""The estimator that values the states between calls by the returns of forks, which continue from there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from leyden._lib.options import check_flag, check_number, named_options
from leyden.errors import ConfigError
from leyden.objectives.advantages.estimator import (
    AdvantageEstimate,
    GroupAdvantages,
    RolloutRewards,
    members,
    register_estimator,
)
from leyden.objectives.advantages.statistics import mean, whitened


@named_options
@dataclass(frozen=True, slots=True)
class VinePPOAdvantages(GroupAdvantages):
    """Constants of the estimator `vineppo`. Raise ConfigError for one out of its range."""

    n_forks: int = 4
    """Forks at each chosen call; at least 1. More make its advantage less noisy."""
    calls: tuple[int, ...] | None = None
    """The calls at which a rollout is forked, by their index among its trained calls. None: all but the first, whose
    value the group's other rollouts give. Add 0 if calls that are not trained come before it, such as another agent's.
    A call between two chosen ones shares their difference of values."""
    whiten: bool = True
    """Whether the advantages of the step are standardised. Each rollout weighs the same in mean and variance."""
    epsilon: float = 1e-8
    """Added to the variance; above 0."""
    ddof: float = 1.0
    """The variance over R rollouts is multiplied by R / (R - ddof); from 0 to 1."""

    def __post_init__(self) -> None:
        check_number("n_forks", self.n_forks, at_least=1, whole=True)
        if self.calls is not None:
            if not self.calls:
                raise ConfigError('calls is empty, so nothing would be forked; give places, None, or advantages="rloo"')
            for place in self.calls:
                check_number("calls", place, at_least=0, whole=True)
        check_flag("whiten", self.whiten)
        check_number("epsilon", self.epsilon, above=0)
        check_number("ddof", self.ddof, at_least=0, at_most=1)

    @property
    def forks_per_call(self) -> int:
        return self.n_forks

    def fork_places(self, n_calls: int) -> list[int]:
        """Return the indices of the calls at which a rollout is forked: those in `calls`, or all but the first."""
        return [place for place in range(n_calls) if (place > 0 if self.calls is None else place in self.calls)]


@register_estimator("vineppo", VinePPOAdvantages)
def vineppo(rollouts: Sequence[RolloutRewards], constants: VinePPOAdvantages) -> AdvantageEstimate:
    """Return the differences of Monte Carlo values at consecutive calls (VinePPO, arXiv:2410.01679, section 4).

    A_c = V_{c+1} - V_c, where V_c is the mean return of the forks that repeat all calls before c, and V_C the rollout's
    own reward, which is exact. Without forks at call 0, V_0 is the mean reward of the group's other rollouts. Rewards
    of earlier calls are part of each return, and nothing is discounted. Without forks at a call its value is unknown,
    and each call between two known values gets their whole difference. So a rollout of one call has RLOO's advantage.
    """
    first_values = _mean_of_others(rollouts)
    rows = [_differences(rollout, first) for rollout, first in zip(rollouts, first_values, strict=True)]
    if constants.whiten:
        rows = whitened(rows, epsilon=constants.epsilon, ddof=constants.ddof)
    return AdvantageEstimate(rows)


def _mean_of_others(rollouts: Sequence[RolloutRewards]) -> list[float]:
    found = [0.0] * len(rollouts)
    for places in members(rollouts).values():
        for place in places:
            found[place] = mean([rollouts[other].reward for other in places if other != place])
    return found


def _differences(rollout: RolloutRewards, first_value: float) -> list[float]:
    """Return the advantage of each call of a rollout, shape (C,): the difference between the next known value after the
    call and the last one before it.

    first_value: the value of the first state, unless forks at call 0 give another.
    """
    n_calls = len(rollout.call_rewards)
    values = {0: first_value, n_calls: rollout.reward}
    values |= {place: mean(returns) for place, returns in rollout.forked_returns.items() if returns}
    advantages_C: list[float] = []
    for start, end in itertools.pairwise(sorted(values)):
        advantages_C += [values[end] - values[start]] * (end - start)
    return advantages_C
