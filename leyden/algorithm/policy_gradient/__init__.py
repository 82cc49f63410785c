"""GRPO-style policy gradient on whole rollouts: advantages within groups, a clipped loss, every rollout weighs the same.

`algorithm.py` is the loop's step; `batch.py` is what a step trains on, as pure functions. The gradient itself is the policy backend's.
"""

from leyden.algorithm.policy_gradient.algorithm import PolicyGradient

__all__ = ["PolicyGradient"]
