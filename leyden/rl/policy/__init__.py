"""Policies: the contract, PPO and DQN in plain torch, fixed rules, and adapters for other packages.

torch is imported when a name that needs it is first used. The adapters import neither Stable-Baselines3 nor tianshou,
because the policy that they are given has imported its library already. To add a policy to this package, write a module
beside `ppo.py` and a line in this file. Your own policy is passed to the vessel and needs neither.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden.rl.policy.adapters import Sb3Policy as Sb3Policy
    from leyden.rl.policy.adapters import TianshouPolicy as TianshouPolicy
    from leyden.rl.policy.dqn import DQN as DQN
    from leyden.rl.policy.policies import AllOne as AllOne
    from leyden.rl.policy.policies import NonLearnablePolicy as NonLearnablePolicy
    from leyden.rl.policy.policies import Policy as Policy
    from leyden.rl.policy.policies import PolicyOutput as PolicyOutput
    from leyden.rl.policy.policies import RandomPolicy as RandomPolicy
    from leyden.rl.policy.ppo import PPO as PPO
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__, extra="rl")
