"""Train a policy on rollouts of any number of model calls.

The package holds `PolicyGradient` (fresh rollouts) with its named settings, and `SFT` and `DPO` (recorded rollouts).
`policy_algorithm.py` has their common base class. `rollout_reader.py` reads rollouts, `step_data.py` makes a step's
data of them, `preparation.py` adds columns that models compute, and `group_stream.py` runs groups ahead of their step.
Advantages and losses come from `leyden.objectives`, gradients from the policy backend. To add an algorithm that differs
in an estimator, a loss or an option, add a setting to `settings.py`.
"""

from leyden.algorithm.policy_gradient.policy_algorithm import PolicyAlgorithm
from leyden.algorithm.policy_gradient.policy_gradient import PolicyGradient
from leyden.algorithm.policy_gradient.rate_finder import RateFinder
from leyden.algorithm.policy_gradient.recorded import DPO, SFT
from leyden.algorithm.policy_gradient.settings import GRPO, PPO, RLOO, DrGRPO, REINFORCEpp, ReMax, VinePPO

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "RLOO",
    "SFT",
    "DrGRPO",
    "PolicyAlgorithm",
    "PolicyGradient",
    "REINFORCEpp",
    "RateFinder",
    "ReMax",
    "VinePPO",
]
