"""Estimators of advantages: how much better a rollout did than the others of its group.

An estimator is a function of the rewards of one group, the rollouts of one task, and returns one
advantage for each of them. To add an estimator, write the function, cite its source, and add it to
`ESTIMATORS`; `PolicyGradient(advantages=NAME)` finds it there. This module knows no spans and no store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from leyden.errors import ConfigError

AdvantageEstimator: TypeAlias = Callable[[Sequence[float]], list[float]]
"""Rewards of one group to one advantage each."""

_EPSILON: Final = 1e-4


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Centre rewards within one group and divide by its deviation, `A_i = (r_i - mean(r)) / (std(r) + 1e-4)`.

    Source: GRPO, arXiv:2402.03300, section 4.1.2. The deviation has n - 1 in its denominator.

    rewards_G: shape (G,), one reward per rollout of the same task, G >= 2.
    Raises ConfigError if G < 2, because a single rollout has nothing to be compared with.
    """
    centred = dr_grpo(rewards_G)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1))
    return [value / (deviation + _EPSILON) for value in centred]


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """Centre rewards within one group, `A_i = r_i - mean(r)`.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2. Without the division, groups whose rewards hardly
    differ do not weigh more than others.

    rewards_G: shape (G,), one reward per rollout of the same task, G >= 2.
    Raises ConfigError if G < 2, because a single rollout has nothing to be compared with.
    """
    n = len(rewards_G)
    if n < 2:
        raise ConfigError(f"a group needs at least 2 rollouts to compare, got {n}; raise rollouts_per_task")
    mean = math.fsum(rewards_G) / n
    return [reward - mean for reward in rewards_G]


ESTIMATORS: Final[dict[str, AdvantageEstimator]] = {"grpo": grpo, "dr_grpo": dr_grpo}
"""Estimators by name."""
