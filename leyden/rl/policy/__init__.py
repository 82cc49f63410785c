"""Policies: the contract, PPO and DQN in plain torch, fixed rules, and adapters for other packages.

torch is loaded when a name that needs it is first used. The adapters import neither
Stable-Baselines3 nor tianshou, because the policy that they are given has loaded its library
already. To add a policy, write a module beside `ppo.py` and a line in `__init__.pyi`. A `Policy` of
a user's own is passed in and needs neither.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
