"""Reinforcement learning from simulators: simulator, interpreters and reward, policies, and the trainer that runs them.

Lives here: the parts that a user writes (`parts`), seeds that are given out exactly once (`SeedPlan`, `DataQueue`),
environments over them (`env/`), policies (`policy/`), `Collector` and buffers, vessels and the trainer (`trainer/`).
The loop, callbacks, writers and checkpoints are those of `leyden.training`. Nothing here knows a language model, a
store, an agent or a domain; order execution is in `leyden_compat.order_execution`.

Modules are imported when a name of theirs is first used, so that torch is imported only with a policy that learns. To
add a public name, add a line to this file.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden.rl.collector import Collector as Collector
    from leyden.rl.collector import CollectResult as CollectResult
    from leyden.rl.data_queue import DataQueue as DataQueue
    from leyden.rl.env import BatchSimulator as BatchSimulator
    from leyden.rl.env import EnvWrapper as EnvWrapper
    from leyden.rl.env import FiniteBatchVectorEnv as FiniteBatchVectorEnv
    from leyden.rl.env import FiniteDummyVectorEnv as FiniteDummyVectorEnv
    from leyden.rl.env import FiniteShmemVectorEnv as FiniteShmemVectorEnv
    from leyden.rl.env import FiniteSubprocVectorEnv as FiniteSubprocVectorEnv
    from leyden.rl.env import FiniteThreadVectorEnv as FiniteThreadVectorEnv
    from leyden.rl.env import FiniteVectorEnv as FiniteVectorEnv
    from leyden.rl.env import check_simulator as check_simulator
    from leyden.rl.env import vectorize_env as vectorize_env
    from leyden.rl.parts import ActionInterpreter as ActionInterpreter
    from leyden.rl.parts import AuxiliaryInfoCollector as AuxiliaryInfoCollector
    from leyden.rl.parts import InitialStateType as InitialStateType
    from leyden.rl.parts import Reward as Reward
    from leyden.rl.parts import RewardCombination as RewardCombination
    from leyden.rl.parts import Simulator as Simulator
    from leyden.rl.parts import StateInterpreter as StateInterpreter
    from leyden.rl.policy import DQN as DQN
    from leyden.rl.policy import PPO as PPO
    from leyden.rl.policy import AllOne as AllOne
    from leyden.rl.policy import NonLearnablePolicy as NonLearnablePolicy
    from leyden.rl.policy import Policy as Policy
    from leyden.rl.policy import RandomPolicy as RandomPolicy
    from leyden.rl.policy import Sb3Policy as Sb3Policy
    from leyden.rl.policy import TianshouPolicy as TianshouPolicy
    from leyden.rl.seed import Seed as Seed
    from leyden.rl.seed import SeedPlan as SeedPlan
    from leyden.rl.spaces import GymSpaceValidationError as GymSpaceValidationError
    from leyden.rl.trainer import SeedIteratorNotAvailable as SeedIteratorNotAvailable
    from leyden.rl.trainer import Trainer as Trainer
    from leyden.rl.trainer import TrainingVessel as TrainingVessel
    from leyden.rl.trainer import TrainingVesselBase as TrainingVesselBase
    from leyden.rl.trainer import backtest as backtest
    from leyden.rl.trainer import train as train
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__, extra="rl")
