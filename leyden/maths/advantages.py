"""Advantages of whole rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leyden.errors import ConfigError

_EPSILON = 1e-4


def group_advantages(rewards: Sequence[float], *, scale: bool) -> list[float]:
    """Rewards centred within one group, `A_i = r_i - mean(r)` (GRPO, arXiv:2402.03300, section 4.1.2).

    rewards: one for each rollout of the same task, at least 2.
    scale: divide by the group's standard deviation too (n - 1 in the denominator, plus 1e-4), as that paper does.
    Raises ConfigError for fewer than 2: a single rollout has no group to compare with.
    """
    n = len(rewards)
    if n < 2:
        raise ConfigError(f"a group needs at least 2 rollouts to compare, got {n}; raise rollouts_per_task")
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if not scale:
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (n - 1))
    return [value / (deviation + _EPSILON) for value in centred]
