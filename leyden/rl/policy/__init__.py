"""Policies: the contract, PPO and DQN in plain torch, rules that learn nothing, and adapters for other libraries' policies.

torch is loaded when a name that needs it is first used, Stable-Baselines3 and tianshou when their adapter is given a policy. To add a
policy, write a module beside `ppo.py` and name it in `_LAZY`; users pass their own `Policy` in and need not.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
