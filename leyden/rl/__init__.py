"""Reinforcement learning from simulators: a policy, a simulator, what lies between them, and the trainer that runs them.

Lives here: the parts that a user writes (`Simulator`, `StateInterpreter`, `ActionInterpreter`, `Reward`), seeds handed out exactly once
(`SeedPlan`, `DataQueue`), environments over them (`env/`), policies (`policy/`), `Collector` and buffers, vessels and the trainer
(`trainer/`), and order execution as a worked domain (`order_execution/`). The loop, callbacks, writers and checkpoints are `leyden.loop`'s.
It knows no language model, no store and no agent.

Names are loaded when they are first used: NumPy and Gymnasium with the first of them, torch with the first policy that learns. To add a
public name, put it into `_WHERE`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.rl.aux_info import AuxiliaryInfoCollector
    from leyden.rl.collector import Collector, CollectResult
    from leyden.rl.data_queue import DataQueue
    from leyden.rl.env import (
        BatchSimulator,
        EnvWrapper,
        FiniteBatchVectorEnv,
        FiniteDummyVectorEnv,
        FiniteShmemVectorEnv,
        FiniteSubprocVectorEnv,
        FiniteThreadVectorEnv,
        FiniteVectorEnv,
        check_simulator,
        vectorize_env,
    )
    from leyden.rl.interpreter import ActionInterpreter, StateInterpreter
    from leyden.rl.policy import DQN, PPO, AllOne, NonLearnablePolicy, Policy, RandomPolicy, Sb3Policy, TianshouPolicy
    from leyden.rl.reward import Reward, RewardCombination
    from leyden.rl.seed import Seed, SeedPlan
    from leyden.rl.simulator import InitialStateType, Simulator
    from leyden.rl.spaces import GymSpaceValidationError
    from leyden.rl.trainer import (
        SeedIteratorNotAvailable,
        Trainer,
        TrainingVessel,
        TrainingVesselBase,
        backtest,
        train,
    )

_WHERE = {
    "aux_info": ("AuxiliaryInfoCollector",),
    "collector": ("CollectResult", "Collector"),
    "data_queue": ("DataQueue",),
    "env": (
        "BatchSimulator",
        "EnvWrapper",
        "FiniteBatchVectorEnv",
        "FiniteDummyVectorEnv",
        "FiniteShmemVectorEnv",
        "FiniteSubprocVectorEnv",
        "FiniteThreadVectorEnv",
        "FiniteVectorEnv",
        "check_simulator",
        "vectorize_env",
    ),
    "interpreter": ("ActionInterpreter", "StateInterpreter"),
    "policy": (
        "DQN",
        "PPO",
        "AllOne",
        "NonLearnablePolicy",
        "Policy",
        "RandomPolicy",
        "Sb3Policy",
        "TianshouPolicy",
    ),
    "reward": ("Reward", "RewardCombination"),
    "seed": ("Seed", "SeedPlan"),
    "simulator": ("InitialStateType", "Simulator"),
    "spaces": ("GymSpaceValidationError",),
    "trainer": ("SeedIteratorNotAvailable", "Trainer", "TrainingVessel", "TrainingVesselBase", "backtest", "train"),
}
_MODULES = {name: f"leyden.rl.{module}" for module, names in _WHERE.items() for name in names}

__all__ = [  # noqa: RUF022 -- as in `_WHERE`
    "AuxiliaryInfoCollector",
    "CollectResult", "Collector",
    "BatchSimulator", "EnvWrapper", "FiniteBatchVectorEnv", "FiniteDummyVectorEnv", "FiniteShmemVectorEnv", "FiniteSubprocVectorEnv",
    "FiniteThreadVectorEnv", "FiniteVectorEnv", "check_simulator", "vectorize_env",
    "ActionInterpreter", "StateInterpreter",
    "DQN", "PPO", "AllOne", "NonLearnablePolicy", "Policy", "RandomPolicy", "Sb3Policy", "TianshouPolicy",
    "Reward", "RewardCombination",
    "DataQueue", "InitialStateType", "Seed", "SeedPlan",
    "Simulator",
    "GymSpaceValidationError",
    "SeedIteratorNotAvailable", "Trainer", "TrainingVessel", "TrainingVesselBase", "backtest", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ImportError as error:
        from leyden.extras import missing_extra

        raise missing_extra(error, extra="rl", needed_by=f"leyden.rl.{name}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
