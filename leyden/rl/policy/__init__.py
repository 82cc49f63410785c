"""Policies: the contract, PPO and DQN in plain torch, rules that learn nothing, and adapters for other libraries' policies.

torch is loaded when a name that needs it is first used, Stable-Baselines3 and tianshou when their adapter is given a policy. To add a
policy, write a module beside `ppo.py` and name it in `_LAZY`; users pass their own `Policy` in and need not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leyden.extras import missing_extra

try:
    from leyden.rl.policy.base import AllOne, NonLearnablePolicy, Policy, PolicyOutput, RandomPolicy
except ImportError as error:
    raise missing_extra(error, extra="rl", needed_by=__name__) from None

if TYPE_CHECKING:
    from leyden.rl.policy.adapters import Sb3Policy, TianshouPolicy
    from leyden.rl.policy.dqn import DQN
    from leyden.rl.policy.ppo import PPO

__all__ = [
    "DQN",
    "PPO",
    "AllOne",
    "NonLearnablePolicy",
    "Policy",
    "PolicyOutput",
    "RandomPolicy",
    "Sb3Policy",
    "TianshouPolicy",
]

_LAZY = {
    "DQN": "leyden.rl.policy.dqn",
    "PPO": "leyden.rl.policy.ppo",
    "Sb3Policy": "leyden.rl.policy.adapters",
    "TianshouPolicy": "leyden.rl.policy.adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
