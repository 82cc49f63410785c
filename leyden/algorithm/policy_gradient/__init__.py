"""Train a policy on rollouts of any number of model calls.

Lives here: `PolicyGradient` (fresh rollouts) with its named settings, and `SFT` and `DPO` (recorded
rollouts). `base.py` is what they share; `reading.py` reads rollouts, `batch.py` makes a step's data
of them, as pure functions, `preparation.py` adds what other models compute, `stream.py` runs groups
ahead. The maths is `leyden.maths`; gradients are the policy backend's. To add an algorithm that
differs in an estimator, a loss or an option, add a setting to `settings.py`.
"""

from leyden.algorithm.policy_gradient.algorithm import PolicyGradient
from leyden.algorithm.policy_gradient.base import PolicyAlgorithm
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
    "ReMax",
    "VinePPO",
]
