"""Advantage estimators: from the rewards of one step's rollouts to an advantage
for each model call.

They know no tokens, tasks or optimizer. Statistics are over rollouts: a rollout counts
once, however many calls it made. To add an estimator, write a frozen dataclass with its
constants and, beside it, a function decorated with `register_estimator`, its source and a
test against an independent formula. Every algorithm that takes `advantages="NAME"`, or the
constants, can then use it.

Shapes: R rollouts of a step, G rollouts of one group (one task), C_r calls of rollout r.
"""

from leyden.maths.advantages.base import (
    ESTIMATORS,
    Advantages,
    Estimate,
    RegisteredEstimator,
    RolloutRewards,
    find_estimator,
    make_advantages,
    register_estimator,
)
from leyden.maths.advantages.forked import VinePPOAdvantages, vineppo
from leyden.maths.advantages.outcome import (
    DrGRPOAdvantages,
    GRPOAdvantages,
    ReinforcePPAdvantages,
    ReMaxAdvantages,
    RLOOAdvantages,
    dr_grpo,
    grpo,
    reinforce_pp,
    remax,
    rloo,
)
from leyden.maths.advantages.per_call import GAEAdvantages, ProcessAdvantages, gae, process

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "DrGRPOAdvantages",
    "Estimate",
    "GAEAdvantages",
    "GRPOAdvantages",
    "ProcessAdvantages",
    "RLOOAdvantages",
    "ReMaxAdvantages",
    "RegisteredEstimator",
    "ReinforcePPAdvantages",
    "RolloutRewards",
    "VinePPOAdvantages",
    "dr_grpo",
    "find_estimator",
    "gae",
    "grpo",
    "make_advantages",
    "process",
    "register_estimator",
    "reinforce_pp",
    "remax",
    "rloo",
    "vineppo",
]
