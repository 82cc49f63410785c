"""Policies: the contract, PPO and DQN in plain torch, fixed rules, and adapters for other packages.

torch is imported when a name that needs it is first used. The adapters import neither
Stable-Baselines3 nor tianshou, because the policy that they are given has imported its library
already. To add a policy to this package, write a module beside `ppo.py` and a line in
`__init__.pyi`. A policy of your own is passed to the vessel and needs neither.
"""

from leyden._lib.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
