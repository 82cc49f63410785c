"""Advantage estimators: from the rewards of one group of rollouts to an advantage for each rollout.

They know no tokens, tasks or optimizer. To add an estimator, write a function with its source and a
test against an independent formula, and add its line to `ESTIMATORS`. Every algorithm that takes
`advantages="NAME"` can then use it.

Shapes: G rollouts of one task (a group).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from leyden.errors import ConfigError

Estimator = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group, shape (G,) with G >= 2, to the advantages, shape (G,)."""

_EPSILON = 1e-4


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return the standardised rewards of a group (GRPO, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + 1e-4), where std has G - 1 in its denominator. Every group
    then weighs about the same, whether its rewards differ by little or by much.

    Raise ConfigError if G < 2.
    """
    centred_G = dr_grpo(rewards_G)
    deviation = math.sqrt(math.fsum(value * value for value in centred_G) / (len(centred_G) - 1))
    return [value / (deviation + _EPSILON) for value in centred_G]


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """Return the centred rewards of a group (Dr. GRPO, arXiv:2503.20783, section 3.2).

    A_i = r_i - mean(r). Without a division by the deviation, tasks that are nearly always or nearly
    never solved weigh no more than the others.

    Raise ConfigError if G < 2, because a single rollout has nothing to be compared with.
    """
    n = len(rewards_G)
    if n < 2:
        raise ConfigError(f"a group needs at least 2 rollouts to compare, got {n}; raise rollouts_per_task")
    mean = math.fsum(rewards_G) / n
    return [reward - mean for reward in rewards_G]


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo}
"""Estimators by the name that a user gives, for example `PolicyGradient(advantages="grpo")`."""
